"""Windows that never let more than their limit through, whichever stretch of time one looks at.

Owns Steady (time in whole microseconds that never goes back) and Window (a log of what was used when). Knows neither
requests nor whom a limit is for.

A token bucket with room for a burst lets nearly twice its limit through in one span, and a counter for each calendar
minute does so at the turn of the minute. So a window keeps what was used with its time: at any time `now`, what was
used in (now - span, now] is no more than the limit, and because the times are there, so is the time at which there
is room again. Memory has a bound: where there are too many entries, neighbours become one with the later one's time,
which counts them a little longer, never shorter.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable


class SteadyClock:
    """A clock's time in whole microseconds. Where the clock jumps back, it goes on from where it was."""

    __slots__ = ("_clock", "_now", "_raw")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._now = self._raw = round(clock() * 1e6)

    def __call__(self) -> int:
        raw = round(self._clock() * 1e6)
        if raw > self._raw:
            self._now += raw - self._raw
        self._raw = raw
        return self._now


class SlidingWindow:
    """What was used in the last `span` microseconds, and what is held besides.

        limit ≥ used (let through, younger than the span) + held (promised, not used as yet)

    `wanted` is what somebody who was let in asks for in vain: newcomers leave it to him.
    """

    __slots__ = ("_amounts", "_entries", "_head", "_times", "held", "limit", "span", "used", "wanted")

    def __init__(self, limit: int, span: int, *, entries: int = 1024) -> None:
        """`entries`: most that are kept apart; 16 bytes each."""
        self.limit = limit
        self.span = span
        self.used = self.held = self.wanted = 0
        self._entries = max(entries, 4)
        self._times = array("q")
        self._amounts = array("q")
        self._head = 0  # of the entries that count

    def __len__(self) -> int:
        return len(self._times) - self._head

    def forget(self, now: int) -> None:
        """Drops what is too old to count."""
        times, amounts, head, past = self._times, self._amounts, self._head, now - self.span
        end = len(times)
        while head < end and times[head] <= past:
            self.used -= amounts[head]
            head += 1
        if head == end or head > self._entries:
            del times[:head], amounts[:head]
            head = 0
        self._head = head

    def use(self, now: int, amount: int) -> None:
        """Counts it, whether or not there is room. `now` is no earlier than any before."""
        if amount <= 0:
            return
        self.used += amount
        times, head = self._times, self._head
        if len(times) > head:
            if times[-1] >= now:
                self._amounts[-1] += amount
                return
            if times[head] <= now - self.span:
                self.forget(now)
        times.append(now)
        self._amounts.append(amount)
        if len(times) - self._head > self._entries:
            self._merge()

    def give_back(self, now: int, since: int, amount: int) -> None:
        """Takes out again what was used at `since` or later, and turned out not to be.

        The oldest go first, which counts what is left longest. What was used before the window began is left alone:
        it may be forgotten already.
        """
        self.forget(now)
        if since <= now - self.span:
            return
        first = place = bisect_left(self._times, since, self._head)
        while amount > 0 and place < len(self._times):
            part = min(amount, self._amounts[place])
            self._amounts[place] -= part
            self.used -= part
            amount -= part
            place += self._amounts[place] == 0
        del self._times[first:place], self._amounts[first:place]

    def room(self) -> int:
        """For those who were let in. Negative where a limit became smaller."""
        return self.limit - self.used - self.held

    def room_for_new(self) -> int:
        return self.limit - self.used - self.held - self.wanted

    def wait(self, now: int, short: int, ahead: int) -> tuple[int, bool]:
        """Microseconds until `short` more is free, and whether that is certain.

        It is where entries that grow old are enough. Else somebody who holds must end: guessed as though all of them
        had used up what they hold after `ahead` microseconds.
        """
        for place in range(self._head, len(self._times)):
            short -= self._amounts[place]
            if short <= 0:
                return self._times[place] + self.span - now, True
        return ahead + self.span, False

    def reset(self, now: int) -> int:
        """Microseconds until all of it is free, if what is held is used now."""
        if self.held or self.wanted:
            return self.span
        return self._times[-1] + self.span - now if len(self) else 0

    def idle(self, now: int) -> bool:
        self.forget(now)
        return not (len(self) or self.held or self.wanted)

    def _merge(self) -> None:
        """Half as many entries or fewer: those of one grain of time become one, as late as its last."""
        grain = max(1, self.span // (self._entries // 2))
        times, amounts = array("q"), array("q")
        for place in range(self._head, len(self._times)):
            time, amount = self._times[place], self._amounts[place]
            if times and times[-1] // grain == time // grain:
                times[-1] = time
                amounts[-1] += amount
            else:
                times.append(time)
                amounts.append(amount)
        self._times, self._amounts, self._head = times, amounts, 0
