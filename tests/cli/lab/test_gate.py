"""`headrace gate` from the command line: exit codes, files, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.lab.comparison.answer import Answer
from headrace.lab.gate.thresholds import thresholds_toml
from headrace.lab.recording.recorded_request import RecordedRequest, write_trace

TEXT = "It is a question of the time that you have, and of what the people are for you."


def replayed(folder: Path, *answers: str | None, original: str = TEXT) -> str:
    records = [
        RecordedRequest(
            id=f"request {place}",
            arrived=1000.0 + place,
            body={"model": "mini", "messages": [{"role": "user", "content": f"<b>Question</b> {place}"}]},
            answers=(Answer(text=original, output_tokens=9),),
            replayed=None if answer is None else Answer(text=answer, output_tokens=9),
        )
        for place, answer in enumerate(answers)
    ]
    path = folder / "answers.jsonl"
    path.write_bytes(b"".join(write_trace(records)))
    return str(path)


def test_replayed_answers_pass_or_fail_with_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = replayed(tmp_path, *[TEXT] * 12)
    assert main(["gate", "replayed", "recorded", "--recorded", good]) == 0
    assert "PASS" in capsys.readouterr().out
    bad = replayed(tmp_path, *["zebra </script><script>alert(1)</script>"] * 12)
    html, result = tmp_path / "gate.html", tmp_path / "gate.json"
    arguments = ["gate", "replayed", "recorded", "--recorded", bad, "--html", str(html), "--json", str(result)]
    with pytest.raises(SystemExit, match="1"):
        main(arguments)
    assert "FAIL" in capsys.readouterr().out
    found = json.loads(result.read_text())
    assert found["passed"] is False
    assert "similarity" in [each["name"] for each in found["metrics"] if each["verdict"] == "fail"]
    page = html.read_text()
    assert "<script>alert" not in page
    assert "&lt;b&gt;Question&lt;/b&gt; 0" in page
    assert page.index("1. request") < page.index("2. request")


def test_two_models_are_judged_on_prompts_and_the_red_team_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "What is 2 plus 3?", "max_tokens": 8}\n')
    thresholds = tmp_path / "limits.toml"
    thresholds.write_text("[limits]\nttft = false\ntpot = false\n")
    arguments = ["gate", "mini@int8", "mini", "--prompts", str(prompts), "--thresholds", str(thresholds)]
    assert main([*arguments, "--red-team", "6", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["cases"], found["red_team"]) == (7, 6)
    verdicts = {each["name"]: each["verdict"] for each in found["metrics"]}
    assert verdicts["kl"] == "pass"
    assert verdicts["tpot"] == "not tested"
    assert verdicts["answered"] == "inconclusive"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Name a candidate and a baseline"),
        (["mini", "mini"], "either --prompts FILE or --recorded FILE"),
        (["mini", "mini", "--prompts", "nowhere.jsonl"], "There is no file nowhere.jsonl"),
        (["replayed", "recorded", "--prompts", "x"], "'replayed' needs --recorded"),
        (["no-such-model", "mini", "--recorded", "answers.jsonl"], "Unknown model"),
        (["mini@int8", "mini", "--weights", "int4", "--recorded", "answers.jsonl"], "names a precision already"),
        (["mini", "recorded", "--recorded", "answers.jsonl", "--red-team", "5"], "red-team"),
        (["replayed", "mini", "--recorded", "answers.jsonl"], "compared with 'recorded'"),
        (["mini", "mini", "--recorded", "answers.jsonl", "--encoder", "mini"], "is no encoder"),
    ],
)
def test_mistakes_are_named_with_exit_code_2(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    replayed(tmp_path, TEXT)
    assert main(["gate", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_requests_without_a_replayed_answer_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gate", "replayed", "recorded", "--recorded", replayed(tmp_path, TEXT, None)]) == 2
    assert "without a replayed answer" in capsys.readouterr().err


def test_the_default_thresholds_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gate", "--print-thresholds"]) == 0
    assert capsys.readouterr().out == thresholds_toml()
