"""Breakers: after too many failures something is left alone for a while, so that nobody waits for it in vain.

Owns Breaker, of who answers requests: closed while calls do well; too many failed or slow ones open it, and then
nothing is asked for a while; after it, it is half open: a few calls are let through, and what becomes of them closes it
or opens it again for longer. And Streak, of a store: some failures in a row open it, and one call tries it again.

    closed ──failures or slow calls in the window──▶ open ──open_s──▶ half-open ──all probes well──▶ closed
                                                      ▲                   │
                                                      └──a probe failed───┘  twice as long, to open_most_s

Knows neither requests nor what a failure is. Time is a parameter; one that goes backwards counts as one that stands.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final, Literal

import msgspec

from headrace.config.breaker_section import BreakerConfig

BreakerState = Literal["closed", "open", "half-open"]
CallOutcome = Literal["well", "slow", "failed", "dropped"]
_PIECES: Final = 10  # of the window: what is older goes a tenth at a time
_PROBE_S: Final = 120.0  # after which a probe that told nothing is given up


class _Piece(msgspec.Struct):
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
        # What did well when it began and failed later may be here without its beginning.
        slow = max(0, slow)
        return max(calls, failed + slow), failed, slow

    def clear(self) -> None:
        self._pieces.clear()


class CallPermit:
    """One call that a breaker let through, and which is to tell how it ended. One that did well may still fail later,
    when its answer breaks off; else the first end counts. All count in the breaker's same state only."""

    __slots__ = ("_breaker", "_said", "epoch", "given")

    def __init__(self, breaker: CircuitBreaker, epoch: int, given: float) -> None:
        self.epoch = epoch
        self.given = given
        self._breaker = breaker
        self._said: CallOutcome | None = None

    def succeeded(self, seconds: float | None = None) -> None:
        """`seconds`: to its first output."""
        self._tell("slow" if self._breaker.is_slow(seconds) else "well")

    def failed(self) -> None:
        self._tell("failed")

    def dropped(self) -> None:
        """It ended and says nothing of who was asked: the client left, or the request was wrong."""
        self._tell("dropped")

    def _tell(self, ended: CallOutcome) -> None:
        before = self._said
        if before is None or (ended == "failed" and before in ("well", "slow")):
            self._said = ended
            self._breaker.report(self, ended, before)


class CircuitBreaker:
    def __init__(
        self,
        config: BreakerConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        changed: Callable[[BreakerState], None] | None = None,
    ) -> None:
        """`changed` hears of every new state."""
        self.config = config or BreakerConfig()
        self.opened = 0  # times that it did
        self._clock = clock
        self._changed = changed
        self._latest = clock()
        self._state: BreakerState = "closed"
        self._epoch = 0  # of the state: what was let through in another one counts no more
        self._window = _Window(self.config.window_s)
        self._until = 0.0  # it stays open
        self._wait = self.config.open_s
        self._probes: set[CallPermit] = set()
        self._well = 0  # probes that were

    @property
    def state(self) -> BreakerState:
        """As it is now: an open one whose time is over is half open."""
        if self._state == "open" and self._now() >= self._until:
            return "half-open"
        return self._state

    @property
    def ready(self) -> bool:
        """Whether a call would be let through."""
        return self.why_not() is None

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

    def enter(self) -> CallPermit | None:
        """A permit for one call, which must say how it ended; None where it may not be made."""
        now = self._now()
        if self._state == "open":
            if now < self._until:
                return None
            self._turn("half-open")
        permit = CallPermit(self, self._epoch, now)
        if self._state == "half-open":
            if not self._room(now):
                return None
            self._probes.add(permit)
        return permit

    def is_slow(self, seconds: float | None) -> bool:
        return seconds is not None and self.config.slow_s is not None and seconds > self.config.slow_s

    def counts(self) -> tuple[int, int]:
        """In the window: calls that failed or were slow, and all."""
        calls, failed, slow = self._window.total(self._now())
        return failed + slow, calls

    def report(self, permit: CallPermit, ended: CallOutcome, before: CallOutcome | None) -> None:
        """What became of a call; permits call this. `before`: as what it was counted already."""
        if permit.epoch != self._epoch:
            return
        if self._state == "half-open":
            if permit in self._probes or before is not None:
                self._probes.discard(permit)
                if self._probed(ended):
                    permit.epoch = self._epoch  # what becomes of it later still counts
        elif ended != "dropped":
            self._count(ended, before)

    def _probed(self, ended: CallOutcome) -> bool:
        """Whether this closed it."""
        if ended == "well":
            self._well += 1
            if self._well >= self.config.probes:
                self._wait = self.config.open_s
                self._turn("closed")
                return True
        elif ended != "dropped":
            self._wait = min(2 * self._wait, self.config.open_most_s)
            self._open()
        return False

    def _count(self, ended: CallOutcome, before: CallOutcome | None) -> None:
        config, now = self.config, self._now()
        piece = self._window.at(now)
        piece.calls += before is None
        piece.failed += ended == "failed"
        piece.slow += (ended == "slow") - (before == "slow")
        calls, failed, slow = self._window.total(now)
        if calls < config.least_calls:
            return
        if failed >= config.failures * calls or (config.slow_s is not None and failed + slow >= config.slow * calls):
            self._open()

    def _open(self) -> None:
        self._until = self._now() + min(self._wait, self.config.open_most_s)
        self.opened += 1
        self._turn("open")

    def _turn(self, state: BreakerState) -> None:
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


class StoreBreaker:
    """Closed: calls pass. After some failures in a row it opens, and no call passes for a while; then one does, as a
    try, and its outcome decides."""

    def __init__(self, *, failures: int = 5, rest_s: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = failures
        self._rest_s = rest_s
        self._clock = clock
        self._failures = 0
        self._broke = 0.0
        self._trying = False

    @property
    def open(self) -> bool:
        return self._failures >= self._most

    @property
    def due(self) -> bool:
        """It is open, and may be tried."""
        return self.open and not self._trying and self.left() <= 0.0

    def left(self) -> float:
        """Seconds until the next try."""
        return max(0.0, self._rest_s - max(0.0, self._clock() - self._broke)) if self.open else 0.0

    def passes(self) -> bool:
        """Whether a call may be made, which is to tell how it went."""
        if not self.open:
            return True
        if not self.due:
            return False
        self._trying = True
        return True

    def succeeded(self) -> None:
        self._failures, self._trying = 0, False

    def failed(self) -> bool:
        """Whether it is this failure that opened it."""
        was_open = self.open
        self._trying = False
        self._failures = min(self._failures + 1, self._most)
        self._broke = self._clock()
        return self.open and not was_open

    def dropped(self) -> None:
        """A call that was given up says nothing of the store."""
        self._trying = False
