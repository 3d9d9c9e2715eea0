"""`headrace shadows`: what a server's shadows have found, and what to do if there are none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.cli import main
from headrace.cli.lab import shadows as command
from headrace.lab.comparison.similarity import lexical_overlap
from headrace.lab.online.answer_difference import AnswerText, DifferenceSummary


def shadow(name: str = "trial") -> dict[str, Any]:
    summary = DifferenceSummary()
    served = AnswerText("the served answer", 3, 0.2, 0.1)
    for text in ("the served answer", "the other answer"):
        other = AnswerText(text, 6, 0.4, 0.1)
        summary.add(served, other, lexical_overlap(served.text, text))
    found = summary.as_json()
    routes = [{"variant": "mini", "route": "rule short", **found}]
    outcomes = {"copied": 2, "timeout": 1, "budget": 2}
    return {"name": name, "variant": "mini@int8", "outcomes": outcomes, "differences": found, "routes": routes}


def answering(monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any]) -> list[tuple[str, ...]]:
    asked: list[tuple[str, ...]] = []

    def request_json(*call: str) -> dict[str, Any]:
        asked.append(call)
        return answer

    monkeypatch.setattr(command, "request_json", request_json)
    return asked


def test_each_shadow_is_a_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = answering(monkeypatch, {"data": [shadow(), shadow("[bold]")]})
    assert main(["shadows", "--url", "http://localhost:1"]) == 0
    assert asked == [("http://localhost:1", "GET", "shadows")]
    _, row, marked = capsys.readouterr().out.splitlines()
    assert row.split()[:5] == ["trial", "mini@int8", "2", "50.0", "%"]
    assert row.split()[-1] == "3"  # lost
    assert "2.00" in row  # twice as long
    assert marked.startswith("[bold]")


def test_one_shadow_shows_its_routes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = answering(monkeypatch, shadow())
    assert main(["shadows", "trial", "--url", "http://localhost:1"]) == 0
    assert asked == [("http://localhost:1", "GET", "shadows/trial")]
    assert "rule short" in capsys.readouterr().out


def test_without_shadows_the_section_to_add_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answering(monkeypatch, {"data": []})
    assert main(["shadows"]) == 0
    assert "[routing.shadows.NAME]" in capsys.readouterr().out
    assert main(["shadows", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"data": []}
