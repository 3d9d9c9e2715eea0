"""Whether a variant is well: circuit breakers that learn from its calls, and checks that ask it.

Owns Breaker, Check and Health (both for every variant, by name). A breaker is closed while calls do well; too many
failed or slow ones open it, and then nothing is asked of the variant for a while; after it, it is half open: a few
calls are let through, and what becomes of them closes it or opens it again for longer.

    closed ──failures or slow calls in the window──▶ open ──open_s──▶ half-open ──all probes well──▶ closed
                                                      ▲                   │
                                                      └──a probe failed───┘  twice as long, to open_most_s

Knows neither requests nor what a failure is. Time is a parameter; one that goes backwards counts as one that stands.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

from millrace.config.routing import BreakerConfig, HealthConfig
from millrace.gateway.routing.parts import Clock

State = Literal["closed", "open", "half-open"]
_PIECES: Final = 10  # of the window: what is older goes a tenth at a time
_PROBE_S: Final = 120.0  # after which a probe that told nothing is given up


@dataclass(slots=True)
class _Piece:
    number: int
    calls: int = 0
    failed: int = 0
    slow: int = 0


class _Window:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds / _PIECES
        self._pieces: deque[_Piece] = deque(maxlen=_PIECES)

    def at(self, now: float) -> _Piece:
        number = int(now / self._seconds)
        while self._pieces and self._pieces[0].number <= number - _PIECES:
            self._pieces.popleft()
        if not self._pieces or self._pieces[-1].number < number:
            self._pieces.append(_Piece(number))
        return self._pieces[-1]

    def total(self, now: float) -> tuple[int, int, int]:
        self.at(now)
        calls = failed = slow = 0
        for each in self._pieces:
            calls += each.calls
            failed += each.failed
            slow += each.slow
        return calls, failed, slow

    def clear(self) -> None:
        self._pieces.clear()


class Permit:
    """One call that a breaker let through. Of the three ends the first counts, and only in the breaker's same state."""

    __slots__ = ("_breaker", "_epoch", "given")

    def __init__(self, breaker: Breaker, epoch: int, given: float) -> None:
        self._breaker: Breaker | None = breaker
        self._epoch = epoch
        self.given = given

    def succeeded(self, seconds: float | None = None) -> None:
        """`seconds`: to its first token."""
        breaker = self._take()
        if breaker is not None:
            breaker.report(self, self._epoch, "slow" if breaker.is_slow(seconds) else "well")

    def failed(self) -> None:
        breaker = self._take()
        if breaker is not None:
            breaker.report(self, self._epoch, "failed")

    def dropped(self) -> None:
        """It ended and says nothing of the variant: the client left, or the request was wrong."""
        breaker = self._take()
        if breaker is not None:
            breaker.report(self, self._epoch, "dropped")

    def _take(self) -> Breaker | None:
        breaker, self._breaker = self._breaker, None
        return breaker


Ended = Literal["well", "slow", "failed", "dropped"]


class Breaker:
    def __init__(
        self,
        config: BreakerConfig | None = None,
        *,
        clock: Clock = time.monotonic,
        changed: Callable[[State], None] | None = None,
    ) -> None:
        """`changed` hears of every new state."""
        self.config = config or BreakerConfig()
        self.opened = 0  # times that it did
        self._clock = clock
        self._changed = changed
        self._latest = clock()
        self._state: State = "closed"
        self._epoch = 0  # of the state: what was let through in another one counts no more
        self._window = _Window(self.config.window_s)
        self._until = 0.0  # it stays open
        self._wait = self.config.open_s
        self._probes: set[Permit] = set()
        self._well = 0  # probes that were

    @property
    def state(self) -> State:
        """As it is now: an open one whose time is over is half open."""
        if self._state == "open" and self._now() >= self._until:
            return "half-open"
        return self._state

    def why_not(self) -> str | None:
        """Why a call would not be let through; None where it would. Changes nothing."""
        match self.state:
            case "closed":
                return None
            case "open":
                return f"its breaker is open for {max(0.0, self._until - self._now()):.1f} s more"
            case "half-open":
                if self._state == "open":
                    return None
                # Every probe that may be needed is under way.
                return None if self._room(self._now()) else "its breaker is half open, and its probes are under way"

    def retry_after(self) -> float:
        """Seconds until a call may be let through."""
        return max(0.0, self._until - self._now()) if self._state == "open" else 0.0

    def enter(self) -> Permit | None:
        """A permit for one call, which must say how it ended; None where it may not be made."""
        now = self._now()
        if self._state == "open":
            if now < self._until:
                return None
            self._turn("half-open")
        permit = Permit(self, self._epoch, now)
        if self._state == "half-open":
            if not self._room(now):
                return None
            self._probes.add(permit)
        return permit

    def is_slow(self, seconds: float | None) -> bool:
        return seconds is not None and self.config.slow_s is not None and seconds > self.config.slow_s

    def report(self, permit: Permit, epoch: int, ended: Ended) -> None:
        """What became of a call; permits call this."""
        if epoch != self._epoch:
            return
        if self._state == "half-open":
            if permit in self._probes:
                self._probes.discard(permit)
                self._probed(ended)
        elif ended != "dropped":
            self._count(ended)

    def _probed(self, ended: Ended) -> None:
        if ended == "well":
            self._well += 1
            if self._well >= self.config.probes:
                self._wait = self.config.open_s
                self._turn("closed")
        elif ended != "dropped":
            self._wait = min(2 * self._wait, self.config.open_most_s)
            self._open()

    def _count(self, ended: Ended) -> None:
        config, now = self.config, self._now()
        piece = self._window.at(now)
        piece.calls += 1
        piece.failed += ended == "failed"
        piece.slow += ended == "slow"
        calls, failed, slow = self._window.total(now)
        if calls < config.least_calls:
            return
        if failed >= config.failures * calls or (config.slow_s is not None and failed + slow >= config.slow * calls):
            self._open()

    def _open(self) -> None:
        self._until = self._now() + min(self._wait, self.config.open_most_s)
        self.opened += 1
        self._turn("open")

    def _turn(self, state: State) -> None:
        self._state = state
        self._epoch += 1
        self._well = 0
        self._probes.clear()
        self._window.clear()
        if self._changed is not None:
            self._changed(state)

    def _room(self, now: float) -> bool:
        """Whether one more probe may be under way: no more than are still needed."""
        for probe in [each for each in self._probes if now - each.given > _PROBE_S]:
            self._probes.discard(probe)
        return len(self._probes) < self.config.probes - self._well

    def _now(self) -> float:
        self._latest = max(self._latest, self._clock())
        return self._latest


class Check:
    """Whether a variant answers when it is asked if it is there. At first it counts as there."""

    def __init__(self, config: HealthConfig) -> None:
        self._config = config
        self._in_a_row = 0  # answers that speak against what it counts as
        self.well = True
        self.why = ""

    def passed(self) -> None:
        self._hear(well=True)

    def failed(self, why: str) -> None:
        self.why = why
        self._hear(well=False)

    def _hear(self, *, well: bool) -> None:
        if well == self.well:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        if self._in_a_row >= (self._config.rise if well else self._config.fall):
            self.well, self._in_a_row = well, 0


Probe = Callable[[], Awaitable[None]]  # raises where the variant is not there


class Health:
    """The breakers and checks of all variants. Their names are the configuration's, so there are no more than those."""

    def __init__(
        self,
        breaker: BreakerConfig | None = None,
        check: HealthConfig | None = None,
        *,
        clock: Clock = time.monotonic,
        changed: Callable[[str, State], None] | None = None,
    ) -> None:
        """`changed` hears of every new state of a variant's breaker."""
        self._breaker = breaker or BreakerConfig()
        self._check = check or HealthConfig()
        self._clock = clock
        self._changed = changed
        self._breakers: dict[str, Breaker] = {}
        self._checks: dict[str, Check] = {}

    def breaker(self, variant: str) -> Breaker:
        found = self._breakers.get(variant)
        if found is None:
            changed = None if self._changed is None else partial(self._changed, variant)
            found = self._breakers[variant] = Breaker(self._breaker, clock=self._clock, changed=changed)
        return found

    def check(self, variant: str) -> Check:
        return self._checks.setdefault(variant, Check(self._check))

    def why_not(self, variant: str) -> str | None:
        """Why a variant is to be left alone now; None where it is well."""
        check = self._checks.get(variant)
        if check is not None and not check.well:
            return f"it does not answer: {check.why}"
        breaker = self._breakers.get(variant)
        return None if breaker is None else breaker.why_not()

    async def watch(self, probes: Mapping[str, Probe]) -> None:
        """Asks every variant again and again, until it is cancelled."""
        while True:
            await asyncio.gather(*(self.ask(variant, probe) for variant, probe in probes.items()))
            await asyncio.sleep(self._check.every_s)

    async def ask(self, variant: str, probe: Probe) -> None:
        """Once."""
        check = self.check(variant)
        try:
            async with asyncio.timeout(self._check.within_s):
                await probe()
        except TimeoutError:
            check.failed(f"nothing came within {self._check.within_s:g} s")
        except Exception as error:
            check.failed(str(error) or type(error).__name__)
        else:
            check.passed()
