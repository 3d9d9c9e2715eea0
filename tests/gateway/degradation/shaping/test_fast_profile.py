"""The fast profile changes what it declares, and tells it."""

from __future__ import annotations

from typing import Any

from headrace.config.shaping_section import ProfileConfig
from headrace.engine.interface.grammar_spec import Grammar
from headrace.engine.interface.sampling import SamplingParams
from headrace.gateway.degradation.shaping.change_record import ShapingChange, header_value
from headrace.gateway.degradation.shaping.fast_profile import apply_fast_profile
from headrace.gateway.requests.text_request import TextRequest, Tool

HOT = SamplingParams(temperature=1.0, top_p=1.0, seed=7)
TALK = [{"role": "user", "content": "hi"}]


def test_answers_are_short_and_sampling_is_conservative() -> None:
    asked, shaped = apply_fast_profile(
        TextRequest(model="mini", messages=TALK, sampling=HOT, min_tokens=500, max_tokens=1000)
    )
    assert (asked.max_tokens, asked.min_tokens) == (160, 160)
    assert (asked.sampling.temperature, asked.sampling.top_p, asked.sampling.seed) == (0.3, 0.9, 7)
    assert header_value(shaped) == "max_tokens=1000>160, temperature=1>0.3, top_p=1>0.9"


def test_what_is_faster_already_stays() -> None:
    given = TextRequest(model="mini", messages=TALK, sampling=SamplingParams(temperature=0.0, top_p=0.5), max_tokens=20)
    asked, shaped = apply_fast_profile(given)
    assert asked == given
    assert shaped == ()


def test_an_answer_with_a_form_is_not_cut() -> None:
    forms: list[dict[str, Any]] = [{"grammar": Grammar("json_object")}, {"tools": (Tool("f"),)}]
    for form in forms:
        asked, _ = apply_fast_profile(TextRequest(model="mini", messages=TALK, **form))
        assert asked.max_tokens is None
    asked, _ = apply_fast_profile(TextRequest(model="mini", messages=TALK, tools=(Tool("f"),), choosing="none"))
    assert asked.max_tokens == 160


def test_reasoning_is_off_unless_it_was_asked_for() -> None:
    assert apply_fast_profile(TextRequest(model="mini", messages=TALK), can_reason=True)[0].think is False
    assert apply_fast_profile(TextRequest(model="mini", messages=TALK, think=True), can_reason=True)[0].think is True
    assert apply_fast_profile(TextRequest(model="mini", messages=TALK))[0].think is None
    assert (
        apply_fast_profile(TextRequest(model="mini", messages=TALK), ProfileConfig(think=True), can_reason=True)[
            0
        ].think
        is None
    )


def test_what_is_told_cannot_break_a_header() -> None:
    assert (
        header_value([ShapingChange("variant", None, "a,b\r\nx: y"), ShapingChange("t", 0.125, 2)])
        == "variant=a_b__x:_y, t=0.125>2"
    )
