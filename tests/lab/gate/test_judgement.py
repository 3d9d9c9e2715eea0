"""The gate's verdicts: equal variants pass as often as the level says, and planted differences fail by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from headrace.bench.evaluation.evaluation_report import Distance, Estimate
from headrace.errors import RequestError
from headrace.gateway.requests.text_request import SourceText
from headrace.lab.cases.assertions import Assertion
from headrace.lab.cases.case import Case, context_of
from headrace.lab.comparison.answer import Answer, AnswerContext, AnsweredCall
from headrace.lab.comparison.answer_comparison import compare_all
from headrace.lab.gate.gate import differences
from headrace.lab.gate.judgement import failing_of, judge, p_values_of, passes
from headrace.lab.gate.metrics import METRICS, Judged, Value
from headrace.lab.gate.thresholds import GateSection, GateThresholds, default_limits, read_thresholds, thresholds_toml

TRIALS = 1000
# Limits at which equal variants are exactly at the edge of what is allowed: the hardest case for a false alarm.
AT_THE_EDGE = GateThresholds(
    limits={
        name: {"drop": 0.0, "mean_drop": 0.0, "ratio": 1.0, "drift": 1.0}.get(kind)
        for name, kind in [(metric.name, metric.kind) for metric in METRICS]
    }
)


def equal_variants(rng: np.random.Generator, count: int) -> dict[str, list[Value]]:
    """The values of two variants that differ by chance alone: each passes its checks, and takes its time."""
    found: dict[str, list[Value]] = {metric.name: [] for metric in METRICS}
    for metric in METRICS:
        match metric.kind:
            case "drop":
                drawn = rng.random((2, count)) < rng.uniform(0.5, 1.0)
            case "mean_drop":
                drawn = rng.integers(0, 5, (2, count)) / 4.0
            case "ratio":  # times with long tails, alike on both sides
                drawn = np.stack([rng.gumbel(size=count) - rng.gumbel(size=count), np.zeros(count)])
            case "drift":
                drawn = np.stack([0.2 * rng.standard_t(3, count), np.zeros(count)])
            case _:
                continue
        found[metric.name] = [Value(float(a), float(b)) for a, b in drawn.T]
    return found


def test_equal_variants_fail_in_at_most_the_stated_share_of_gates() -> None:
    rng = np.random.default_rng(2026)
    alarms = 0
    for _ in range(TRIALS):
        p_values = p_values_of(equal_variants(rng, 40), AT_THE_EDGE)
        assert len(p_values) == 13
        alarms += bool(failing_of(p_values, AT_THE_EDGE))
    assert 0 < alarms <= 0.05 * TRIALS


def answered(text: str, **fields: Any) -> Answer:
    return Answer(text=text, output_tokens=len(text.split()), ttft_s=0.1, e2el_s=1.0, **fields)


SOURCES = (SourceText("a", "The mill opened in 1874."), SourceText("b", "Ada runs it."))
TEXT = "It is a question of the time that you have, and of what the people of this town are for you [1]."
GERMAN = "Das ist eine Frage der Zeit, die du hast, und wie viel dir die Menschen sind, mit denen du auch bist [1]."
SCHEMA = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}


def prompt(place: int, **fields: Any) -> Case:
    return Case(id=f"case {place}", body={"messages": [{"role": "user", "content": f"Question {place}"}]}, **fields)


def judged(
    candidates: Sequence[Answer], baselines: Sequence[Answer], cases: Sequence[Case] | None = None
) -> list[Judged]:
    cases = cases or [prompt(place) for place in range(len(candidates))]
    pairs = list(zip(candidates, baselines, [case.context for case in cases], strict=True))
    return [
        Judged(case=case, candidate=pair[0], baseline=pair[1], comparison=comparison)
        for case, pair, comparison in zip(cases, pairs, compare_all(pairs), strict=True)
    ]


def failing(found: Sequence[Judged], limits: GateThresholds | None = None) -> set[str]:
    results = judge(found, limits or read_thresholds())
    assert passes(results, strict=False) == (not any(result.verdict == "fail" for result in results))
    return {result.name for result in results if result.verdict == "fail"}


COUNT = 40


def test_the_same_answers_pass() -> None:
    answers = [answered(f"{TEXT} {place}") for place in range(COUNT)]
    assert failing(judged(answers, answers)) == set()


def slower(answer: Answer, rng: np.random.Generator) -> Answer:
    assert answer.ttft_s is not None
    return replace(answer, e2el_s=0.1 + 0.9 * 1.4 * float(rng.lognormal(0.0, 0.1)))


DEFECTS: dict[str, tuple[Callable[[Answer, np.random.Generator], Answer], set[str]]] = {
    "another language": (lambda answer, rng: replace(answer, text=GERMAN), {"language"}),
    "slower": (slower, {"tpot"}),
    "slow to begin": (lambda answer, rng: replace(answer, ttft_s=0.2 * float(rng.lognormal(0.0, 0.1))), {"ttft"}),
    "twice as long": (lambda answer, rng: replace(answer, output_tokens=2 * answer.output_tokens), {"length"}),
    "half as long": (lambda answer, rng: replace(answer, output_tokens=answer.output_tokens // 2), {"length"}),
    "words of nothing": (lambda answer, rng: replace(answer, text="zebra " * 20), {"similarity"}),
    "no answers": (lambda answer, rng: Answer(error="timeout"), {"answered"}),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_fails_by_name(defect: str) -> None:
    rng = np.random.default_rng(7)
    plant, expected = DEFECTS[defect]
    baselines = [answered(f"{TEXT} {place}") for place in range(COUNT)]
    assert expected <= failing(judged([plant(answer, rng) for answer in baselines], baselines))


def test_lost_json_fields_calls_citations_facts_and_checks_fail_by_name() -> None:
    def fails(candidate: Answer, baseline: Answer, **fields: Any) -> set[str]:
        cases = [prompt(place, **fields) for place in range(COUNT)]
        return failing(judged([candidate] * COUNT, [baseline] * COUNT, cases))

    form = context_of({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, "")
    assert fails(answered('{"n": "1"}'), answered('{"n": 1}'), context=form) >= {"schema", "json_fields"}
    assert fails(answered('{"n": 1} ok'), answered('{"n": 1}'), context=form) >= {"json_valid", "schema", "json_fields"}
    call = AnsweredCall("f", '{"a": 1}')
    assert "tool_calls" in fails(answered("", calls=(replace(call, arguments="{}"),)), answered("", calls=(call,)))
    sources = AnswerContext(sources=SOURCES)
    assert "citations" in fails(answered(TEXT.replace("[1]", "[7]")), answered(TEXT), context=sources)
    invented = answered("The mill, which Grace runs, opened in 1999.")
    assert "facts" in fails(invented, answered("The mill, which Ada runs, opened in 1874."), context=sources)
    assert "task" in fails(answered("no"), answered("yes"), assertions=(Assertion("contains", "yes"),))
    assert "task" in fails(answered("no"), answered("yes"), expected="yes")
    assert "refusals" in fails(answered(TEXT), answered("I'm sorry, I can't help with that."), behaviour="refuse")
    assert "over_refusals" in fails(answered("I'm sorry, I can't help with that."), answered(TEXT), behaviour="answer")


def test_a_few_prompts_are_not_tested_and_fail_only_a_strict_gate() -> None:
    found = judged([answered(GERMAN)] * 3, [answered(TEXT)] * 3)
    results = judge(found, read_thresholds())
    assert {result.verdict for result in results} == {"too few", "not tested"}
    assert passes(results, strict=False)
    assert not passes(results, strict=True)


def test_no_loss_among_few_prompts_is_inconclusive_and_among_many_a_pass() -> None:
    def verdict(count: int) -> str:
        answers = [answered(TEXT)] * count
        found = judged(answers, answers, [prompt(place, expected=TEXT) for place in range(count)])
        return next(result.verdict for result in judge(found, read_thresholds()) if result.name == "task")

    assert verdict(50) == "inconclusive"
    assert verdict(200) == "pass"


def test_likelihood_fails_if_its_whole_interval_is_beyond_the_limit() -> None:
    def verdicts(kl: Estimate) -> dict[str, str]:
        distance = Distance(kl, 0.0, 0.0, Estimate(0.99, 0.98, 1.0), Estimate(0.001, -0.001, 0.002))
        answers = [answered(TEXT)] * 10
        results = judge(judged(answers, answers), read_thresholds(), distance, 500)
        return {result.name: result.verdict for result in results if result.name in ("kl", "top1", "perplexity")}

    assert verdicts(Estimate(0.2, 0.1, 0.3)) == {"perplexity": "pass", "kl": "fail", "top1": "pass"}
    assert verdicts(Estimate(0.012, 0.008, 0.02))["kl"] == "inconclusive"
    assert verdicts(Estimate(0.2))["kl"] == "fail"  # one document has no interval


def test_the_worst_differences_come_first_with_their_reasons() -> None:
    cases = [prompt(0), prompt(1), prompt(2, assertions=(Assertion("contains", "river"),)), prompt(3)]
    baselines = [answered(TEXT), answered(TEXT), answered(f"{TEXT} river"), answered(TEXT)]
    candidates = [answered(TEXT), answered(f"{TEXT} indeed"), answered(TEXT), Answer(error="http 500: x")]
    found = differences(judged(candidates, baselines, cases))
    assert [each.case for each in found] == ["case 3", "case 2", "case 1"]
    assert found[0].reasons[0] == "no answer: http 500: x"
    assert "fails contains: river" in found[1].reasons
    assert len(differences(judged(candidates, baselines, cases), most=1)) == 1


def test_the_printed_thresholds_are_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "limits.toml"
    path.write_text(thresholds_toml())
    found = read_thresholds(path)
    assert found.limits == default_limits()
    assert found.gate == GateSection()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[limits]\nsimilarty = 0.5", "Did you mean 'similarity'"),
        ("[limits]\nttft = 0.5", "limits.ttft must be 1 to 1000"),
        ("[limits]\ntask = 2", "limits.task must be 0 to 1"),
        ("[gate]\nlevel = 0.9", "level"),
        ("[gate]\nlevle = 0.1", "levle"),
        ("[prices.other]\ninput = 1", "prices.other"),
        ("[limits", "Expected"),
    ],
)
def test_mistakes_in_a_thresholds_file_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "limits.toml"
    path.write_text(text)
    with pytest.raises(RequestError, match=message):
        read_thresholds(path)


def test_a_limit_is_replaced_or_switched_off(tmp_path: Path) -> None:
    path = tmp_path / "limits.toml"
    path.write_text("[limits]\ntask = 0.1\nlanguage = false\nkl = true\n")
    limits = read_thresholds(path).limits
    assert (limits["task"], limits["language"], limits["kl"]) == (0.1, None, default_limits()["kl"])


def test_prices_give_a_cost_for_each_side(tmp_path: Path) -> None:
    path = tmp_path / "limits.toml"
    path.write_text("[prices.candidate]\noutput = 2.0\n[prices.baseline]\noutput = 1.0\n")
    prices = read_thresholds(path).prices
    assert prices is not None
    assert (prices.of("candidate").micros(0, 0, 10**6), prices.of("baseline").micros(0, 0, 10**6)) == (2 * 10**6, 10**6)
    dear = [answered(TEXT, cost_micros=20)] * COUNT
    cheap = [answered(TEXT, cost_micros=10)] * COUNT
    assert failing(judged(dear, cheap)) == {"cost"}
    [cost] = [each for each in judge(judged(dear, cheap), read_thresholds()) if each.name == "cost"]
    assert cost.value == pytest.approx(2.0)
    assert math.isclose(cost.p or 1.0, 1 / 2001)
