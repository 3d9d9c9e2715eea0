"""Circuit breakers: stop calling something that keeps failing, and try it again later.

CircuitBreaker guards a variant or an upstream. It opens after too many failed or slow calls in a window, rejects calls
while it is open, and then lets a few probes through that close it or open it again for longer. StoreBreaker guards a
store: it opens after several failures in a row, and one call at a time tries it again.

    closed ──failures or slow calls in the window──▶ open ──open_s──▶ half-open ──all probes succeed──▶ closed
                                                      ▲                   │
                                                      └──a probe failed───┘  twice as long, up to open_most_s

Does not know requests or what counts as a failure. Time is a parameter; a clock that goes backwards stands still.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final, Literal

import msgspec

from headrace.config.breaker_section import BreakerConfig

BreakerState = Literal["closed", "open", "half-open"]
CallOutcome = Literal["succeeded", "slow", "failed", "dropped"]
_SLICES: Final = 10  # of the window, which expires a tenth at a time
_PROBE_TIMEOUT_S: Final = 120.0  # a probe that reports nothing for so long is given up


class _Slice(msgspec.Struct):
    number: int
    calls: int = 0
    failed: int = 0
    slow: int = 0


class _Window:
    def __init__(self, seconds: float) -> None:
        self._slice_s = seconds / _SLICES
        self._slices: deque[_Slice] = deque(maxlen=_SLICES)

    def at(self, now: float) -> _Slice:
        number = int(now / self._slice_s)
        while self._slices and self._slices[0].number <= number - _SLICES:
            self._slices.popleft()
        if not self._slices or self._slices[-1].number < number:
            self._slices.append(_Slice(number))
        return self._slices[-1]

    def totals(self, now: float) -> tuple[int, int, int]:
        """Return the calls, the failed and the slow ones."""
        self.at(now)
        calls = sum(each.calls for each in self._slices)
        failed = sum(each.failed for each in self._slices)
        slow = max(0, sum(each.slow for each in self._slices))
        # The start of a call that succeeded at first and failed later may have left the window already.
        return max(calls, failed + slow), failed, slow

    def clear(self) -> None:
        self._slices.clear()


class CallPermit:
    """One call that a breaker admitted, and that must report how it ended.

    A call that succeeded may still fail later, when its answer breaks off; otherwise the first report counts. Reports
    count only in the state of the breaker that admitted the call.
    """

    __slots__ = ("_breaker", "_outcome", "epoch", "granted_at")

    def __init__(self, breaker: CircuitBreaker, epoch: int, granted_at: float) -> None:
        self.epoch = epoch
        self.granted_at = granted_at
        self._breaker = breaker
        self._outcome: CallOutcome | None = None

    def succeeded(self, seconds: float | None = None) -> None:
        """Report a success. `seconds`: until its first output."""
        self._report("slow" if self._breaker.is_slow(seconds) else "succeeded")

    def failed(self) -> None:
        self._report("failed")

    def dropped(self) -> None:
        """Report an end that says nothing about the callee: the client left, or the request was wrong."""
        self._report("dropped")

    def _report(self, outcome: CallOutcome) -> None:
        before = self._outcome
        if before is None or (outcome == "failed" and before in ("succeeded", "slow")):
            self._outcome = outcome
            self._breaker.report(self, outcome, before)


class CircuitBreaker:
    def __init__(
        self,
        config: BreakerConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        changed: Callable[[BreakerState], None] | None = None,
    ) -> None:
        """`changed` is called with every new state."""
        self.config = config or BreakerConfig()
        self.times_opened = 0
        self._clock = clock
        self._changed = changed
        self._latest = clock()
        self._state: BreakerState = "closed"
        self._epoch = 0  # of the state: calls admitted in an earlier one no longer count
        self._window = _Window(self.config.window_s)
        self._open_until = 0.0
        self._open_s = self.config.open_s
        self._probes: set[CallPermit] = set()
        self._succeeded_probes = 0

    @property
    def state(self) -> BreakerState:
        """The state as of now: an open breaker whose time is over is half open."""
        if self._state == "open" and self._now() >= self._open_until:
            return "half-open"
        return self._state

    @property
    def ready(self) -> bool:
        """True if the breaker would admit a call."""
        return self.why_not() is None

    def why_not(self) -> str | None:
        """Return why it would reject a call, or None. Changes nothing."""
        match self.state:
            case "closed":
                return None
            case "open":
                return f"its circuit breaker is open for {max(0.0, self._open_until - self._now()):.1f} s more"
            case "half-open":
                if self._state == "open" or self._has_room(self._now()):
                    return None
                return "its circuit breaker is half open and waits for its probes"

    def retry_after(self) -> float:
        """Return the seconds until it may admit a call."""
        return max(0.0, self._open_until - self._now()) if self._state == "open" else 0.0

    def enter(self) -> CallPermit | None:
        """Admit one call, which must report how it ended; None if the call is rejected."""
        now = self._now()
        if self._state == "open":
            if now < self._open_until:
                return None
            self._change("half-open")
        permit = CallPermit(self, self._epoch, now)
        if self._state == "half-open":
            if not self._has_room(now):
                return None
            self._probes.add(permit)
        return permit

    def is_slow(self, seconds: float | None) -> bool:
        return seconds is not None and self.config.slow_s is not None and seconds > self.config.slow_s

    def counts(self) -> tuple[int, int]:
        """Return the failed or slow calls in the window, and all calls."""
        calls, failed, slow = self._window.totals(self._now())
        return failed + slow, calls

    def report(self, permit: CallPermit, outcome: CallOutcome, before: CallOutcome | None) -> None:
        """Count the outcome of a call; called by its permit. `before`: the outcome counted for it earlier."""
        if permit.epoch != self._epoch:
            return
        if self._state == "half-open":
            if permit in self._probes or before is not None:
                self._probes.discard(permit)
                if self._close_or_reopen(outcome):
                    permit.epoch = self._epoch  # if the call fails later, that still counts
        elif outcome != "dropped":
            self._count(outcome, before)

    def _close_or_reopen(self, outcome: CallOutcome) -> bool:
        """Count a probe; return whether it closed the breaker."""
        if outcome == "succeeded":
            self._succeeded_probes += 1
            if self._succeeded_probes >= self.config.probes:
                self._open_s = self.config.open_s
                self._change("closed")
                return True
        elif outcome != "dropped":
            self._open_s = min(2 * self._open_s, self.config.open_most_s)
            self._open()
        return False

    def _count(self, outcome: CallOutcome, before: CallOutcome | None) -> None:
        config, now = self.config, self._now()
        current = self._window.at(now)
        current.calls += before is None
        current.failed += outcome == "failed"
        current.slow += (outcome == "slow") - (before == "slow")
        calls, failed, slow = self._window.totals(now)
        if calls < config.least_calls:
            return
        if failed >= config.failures * calls or (config.slow_s is not None and failed + slow >= config.slow * calls):
            self._open()

    def _open(self) -> None:
        self._open_until = self._now() + min(self._open_s, self.config.open_most_s)
        self.times_opened += 1
        self._change("open")

    def _change(self, state: BreakerState) -> None:
        self._state = state
        self._epoch += 1
        self._succeeded_probes = 0
        self._probes.clear()
        self._window.clear()
        if self._changed is not None:
            self._changed(state)

    def _has_room(self, now: float) -> bool:
        """True if another probe is needed beside those under way."""
        for probe in [each for each in self._probes if now - each.granted_at > _PROBE_TIMEOUT_S]:
            self._probes.discard(probe)
        return len(self._probes) < self.config.probes - self._succeeded_probes

    def _now(self) -> float:
        self._latest = max(self._latest, self._clock())
        return self._latest


class StoreBreaker:
    """Opens after several failures in a row; after a rest, one call at a time tries the store again."""

    def __init__(self, *, failures: int = 5, rest_s: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_failures = failures
        self._rest_s = rest_s
        self._clock = clock
        self._failures = 0
        self._failed_at = 0.0
        self._is_trying = False

    @property
    def open(self) -> bool:
        return self._failures >= self._max_failures

    @property
    def due(self) -> bool:
        """True if the breaker is open and the store may be tried again."""
        return self.open and not self._is_trying and self.left() <= 0.0

    def left(self) -> float:
        """Return the seconds until the next try."""
        return max(0.0, self._rest_s - max(0.0, self._clock() - self._failed_at)) if self.open else 0.0

    def passes(self) -> bool:
        """Admit or reject one call. An admitted call must report how it ended."""
        if not self.open:
            return True
        if not self.due:
            return False
        self._is_trying = True
        return True

    def succeeded(self) -> None:
        self._failures, self._is_trying = 0, False

    def failed(self) -> bool:
        """Count a failure; return whether it opened the breaker."""
        was_open = self.open
        self._is_trying = False
        self._failures = min(self._failures + 1, self._max_failures)
        self._failed_at = self._clock()
        return self.open and not was_open

    def dropped(self) -> None:
        """Report a call that was cancelled, which says nothing about the store."""
        self._is_trying = False
