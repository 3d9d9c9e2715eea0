"""A surface's ladder as the configuration has it, in the ladder's own words.

Owns the conversion, and what must hold in a ladder. Knows no request.
"""

from __future__ import annotations

from collections.abc import Iterator

from headrace.config import SurfaceConfig
from headrace.config.shaping_section import LadderConfig, LadderStepConfig
from headrace.gateway.degradation.ladder import ladder_options as options
from headrace.gateway.degradation.ladder.ladder_options import LadderOptions, StepOptions, Threshold, by_patience
from headrace.surfaces import SURFACES

_SIGNALS = {"queue_ms": 1e-3, "memory_free": 1.0, "slack_ms": 1e-3, "budget_left": 1.0}  # and what makes them ours


def ladder_of(surface: str, config: SurfaceConfig) -> LadderOptions:
    """The ladder of a surface; one without steps where none is declared."""
    ladder = config.ladder
    if ladder.preset:
        patience = SURFACES[surface].patience if config.patience_s is None else config.patience_s
        found = by_patience(patience, variants=ladder.variants)
        return LadderOptions(steps=found.steps, dwell_s=ladder.dwell_s, hold_s=ladder.hold_s)
    return LadderOptions(steps=tuple(map(_step, ladder.steps)), dwell_s=ladder.dwell_s, hold_s=ladder.hold_s)


def _step(config: LadderStepConfig) -> StepOptions:
    return StepOptions(
        step=config.step,
        queue_s=_threshold(config, "queue_ms"),
        memory_free=_threshold(config, "memory_free"),
        slack_s=_threshold(config, "slack_ms"),
        budget_left=_threshold(config, "budget_left"),
        history_tokens=config.history_tokens,
        sources_tokens=config.sources_tokens,
        max_tokens=config.max_tokens,
        variants=config.variants,
        stale_s=config.stale_s,
    )


def _threshold(config: LadderStepConfig, name: str) -> Threshold | None:
    pair: tuple[float, ...] | None = getattr(config, name)
    return None if pair is None else Threshold(pair[0] * _SIGNALS[name], pair[1] * _SIGNALS[name])


def findings(surface: str, config: SurfaceConfig, where: str) -> Iterator[tuple[str, str]]:
    """What is wrong with it: a key by its path, and why."""
    ladder: LadderConfig = config.ladder
    if ladder.preset and ladder.steps:
        yield where, "expected preset or steps, found both"
    paired = True
    for place, step in enumerate(ladder.steps):
        for name in _SIGNALS:
            pair: tuple[float, ...] | None = getattr(step, name)
            if pair is not None and len(pair) != 2:
                paired = False
                yield (
                    f"{where}.steps[{place}].{name}",
                    f"expected two numbers, found {len(pair)}",
                )
    if paired:
        for path, why in options.findings(ladder_of(surface, config)):
            told, said = (text.replace("queue_s", "queue_ms").replace("slack_s", "slack_ms") for text in (path, why))
            yield f"{where}.{told}", said if told == path else f"{said} (in seconds)"
