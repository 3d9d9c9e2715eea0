"""Runs the gate: asks candidate and baseline in turns, compares their answers, and judges."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec

from headrace.bench.evaluation.evaluation_report import Distance
from headrace.errors import RequestError
from headrace.lab.answering.model_server import AnswererSpec, ModelServer, open_servers
from headrace.lab.cases.case import Case
from headrace.lab.comparison.answer import Answer
from headrace.lab.comparison.answer_comparison import compare_all
from headrace.lab.comparison.json_schema import unchecked_keywords
from headrace.lab.comparison.similarity import Similarity
from headrace.lab.gate.judgement import MetricResult, judge, passes
from headrace.lab.gate.likelihood import LikelihoodError, answer_likelihood
from headrace.lab.gate.metrics import Judged
from headrace.lab.gate.severity import reasons, severity
from headrace.lab.gate.thresholds import GateThresholds

MOST_CASES: Final = 100_000
SHOWN: Final = 100  # differences in the result, the worst first

Watch = Callable[[int, int], None]  # cases done, and in all


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A case whose answers differ."""

    case: str
    category: str
    severity: float
    reasons: list[str]
    prompt: str
    candidate: str
    baseline: str


class GateResult(msgspec.Struct, frozen=True, kw_only=True):
    """The output of --json."""

    passed: bool
    candidate: str
    baseline: str
    started_at: str
    cases: int
    red_team: int
    level: float
    strict: bool
    seconds: float
    similarity_by: str
    metrics: list[MetricResult]
    notes: list[str]
    differences: list[Difference]  # the worst first


class GateOptions(msgspec.Struct, frozen=True, kw_only=True):
    concurrency: int = 1  # pairs under way
    key: str = ""  # API key of servers
    likelihood_tokens: int = 20_000  # of answers, for perplexity and KL


async def run_gate(
    cases: Sequence[Case],
    candidate: AnswererSpec,
    baseline: AnswererSpec | None,
    thresholds: GateThresholds,
    options: GateOptions | None = None,
    *,
    replayed: Mapping[str, Answer] | None = None,
    similarity: Similarity | None = None,
    watch: Watch = lambda _done, _total: None,
) -> GateResult:
    """Judge a candidate. Without a baseline, the recorded answers are the baseline. `replayed` has the candidate's
    answers, by case, where they were collected by a replay."""
    chosen = options or GateOptions()
    if not 1 <= len(cases) <= MOST_CASES:
        raise RequestError(f"The gate takes 1 to {MOST_CASES} prompts, not {len(cases)}.", parameter="prompts")
    began, started_at = time.perf_counter(), datetime.now(UTC).isoformat(timespec="seconds")
    if replayed is not None:
        pairs = [(replayed[case.id], _original(case)) for case in cases]
    else:
        pairs = await _ask(cases, candidate, baseline, chosen, watch)
    priced = [_priced(pair, thresholds) for pair in pairs]
    comparisons = await asyncio.to_thread(
        compare_all,
        [(new, old, case.context) for case, (new, old) in zip(cases, priced, strict=True)],
        similarity,
    )
    judged = [
        Judged(case=case, candidate=new, baseline=old, comparison=comparison)
        for case, (new, old), comparison in zip(cases, priced, comparisons, strict=True)
    ]
    notes = _notes(judged)
    distance, tokens = await asyncio.to_thread(_likelihood, judged, candidate, baseline, thresholds, chosen, notes)
    results = judge(judged, thresholds, distance, tokens)
    return GateResult(
        passed=passes(results, strict=thresholds.gate.strict),
        candidate=candidate.name,
        baseline="recorded answers" if baseline is None else baseline.name,
        started_at=started_at,
        cases=len(cases),
        red_team=sum(case.is_red_team for case in cases),
        level=thresholds.gate.level,
        strict=thresholds.gate.strict,
        seconds=time.perf_counter() - began,
        similarity_by=comparisons[0].similarity_by,
        metrics=results,
        notes=notes,
        differences=differences(judged),
    )


async def _ask(
    cases: Sequence[Case],
    candidate: AnswererSpec,
    baseline: AnswererSpec | None,
    options: GateOptions,
    watch: Watch,
) -> list[tuple[Answer, Answer]]:
    """Ask both for each case, one after the other; which goes first alternates, so that neither gains from a warm
    machine."""
    specs = [candidate] if baseline is None else [candidate, baseline]
    found: dict[int, tuple[Answer, Answer]] = {}
    pending = iter(enumerate(cases))
    async with open_servers(specs, key=options.key) as servers:
        for server in servers:  # neither pays for what is loaded with the first request
            await server.answer(cases[0])

        async def work() -> None:
            for place, case in pending:
                found[place] = await _pair(case, servers, place)
                watch(len(found), len(cases))

        async with asyncio.TaskGroup() as group:
            for _ in range(max(1, options.concurrency)):
                group.create_task(work())
    return [found[place] for place in range(len(cases))]


async def _pair(case: Case, servers: Sequence[ModelServer], place: int) -> tuple[Answer, Answer]:
    if len(servers) == 1:
        return await servers[0].answer(case), _original(case)
    answers: dict[int, Answer] = {}
    for which in (0, 1) if place % 2 else (1, 0):
        answers[which] = await servers[which].answer(case)
    return answers[0], answers[1]


def _original(case: Case) -> Answer:
    if case.original is None:
        raise RequestError(
            f"The prompt '{case.id}' has no recorded answer. Name a baseline, or pass --recorded.", parameter="baseline"
        )
    return case.original


def _priced(pair: tuple[Answer, Answer], thresholds: GateThresholds) -> tuple[Answer, Answer]:
    prices = thresholds.prices
    if prices is None:
        return pair
    new, old = (
        msgspec.structs.replace(
            answer,
            cost_micros=prices.of(name).micros(
                answer.prompt_tokens, 0, answer.output_tokens, round((answer.e2el_s or 0.0) * 1e6)
            ),
        )
        for answer, name in zip(pair, ("candidate", "baseline"), strict=True)
    )
    return new, old


def _likelihood(
    judged: Sequence[Judged],
    candidate: AnswererSpec,
    baseline: AnswererSpec | None,
    thresholds: GateThresholds,
    options: GateOptions,
    notes: list[str],
) -> tuple[Distance | None, int]:
    if candidate.variant is None or baseline is None or baseline.variant is None:
        notes.append("Perplexity and KL need two local models.")
        return None, 0
    try:
        return answer_likelihood(
            judged, candidate.variant, baseline.variant, tokens=options.likelihood_tokens, seed=thresholds.gate.seed
        )
    except LikelihoodError as error:
        notes.append(f"Perplexity and KL were not measured: {error}")
        return None, 0


def _notes(judged: Sequence[Judged]) -> list[str]:
    unchecked = sorted({key for each in judged for key in unchecked_keywords(each.case.context.schema)})
    notes = [f"Keywords of JSON schemas that are not checked: {', '.join(unchecked)}."] if unchecked else []
    sampled = sum(float(each.case.body.get("temperature", 1.0) or 0.0) > 0 for each in judged)
    if sampled:
        notes.append(f"{sampled:,} prompts are sampled (temperature above 0), so equal models answer differently.")
    return notes


def differences(judged: Sequence[Judged], most: int = SHOWN) -> list[Difference]:
    """Return the cases whose answers differ, the worst first."""
    scored = [(severity(each), place, each) for place, each in enumerate(judged)]
    worst = sorted((each for each in scored if each[0] > 0.0), key=lambda each: (-each[0], each[1]))[:most]
    return [
        Difference(
            case=each.case.id,
            category=each.case.category,
            severity=round(score, 3),
            reasons=reasons(each),
            prompt=each.case.prompt_text,
            candidate=shown(each.candidate),
            baseline=shown(each.baseline),
        )
        for score, _, each in worst
    ]


def shown(answer: Answer) -> str:
    """Return an answer as a report shows it, with its tool calls."""
    if answer.error:
        return f"(no answer: {answer.error})"
    calls = [f"{call.name}({call.arguments})" for call in answer.calls]
    return "\n".join([answer.text, *calls] if answer.text or not calls else calls)
