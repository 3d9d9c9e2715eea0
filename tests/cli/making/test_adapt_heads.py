"""`headrace adapt --heads`: heads that are trained, served and measured from the command line, and mistakes."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.adapt.head_examples import HeadExample
from headrace.adapt.head_training import HeadTraining
from headrace.cli import main
from headrace.cli.making import adapt_heads
from headrace.errors import RequestError
from headrace.llm import LLM

PROMPTS = ["The water wheel", "A queue is", "Three seasons are"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": each}) + "\n" for each in PROMPTS))
    return path


def train(model: Path, data: Path, out: Path, *more: str, answer_tokens: int = 8) -> int:
    sizes = [
        "--epochs",
        "1",
        "--answer-tokens",
        str(answer_tokens),
        "--drafts",
        "2",
        "--vocabulary",
        "300",
        "--threads",
        "1",
    ]
    return main(["adapt", str(model), "--data", str(data), "--out", str(out), *sizes, *more])


@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3"])
def test_heads_are_trained_and_served(
    kind: str, tiny_folder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "heads"
    assert train(tiny_folder, data, out, "--heads", kind) == 0
    said = capsys.readouterr().out
    assert "draft_heads" in said
    assert "a step with 2 drafts gives" in said
    assert f"Draft heads ({kind})" in (out / "README.md").read_text()
    common: dict[str, Any] = {"threads": 1, "context": 128}
    wanted: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    with (
        LLM(tiny_folder, speculation="none", **common) as plain,
        LLM(tiny_folder, speculation="heads", draft_heads=str(out), **common) as drafted,
    ):
        expected, found = (llm.generate(PROMPTS, **wanted) for llm in (plain, drafted))
    assert [each.completions[0].tokens for each in found] == [each.completions[0].tokens for each in expected]
    assert train(tiny_folder, data, out, "--heads", kind) == 2
    assert "exists. Choose another name" in capsys.readouterr().err


def test_prompts_have_room_beside_the_longest_answers(
    tiny_folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []

    def record(llm: LLM, documents: Any, most: int, file: Any, watch: Any, reads: Any) -> list[HeadExample]:
        context = llm.opened.executor.capacity.context
        made.append({"context": context, "most": most})
        states = np.ones((8, llm.opened.executor.spec.hidden_size), np.float32)
        return [HeadExample(np.arange(8), states) for _ in documents]

    monkeypatch.setattr(adapt_heads, "_record", record)
    for count in (8, 2048):
        assert train(tiny_folder, data, tmp_path / str(count), "--heads", "medusa", answer_tokens=count) == 0
    assert made[0] == {"context": 2048, "most": 8}
    assert made[-1] == {"context": 4096, "most": 2048}


def test_unfinished_work_of_another_run_is_left_alone(
    tiny_folder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    partial = tmp_path / "heads.partial"
    partial.mkdir()
    (partial / "checkpoint").write_text("of an adapter")
    assert train(tiny_folder, data, tmp_path / "heads", "--heads", "medusa") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "heads.partial has unfinished work of another run. Choose another name" in said
    assert (partial / "checkpoint").read_text() == "of an adapter"
    assert not (tmp_path / "heads").exists()


def test_a_command_that_was_killed_continues(
    tiny_folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []
    generate = LLM.generate

    def counted(llm: LLM, prompts: Any, **options: Any) -> Any:
        asked.append(len(prompts))
        if killed == "asking" and len(asked) == 2:
            raise KeyboardInterrupt
        return generate(llm, prompts, **options)

    def learn(training: HeadTraining, examples: Any) -> None:
        if killed == "learning":
            raise KeyboardInterrupt
        run(training, examples)

    run = HeadTraining.run
    monkeypatch.setattr(LLM, "generate", counted)
    monkeypatch.setattr(HeadTraining, "run", learn)
    monkeypatch.setattr(adapt_heads, "_AT_ONCE", 1)
    expected: list[int] = [1, 1, 1]  # two prompts to learn from and one held out
    killed = ""
    assert train(tiny_folder, data, tmp_path / "whole", "--heads", "medusa") == 0
    assert asked == expected
    out = tmp_path / "heads"
    for when, left in (("asking", [1, 1]), ("learning", [1, 1]), ("", [])):
        killed = when
        asked.clear()
        with contextlib.suppress(KeyboardInterrupt):
            train(tiny_folder, data, out, "--heads", "medusa")
        assert asked == left
    names = {path.name for path in (tmp_path / "whole").iterdir()}
    assert {path.name for path in out.iterdir()} == names
    for name in names:
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    capsys.readouterr()
    killed = "learning"
    with contextlib.suppress(KeyboardInterrupt):
        train(tiny_folder, data, tmp_path / "other", "--heads", "medusa")
    assert train(tiny_folder, data, tmp_path / "other", "--heads", "eagle") == 2
    assert "pass --restart to begin again" in " ".join(capsys.readouterr().err.split())
    killed = ""
    assert train(tiny_folder, data, tmp_path / "other", "--heads", "eagle", "--restart") == 0


def test_a_training_that_fails_leaves_nothing(
    tiny_folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[bool] = []

    def fail(*_: Any) -> list[HeadExample]:
        seen.append((tmp_path / "heads.partial").is_dir())
        raise RequestError("The answers have fewer than 4 tokens.", parameter="data")

    monkeypatch.setattr(adapt_heads, "_record", fail)
    assert train(tiny_folder, data, tmp_path / "heads", "--heads", "medusa") == 2
    assert "fewer than 4 tokens" in capsys.readouterr().err
    assert seen == [True]
    assert [each.name for each in tmp_path.iterdir()] == [data.name]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--heads", "medusa", "--full"], "Remove --full"),
        (["--heads", "medusa", "--merge", "x"], "Remove --merge"),
        (["--heads", "medusa", "--drafts", "99"], "'drafts' must be 1 to 16"),
        (["--heads", "medusa", "--vocabulary", "5"], "'vocabulary' must be at least"),
        (
            ["--heads", "eagle", "--answer-tokens", "2"],
            "'answer_tokens' must be 8 to 2048, half of the model's context",
        ),
        (["--heads", "medusa", "--answer-tokens", "2049"], "half of the model's context, not 2049"),
        (["--heads", "eagle", "--data", "missing.jsonl"], "There is no file missing.jsonl"),
        (["--heads", "llama"], "heads"),
    ],
)
def test_mistakes_are_named(
    more: list[str], reason: str, tiny_folder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = {"--data": str(data), "--out": str(tmp_path / "heads")}
    flags = dict(zip(more[::2], more[1::2], strict=False)) if "--full" not in more else {"--heads": "medusa"}
    listed = [part for pair in ({**arguments, **flags}).items() for part in pair]
    assert main(["adapt", str(tiny_folder), *listed, *(["--full"] if "--full" in more else [])]) == 2
    assert reason in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "heads").exists()
