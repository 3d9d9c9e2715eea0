"""`headrace evaluate`: the table, the JSON file, and one line for a mistake."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.bench.evaluation.evaluation import EvaluationProgress
from headrace.cli import main
from headrace.cli.evaluate import EvaluationBar

FAST = ("--no-speed", "--no-cache", "--window", "64", "--threads", "2")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "notes.txt"
    path.write_text("The old mill stands by the river, and its wheel turns. " * 30)
    return path


def test_precisions_are_compared_with_the_first_and_written_as_json(
    tiny_folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report.json"
    names = "f32,bf16,int8,int8-g32,int8-channel,int4,int4-channel"
    arguments = ["evaluate", str(tiny_folder), "--text", str(text), "--precisions", names, "--json", str(out), *FAST]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 100
    report = json.loads(out.read_text())
    expected = ["f32", "bf16", "int8-g128", "int8-g32", "int8-channel", "int4-g32", "int4-channel"]
    assert [row["weights"] for row in report["variants"]] == expected
    assert all(name in shown for name in expected)
    assert report["variants"][0]["distance"] is None
    bf16, int8, int4 = (report["variants"][row]["distance"]["kl"]["value"] for row in (1, 2, 6))
    assert int4 > int8 > bf16 >= 0  # bf16 loses nothing where rows and products stay in f32
    assert (report["window"], report["stride"], report["source"]) == (64, 32, "notes.txt")


def test_a_reference_of_the_same_model_differs_only_where_an_option_says_so(
    tiny_folder: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["evaluate", str(tiny_folder), "--text", str(text), "--json", "-", *FAST]
    assert main([*common, "--weights", "int8", "--against-weights", "int8"]) == 0
    same = json.loads(capsys.readouterr().out)
    assert same["variants"][1]["distance"]["kl"]["value"] == 0.0
    assert same["variants"][1]["distance"]["top1"]["value"] == 1.0
    assert main([*common, "--against-kv", "f32"]) == 0
    kv = json.loads(capsys.readouterr().out)
    assert [(row["weights"], row["kv"]) for row in kv["variants"]] == [("bf16", "f32"), ("bf16", "bf16")]


def test_prompts_are_scored_line_by_line(tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "One two", "completion": " three four"}\n' * 3)
    assert main(["evaluate", str(tiny_folder), "--prompts", str(prompts), "--json", "-", *FAST]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["chunks"] == 3
    assert report["tokens"] % 3 == 0
    assert len(report["variants"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Pass a text to measure on"),
        (["--text", "TEXT", "--prompts", "TEXT"], "either --text FILE or --prompts"),
        (["--text", "missing.txt"], "There is no file missing.txt"),
        (["--prompts", "TEXT"], "notes.txt, line 1: "),
        (["--text", "TEXT", "--precisions", "f32"], "needs at least two names"),
        (["--text", "TEXT", "--precisions", "f32,int8", "--weights", "int4"], "--precisions names every precision"),
        (["--text", "TEXT", "--weights", "int7"], "Unknown precision 'int7'"),
        (["--text", "TEXT", "--kv", "int3"], "Unknown KV type 'int3'"),
        (["--text", "TEXT", "--window", "4"], "'window' must be 16 to"),
        (["--text", "TEXT", "--json", "no/such/folder.json"], "The folder of no/such/folder.json does not exist"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    tiny_folder: Path, text: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    given = [str(text) if argument == "TEXT" else argument for argument in arguments]
    assert main(["evaluate", str(tiny_folder), "--no-cache", *given]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("headrace: ")
    assert message in output.err
    assert output.err.count("\n") == 1


def test_progress_outside_a_terminal_is_a_line_now_and_then_with_the_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter((100.0, 105.0, 111.0, 112.0, 122.0))
    monkeypatch.setattr("headrace.cli.evaluate.time", SimpleNamespace(monotonic=lambda: next(clock)))
    with EvaluationBar() as bar:
        for done in (10, 25, 26, 50):
            bar.show(EvaluationProgress("mini int8", done, 100))
    assert capsys.readouterr().err == "mini int8: 25%, about 33.0 s left\nmini int8: 50%, about 22.0 s left\n"
