"""Resolves and checks the degradation ladder of a surface.

Owns the preset ladder, the order of steps and the rules that a declared ladder must satisfy. Does not look at requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Literal, get_args

from msgspec.structs import replace

from headrace.config import SurfaceConfig
from headrace.config.shaping_section import LadderConfig, LadderStepConfig, StepName
from headrace.surfaces import SURFACES

Signal = Literal["queue_ms", "memory_free", "slack_ms", "budget_left"]
Threshold = tuple[float, ...]  # (enter, leave)

STEP_ORDER: Final[tuple[StepName, ...]] = get_args(StepName)
SIGNALS: Final[tuple[Signal, ...]] = get_args(Signal)
# The direction of more pressure: a longer queue, and less of everything else.
WORSE_SIGN: Final[Mapping[Signal, float]] = MappingProxyType(
    {"queue_ms": 1.0, "memory_free": -1.0, "slack_ms": -1.0, "budget_left": -1.0}
)
# The values that a signal can have. A threshold outside of them is reached always or never.
_RANGE: Final[Mapping[Signal, tuple[float, float]]] = MappingProxyType(
    {"queue_ms": (0.0, math.inf), "memory_free": (0.0, 1.0), "budget_left": (0.0, 1.0)}
)

# Of each preset step: the share of the patience, the free memory and the slack in seconds at which it is entered.
_PRESET: Final[tuple[tuple[StepName, float, float | None, float | None], ...]] = (
    ("trim", 0.10, 0.10, None),
    ("max_tokens", 0.15, 0.06, 1.0),
    ("variant", 0.20, 0.04, 0.5),
    ("stale", 0.30, None, 0.0),
    ("extract", 0.30, None, 0.0),
    ("refuse", 0.80, None, None),
)


def threshold(step: LadderStepConfig, signal: Signal) -> Threshold | None:
    return getattr(step, signal)


def resolve_ladder(surface: str, config: SurfaceConfig) -> LadderConfig:
    """Return the ladder of a surface with its preset expanded. Without declared steps it has none."""
    ladder = config.ladder
    if not ladder.preset:
        return ladder
    patience_s = SURFACES[surface].patience if config.patience_s is None else config.patience_s
    return replace(ladder, steps=preset_steps(patience_s, variants=ladder.variants))


def preset_steps(patience_s: float, *, variants: tuple[str, ...] = ()) -> tuple[LadderStepConfig, ...]:
    """Return the steps for a surface that rejects requests after `patience_s`; none without a finite patience.

    The `variant` step is included only if you name variants: whether a smaller one helps depends on where it runs.
    """
    if not patience_s < math.inf:
        return ()
    return tuple(
        LadderStepConfig(
            step=name,
            variants=variants,
            queue_ms=(share * patience_s * 1e3, 0.5 * share * patience_s * 1e3),
            memory_free=None if memory is None else (memory, 2.0 * memory),
            slack_ms=None if slack_s is None else (slack_s * 1e3, (slack_s + 1.0) * 1e3),
        )
        for name, share, memory, slack_s in _PRESET
        if name != "variant" or variants
    )


def findings(surface: str, config: SurfaceConfig, where: str) -> Iterator[tuple[str, str]]:
    """Yield every problem of a surface's ladder as (key path, message)."""
    ladder = config.ladder
    if ladder.preset and ladder.steps:
        yield where, "expected either preset or steps, found both"
    for name, seconds in (("dwell_s", ladder.dwell_s), ("hold_s", ladder.hold_s)):
        if not 0.0 < seconds < math.inf:
            yield f"{where}.{name}", f"expected a finite number of seconds above 0, found {seconds:g}"
    unpaired = False
    for index, step in enumerate(ladder.steps):
        for signal in SIGNALS:
            pair = threshold(step, signal)
            if pair is not None and len(pair) != 2:
                unpaired = True
                yield f"{where}.steps[{index}].{signal}", f"expected two numbers (enter, leave), found {len(pair)}"
    if not unpaired:
        yield from _step_findings(resolve_ladder(surface, config).steps, where)


def _step_findings(steps: Sequence[LadderStepConfig], where: str) -> Iterator[tuple[str, str]]:
    for index, step in enumerate(steps):
        here = f"{where}.steps[{index}]"
        if index and STEP_ORDER.index(step.step) <= STEP_ORDER.index(steps[index - 1].step):
            yield (
                f"{here}.step",
                f"expected the order {', '.join(STEP_ORDER)}, each once; found {step.step} after "
                f"{steps[index - 1].step}",
            )
        declared: list[Signal] = [signal for signal in SIGNALS if threshold(step, signal) is not None]
        if not declared:
            yield here, f"expected a threshold for at least one of {', '.join(SIGNALS)}"
        for signal in declared:
            for problem in _threshold_problems(step, signal, steps[:index]):
                yield f"{here}.{signal}", problem
        if step.step == "variant" and not step.variants:
            yield f"{here}.variants", "expected at least one variant"
        if not step.stale_s < math.inf:
            yield f"{here}.stale_s", f"expected a finite number of seconds, found {step.stale_s:g}"


def _threshold_problems(step: LadderStepConfig, signal: Signal, milder: Sequence[LadderStepConfig]) -> Iterator[str]:
    pair = threshold(step, signal)
    assert pair is not None
    enter, leave = pair
    sign = WORSE_SIGN[signal]
    if not (math.isfinite(enter) and math.isfinite(leave)):
        yield "expected finite numbers"
        return
    least, most = _RANGE.get(signal, (-math.inf, math.inf))
    outside = [value for value in pair if not least <= value <= most]
    if outside:
        expected = f"from {least:g} to {most:g}" if most < math.inf else f"of at least {least:g}"
        yield f"expected numbers {expected}, found {outside[0]:g}"
    elif sign * enter <= sign * leave:
        side = "below" if sign > 0 else "above"
        yield f"expected leave {side} enter, found enter {enter:g} and leave {leave:g}"
    pairs = [other for each in milder if (other := threshold(each, signal)) is not None]
    if pairs and (sign * enter < sign * pairs[-1][0] or sign * leave < sign * pairs[-1][1]):
        yield "expected thresholds that are not milder than those of the step before"
