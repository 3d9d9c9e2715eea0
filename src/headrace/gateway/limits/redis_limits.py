"""Counts rate limits in Redis or Valkey, so that several gateways share them.

Calls the script limits.lua and keeps leases: when a gateway dies, what it held is given back as its leases expire.
redis_calls owns the connection; rate_limiter decides what to do when Redis is down.

Time is that of Redis, the only clock gateways share. A grant records deliveries with their age by this process's clock,
so clocks are never compared, and a token counts from its delivery however late it is reported.

A lease is renewed after a sixth of its length, and a grant stops delivering after a third without renewal. When a lease
expires, the deliveries under it are at least two thirds of a lease old: with leases of 90 seconds, older than every
window, so they no longer count.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, Literal, Protocol, TypeVar

import msgspec
import structlog

from headrace.errors import HeadraceError
from headrace.gateway.circuit_breaker import StoreBreaker
from headrace.gateway.limits.limit_scopes import MINUTE, LimitRefusal, LimitRequest, LimitScope, WindowStatus
from headrace.gateway.limits.local_limits import UNLIMITED
from headrace.gateway.limits.lua_script import ScriptArguments, ScriptKeys, script_keys
from headrace.gateway.limits.rate_windows import SteadyClock
from headrace.gateway.limits.redis_calls import RedisUnavailableError
from headrace.observe.outage_log import OutageLog

log: Final = structlog.stdlib.get_logger("headrace.limits")
Result = TypeVar("Result")

_SEGMENTS: Final = 64  # deliveries recorded per grant; neighbours are merged beyond this


class RedisScriptCalls(Protocol):
    """The interface of RedisCallBatcher that this store uses."""

    @property
    def breaker(self) -> StoreBreaker: ...

    async def call(self, keys: Sequence[str], payload: bytes, *, probe: bool = False) -> list[int]: ...

    async def close(self) -> None: ...


class RedisLimitStore:
    def __init__(
        self,
        calls: RedisScriptCalls,
        *,
        prefix: str = "headrace",  # of all keys; the same in gateways that share limits
        lease_s: float = 90.0,
        entries: int = 1024,  # log entries per window
        owed: int = 10_000,  # finished reservations that could not be reported yet
        tend_s: float = 1.0,  # interval of lease renewal and retries
        clock: Callable[[], float] = time.monotonic,
        server_clock: Callable[[], float] | None = None,  # replaces the time of Redis in tests
    ) -> None:
        self.now: Final = SteadyClock(clock)
        self.lease: Final = round(lease_s * 1e6)
        if 2 * self.lease < 3 * MINUTE:
            raise HeadraceError(
                "The lease of shared limits must be at least 90 s, one and a half times the longest window."
            )
        self._calls = calls
        self._prefix = prefix
        self._entries = entries
        self._most_owed = owed
        self._tend_s = tend_s
        self._server_clock = server_clock
        self._running: dict[str, RedisGrant] = {}
        self._owed: OrderedDict[str, RedisGrant] = OrderedDict()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._tending: asyncio.Task[None] | None = None
        self._encode: Final = msgspec.msgpack.Encoder().encode

    @property
    def skipped_s(self) -> float:
        """Seconds until Redis is tried again while the circuit breaker is open."""
        return self._calls.breaker.left()

    @property
    def owed(self) -> int:
        """Finished reservations that Redis does not know of yet."""
        return len(self._owed)

    async def open(self) -> None:
        """Connect ahead of the first request. A failure is not an error."""
        if self._tending is None:
            self._tending = asyncio.create_task(self._tend_always())
            with contextlib.suppress(RedisUnavailableError):
                await self.send(script_keys(self._prefix, ()), ScriptArguments(operation="look"))

    async def reserve(self, scopes: Sequence[LimitScope], request: LimitRequest) -> RedisGrant | LimitRefusal:
        """Reserve all scopes or none. Raise RedisUnavailableError if Redis does not answer; a late effect is undone."""
        if self._tending is None:
            self._tending = asyncio.create_task(self._tend_always())
        grant = RedisGrant(self, script_keys(self._prefix, tuple(scopes)), request)
        beginning = self.spawn(grant.begin())
        try:
            return await asyncio.shield(beginning)
        except asyncio.CancelledError:
            beginning.add_done_callback(
                lambda _: grant.close(0, 0, void=True)
            )  # the caller is gone and cannot close it
            raise

    async def send(self, layout: ScriptKeys, ask: ScriptArguments, *, probe: bool = False) -> list[int]:
        ask.scopes = layout.asked
        ask.lease, ask.entries = self.lease, self._entries
        ask.keep = (self.lease + 2 * MINUTE) // 1000
        if self._server_clock is not None:
            ask.raw = round(self._server_clock() * 1e6)
        return await self._calls.call(layout.keys, self._encode(ask), probe=probe)

    def spawn(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Run `work` to its end even if the caller is cancelled."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._spawned)
        return task

    def _spawned(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # reported to the awaiting caller

    def begun(self, grant: RedisGrant) -> None:
        self._running[grant.id] = grant

    async def end(self, grant: RedisGrant) -> None:
        """Report the end of a grant to Redis, now or as soon as it is reachable."""
        self._running.pop(grant.id, None)
        try:
            done = await grant.end()
        except RedisUnavailableError:
            done = False
        if done:
            self._owed.pop(grant.id, None)
        elif grant.id not in self._owed:
            if len(self._owed) >= self._most_owed:
                self._owed.popitem(last=False)  # its lease expires
            self._owed[grant.id] = grant

    async def tend(self) -> None:
        """Probe Redis if the breaker allows it, renew leases, and report overdue ends."""
        if self._calls.breaker.due:
            with contextlib.suppress(RedisUnavailableError):
                await self.send(script_keys(self._prefix, ()), ScriptArguments(operation="look"), probe=True)
        if self._calls.breaker.open:
            return
        now = self.now()
        due = [grant.renew() for grant in self._running.values() if now - grant.contact >= self.lease // 6]
        for id, grant in list(self._owed.items()):
            if now - grant.contact < self.lease:
                due.append(self.end(grant))
            else:
                del self._owed[id]  # expired
        await asyncio.gather(*due)

    async def _tend_always(self) -> None:
        outage = OutageLog(log, "shared limits could not be maintained")
        while True:
            await asyncio.sleep(self._tend_s)
            try:
                await self.tend()
                outage.succeeded()
            except Exception as error:  # an error must not stop renewal: leases of running requests would expire
                outage.failed(error, exc_info=error)

    async def settled(self) -> None:
        """Wait for the calls in flight."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Finish the calls in flight. Running grants expire with their leases."""
        if self._tending is not None:
            self._tending.cancel()
            await asyncio.wait({self._tending})
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)
        await self._calls.close()


class RedisGrant:
    """The amounts that Redis granted one request. `taken` counts the output tokens delivered."""

    def __init__(self, store: RedisLimitStore, layout: ScriptKeys, request: LimitRequest) -> None:
        self.id: Final = secrets.token_hex(8)
        self.taken = 0
        self.contact = store.now()  # when the last successful report was sent, on this process's clock
        self._store, self._layout, self._request = store, layout, request
        self._state: Literal["new", "unsure", "open", "closed"] = "new"
        self._granted = [
            first if paced else UNLIMITED for first, paced in zip(request.first, layout.paced, strict=True)
        ]
        self._least = min(self._granted)
        self._asked_at = -1  # the grant at which more was requested in advance
        self._asking: asyncio.Task[LimitRefusal | None] | None = None
        self._reported = 0  # tokens that Redis has certainly counted
        self._sent: list[tuple[int, int]] = []  # (time, tokens) sent but not confirmed
        self._segments: list[tuple[int, int]] = []  # (time, tokens) not sent yet
        self._ending = ScriptArguments(operation="close")
        self._statuses: tuple[WindowStatus, ...] = ()

    @property
    def granted(self) -> tuple[int, int]:
        """Output tokens allowed in total before more must be granted, per pace."""
        return self._granted[0], self._granted[1]

    def statuses(self) -> tuple[WindowStatus, ...]:
        """The window statuses as of the start."""
        return self._statuses

    async def begin(self) -> RedisGrant | LimitRefusal:
        layout, request = self._layout, self._request
        amounts = tuple(request.amount(window) for window in layout.windows)
        ask = ScriptArguments(
            operation="reserve", id=self.id, amounts=amounts, targets=self._pairs(request.first), ahead=request.ahead
        )
        try:
            answer = await self._store.send(layout, ask)
        except RedisUnavailableError as gone:
            if gone.why in ("timeout", "reset", "error"):
                self._state = "unsure"
                self._ending.void, self._ending.input = 1, -request.input_tokens
                self._store.spawn(self._store.end(self))
            raise
        if answer[0] == 0:
            return layout.refusal(answer[2:6], layout.statuses(answer[6:]))
        self._statuses = layout.statuses(answer[2:])
        self._state = "open"
        self._store.begun(self)
        return self

    def take(self, count: int) -> bool:
        """Deliver `count` more tokens. Return False if more must be granted first."""
        if self._least == UNLIMITED:
            self.taken += count
            return True
        now = self._store.now()
        taken = self.taken + count
        if not self._can_deliver(taken, now):
            return False
        self.taken = taken
        self._record(now, count)
        if self._asking is None and self._asked_at != self._least and self._runs_low():
            self._asked_at = self._least
            self._ask(self._least + 1)
        return True

    def _can_deliver(self, taken: int, now: int) -> bool:
        return self._state == "open" and taken <= self._least and now - self.contact < self._store.lease // 3

    def _runs_low(self) -> bool:
        step = min(step for step, paced in zip(self._request.step, self._layout.paced, strict=True) if paced)
        return self._least - self.taken <= step // 2 and self._least < self._request.most_output

    def _record(self, now: int, count: int) -> None:
        segments = self._segments
        if segments and segments[-1][0] == now:
            segments[-1] = (now, segments[-1][1] + count)
            return
        segments.append((now, count))
        if len(segments) > _SEGMENTS:
            pairs = zip(segments[::2], segments[1::2], strict=False)
            odd = segments[-1:] if len(segments) % 2 else []
            self._segments = [(late, first + second) for (_, first), (late, second) in pairs] + odd

    async def more(self, count: int) -> LimitRefusal | None:
        """Grow the grant by `count` tokens. Return None on success; raise RedisUnavailableError if Redis is down."""
        if count > self._layout.smallest:
            return self._layout.never(count)
        if self._asking is not None:
            with contextlib.suppress(RedisUnavailableError):
                await asyncio.shield(self._asking)
        if self._state != "open" or self._can_deliver(self.taken + count, self._store.now()):
            return None
        return await asyncio.shield(self._ask(self.taken + count))

    async def renew(self) -> None:
        if self._asking is None:
            with contextlib.suppress(RedisUnavailableError):
                await asyncio.shield(self._ask(0))

    def _ask(self, need: int) -> asyncio.Task[LimitRefusal | None]:
        asking = self._asking = self._store.spawn(self._grow(need))
        return asking

    async def _grow(self, need: int) -> LimitRefusal | None:
        """Report deliveries and request a larger grant. One call at a time."""
        try:
            now = self._store.now()
            request = self._request
            self._sent += self._segments
            self._segments = []
            targets = [
                granted + max(need - granted, min(step, request.most_output - granted)) if need > granted else granted
                for granted, step in zip(self._granted, request.step, strict=True)
            ]
            ask = ScriptArguments(
                operation="more", id=self.id, need=need, targets=self._pairs(targets), ahead=request.ahead
            )
            ask.start, ask.segments = self._reported, self._ages(self._sent, now)
            answer = await self._store.send(self._layout, ask)
            if answer[0] < 0:
                ask.again = 1
                answer = await self._store.send(self._layout, ask)
            self._reported += sum(count for _, count in self._sent)
            self._sent = []
            self.contact = now
            paced = self._layout.paced
            self._granted = [answer[2 + pace] if paced[pace] else UNLIMITED for pace in (0, 1)]
            self._least = min(self._granted)
            return self._layout.refusal(answer[4:8]) if answer[0] == 0 else None
        finally:
            self._asking = None

    def _pairs(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Return the values of limited paces, 0 for the others."""
        first, second = (count if paced else 0 for count, paced in zip(tokens, self._layout.paced, strict=True))
        return first, second

    @staticmethod
    def _ages(segments: Sequence[tuple[int, int]], now: int) -> tuple[tuple[int, int], ...]:
        return tuple((now - when, count) for when, count in segments)

    def close(self, input_tokens: int, extra: int, *, void: bool = False) -> asyncio.Task[None] | None:
        """Count what was used and give back the rest, once. The returned task runs in the background.

        extra: output tokens beyond (or, if negative, below) those delivered. void: do not count the request either.
        """
        if self._state != "open":
            return None
        self._state = "closed"
        self._ending.input, self._ending.extra = input_tokens - self._request.input_tokens, extra
        self._ending.void = int(void)
        return self._store.spawn(self._store.end(self))

    async def end(self) -> bool:
        """Report the end. Return whether Redis knows it now."""
        ask, now = self._ending, self._store.now()
        ask.id = self.id
        ask.start, ask.segments = self._reported, self._ages([*self._sent, *self._segments], now)
        answer = await self._store.send(self._layout, ask)
        # A reservation that timed out may still take effect later, so this must be repeated until it is found.
        return answer[0] == 1 or self._state != "unsure"
