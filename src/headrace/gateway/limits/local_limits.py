"""Counts rate limits in this process: the default, and the fallback when Redis is down.

Nothing here waits: each operation covers all scopes before anything else in the process runs, so it is all or nothing.

    scope ── usage ──┬─ window (requests per second)
                     ├─ window (output tokens per minute)     held ◀── grant of a request
                     └─ running: requests
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from headrace.gateway.limits.limit_errors import too_many_scopes_error
from headrace.gateway.limits.limit_scopes import (
    LimitRefusal,
    LimitRequest,
    LimitScope,
    WindowLimit,
    WindowStatus,
    windows_of,
)
from headrace.gateway.limits.rate_windows import SlidingWindow, SteadyClock

UNLIMITED: Final = 1 << 62  # tokens
_EVICTION_LOOK: Final = 64  # scopes to inspect when looking for an idle one to evict


class _ScopeUsage:
    """The amounts that requests of one scope have used and hold."""

    __slots__ = ("concurrent", "grants", "limits", "running", "windows")

    def __init__(self) -> None:
        self.limits: object = None
        self.concurrent: int | None = None
        self.running = 0
        self.grants = 0  # open grants of this scope
        self.windows: list[tuple[WindowLimit, SlidingWindow]] = []

    def follow(self, scope: LimitScope, entries: int) -> None:
        """Adopt changed limits: existing windows keep their counts, new ones start empty."""
        if self.limits == scope.limits:
            return
        self.limits, self.concurrent = scope.limits, scope.limits.concurrent
        before = {limit.field: window for limit, window in self.windows}
        self.windows = []
        for limit in windows_of(scope.limits):
            window = before.get(limit.field)
            if window is None:
                window = SlidingWindow(limit.limit, limit.span, entries=entries)
            window.limit = limit.limit
            self.windows.append((limit, window))

    def idle(self, now: int) -> bool:
        return self.grants == 0 and all(window.idle(now) for _, window in self.windows)


class _Shortage:
    """Collects limits without room and keeps the one with the longest wait."""

    __slots__ = ("exact", "found", "wait")

    def __init__(self) -> None:
        self.found: tuple[LimitScope, str, int] | None = None
        self.wait = 0
        self.exact = True

    def add(self, scope: LimitScope, field: str, limit: int, wait: int, exact: bool) -> None:
        self.exact = self.exact and exact
        if self.found is None or wait > self.wait:
            self.found, self.wait = (scope, field, limit), wait


class LocalLimitStore:
    def __init__(
        self,
        *,
        scopes: int = 10_000,  # scopes kept; idle ones are evicted, least recently used first
        entries: int = 1024,  # log entries per window
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.now: Final = SteadyClock(clock)
        self._most = max(scopes, _EVICTION_LOOK)
        self._entries = entries
        self._usages: OrderedDict[tuple[str, str], _ScopeUsage] = OrderedDict()

    def __len__(self) -> int:
        """Number of scopes kept."""
        return len(self._usages)

    def reserve(
        self, scopes: Sequence[LimitScope], request: LimitRequest, *, begins: bool = True
    ) -> LocalGrant | LimitRefusal:
        """Reserve all scopes or none. `begins`: a new request, not more output for a running one.

        Raise LimitError if too many scopes are active.
        """
        now = self.now()
        usages = [self._usage(scope, now) for scope in scopes]
        shortage = _Shortage()
        for scope, usage in zip(scopes, usages, strict=True):
            if begins and request.runs and usage.concurrent is not None and usage.running >= usage.concurrent:
                # With this many running, one ends about this often.
                shortage.add(scope, "concurrent", usage.concurrent, max(1000, request.ahead // usage.concurrent), False)
            for limit, window in usage.windows:
                window.forget(now)
                amount = request.amount(limit) if begins or limit.meter == "output_tokens" else 0
                missing = amount - window.room_for_new()
                if amount and missing > 0:
                    shortage.add(scope, limit.field, limit.limit, *window.wait(now, missing, request.ahead))
        if shortage.found is not None:
            return LimitRefusal(*shortage.found, shortage.wait, shortage.exact, _statuses(usages, now))
        return LocalGrant(self.now, scopes, usages, request, begins)

    def requests_left(self, scopes: Sequence[LimitScope]) -> LimitRefusal | None:
        """Return the refusal of one more request, by the limits on requests alone; None if there is room."""
        now = self.now()
        usages = [self._usages.get((scope.kind, scope.name)) for scope in scopes]
        shortage = _Shortage()
        for scope, usage in zip(scopes, usages, strict=True):
            if usage is None or usage.limits != scope.limits:
                continue  # not used yet, or about to change
            for limit, window in usage.windows:
                if limit.meter == "requests":
                    window.forget(now)
                    if window.room_for_new() < 1:
                        shortage.add(scope, limit.field, limit.limit, *window.wait(now, 1, 0))
        if shortage.found is None:
            return None
        return LimitRefusal(
            *shortage.found, shortage.wait, shortage.exact, _statuses([each for each in usages if each], now)
        )

    def _usage(self, scope: LimitScope, now: int) -> _ScopeUsage:
        name = (scope.kind, scope.name)
        usage = self._usages.get(name)
        if usage is None:
            if len(self._usages) >= self._most:
                self._evict_idle(now)
            usage = self._usages[name] = _ScopeUsage()
        else:
            self._usages.move_to_end(name)
        usage.follow(scope, self._entries)
        return usage

    def _evict_idle(self, now: int) -> None:
        """Evict an idle scope. Busy ones move to the end of the queue."""
        for _ in range(_EVICTION_LOOK):
            name, usage = next(iter(self._usages.items()))
            if usage.idle(now):
                del self._usages[name]
                return
            self._usages.move_to_end(name)
        raise too_many_scopes_error()


class LocalGrant:
    """The amounts that this store granted one request. `taken` counts the output tokens delivered."""

    __slots__ = (
        "_at",
        "_granted",
        "_inputs",
        "_least",
        "_now",
        "_open",
        "_outputs",
        "_request",
        "_requests",
        "_runs",
        "_usages",
        "_wanted",
        "taken",
    )

    def __init__(
        self,
        now: Callable[[], int],
        scopes: Sequence[LimitScope],
        usages: Sequence[_ScopeUsage],
        request: LimitRequest,
        begins: bool,
    ) -> None:
        self._now, self._usages, self._request, self._runs = now, usages, request, begins and request.runs
        self._at = at = now()
        self._open = True
        self.taken = 0
        self._granted = [UNLIMITED, UNLIMITED]
        self._wanted = [0, 0]
        # The windows that exist now; windows added later do not count this request.
        self._requests: list[SlidingWindow] = []
        self._inputs: list[SlidingWindow] = []
        self._outputs: list[tuple[LimitScope, WindowLimit, SlidingWindow]] = []
        for scope, usage in zip(scopes, usages, strict=True):
            usage.grants += 1
            usage.running += self._runs
            for limit, window in usage.windows:
                amount = request.amount(limit)
                if limit.meter == "output_tokens":
                    self._outputs.append((scope, limit, window))
                    self._granted[limit.pace] = amount
                    window.held += amount
                elif begins:
                    window.use(at, amount)
                    (self._requests if limit.meter == "requests" else self._inputs).append(window)
        self._least = min(self._granted)

    @property
    def granted(self) -> tuple[int, int]:
        """Output tokens allowed in total before more must be granted, per pace."""
        return self._granted[0], self._granted[1]

    def take(self, count: int) -> bool:
        """Deliver `count` more tokens, growing the grant if needed. Return False if there is no room."""
        taken = self.taken + count
        if taken > self._least and (not self._open or self._grow(count) is not None):
            return False
        self.taken = taken
        if self._outputs:
            now = self._now()
            for _, _, window in self._outputs:
                window.held -= count
                window.use(now, count)
        return True

    async def more(self, count: int) -> LimitRefusal | None:
        """Grow the grant by `count` tokens. Return None on success."""
        return self._grow(count)

    def _grow(self, count: int) -> LimitRefusal | None:
        now = self._now()
        needs = [self.taken + count - granted for granted in self._granted]
        adds = [
            max(need, min(step, self._request.most_output - granted))
            for need, step, granted in zip(needs, self._request.step, self._granted, strict=True)
        ]
        shortage = _Shortage()
        for scope, limit, window in self._outputs:
            if count > limit.limit:
                return LimitRefusal(scope, limit.field, limit.limit, None, True)
            need = needs[limit.pace]
            if need > 0:
                window.forget(now)
                room = window.room()
                adds[limit.pace] = min(adds[limit.pace], room)
                if room < need:
                    wait, exact = window.wait(now, need - room, self._request.ahead)
                    own = self._granted[limit.pace] - self.taken
                    # Tokens that other requests hold and do not use may become free sooner.
                    shortage.add(scope, limit.field, limit.limit, wait, exact and window.held <= own)
        wanted = [max(0, need) if shortage.found is not None else 0 for need in needs]
        for _, limit, window in self._outputs:
            window.wanted += wanted[limit.pace] - self._wanted[limit.pace]
        self._wanted = wanted
        if shortage.found is not None:
            return LimitRefusal(*shortage.found, shortage.wait, shortage.exact, _statuses(self._usages, now))
        for _, limit, window in self._outputs:
            if needs[limit.pace] > 0:
                window.held += adds[limit.pace]
        for pace, need in enumerate(needs):
            if need > 0:
                self._granted[pace] += adds[pace]
        self._least = min(self._granted)
        return None

    def close(self, input_tokens: int, extra: int, *, void: bool = False) -> asyncio.Future[None] | None:
        """Count what was used and give back the rest, once.

        extra: output tokens beyond (or, if negative, below) those delivered. void: do not count the request either.
        """
        if not self._open:
            return None
        self._open = False
        self._least = 0
        now = self._now()
        for usage in self._usages:
            usage.grants -= 1
            usage.running -= self._runs
        for window in self._inputs:
            window.use(now, input_tokens - self._request.input_tokens)
            window.give_back(now, self._at, self._request.input_tokens - input_tokens)
        for window in self._requests:
            if void:
                window.give_back(now, self._at, 1)
        for _, limit, window in self._outputs:
            window.held -= self._granted[limit.pace] - self.taken
            window.wanted -= self._wanted[limit.pace]
            window.use(now, extra)
            window.give_back(now, self._at, -extra)
        return None

    def statuses(self) -> tuple[WindowStatus, ...]:
        return _statuses(self._usages, self._now())


def _statuses(usages: Sequence[_ScopeUsage], now: int) -> tuple[WindowStatus, ...]:
    found: list[WindowStatus] = []
    for usage in usages:
        for limit, window in usage.windows:
            window.forget(now)
            found.append(WindowStatus(limit, window.room_for_new(), window.reset(now)))
    return tuple(found)
