"""How far down its ladder a surface is: decided from signals, with hysteresis, on a clock that is passed in.

Owns Signals, Level and the state of each ladder. A step is entered as soon as any of its signals says so; a milder one
is taken a step at a time, once every signal is past the thresholds for leaving and the dwell time has gone by since the
last change. So a surface can flap no faster than the dwell time, and at the same state more pressure never gives a
milder level. Deciding is a few comparisons. Knows neither engines nor requests.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from headrace.gateway.degradation.ladder.ladder_options import WORSE, LadderOptions, SignalName, StepName, StepOptions

# What many requests see alike, and so has a state; the others are a request's own, and are looked at by themselves.
_SHARED: Final[tuple[SignalName, ...]] = ("queue_s", "memory_free", "budget_left")
_OWN: Final[tuple[SignalName, ...]] = ("slack_s",)
_MEASURED: Final[tuple[SignalName, ...]] = ("queue_s", "memory_free")


class PressureSignals(msgspec.Struct, frozen=True, kw_only=True):
    """The pressure that a request meets; see StepOptions for the meanings. None: not known, or there is none."""

    queue_s: float | None = None
    memory_free: float | None = None
    slack_s: float | None = None
    budget_left: float | None = None

    def get(self, name: SignalName) -> float | None:
        found: float | None = getattr(self, name)
        return found


class LadderLevel(msgspec.Struct, frozen=True):
    """How many steps of a ladder are taken. A harder step includes the milder ones."""

    number: int  # 0: none
    steps: tuple[StepOptions, ...] = ()  # so many, mildest first
    why: tuple[SignalName, ...] = ()  # the signals that lead to the hardest of them, where they do so now

    @property
    def name(self) -> str:
        """Of the hardest step; for metrics and logs."""
        return self.steps[-1].step if self.steps else "none"

    def step(self, name: StepName) -> StepOptions | None:
        return next((step for step in self.steps if step.step == name), None)


NONE: Final = LadderLevel(0)


class LadderState(msgspec.Struct, frozen=True):
    """Of one ladder."""

    number: int = 0
    since: float = 0.0  # when it last changed
    known: float = 0.0  # when queue or memory was last known


def next_state(options: LadderOptions, state: LadderState, signals: PressureSignals, now: float) -> LadderState:
    """Where a ladder is after a look at the signals. A clock that goes backwards holds everything as it is."""
    steps = options.steps
    is_known = any(signals.get(name) is not None for name in _MEASURED)
    known = now if is_known else state.known
    entered = _hardest(steps, signals, _SHARED, leaving=False)
    if entered > state.number:
        return LadderState(entered, now, known)
    held = _hardest(steps, signals, _SHARED, leaving=True)
    if not is_known and now - state.known <= options.hold_s:
        held = state.number  # an engine that says nothing may be one that cannot
    if held < state.number and now - state.since >= options.dwell_s:
        return LadderState(state.number - 1, now, known)
    return LadderState(state.number, state.since, known)


def _hardest(
    steps: Sequence[StepOptions], signals: PressureSignals, names: Sequence[SignalName], *, leaving: bool
) -> int:
    """How many steps the signals ask for; with `leaving`, how many they do not let go of."""
    for number in range(len(steps), 0, -1):
        if _asked_by(steps[number - 1], signals, names, leaving=leaving):
            return number
    return 0


def _asked_by(
    step: StepOptions, signals: PressureSignals, names: Sequence[SignalName], *, leaving: bool = False
) -> tuple[SignalName, ...]:
    found: list[SignalName] = []
    for name in names:
        threshold, value = step.threshold(name), signals.get(name)
        if threshold is None or value is None:
            continue
        sign = WORSE[name]
        if sign * value > sign * threshold.leave if leaving else sign * value >= sign * threshold.enter:
            found.append(name)
    return tuple(found)


class Ladder:
    """The ladders of all surfaces, each with its state. All of it belongs to one event loop."""

    def __init__(
        self,
        options: Mapping[str, LadderOptions],  # by surface
        *,
        clock: Callable[[], float] = time.monotonic,
        most: int = 4096,  # states that are kept; the one that was longest not asked for goes
    ) -> None:
        self._options = dict(options)
        self._clock = clock
        self._most = most
        self._states: OrderedDict[tuple[str, str], LadderState] = OrderedDict()

    def decide(
        self,
        surface: str,
        signals: PressureSignals,
        now: float | None = None,
        *,
        of: str = "",
        least: StepName | None = None,
    ) -> LadderLevel:
        """`of`: whose state it is beside the surface's, such as a model and a tenant: one's queue is not another's.
        `least`: a step that is taken whatever the signals say, such as by an operator's order."""
        options = self._options.get(surface)
        if options is None or not options.steps:
            return NONE
        at = self._clock() if now is None else now
        key = (surface, of)
        before = self._states.pop(key, None) or LadderState(0, at - options.dwell_s, at)
        state = self._states[key] = next_state(options, before, signals, at)
        if len(self._states) > self._most:
            self._states.popitem(last=False)
        steps = options.steps
        ordered = [number for number, step in enumerate(steps, start=1) if step.step == least]
        number = max(state.number, _hardest(steps, signals, _OWN, leaving=False), *ordered, 0)
        if not number:
            return NONE
        return LadderLevel(number, steps[:number], _asked_by(steps[number - 1], signals, (*_SHARED, *_OWN)))

    def bottom(self, surface: str) -> LadderLevel:
        """Every step of it: for a request that the engine has refused."""
        options = self._options.get(surface)
        return NONE if options is None else LadderLevel(len(options.steps), options.steps)

    def number(self, surface: str, of: str = "") -> int:
        """Where it is, without a look; for metrics."""
        state = self._states.get((surface, of))
        return 0 if state is None else state.number
