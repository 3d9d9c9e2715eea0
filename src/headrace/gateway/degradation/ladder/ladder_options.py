"""What an operator declares of a ladder: its steps in order, when each is taken and left, and what it does.

Owns these shapes, their checks, and a ladder made from a surface's objectives for operators who declare none of their
own. Reads no file; milliseconds become seconds before they come here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Literal, get_args

import msgspec

from headrace.config.shaping_section import StepName

SignalName = Literal["queue_s", "memory_free", "slack_s", "budget_left"]
ORDER: Final[tuple[StepName, ...]] = get_args(StepName)
SIGNALS: Final[tuple[SignalName, ...]] = get_args(SignalName)
WORSE: Final[Mapping[SignalName, float]] = MappingProxyType(
    # The sign of what is worse: a longer queue, and less of everything else.
    {"queue_s": 1.0, "memory_free": -1.0, "slack_s": -1.0, "budget_left": -1.0}
)


class Threshold(msgspec.Struct, frozen=True):
    """A step is entered at `enter` and beyond it, and left once the signal is back at the mild side of `leave`."""

    enter: float
    leave: float


class StepOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A step, the signals that lead to it (any of them is enough), and what it does."""

    step: StepName
    queue_s: Threshold | None = None  # predicted seconds to the first token
    memory_free: Threshold | None = None  # share of the KV blocks that hold nothing or only prefixes for later
    slack_s: Threshold | None = None  # seconds that would be left at the deadline once the answer is whole
    budget_left: Threshold | None = None  # share of the tenant's budget

    history_tokens: int = 1024  # trim: the conversation without its sources
    sources_tokens: int = 512  # trim: the sources
    max_tokens: int = 128  # max_tokens: of an answer
    variants: tuple[str, ...] = ("fast",)  # variant: MODEL@NAME, the first that is there
    stale_s: float = 86_400.0  # stale: most seconds since a cached answer expired

    def threshold(self, signal: SignalName) -> Threshold | None:
        found: Threshold | None = getattr(self, signal)
        return found


class LadderOptions(msgspec.Struct, frozen=True, kw_only=True):
    steps: tuple[StepOptions, ...] = ()  # none: the surface never degrades
    dwell_s: float = 2.0  # least seconds on a step before a milder one; going down the ladder is never held up
    hold_s: float = 30.0  # that a step is kept while nothing is known of queue and memory


def findings(options: LadderOptions) -> Iterator[tuple[str, str]]:
    """What is wrong with it: where, and why."""
    for name, value in (("dwell_s", options.dwell_s), ("hold_s", options.hold_s)):
        if not 0.0 < value < math.inf:
            yield name, f"expected seconds above 0, found {value:g}"
    before: StepOptions | None = None
    for place, step in enumerate(options.steps):
        where = f"steps[{place}]"
        if before is not None and ORDER.index(step.step) <= ORDER.index(before.step):
            yield (
                f"{where}.step",
                f"expected the order {', '.join(ORDER)}, each once, found {step.step} after {before.step}",
            )
        declared: list[SignalName] = [signal for signal in SIGNALS if step.threshold(signal) is not None]
        if not declared:
            yield where, f"expected a threshold of at least one of {', '.join(SIGNALS)}"
        for signal in declared:
            yield from ((f"{where}.{signal}", why) for why in _wrong(step, signal, options.steps[:place]))
        yield from _wrong_counts(step, where)
        before = step


def _wrong(step: StepOptions, signal: SignalName, milder: Sequence[StepOptions]) -> Iterator[str]:
    threshold = step.threshold(signal)
    assert threshold is not None
    sign = WORSE[signal]
    if not (math.isfinite(threshold.enter) and math.isfinite(threshold.leave)):
        yield "expected finite numbers"
    elif sign * threshold.enter <= sign * threshold.leave:
        side = "below" if sign > 0 else "above"
        yield f"expected leave {side} enter, found enter {threshold.enter:g}, leave {threshold.leave:g}"
    others = [other for each in milder if (other := each.threshold(signal)) is not None]
    if others and (
        sign * threshold.enter < sign * others[-1].enter or sign * threshold.leave < sign * others[-1].leave
    ):
        yield "expected no milder thresholds than those of the step before"


def _wrong_counts(step: StepOptions, where: str) -> Iterator[tuple[str, str]]:
    for name in ("history_tokens", "sources_tokens", "max_tokens"):
        value = getattr(step, name)
        if value < 1:
            yield f"{where}.{name}", f"expected at least 1, found {value}"
    if step.step == "variant" and not step.variants:
        yield f"{where}.variants", "expected at least one"
    if not 0.0 <= step.stale_s < math.inf:
        yield f"{where}.stale_s", f"expected seconds, found {step.stale_s:g}"


# At which share of the patience steps are entered, at which free memory, and with how many seconds left at the
# deadline.
_BY_PATIENCE: Final[tuple[tuple[StepName, float, float | None, float | None], ...]] = (
    ("trim", 0.10, 0.10, None),
    ("max_tokens", 0.15, 0.06, 1.0),
    ("variant", 0.20, 0.04, 0.5),
    ("stale", 0.30, None, 0.0),
    ("extract", 0.30, None, 0.0),
    ("refuse", 0.80, None, None),
)


def by_patience(patience: float, *, variants: tuple[str, ...] = ()) -> LadderOptions:
    """A ladder for a surface that refuses at a wait of so many seconds. Without patience there is none.

    A smaller variant is a step of it only where one is named: whether that helps depends on where it runs.
    """
    if not patience < math.inf:
        return LadderOptions()
    return LadderOptions(
        steps=tuple(
            StepOptions(
                step=name,
                variants=variants,
                queue_s=Threshold(share * patience, 0.5 * share * patience),
                memory_free=None if memory is None else Threshold(memory, 2.0 * memory),
                slack_s=None if slack is None else Threshold(slack, slack + 1.0),
            )
            for name, share, memory, slack in _BY_PATIENCE
            if name != "variant" or variants
        )
    )
