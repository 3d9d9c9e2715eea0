"""Limits counted in Redis or Valkey, so that several gateways hold one limit together.

Owns what is said to the script limits.lua, the tickets of requests, and their leases: a gateway that dies gives back
what it held when the leases lapse. Knows neither sockets (redis_calls) nor what happens where the store is gone
(limiter).

Time is the server's: gateways share no other clock. What a ticket lets out it notes with its age by this process's own
clock, so no two clocks are ever compared, and a token counts from when it was let out, however late it is reported.

A lease is renewed at a sixth of its length, and a ticket lets out no more once a third has passed without that. So when
a lease lapses, what was let out under it is two thirds of a lease old: with a lease of 90 seconds, older than every
window, and nothing of it needs to be counted any more.
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

log: Final = structlog.stdlib.get_logger("headrace.limits")
Result = TypeVar("Result")

_SEGMENTS: Final = 64  # notes of a ticket on what it let out; neighbours become one where there are more


class RedisScriptCalls(Protocol):
    """What RedisCalls does."""

    @property
    def breaker(self) -> StoreBreaker: ...

    async def call(self, keys: Sequence[str], payload: bytes, *, probe: bool = False) -> list[int]: ...

    async def close(self) -> None: ...


class RedisLimitStore:
    def __init__(
        self,
        calls: RedisScriptCalls,
        *,
        prefix: str = "headrace",  # of all keys; gateways that hold limits together have the same
        lease_s: float = 90.0,
        entries: int = 1024,  # of one window
        owed: int = 10_000,  # reservations whose end could not be told as yet
        tend_s: float = 1.0,  # between two looks at leases and at what is owed
        clock: Callable[[], float] = time.monotonic,
        server_clock: Callable[[], float] | None = None,  # in place of the server's, for tests
    ) -> None:
        self.now: Final = SteadyClock(clock)
        self.lease: Final = round(lease_s * 1e6)
        if 2 * self.lease < 3 * MINUTE:
            raise HeadraceError("a lease of shared limits is 90 s at least: one and a half of the longest window")
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
        """Seconds until the store is tried again, where it is left alone."""
        return self._calls.breaker.left()

    @property
    def owed(self) -> int:
        """Reservations whose end the store has yet to be told."""
        return len(self._owed)

    async def open(self) -> None:
        """Connects, so that the first request need not; where that does not work, it is no error."""
        if self._tending is None:
            self._tending = asyncio.create_task(self._tend_always())
            with contextlib.suppress(RedisUnavailableError):
                await self.send(script_keys(self._prefix, ()), ScriptArguments(operation="look"))

    async def reserve(self, scopes: Sequence[LimitScope], wish: LimitRequest) -> RedisGrant | LimitRefusal:
        """GoneError where the store does not answer; what it may have done is taken back."""
        if self._tending is None:
            self._tending = asyncio.create_task(self._tend_always())
        ticket = RedisGrant(self, script_keys(self._prefix, tuple(scopes)), wish)
        beginning = self.spawn(ticket.begin())
        try:
            return await asyncio.shield(beginning)
        except asyncio.CancelledError:
            beginning.add_done_callback(lambda _: ticket.close(0, 0, void=True))  # nobody is left to do it
            raise

    async def send(self, layout: ScriptKeys, ask: ScriptArguments, *, probe: bool = False) -> list[int]:
        ask.scopes = layout.asked
        ask.lease, ask.entries = self.lease, self._entries
        ask.keep = (self.lease + 2 * MINUTE) // 1000
        if self._server_clock is not None:
            ask.raw = round(self._server_clock() * 1e6)
        return await self._calls.call(layout.keys, self._encode(ask), probe=probe)

    def spawn(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Runs it to its end, whoever waits for it or does not."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._spawned)
        return task

    def _spawned(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # told to whoever waits

    def begun(self, ticket: RedisGrant) -> None:
        self._running[ticket.id] = ticket

    async def end(self, ticket: RedisGrant) -> None:
        """Tells the store how it ended, now or as soon as it is there."""
        self._running.pop(ticket.id, None)
        try:
            done = await ticket.end()
        except RedisUnavailableError:
            done = False
        if done:
            self._owed.pop(ticket.id, None)
        elif ticket.id not in self._owed:
            if len(self._owed) >= self._most_owed:
                self._owed.popitem(last=False)  # its lease lapses
            self._owed[ticket.id] = ticket

    async def tend(self) -> None:
        """Tries a store that was left alone, renews leases, tells what is owed."""
        if self._calls.breaker.due:
            with contextlib.suppress(RedisUnavailableError):
                await self.send(script_keys(self._prefix, ()), ScriptArguments(operation="look"), probe=True)
        if self._calls.breaker.open:
            return
        now = self.now()
        due = [ticket.renew() for ticket in self._running.values() if now - ticket.contact >= self.lease // 6]
        for id, ticket in list(self._owed.items()):
            if now - ticket.contact < self.lease:
                due.append(self.end(ticket))
            else:
                del self._owed[id]  # it has lapsed
        await asyncio.gather(*due)

    async def _tend_always(self) -> None:
        while True:
            await asyncio.sleep(self._tend_s)
            try:
                await self.tend()
            except Exception:  # leases would lapse under requests that run
                log.exception("shared limits could not be tended")

    async def settled(self) -> None:
        """Waits for what is being said to the store just now."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Says what is left to say. What runs still is left to its leases."""
        if self._tending is not None:
            self._tending.cancel()
            await asyncio.wait({self._tending})
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)
        await self._calls.close()


class RedisGrant:
    """What one request was granted there. Tokens are counted from `taken`, those that it has let out."""

    def __init__(self, store: RedisLimitStore, layout: ScriptKeys, wish: LimitRequest) -> None:
        self.id: Final = secrets.token_hex(8)
        self.taken = 0
        self.contact = store.now()  # when what the store knows of last was sent; on this process's clock
        self._store, self._layout, self._wish = store, layout, wish
        self._state: Literal["new", "unsure", "open", "closed"] = "new"
        self._granted = [first if paced else UNLIMITED for first, paced in zip(wish.first, layout.paced, strict=True)]
        self._least = min(self._granted)
        self._asked_at = -1  # what was granted when more was asked for ahead of time
        self._asking: asyncio.Task[LimitRefusal | None] | None = None
        self._reported = 0  # tokens that the store has counted for certain
        self._sent: list[tuple[int, int]] = []  # when and how many, since: told, and not known to have come
        self._segments: list[tuple[int, int]] = []  # and not told
        self._ending = ScriptArguments(operation="close")
        self._standings: tuple[WindowStatus, ...] = ()

    @property
    def granted(self) -> tuple[int, int]:
        """Tokens that may be let out in all before more is asked for, by the windows' paces."""
        return self._granted[0], self._granted[1]

    def standings(self) -> tuple[WindowStatus, ...]:
        """As they were when it began."""
        return self._standings

    async def begin(self) -> RedisGrant | LimitRefusal:
        layout, wish = self._layout, self._wish
        amounts = tuple(wish.amount(window) for window in layout.windows)
        ask = ScriptArguments(
            operation="reserve", id=self.id, amounts=amounts, targets=self._pairs(wish.first), ahead=wish.ahead
        )
        try:
            answer = await self._store.send(layout, ask)
        except RedisUnavailableError as gone:
            if gone.why in ("timeout", "reset", "error"):
                self._state = "unsure"
                self._ending.void, self._ending.input = 1, -wish.input_tokens
                self._store.spawn(self._store.end(self))
            raise
        if answer[0] == 0:
            return layout.refusal(answer[2:6], layout.standings(answer[6:]))
        self._standings = layout.standings(answer[2:])
        self._state = "open"
        self._store.begun(self)
        return self

    def take(self, count: int) -> bool:
        """Lets so many more tokens out. False: more is to be granted first."""
        if self._least == UNLIMITED:
            self.taken += count
            return True
        now = self._store.now()
        taken = self.taken + count
        if not self._may(taken, now):
            return False
        self.taken = taken
        self._note(now, count)
        if self._asking is None and self._asked_at != self._least and self._runs_low():
            self._asked_at = self._least
            self._ask(self._least + 1)
        return True

    def _may(self, taken: int, now: int) -> bool:
        return self._state == "open" and taken <= self._least and now - self.contact < self._store.lease // 3

    def _runs_low(self) -> bool:
        step = min(step for step, paced in zip(self._wish.step, self._layout.paced, strict=True) if paced)
        return self._least - self.taken <= step // 2 and self._least < self._wish.most_output

    def _note(self, now: int, count: int) -> None:
        noted = self._segments
        if noted and noted[-1][0] == now:
            noted[-1] = (now, noted[-1][1] + count)
            return
        noted.append((now, count))
        if len(noted) > _SEGMENTS:
            pairs = zip(noted[::2], noted[1::2], strict=False)
            odd = noted[-1:] if len(noted) % 2 else []
            self._segments = [(late, first + second) for (_, first), (late, second) in pairs] + odd

    async def more(self, count: int) -> LimitRefusal | None:
        """Has so many more granted. None: they are. GoneError where the store does not answer."""
        if count > self._layout.smallest:
            return self._layout.never(count)
        if self._asking is not None:
            with contextlib.suppress(RedisUnavailableError):
                await asyncio.shield(self._asking)
        if self._state != "open" or self._may(self.taken + count, self._store.now()):
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
        """One at a time."""
        try:
            now = self._store.now()
            wish = self._wish
            self._sent += self._segments
            self._segments = []
            targets = [
                granted + max(need - granted, min(step, wish.most_output - granted)) if need > granted else granted
                for granted, step in zip(self._granted, wish.step, strict=True)
            ]
            ask = ScriptArguments(
                operation="more", id=self.id, need=need, targets=self._pairs(targets), ahead=wish.ahead
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
        """Of the paces that have a limit, and 0 of others."""
        first, second = (count if paced else 0 for count, paced in zip(tokens, self._layout.paced, strict=True))
        return first, second

    @staticmethod
    def _ages(segments: Sequence[tuple[int, int]], now: int) -> tuple[tuple[int, int], ...]:
        return tuple((now - when, count) for when, count in segments)

    def close(self, input_tokens: int, extra: int, *, void: bool = False) -> asyncio.Task[None] | None:
        """Counts what was used and gives back the rest, once; in the background, unless somebody waits for it.

        extra: output tokens beyond those that were let out, or below zero, fewer; void: not even the request counts.
        """
        if self._state != "open":
            return None
        self._state = "closed"
        self._ending.input, self._ending.extra = input_tokens - self._wish.input_tokens, extra
        self._ending.void = int(void)
        return self._store.spawn(self._store.end(self))

    async def end(self) -> bool:
        """Tells the store; whether it knows now."""
        ask, now = self._ending, self._store.now()
        ask.id = self.id
        ask.start, ask.segments = self._reported, self._ages([*self._sent, *self._segments], now)
        answer = await self._store.send(self._layout, ask)
        # What was reserved without an answer may be done late, and is to be found then.
        return answer[0] == 1 or self._state != "unsure"
