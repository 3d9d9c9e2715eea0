"""Scores variants on prompts whose good answers are known: exact matches, JSON fields, and a test between two."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Literal

import msgspec

from headrace.errors import RequestError
from headrace.lab.answering.model_server import AnswererSpec, ModelServer, open_servers
from headrace.lab.cases.case import Case
from headrace.lab.comparison.answer import Answer
from headrace.lab.comparison.answer_comparison import compare_all
from headrace.lab.comparison.paired_tests import mean_interval, share_interval, worse_share
from headrace.lab.gate.judgement import values_of
from headrace.lab.gate.metrics import Judged, is_correct

SCORED: Final = ("exact", "json_valid", "schema", "json_fields", "tool_calls", "similarity")  # metrics of the gate
_SHARES: Final = ("exact", "json_valid", "schema", "tool_calls")
LEVEL: Final = 0.05  # chance that equal variants are called different

TaskVerdict = Literal["better", "worse", "inconclusive"]


class TaskScore(msgspec.Struct, frozen=True):
    """A metric's mean over the prompts that it applies to, with its interval."""

    metric: str
    count: int
    value: float
    low: float
    high: float


class VariantScores(msgspec.Struct, frozen=True):
    name: str
    scores: list[TaskScore]
    correct: list[bool]  # by case

    def of(self, metric: str) -> TaskScore | None:
        return next((score for score in self.scores if score.metric == metric), None)


async def ask_all(
    cases: Sequence[Case],
    specs: Sequence[AnswererSpec],
    *,
    key: str = "",
    concurrency: int = 4,
    watch: Callable[[int, int], None] = lambda _done, _total: None,
) -> list[list[Answer]]:
    """Return each variant's answers, in the order of the cases."""
    found: list[list[Answer]] = [[Answer()] * len(cases) for _ in specs]
    places = [(which, place) for place in range(len(cases)) for which in range(len(specs))]
    pending, done = iter(places), 0
    async with open_servers(specs, key=key) as servers:

        async def work(servers: Sequence[ModelServer]) -> None:
            nonlocal done
            for which, place in pending:
                found[which][place] = await servers[which].answer(cases[place])
                done += 1
                watch(done, len(places))

        async with asyncio.TaskGroup() as group:
            for _ in range(max(1, concurrency)):
                group.create_task(work(servers))
    return found


def score_answers(name: str, cases: Sequence[Case], answers: Sequence[Answer]) -> VariantScores:
    """Compare answers with the good ones. RequestError for a case without a good answer."""
    good = [good_answer(case) for case in cases]
    comparisons = compare_all([(new, old, case.context) for case, new, old in zip(cases, answers, good, strict=True)])
    judged = [
        Judged(case=case, candidate=new, baseline=old, comparison=comparison)
        for case, new, old, comparison in zip(cases, answers, good, comparisons, strict=True)
    ]
    values = values_of(judged)
    scores: list[TaskScore] = []
    for metric in SCORED:
        found = [value.candidate for value in values[metric]]
        if found:
            interval = (
                share_interval(sum(value >= 0.5 for value in found), len(found))
                if metric in _SHARES
                else mean_interval(found)
            )
            scores.append(TaskScore(metric, len(found), sum(found) / len(found), *interval))
    correct = [bool(is_correct(case, answer)) for case, answer in zip(cases, answers, strict=True)]
    return VariantScores(name, scores, correct)


def good_answer(case: Case) -> Answer:
    if case.expected is None and not case.expected_calls:
        raise RequestError(
            f"The prompt '{case.id}' has no good answer to compare with. Add its 'completion'.", parameter="prompts"
        )
    return Answer(text=case.expected or "", calls=case.expected_calls)


def compare_scores(candidate: VariantScores, baseline: VariantScores) -> TaskVerdict:
    """Say whether the candidate has more correct answers, by an exact test on the pairs."""
    if worse_share(candidate.correct, baseline.correct) < LEVEL:
        return "worse"
    if worse_share(baseline.correct, candidate.correct) < LEVEL:
        return "better"
    return "inconclusive"
