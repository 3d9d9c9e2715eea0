"""Resolving and checking the ladder that a surface declares."""

from __future__ import annotations

import pytest

from headrace.config import LadderConfig, SurfaceConfig
from headrace.config.shaping_section import LadderStepConfig
from headrace.gateway.degradation.ladder.ladder_config import STEP_ORDER, findings, preset_steps, resolve_ladder
from headrace.surfaces import SURFACES


def test_declared_steps_are_used_as_they_are() -> None:
    step = LadderStepConfig(step="variant", queue_ms=(300.0, 150.0), slack_ms=(-50.0, 1000.0), variants=("int4",))
    config = SurfaceConfig(ladder=LadderConfig(steps=(step,), dwell_s=1.0, hold_s=3.0))
    assert resolve_ladder("voice", config) == config.ladder
    assert list(findings("voice", config, "here")) == []


@pytest.mark.parametrize("surface", SURFACES)
def test_a_preset_follows_the_surfaces_patience(surface: str) -> None:
    config = SurfaceConfig(ladder=LadderConfig(preset=True, variants=("fast",), dwell_s=1.0))
    ladder = resolve_ladder(surface, config)
    assert ladder.steps == preset_steps(SURFACES[surface].patience, variants=("fast",))
    assert (ladder.dwell_s, ladder.hold_s) == (1.0, 30.0)
    assert list(findings(surface, config, "here")) == []


def test_a_preset_follows_a_declared_patience() -> None:
    config = SurfaceConfig(patience_s=20.0, ladder=LadderConfig(preset=True))
    steps = resolve_ladder("batch", config).steps
    assert [step.step for step in steps] == ["trim", "max_tokens", "stale", "extract", "refuse"]
    assert steps[0].queue_ms == (2000.0, 1000.0)


def test_preset_steps_include_a_smaller_variant_only_by_name() -> None:
    steps = preset_steps(10.0, variants=("fast",))
    assert [step.step for step in steps] == list(STEP_ORDER)
    assert steps[0].queue_ms == (1000.0, 500.0)
    assert [step.step for step in preset_steps(10.0)] == [name for name in STEP_ORDER if name != "variant"]
    assert preset_steps(float("inf")) == ()


def test_without_preset_and_steps_there_is_no_ladder() -> None:
    assert resolve_ladder("chat", SurfaceConfig()).steps == ()


@pytest.mark.parametrize(
    ("signal", "pair", "problem"),
    [
        ("queue_ms", (0.0, -1.0), "expected numbers of at least 0, found -1"),
        ("memory_free", (-0.1, 0.5), "expected numbers from 0 to 1, found -0.1"),
        ("budget_left", (0.5, 1.5), "expected numbers from 0 to 1, found 1.5"),
        ("slack_ms", (-500.0, -100.0), None),  # below 0 the deadline is missed
        ("memory_free", (0.0, 1.0), None),
    ],
)
def test_thresholds_that_no_signal_can_have_are_problems(
    signal: str, pair: tuple[float, float], problem: str | None
) -> None:
    ladder = LadderConfig(steps=(LadderStepConfig(step="extract", **{signal: pair}),))
    found = list(findings("chat", SurfaceConfig(ladder=ladder), "surfaces.chat.ladder"))
    assert found == ([] if problem is None else [(f"surfaces.chat.ladder.steps[0].{signal}", problem)])


def test_problems_of_a_ladder_are_named() -> None:
    steps = (
        LadderStepConfig(step="extract", queue_ms=(2.0, 2.0)),
        LadderStepConfig(step="trim", queue_ms=(1.0, 0.5), memory_free=(0.2, 0.1)),
        LadderStepConfig(step="variant", variants=(), stale_s=float("inf")),
    )
    config = SurfaceConfig(ladder=LadderConfig(steps=steps, dwell_s=float("inf")))
    assert list(findings("chat", config, "here")) == [
        ("here.dwell_s", "expected a finite number of seconds above 0, found inf"),
        ("here.steps[0].queue_ms", "expected leave below enter, found enter 2 and leave 2"),
        (
            "here.steps[1].step",
            f"expected the order {', '.join(STEP_ORDER)}, each once; found trim after extract",
        ),
        ("here.steps[1].queue_ms", "expected thresholds that are not milder than those of the step before"),
        ("here.steps[1].memory_free", "expected leave above enter, found enter 0.2 and leave 0.1"),
        ("here.steps[2]", "expected a threshold for at least one of queue_ms, memory_free, slack_ms, budget_left"),
        ("here.steps[2].variants", "expected at least one variant"),
        ("here.steps[2].stale_s", "expected a finite number of seconds, found inf"),
    ]
    unpaired = LadderConfig(preset=True, steps=(LadderStepConfig(step="trim", queue_ms=(1.0,)),))
    assert list(findings("chat", SurfaceConfig(ladder=unpaired), "here")) == [
        ("here", "expected either preset or steps, found both"),
        ("here.steps[0].queue_ms", "expected two numbers (enter, leave), found 1"),
    ]
