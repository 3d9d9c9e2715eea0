"""A ladder as the configuration declares it becomes the ladder's own: milliseconds are seconds, presets are steps."""

from __future__ import annotations

import pytest

from headrace.config import LadderConfig, SurfaceConfig
from headrace.config.shaping_section import LadderStepConfig
from headrace.gateway.degradation.ladder.ladder_config import findings, ladder_of
from headrace.gateway.degradation.ladder.ladder_options import LadderOptions, StepOptions, Threshold, by_patience
from headrace.surfaces import SURFACES


def test_declared_steps_are_in_seconds() -> None:
    step = LadderStepConfig(
        step="variant",
        queue_ms=(300.0, 150.0),
        memory_free=(0.1, 0.2),
        slack_ms=(-50.0, 1000.0),
        budget_left=(0.0, 0.05),
        variants=("int4", "fast"),
        stale_s=5.0,
        max_tokens=7,
    )
    config = SurfaceConfig(ladder=LadderConfig(steps=(step,), dwell_s=1.0, hold_s=3.0))
    assert ladder_of("voice", config) == LadderOptions(
        steps=(
            StepOptions(
                step="variant",
                queue_s=Threshold(0.3, 0.15),
                memory_free=Threshold(0.1, 0.2),
                slack_s=Threshold(-0.05, 1.0),
                budget_left=Threshold(0.0, 0.05),
                variants=("int4", "fast"),
                stale_s=5.0,
                max_tokens=7,
            ),
        ),
        dwell_s=1.0,
        hold_s=3.0,
    )
    assert list(findings("voice", config, "here")) == []


@pytest.mark.parametrize("surface", SURFACES)
def test_a_preset_follows_the_surfaces_patience(surface: str) -> None:
    config = SurfaceConfig(ladder=LadderConfig(preset=True, variants=("fast",), dwell_s=1.0))
    found = ladder_of(surface, config)
    assert found.steps == by_patience(SURFACES[surface].patience, variants=("fast",)).steps
    assert (found.dwell_s, found.hold_s) == (1.0, 30.0)
    assert list(findings(surface, config, "here")) == []


def test_a_preset_follows_a_declared_patience() -> None:
    config = SurfaceConfig(patience_s=20.0, ladder=LadderConfig(preset=True))
    steps = ladder_of("batch", config).steps
    assert [step.step for step in steps] == ["trim", "max_tokens", "stale", "extract", "refuse"]
    assert steps[0].queue_s == Threshold(2.0, 1.0)


def test_without_preset_and_steps_there_is_no_ladder() -> None:
    assert ladder_of("chat", SurfaceConfig()).steps == ()
