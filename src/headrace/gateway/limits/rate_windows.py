"""Sliding windows that never let more than their limit through in any interval of their span.

A token bucket that allows bursts passes nearly twice its limit in one span, and a counter per calendar minute does so
at the turn of the minute. A window therefore logs what was used and when: at any time, what was used in
(now - span, now] is within the limit, and the log also tells when there is room again. Memory is bounded: when there
are too many entries, neighbours are merged at the later time, which counts them a little longer, never shorter.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable


class SteadyClock:
    """A clock in whole microseconds that never goes back, even if the underlying clock does."""

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
    """The amount used in the last `span` microseconds, and the amount held.

        limit ≥ used (passed within the span) + held (granted, not used yet)

    `wanted` is what running requests are waiting for; new requests must leave it to them.
    """

    __slots__ = ("_amounts", "_entries", "_head", "_times", "held", "limit", "span", "used", "wanted")

    def __init__(self, limit: int, span: int, *, entries: int = 1024) -> None:
        """`entries`: log entries kept, 16 bytes each."""
        self.limit = limit
        self.span = span
        self.used = self.held = self.wanted = 0
        self._entries = max(entries, 4)
        self._times = array("q")
        self._amounts = array("q")
        self._head = 0  # index of the first entry that counts

    def __len__(self) -> int:
        return len(self._times) - self._head

    def forget(self, now: int) -> None:
        """Drop entries older than the span."""
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
        """Count `amount`, even if there is no room. `now` must not go back."""
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
        """Remove an `amount` that was counted at `since` or later and not used after all.

        Removes the oldest entries first, so that the rest counts longest. Ignores amounts older than the span.
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
        """Return the room for running requests. Negative if the limit was lowered."""
        return self.limit - self.used - self.held

    def room_for_new(self) -> int:
        """Return the room for new requests."""
        return self.limit - self.used - self.held - self.wanted

    def wait(self, now: int, short: int, ahead: int) -> tuple[int, bool]:
        """Return the microseconds until `short` more is free, and whether that is certain.

        It is certain if expiring entries suffice. Otherwise a running request must end first; the guess assumes that
        all of them use up what they hold after `ahead` microseconds.
        """
        for place in range(self._head, len(self._times)):
            short -= self._amounts[place]
            if short <= 0:
                return self._times[place] + self.span - now, True
        return ahead + self.span, False

    def reset(self, now: int) -> int:
        """Return the microseconds until the window is empty, if what is held were used now."""
        if self.held or self.wanted:
            return self.span
        return self._times[-1] + self.span - now if len(self) else 0

    def idle(self, now: int) -> bool:
        self.forget(now)
        return not (len(self) or self.held or self.wanted)

    def _merge(self) -> None:
        """Merge entries within one grain of time, which at least halves their number. The latest time is kept."""
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
