"""What differs between two answers, and its sums."""

from __future__ import annotations

import pytest

from headrace.gateway.requests.text_request import Choice, ToolCall
from headrace.lab.online.answer_difference import AnswerText, DifferenceSummary


def answer(text: str, *, tokens: int = 4, seconds: float = 1.0) -> AnswerText:
    return AnswerText(text, tokens, seconds, seconds / 4)


def test_tool_calls_are_compared_by_name_and_arguments_in_any_order() -> None:
    def called(arguments: str) -> AnswerText:
        choice = Choice(0, " Looking. ", calls=[ToolCall("call_1", "look", arguments)])
        return AnswerText.of([choice], tokens=3, seconds=1.0, first_s=0.5)

    assert called('{"a": 1, "b": [2]}').text == called('{"b":[2],"a":1}').text
    assert called('{"a": 1}').text != called('{"a": 2}').text
    assert called("no JSON").text.splitlines() == ["Looking.", '["look","no JSON"]']


def test_a_summary_has_shares_means_and_percentiles() -> None:
    summary = DifferenceSummary()
    assert summary.as_json()["similarity"] is None
    summary.add(answer("one"), answer("one", tokens=8, seconds=2.0), 1.0)
    summary.add(answer("two"), answer("three", tokens=4, seconds=2.0), 0.5)
    found = summary.as_json()
    assert (found["compared"], found["exact_share"], found["similarity"]) == (2, 0.5, 0.75)
    assert (found["lowest_similarity"], found["length_ratio"]) == (0.5, 1.5)
    assert found["served"]["e2e"]["p95_ms"] == pytest.approx(1000, rel=0.02)
    assert found["other"]["e2e"]["p50_ms"] == pytest.approx(2000, rel=0.02)


def test_first_outputs_are_compared_only_where_both_are_known() -> None:
    summary = DifferenceSummary()
    held_back = AnswerText("one", 4, 1.0, 0.0)
    summary.add(held_back, answer("one"), 1.0)
    summary.add(answer("one"), held_back, 1.0)
    found = summary.as_json()
    assert (found["served"]["ttft"], found["other"]["ttft"]) == (None, None)
    assert found["served"]["e2e"] is not None
    summary.add(answer("one", seconds=2.0), answer("one", seconds=4.0), 1.0)
    found = summary.as_json()
    assert found["served"]["ttft"]["p50_ms"] == pytest.approx(500, rel=0.02)
    assert found["other"]["ttft"]["p50_ms"] == pytest.approx(1000, rel=0.02)
