"""`headrace simulate`: tables for people, JSON for programs, and bad input named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli import WRONG_USAGE, main

SMALL = ["--tenants", "5", "--seconds", "10", "--fixed-ms", "2", "--row-ms", "0.1"]


def test_the_json_holds_a_summary_of_each_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *SMALL, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["capacity"] > report["rate"] > 0
    assert [run["order"] for run in report["runs"]] == ["fair", "fcfs", "longest-prefix"]
    for run in report["runs"]:
        assert run["all"]["requests"] == sum(group["requests"] for group in run["surfaces"])
        assert 0.0 < run["fairness"] <= 1.0


def test_the_tables_answer_what_was_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *SMALL, "--ask", "run", "--ask", "cold", "--order", "fair"]) == 0
    out = capsys.readouterr().out
    assert "Capacity for this traffic" in out
    assert "with a unique prefix" in out
    assert "fcfs" not in out


def test_a_trace_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"at": 0, "prompt": 40, "answer": 5}\n{"at": 0.5, "prompt": 400, "answer": 9}\n')
    assert main(["simulate", "--trace", str(trace), "--order", "fair", "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert (run["all"]["requests"], run["output_tokens"]) == (2, 14)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--seconds", "nan"], "seconds"),
        (["--load", "-1"], "load"),
        (["--tenants", "0"], "tenants"),
        (["--kv-block", "0"], "kv_block"),
        (["--surfaces", "chat=x"], "surfaces"),
        (["--surfaces", "nobody=1"], "surfaces"),
        (["--trace", "no-such-file"], "no-such-file"),
    ],
)
def test_what_is_wrong_is_named(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *arguments]) != 0
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""


def test_a_trace_takes_no_other_question(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"at": 0, "prompt": 4, "answer": 5}\n')
    assert main(["simulate", "--trace", str(trace), "--ask", "abuse"]) == WRONG_USAGE
    assert "trace" in capsys.readouterr().err
