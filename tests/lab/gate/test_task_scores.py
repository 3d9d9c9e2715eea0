"""Scores against good answers, and when two variants differ."""

from __future__ import annotations

import pytest

from headrace.errors import RequestError
from headrace.lab.cases.case import Case
from headrace.lab.comparison.answer import Answer
from headrace.lab.gate.task_scores import compare_scores, score_answers


def cases(count: int) -> list[Case]:
    good = [f'{{"city": "Oslo", "count": {number}}}' for number in range(count)]
    return [
        Case(id=str(number), body={"messages": [{"role": "user", "content": "Order"}]}, expected=text)
        for number, text in enumerate(good)
    ]


def test_answers_are_scored_against_the_good_ones() -> None:
    some = cases(4)
    answers = [
        Answer(text='{"city": "Oslo", "count": 0}'),
        Answer(text='{"city": "Turin", "count": 1}'),
        Answer(text="Sorry."),
        Answer(error="timeout: none"),
    ]
    found = score_answers("one", some, answers)
    values = {score.metric: (score.count, score.value) for score in found.scores}
    assert values["exact"] == (4, 0.25)
    assert values["json_valid"] == (4, 0.5)
    assert values["json_fields"] == (4, (1.0 + 0.5) / 4)
    assert found.correct == [True, False, False, False]
    exact = found.of("exact")
    assert exact is not None
    assert exact.low < 0.25 < exact.high


def test_a_difference_counts_when_the_pairs_prove_it() -> None:
    some = cases(12)
    good = score_answers("good", some, [Answer(text=case.expected or "") for case in some])
    bad = score_answers("bad", some, [Answer(text="no")] * 12)
    assert compare_scores(good, bad) == "better"
    assert compare_scores(bad, good) == "worse"
    assert compare_scores(good, good) == "inconclusive"
    few = [score_answers("", some[:2], [Answer(text=text)] * 2) for text in (some[0].expected or "", "no")]
    assert compare_scores(few[0], few[1]) == "inconclusive"


def test_a_prompt_without_a_good_answer_is_rejected() -> None:
    with pytest.raises(RequestError, match="has no good answer"):
        score_answers("one", [Case(id="line 3", body={})], [Answer(text="a")])
