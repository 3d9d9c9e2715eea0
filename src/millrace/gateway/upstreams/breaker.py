"""The circuit breaker: whether anything is sent to an upstream, by how the last attempts went.

Owns the window of outcomes and the three states. Closed: all goes through. Open: nothing does, for a while that doubles
each time. Half-open: one attempt may try, and decides. Knows no connection; the clock is passed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Literal

from millrace.config.upstreams import BreakerConfig

State = Literal["closed", "open", "half-open"]

_SLOTS: Final = 10  # of the window: what happened leaves it in tenths


class Breaker:
    def __init__(self, config: BreakerConfig, clock: Callable[[], float]) -> None:
        self.opened = 0  # times, since the start
        self._config = config
        self._clock = clock
        self._window = Window(config.window_s, clock)
        self._era = 0  # changes with the state: what began before says nothing about now
        self._open_since: float | None = None
        self._in_a_row = 0  # times that it opened since it was last closed
        self._probe: Permit | None = None

    @property
    def state(self) -> State:
        if self._open_since is None:
            return "closed"
        return "open" if self.wait() > 0 else "half-open"

    def wait(self) -> float:
        """Seconds until something may be tried; 0 where it may now."""
        if self._open_since is None:
            return 0.0
        return max(0.0, self._pause() - max(0.0, self._clock() - self._open_since))

    def ready(self) -> bool:
        """Whether an attempt would be let through."""
        return self._open_since is None or (self._probe is None and self.wait() <= 0)

    def enter(self) -> Permit | None:
        """For one attempt, which is to tell how it went; None where nothing goes through."""
        if not self.ready():
            return None
        permit = Permit(self, self._era)
        if self._open_since is not None:
            self._probe = permit
        return permit

    def _pause(self) -> float:
        config = self._config
        return min(config.open_s * 2.0 ** min(self._in_a_row - 1, 30), config.longest_s)

    def leave(self, permit: Permit) -> None:
        """It says nothing."""
        if self._probe is permit:
            self._probe = None

    def record(self, permit: Permit, *, bad: bool, again: bool) -> None:
        """`again`: the same attempt was counted before, as a good one."""
        if permit.era != self._era:
            return
        if self._open_since is not None:
            if self._probe is not permit:
                return
            self._probe = None
            if bad:
                self._open()
            else:
                self._close()
                permit.era = self._era  # what becomes of it later still counts
            return
        self._window.add(bad=bad, attempts=0 if again else 1)
        if bad:
            bads, attempts = self._window.counts()
            if attempts >= self._config.least and bads >= self._config.share * attempts:
                self._open()

    def _open(self) -> None:
        self._in_a_row += 1
        self.opened += 1
        self._era += 1
        self._open_since = self._clock()
        self._window.clear()

    def _close(self) -> None:
        self._in_a_row = 0
        self._era += 1
        self._open_since = None
        self._window.clear()

    def counts(self) -> tuple[int, int]:
        """In the window: attempts that failed or were slow, and all."""
        return self._window.counts()


class Permit:
    """One attempt. Of `worked` and `dropped` one is called at most, and `failed` may follow the first."""

    __slots__ = ("_breaker", "_said", "era")

    def __init__(self, breaker: Breaker, era: int) -> None:
        self.era = era
        self._breaker = breaker
        self._said = False

    def worked(self, *, slow: bool = False) -> None:
        """Its first output came."""
        if not self._said:
            self._said = True
            self._breaker.record(self, bad=slow, again=False)

    def failed(self) -> None:
        """It came to nothing, or broke off."""
        self._breaker.record(self, bad=True, again=self._said)
        self._said = True

    def dropped(self) -> None:
        """Nobody waits for it any more."""
        if not self._said:
            self._said = True
            self._breaker.leave(self)


class Window:
    """How many attempts there were of late, and how many of them were bad."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._width = seconds / _SLOTS
        self._clock = clock
        self._slots: deque[list[int]] = deque()  # [number of the slot, bad ones, attempts]

    def add(self, *, bad: bool, attempts: int) -> None:
        now = int(self._clock() / self._width)
        if not self._slots or self._slots[-1][0] != now:
            self._slots.append([now, 0, 0])
        self._slots[-1][1] += bad
        self._slots[-1][2] += attempts
        self._forget(now)

    def counts(self) -> tuple[int, int]:
        self._forget(int(self._clock() / self._width))
        bad = sum(slot[1] for slot in self._slots)
        # One that was good when it began and broke off after that moved on may be here without its beginning.
        return bad, max(bad, sum(slot[2] for slot in self._slots))

    def clear(self) -> None:
        self._slots.clear()

    def _forget(self, now: int) -> None:
        while self._slots and self._slots[0][0] <= now - _SLOTS:
            self._slots.popleft()
