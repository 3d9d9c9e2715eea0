"""Decides how far down its ladder a surface is, from pressure signals, with hysteresis.

Owns PressureSignals, LadderLevel and the state of each ladder. Does not know engines or requests; time is a parameter.

A step is entered as soon as any of its signals reaches the enter threshold. A milder step follows one at a time, once
every signal is past the leave thresholds and `dwell_s` has passed since the last change. So a surface changes no more
often than the dwell time allows, and in the same state more pressure never gives a milder level.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from headrace.config import SurfaceConfig
from headrace.config.shaping_section import LadderConfig, LadderStepConfig, StepName
from headrace.gateway.degradation.ladder.ladder_config import WORSE_SIGN, Signal, resolve_ladder, threshold
from headrace.surfaces import SURFACES

# Many requests see the same value of a shared signal, so these have state. `slack_ms` belongs to one request.
_SHARED: Final[tuple[Signal, ...]] = ("queue_ms", "memory_free", "budget_left")
_PER_REQUEST: Final[tuple[Signal, ...]] = ("slack_ms",)
_MEASURED: Final[tuple[Signal, ...]] = ("queue_ms", "memory_free")


class PressureSignals(msgspec.Struct, frozen=True, kw_only=True):
    """The pressure that a request meets; LadderStepConfig describes each signal. None: unknown or not applicable."""

    queue_ms: float | None = None
    memory_free: float | None = None
    slack_ms: float | None = None
    budget_left: float | None = None

    def get(self, signal: Signal) -> float | None:
        return getattr(self, signal)


class LadderLevel(msgspec.Struct, frozen=True):
    """How many steps of a ladder apply. A harder step includes the milder ones."""

    number: int  # 0: none
    steps: tuple[LadderStepConfig, ...] = ()  # `number` of them, mildest first
    reasons: tuple[Signal, ...] = ()  # the signals that currently ask for the hardest of them

    @property
    def name(self) -> str:
        """The hardest step, for metrics and logs."""
        return self.steps[-1].step if self.steps else "none"

    def step(self, name: StepName) -> LadderStepConfig | None:
        return next((step for step in self.steps if step.step == name), None)


NO_LEVEL: Final = LadderLevel(0)


class LadderState(msgspec.Struct, frozen=True):
    number: int = 0
    changed_at: float = 0.0
    known_at: float = 0.0  # when queue or memory was last known


def next_state(ladder: LadderConfig, state: LadderState, signals: PressureSignals, now: float) -> LadderState:
    """Return the state of a ladder after looking at the signals. A clock that goes backwards changes nothing."""
    steps = ladder.steps
    is_known = any(signals.get(signal) is not None for signal in _MEASURED)
    known_at = now if is_known else state.known_at
    entered = _hardest(steps, signals, _SHARED, leaving=False)
    if entered > state.number:
        return LadderState(entered, now, known_at)
    held = _hardest(steps, signals, _SHARED, leaving=True)
    if not is_known and now - state.known_at <= ladder.hold_s:
        held = state.number  # an engine that reports nothing may be too busy to report
    if held < state.number and now - state.changed_at >= ladder.dwell_s:
        return LadderState(state.number - 1, now, known_at)
    return LadderState(state.number, state.changed_at, known_at)


def _hardest(
    steps: Sequence[LadderStepConfig], signals: PressureSignals, names: Sequence[Signal], *, leaving: bool
) -> int:
    """Count the steps that the signals ask for; with `leaving`, those that they do not allow to leave yet."""
    for number in range(len(steps), 0, -1):
        if _reasons(steps[number - 1], signals, names, leaving=leaving):
            return number
    return 0


def _reasons(
    step: LadderStepConfig, signals: PressureSignals, names: Sequence[Signal], *, leaving: bool = False
) -> tuple[Signal, ...]:
    reasons: list[Signal] = []
    for name in names:
        pair, value = threshold(step, name), signals.get(name)
        if pair is None or value is None:
            continue
        sign = WORSE_SIGN[name]
        if sign * value > sign * pair[1] if leaving else sign * value >= sign * pair[0]:
            reasons.append(name)
    return tuple(reasons)


class Ladder:
    """The ladders of all surfaces with their state. Used from one event loop only."""

    def __init__(
        self,
        ladders: Mapping[str, LadderConfig],  # by surface, with presets expanded
        *,
        clock: Callable[[], float] = time.monotonic,
        max_states: int = 4096,  # the least recently used state is dropped first
        patience_s: Mapping[str, float] | None = None,  # by surface, where the configuration sets it
    ) -> None:
        self._ladders = dict(ladders)
        self._clock = clock
        self._max_states = max_states
        self._patience_s = dict(patience_s or {})
        self._states: OrderedDict[tuple[str, str], LadderState] = OrderedDict()

    @classmethod
    def from_config(
        cls, surfaces: Mapping[str, SurfaceConfig], *, clock: Callable[[], float] = time.monotonic
    ) -> Ladder:
        ladders = {name: resolve_ladder(name, surfaces.get(name) or SurfaceConfig()) for name in SURFACES}
        return cls(
            {name: ladder for name, ladder in ladders.items() if ladder.steps},
            clock=clock,
            patience_s={name: each.patience_s for name, each in surfaces.items() if each.patience_s is not None},
        )

    @property
    def is_used(self) -> bool:
        """True if any surface has a ladder."""
        return bool(self._ladders)

    def has_steps(self, surface: str) -> bool:
        ladder = self._ladders.get(surface)
        return ladder is not None and bool(ladder.steps)

    def patience_s(self, surface: str) -> float:
        """Return how long a request of the surface may wait for its first token."""
        return self._patience_s.get(surface, SURFACES[surface].patience)

    def decide(
        self,
        surface: str,
        signals: PressureSignals,
        now: float | None = None,
        *,
        scope: str = "",
        least: StepName | None = None,
    ) -> LadderLevel:
        """Return the level for a request, and update the ladder's state.

        `scope`: whose state it is within the surface, such as a model and a tenant, because their queues differ.
        `least`: a step that applies whatever the signals say, such as an operator's order.
        """
        ladder = self._ladders.get(surface)
        if ladder is None or not ladder.steps:
            return NO_LEVEL
        now = self._clock() if now is None else now
        key = (surface, scope)
        before = self._states.pop(key, None) or LadderState(0, now - ladder.dwell_s, now)
        state = self._states[key] = next_state(ladder, before, signals, now)
        if len(self._states) > self._max_states:
            self._states.popitem(last=False)
        steps = ladder.steps
        ordered = [number for number, step in enumerate(steps, start=1) if step.step == least]
        number = max(state.number, _hardest(steps, signals, _PER_REQUEST, leaving=False), *ordered, 0)
        if not number:
            return NO_LEVEL
        return LadderLevel(number, steps[:number], _reasons(steps[number - 1], signals, (*_SHARED, *_PER_REQUEST)))

    def bottom(self, surface: str) -> LadderLevel:
        """Return the level with every step, for a request that the engine has refused."""
        ladder = self._ladders.get(surface)
        return NO_LEVEL if ladder is None else LadderLevel(len(ladder.steps), ladder.steps)

    def levels(self) -> Iterator[tuple[str, str, int, str]]:
        """Yield surface, scope, level and the name of its last step, for all that are degraded now."""
        for (surface, scope), state in self._states.items():
            if state.number:
                yield surface, scope, state.number, self._ladders[surface].steps[state.number - 1].step

    def number(self, surface: str, scope: str = "") -> int:
        """Return the current level without updating the state."""
        state = self._states.get((surface, scope))
        return 0 if state is None else state.number
