"""`headrace tune cascade`: from prompts to the files that a configuration uses."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from headrace.cli import main
from headrace.gateway.routing.calibration import read_labelled
from headrace.lab.tuning.judged_pair import write_pairs
from tests.lab.tuning.test_cascade_fit import traffic
from tests.support.config_text import mistakes, read


def test_pairs_become_a_configuration_that_is_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_pairs(Path("judged.jsonl"), traffic())
    assert main(["tune", "cascade", "--pairs", "judged.jsonl", "--small", "draft", "--large", "mini"]) == 0
    printed = capsys.readouterr().out
    assert "cascade, " in printed
    assert "small alone" in printed
    assert len(read_labelled(Path("cascade/calibration.jsonl"))) == 400
    models = "[models.draft]\n[models.mini]\n"
    config = read(models + Path("cascade/cascade.toml").read_text())
    tuned = config.routing.cascades["tuned"]
    assert (tuned.small, tuned.large) == ("draft", "mini")
    assert config.routing.complexity == "cascade/complexity.json"
    Path("cascade/complexity.json").write_text('{"weights": {}, "bias": 0}')
    [mistake] = mistakes(models + '[routing]\ncomplexity = "cascade/complexity.json"\n')
    assert "other features" in mistake


def test_both_models_answer_and_are_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [{"prompt": f"Say the number {number}.", "max_tokens": 3} for number in range(24)]
    Path("prompts.jsonl").write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in lines))
    arguments = ["--small", "draft", "--large", "mini", "--prompts", "prompts.jsonl", "--json"]
    assert main(["tune", "cascade", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cascade"]["pairs"] == 24
    assert found["cascade"]["large_quality"] == 1.0
    pairs = [json.loads(line) for line in Path("cascade/pairs.jsonl").read_text().splitlines()]
    assert all(0.0 < pair["confidence"]["mean"] <= 1.0 for pair in pairs)
    assert all(pair["small_cost"] > 0 and pair["large_cost"] > 0 for pair in pairs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "x"], "--small"),
        (["--small", "draft", "--large", "mini"], "--prompts or --recorded"),
        (["--pairs", "none.jsonl"], "no file none.jsonl"),
        (["--pairs", "none.jsonl", "--quality", "2"], "quality"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["tune", "cascade", *arguments]) == 2
    assert message in capsys.readouterr().err
