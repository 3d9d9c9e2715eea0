"""What a level changes of a request, what a request may decline, and how changes are reported."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.config.shaping_section import DegradeMode, LadderConfig, LadderStepConfig
from headrace.engine.interface.grammar_spec import Grammar
from headrace.engine.interface.sampling import SamplingParams
from headrace.gateway.degradation.ladder.ladder_config import STEP_ORDER, preset_steps
from headrace.gateway.degradation.ladder.ladder_steps import (
    AllowedSteps,
    DegradationRecord,
    cap_answer,
    find_smaller_variant,
    overload_error,
    plan_degradation,
    retry_after_s,
)
from headrace.gateway.degradation.ladder.levels import Ladder, LadderLevel, PressureSignals
from headrace.gateway.degradation.shaping.change_record import ShapingChange
from headrace.gateway.requests.text_request import TextRequest, Tool

BOTTOM = Ladder({"chat": LadderConfig(steps=preset_steps(10.0, variants=("fast",)))}).bottom("chat")
TALK = [{"role": "user", "content": "hi"}]


def asked(**more: Any) -> TextRequest:
    given: dict[str, Any] = {"model": "mini", "messages": TALK, **more}
    return TextRequest(**given)


def test_every_step_plans_its_change() -> None:
    found = plan_degradation(BOTTOM, asked())
    assert (found.history_tokens, found.sources_tokens, found.max_tokens) == (1024, 512, 128)
    assert (found.variants, found.stale_s, found.extract, found.refuse) == (("fast",), 86_400.0, True, True)
    assert not found.is_empty
    assert plan_degradation(LadderLevel(0), asked()).is_empty


def test_a_milder_level_changes_less() -> None:
    found = plan_degradation(LadderLevel(2, BOTTOM.steps[:2]), asked())
    assert (found.history_tokens, found.max_tokens) == (1024, 128)
    assert (found.variants, found.stale_s, found.extract, found.refuse) == ((), None, False, False)


@pytest.mark.parametrize(
    ("degrade_settings", "steps"),
    [
        ((None, None), set(STEP_ORDER)),
        (("on", None), set(STEP_ORDER)),
        (("off", None), {"refuse"}),
        ((None, "off"), {"refuse"}),
        ((["trim", "stale"], None), {"trim", "stale", "refuse"}),
        ((["trim", "stale"], ["stale", "extract"]), {"stale", "refuse"}),
    ],
)
def test_steps_can_be_declined_by_request_and_by_tenant(
    degrade_settings: tuple[DegradeMode | None, ...], steps: set[str]
) -> None:
    assert AllowedSteps.of(*degrade_settings).steps == steps


def test_declined_steps_are_not_taken() -> None:
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
def test_answers_with_a_fixed_format_are_not_replaced_by_quotes(form: dict[str, Any]) -> None:
    assert not plan_degradation(BOTTOM, asked(**form)).extract


def test_steps_without_an_effect_are_left_out() -> None:
    assert plan_degradation(BOTTOM, asked(max_tokens=100)).max_tokens is None
    assert plan_degradation(BOTTOM, asked(grammar=Grammar("json_object"))).max_tokens is None
    assert plan_degradation(BOTTOM, asked(messages=None, prompts=["once"])).history_tokens is None
    assert plan_degradation(BOTTOM, asked(model="mini@golden")).variants == ()  # it was asked for by its name
    assert plan_degradation(BOTTOM, asked(cache="off")).stale_s is None


def test_an_answer_is_capped_within_its_own_limits() -> None:
    changed, shaped = cap_answer(
        asked(max_tokens=1000, min_tokens=300), plan_degradation(BOTTOM, asked(max_tokens=1000))
    )
    assert (changed.max_tokens, changed.min_tokens) == (128, 128)
    assert shaped == (ShapingChange("max_tokens", 1000, 128),)
    assert cap_answer(asked(), plan_degradation(LadderLevel(0), asked())) == (asked(), ())


def test_a_smaller_variant_must_be_served() -> None:
    there = {"mini": 1, "mini@int4": 1, "mini@fast": 1}
    assert find_smaller_variant("mini", ("tiny", "int4", "fast"), there) == "mini@int4"
    assert find_smaller_variant("mini@int4", ("int4",), there) is None
    assert find_smaller_variant("other", ("int4",), there) is None


def test_rejections_name_the_cause_and_when_to_retry() -> None:
    busy = Ladder({"chat": LadderConfig(steps=preset_steps(10.0))}).decide("chat", PressureSignals(queue_ms=20e3), 0.0)
    error = overload_error(busy, PressureSignals(queue_ms=20e3))
    assert (error.status, error.code, error.retry_after) == (503, "overloaded", 16.0)  # until 4 s are left
    assert retry_after_s(busy, PressureSignals(queue_ms=4e3)) == 1.0
    assert retry_after_s(busy, PressureSignals(queue_ms=1e9)) == 60.0
    steps = LadderConfig(steps=(LadderStepConfig(step="refuse", budget_left=(0.0, 0.01)),))
    poor = Ladder({"chat": steps}).decide("chat", PressureSignals(budget_left=0.0), 0.0)
    assert overload_error(poor, PressureSignals(budget_left=0.0)).status == 429


def test_recorded_steps_are_in_the_header() -> None:
    record = DegradationRecord()
    assert record.headers() == {}
    record.add("max_tokens", ShapingChange("max_tokens", 1000, 128))
    record.add("trim", ShapingChange("turns", 5210, 980), ShapingChange("sources", 900, 512))
    record.add("variant")  # there was none that was smaller
    assert record.steps == ("trim", "max_tokens")
    assert record.headers() == {
        "x-headrace-degraded": "trim; turns=5210>980, trim; sources=900>512, max_tokens=1000>128"
    }


def test_removed_steps_are_not_in_the_header() -> None:
    record = DegradationRecord()
    record.add("trim", ShapingChange("turns", 5210, 980))
    record.add("max_tokens", ShapingChange("max_tokens", 1000, 128))
    record.remove("max_tokens", "variant")
    assert record.steps == ("trim",)
    record.remove()
    assert record.headers() == {}
