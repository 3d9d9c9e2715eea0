"""What a level means for a request, what may be declined, and how it is told."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.config.shaping_section import DegradeMode
from headrace.engine.interface.grammar_spec import Grammar
from headrace.engine.interface.sampling import SamplingParams
from headrace.gateway.degradation.ladder.ladder_options import ORDER, LadderOptions, StepOptions, Threshold, by_patience
from headrace.gateway.degradation.ladder.ladder_steps import (
    AllowedSteps,
    DegradationRecord,
    cap_answer,
    find_smaller_variant,
    overload_error,
    plan_degradation,
    retry_after,
)
from headrace.gateway.degradation.ladder.levels import Ladder, LadderLevel, PressureSignals
from headrace.gateway.degradation.shaping.change_record import ShapingChange
from headrace.gateway.requests.text_request import TextRequest, Tool

BOTTOM = Ladder({"chat": by_patience(10.0, variants=("fast",))}).bottom("chat")
TALK = [{"role": "user", "content": "hi"}]


def asked(**more: Any) -> TextRequest:
    given: dict[str, Any] = {"model": "mini", "messages": TALK, **more}
    return TextRequest(**given)


def test_every_step_says_what_to_change() -> None:
    found = plan_degradation(BOTTOM, asked())
    assert (found.history_tokens, found.sources_tokens, found.max_tokens) == (1024, 512, 128)
    assert (found.variants, found.stale_s, found.extract, found.refuse) == (("fast",), 86_400.0, True, True)
    assert not found.nothing
    assert plan_degradation(LadderLevel(0), asked()).nothing


def test_a_milder_level_changes_less() -> None:
    found = plan_degradation(LadderLevel(2, BOTTOM.steps[:2]), asked())
    assert (found.history_tokens, found.max_tokens) == (1024, 128)
    assert (found.variants, found.stale_s, found.extract, found.refuse) == ((), None, False, False)


@pytest.mark.parametrize(
    ("wishes", "steps"),
    [
        ((None, None), set(ORDER)),
        (("on", None), set(ORDER)),
        (("off", None), {"refuse"}),
        ((None, "off"), {"refuse"}),
        ((["trim", "stale"], None), {"trim", "stale", "refuse"}),
        ((["trim", "stale"], ["stale", "extract"]), {"stale", "refuse"}),
    ],
)
def test_steps_can_be_declined_by_request_and_by_tenant(
    wishes: tuple[DegradeMode | None, ...], steps: set[str]
) -> None:
    assert AllowedSteps.of(*wishes).steps == steps


def test_what_is_declined_is_not_done() -> None:
    found = plan_degradation(BOTTOM, asked(), AllowedSteps.of("off"))
    assert (found.history_tokens, found.max_tokens, found.variants, found.stale_s) == (None, None, (), None)
    assert (found.extract, found.refuse) == (False, True)
    only = plan_degradation(BOTTOM, asked(), AllowedSteps.of(["extract"]))
    assert (only.extract, only.stale_s, only.max_tokens) == (True, None, None)


@pytest.mark.parametrize(
    "form",
    [
        {"grammar": Grammar("json_object")},
        {"tools": (Tool("f"),)},
        {"n": 2},
        {"sampling": SamplingParams(logprobs=0)},
        {"messages": None, "prompts": ["once"]},
    ],
)
def test_answers_that_a_program_reads_are_not_replaced_by_quotes(form: dict[str, Any]) -> None:
    assert not plan_degradation(BOTTOM, asked(**form)).extract


def test_steps_that_can_mean_nothing_for_a_request_are_left_out() -> None:
    assert plan_degradation(BOTTOM, asked(max_tokens=100)).max_tokens is None
    assert plan_degradation(BOTTOM, asked(grammar=Grammar("json_object"))).max_tokens is None
    assert plan_degradation(BOTTOM, asked(messages=None, prompts=["once"])).history_tokens is None
    assert plan_degradation(BOTTOM, asked(model="mini@golden")).variants == ()  # it was asked for by its name
    assert plan_degradation(BOTTOM, asked(cache="off")).stale_s is None


def test_an_answer_is_cut_within_what_was_asked() -> None:
    changed, shaped = cap_answer(
        asked(max_tokens=1000, min_tokens=300), plan_degradation(BOTTOM, asked(max_tokens=1000))
    )
    assert (changed.max_tokens, changed.min_tokens) == (128, 128)
    assert shaped == (ShapingChange("max_tokens", 1000, 128),)
    assert cap_answer(asked(), plan_degradation(LadderLevel(0), asked())) == (asked(), ())


def test_a_smaller_variant_is_one_that_is_there() -> None:
    there = {"mini": 1, "mini@int4": 1, "mini@fast": 1}
    assert find_smaller_variant("mini", ("tiny", "int4", "fast"), there) == "mini@int4"
    assert find_smaller_variant("mini@int4", ("int4",), there) is None
    assert find_smaller_variant("other", ("int4",), there) is None


def test_refusals_say_whose_fault_it_is_and_when_to_come_again() -> None:
    busy = Ladder({"chat": by_patience(10.0)}).decide("chat", PressureSignals(queue_s=20.0), 0.0)
    error = overload_error(busy, PressureSignals(queue_s=20.0))
    assert (error.status, error.code, error.retry_after) == (503, "overloaded", 16.0)  # until 4 s are left
    assert retry_after(busy, PressureSignals(queue_s=4.0)) == 1.0
    assert retry_after(busy, PressureSignals(queue_s=1e6)) == 60.0
    steps = LadderOptions(steps=(StepOptions(step="refuse", budget_left=Threshold(0.0, 0.01)),))
    poor = Ladder({"chat": steps}).decide("chat", PressureSignals(budget_left=0.0), 0.0)
    assert overload_error(poor, PressureSignals(budget_left=0.0)).status == 429


def test_what_was_done_is_told_to_everybody() -> None:
    telling = DegradationRecord()
    assert telling.headers() == {}
    telling.took("max_tokens", ShapingChange("max_tokens", 1000, 128))
    telling.took("trim", ShapingChange("turns", 5210, 980), ShapingChange("sources", 900, 512))
    telling.took("variant")  # there was none that was smaller
    assert telling.steps == ("trim", "max_tokens")
    assert telling.headers() == {
        "x-headrace-degraded": "trim; turns=5210>980, trim; sources=900>512, max_tokens=1000>128"
    }


def test_what_came_to_nothing_is_not_told() -> None:
    telling = DegradationRecord()
    telling.took("trim", ShapingChange("turns", 5210, 980))
    telling.took("max_tokens", ShapingChange("max_tokens", 1000, 128))
    telling.clear("max_tokens", "variant")
    assert telling.steps == ("trim",)
    telling.clear()
    assert telling.headers() == {}
