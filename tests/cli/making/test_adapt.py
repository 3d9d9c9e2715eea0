"""`headrace adapt` from the command line: what it writes and shows, teachers, and one line for a mistake."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.lab.comparison.answer import Answer
from headrace.lab.recording.recorded_request import RecordedRequest, write_trace
from headrace.models.model_folder import open_model

FAST = ("--epochs", "1", "--batch", "8", "--rank", "2", "--threads", "1")


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    path = tmp_path / "examples.jsonl"
    lines = [{"prompt": f"Number {number}?", "completion": f'{{"n": {number}}}'} for number in range(10)]
    chat = [{"role": "user", "content": "Colour?"}, {"role": "assistant", "content": '{"c": "red"}'}]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in [*lines, {"messages": chat}]))
    return path


def recording(folder: Path) -> Path:
    records = [
        RecordedRequest(
            id=f"request {place}",
            arrived=1000.0 + place,
            body={"model": "mini", "messages": [{"role": "user", "content": f"Question {place}"}]},
            answers=(Answer(text=f"Answer {place}", finish="length" if place == 5 else "stop"),),
        )
        for place in range(6)
    ]
    path = folder / "traffic.jsonl"
    path.write_bytes(b"".join(write_trace(records)))
    return path


def test_base_and_adapter_answer_the_held_out_prompts_at_the_end(
    tiny_folder: Path, examples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, merged = tmp_path / "adapter", tmp_path / "merged"
    arguments = ["adapt", str(tiny_folder), "--data", str(examples), "--out", str(out), "--merge", str(merged), *FAST]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "LoRA of rank 2, alpha 4" in shown
    assert "against the good answers" in shown
    assert "Correct answers against the base: inconclusive." in shown
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == str(tiny_folder)
    assert (out / "adapter_model.safetensors").stat().st_size > 1000
    assert (merged / "config.json").exists()
    card = (out / "README.md").read_text()
    assert "| examples | 10 to train on, 1 held out |" in card
    assert "| Exact match | 1 | 0.0 %" in card
    assert not (tmp_path / "adapter.partial").exists()


def test_recorded_answers_are_learnt_without_those_that_were_cut(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "adapter"
    arguments = ["adapt", str(tiny_folder), "--distil-from", str(recording(tmp_path)), "--out", str(out)]
    assert main([*arguments, *FAST, "--no-gate"]) == 0
    assert "Held-out loss" in capsys.readouterr().out
    card = (out / "README.md").read_text()
    assert "| examples | 4 to train on, 1 held out |" in card
    assert "| teacher | recorded answers of traffic.jsonl |" in card


def test_a_model_is_trained_for_the_precision_that_serves_it(tiny_folder: Path, examples: Path, tmp_path: Path) -> None:
    plain, rounded = tmp_path / "plain", tmp_path / "rounded"
    common = ["adapt", str(tiny_folder), "--data", str(examples), "--full", "--no-gate", *FAST]
    assert main([*common, "--out", str(plain)]) == 0
    assert main([*common, "--qat", "int4", "--out", str(rounded)]) == 0
    assert "int4" in (rounded / "README.md").read_text()
    name = "layers.0.attn.qkv"
    one, other, base = (open_model(each).tensor(name).to_f32() for each in (plain, rounded, tiny_folder))
    assert (other != base).any()
    assert (other != one).any()  # gradients were those of the rounded weights
    assert (
        main(["generate", str(rounded), "--weights", "int4", "--prompt", "x", "--max-tokens", "2", "--no-cache"]) == 0
    )


def test_a_teachers_answers_are_learnt(tiny_folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "What is {number} plus 2?"}}\n' for number in range(4)))
    out = tmp_path / "student"
    options = ["--distil-from", "draft", "--distil", "answers", "--no-gate"]
    assert main(["adapt", str(tiny_folder), "--data", str(prompts), "--out", str(out), *options, *FAST]) == 0
    assert "| examples | 3 to train on, 1 held out |" in (out / "README.md").read_text()


def test_a_text_heals_a_model_with_its_teachers_predictions(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("The old mill stands by the river, and its wheel turns. " * 12)
    out = tmp_path / "healed"
    options = ["--full", "--distil-from", str(tiny_folder), "--data", str(text), "--max-length", "32"]
    narrow = tmp_path / "narrow"
    cut = ["--neurons", "128", "--calibrate", str(text), "--window", "32"]
    assert main(["reshape", str(tiny_folder), str(narrow), *cut]) == 0
    assert main(["adapt", str(narrow), "--out", str(out), *options, *FAST]) == 0
    assert open_model(out).spec == open_model(narrow).spec
    assert "all weights, 50% of the loss from a teacher's predictions" in capsys.readouterr().out
    assert (out / "model.safetensors").exists()
    assert main(["generate", str(out), "--prompt", "The old", "--max-tokens", "2", "--no-cache"]) == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "Pass your examples: --data FILE."),
        (["--data", "nothing.jsonl"], "There is no file nothing.jsonl."),
        (["--data", "EXAMPLES", "--qat", "int4"], "Add --merge or --full."),
        (["--data", "EXAMPLES", "--full", "--base", "int8"], "Remove --base or --full."),
        (["--data", "EXAMPLES", "--targets", "w_proj"], "Unknown target 'w_proj'."),
        (["--data", "EXAMPLES", "--max-length", "3"], "Every example has more than 3 tokens."),
        (["--data", "EXAMPLES", "--rate", "0"], "'rate' must be above 0"),
        (["--data", "QUESTIONS"], "the example has no answer."),
        (["--data", "EXAMPLES", "--distil-from", "http://127.0.0.1:9", "--distil", "logits"], "gives answers only"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str],
    expected: str,
    tiny_folder: Path,
    examples: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"prompt": "One?"}\n{"prompt": "Two?"}\n')
    given = [{"EXAMPLES": str(examples), "QUESTIONS": str(questions)}.get(each, each) for each in arguments]
    assert main(["adapt", str(tiny_folder), "--out", str(tmp_path / "adapter"), *given]) == 2
    shown = capsys.readouterr().err
    assert expected in shown
    assert len(shown.splitlines()) == 1
    assert not (tmp_path / "adapter").exists()


def test_without_torch_the_command_says_how_to_install_it(
    tiny_folder: Path,
    examples: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["adapt", str(tiny_folder), "--data", str(examples), "--out", str(tmp_path / "adapter")]) == 2
    assert "pip install 'headrace[train]'" in capsys.readouterr().err
