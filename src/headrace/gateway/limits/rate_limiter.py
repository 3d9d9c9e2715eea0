"""Limits before the fact: what a request may use is reserved before it begins, and settled exactly when it has ended.

Owns the Limiter and the Reservation of one request: how much to hold of an answer whose length nobody knows, what
happens where the shared store is gone, and that the end is counted once. Where and how things are counted is the
stores' (local, shared).

    reserve ──▶ Reservation ──allow──allow──(extend)──allow──▶ settle
                input tokens: used     output tokens: held ──▶ used, as they are let out     the rest: given back

What always holds: in any stretch of time as long as a limit's own, what was let through is no more than the limit; a
token of output counts from the moment it is let out, and before that it is held.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, Protocol

from headrace.config.environment import required_secret
from headrace.config.limit_section import LimitingConfig
from headrace.gateway.limits.limit_errors import (
    LimitError,
    check_context,
    check_size,
    limit_reached_error,
    limits_unavailable_error,
)
from headrace.gateway.limits.limit_scopes import (
    LimitRefusal,
    LimitRequest,
    LimitScope,
    WindowStatus,
    scopes_to_count,
    shortest_context,
    smallest_limit,
)
from headrace.gateway.limits.local_limits import UNLIMITED, LocalLimitStore
from headrace.gateway.limits.lua_script import script
from headrace.gateway.limits.output_estimates import OutputEstimates
from headrace.gateway.limits.rate_windows import SteadyClock
from headrace.gateway.limits.ratelimit_headers import rate_headers
from headrace.gateway.limits.redis_calls import RedisCallBatcher, RedisUnavailableError
from headrace.gateway.limits.redis_limits import RedisLimitStore
from headrace.observe import metrics

# Of a limit a second, what a stream holds at a time: a small part, so that many streams can run under it.
_PART_OF_A_SECOND: Final = 32
_LEAST_STEP: Final = 16  # tokens
_PART_OF_AN_ANSWER: Final = 4  # of the estimate, what is held further at a time
_LONGEST_SLEEP: Final = 0.25  # seconds; others may give back in between

CountEvent = Callable[[str, str], None]


class LimitGrant(Protocol):
    """What one request was granted by a store. Tokens are counted from `taken`."""

    taken: int

    @property
    def granted(self) -> tuple[int, int]: ...

    def take(self, count: int) -> bool: ...

    async def more(self, count: int) -> LimitRefusal | None: ...

    def close(self, input_tokens: int, extra: int, *, void: bool = False) -> asyncio.Future[None] | None: ...

    def standings(self) -> tuple[WindowStatus, ...]: ...


class RateLimiter:
    def __init__(
        self,
        *,
        local: LocalLimitStore | None = None,
        shared: RedisLimitStore | None = None,
        closed: bool = False,  # where the shared store is gone: nothing is let in, or each gateway counts for itself
        patience_s: float = 2.0,  # that a stream may wait for more before it is stopped
        estimates: OutputEstimates | None = None,
        note: CountEvent = lambda event, what: None,  # told what to count; see docs/explanation/limits.md
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.estimates: Final = OutputEstimates() if estimates is None else estimates
        self.note: Final = note
        self.now: Final = SteadyClock(clock)
        self.sleep: Final = sleep
        self.patience_s: Final = patience_s
        self._local = LocalLimitStore(clock=clock) if local is None else local
        self._shared = shared
        self._closed = closed

    @classmethod
    def from_config(cls, config: LimitingConfig, environ: Mapping[str, str]) -> RateLimiter:
        """ConfigError where the environment lacks Redis's URL."""
        shared = None
        if config.redis_env is not None:
            url = required_secret(environ, config.redis_env, "limiting.redis_env")
            calls = RedisCallBatcher(url, script(), bound_s=config.wait_ms / 1e3)
            shared = RedisLimitStore(calls, prefix=config.namespace)
        return cls(
            shared=shared,
            patience_s=config.patience_s,
            note=lambda event, what: metrics.of(metrics.limits, event, what).inc(),
        )

    async def reserve(
        self,
        scopes: Sequence[LimitScope],
        *,
        input_tokens: int,
        most_output: int,  # tokens of all answers together
        tenant: str = "",
        surface: str = "",
        closed: bool | None = None,  # for this one; the limiter's own by default
    ) -> Reservation:
        """LimitError where a limit has no room, or there never is any.

        All limits of all scopes have room for it, or nothing is taken of any.
        """
        context = shortest_context(scopes)
        if context is not None:
            check_context(*context, input_tokens)
            most_output = min(most_output, context[0] - input_tokens)
        limited = scopes_to_count(scopes)
        if not limited:
            wish = _no_wish(input_tokens, most_output)
            return Reservation(self, (), UNLIMITED_GRANT, wish, tenant=tenant, surface=surface)
        check_size(limited, input_tokens)
        wish = self._wish(limited, input_tokens, most_output, tenant, surface)
        found: LimitGrant | LimitRefusal | None = None
        closed = self._closed if closed is None else closed
        if self._shared is not None:
            try:
                found = await self._shared.reserve(limited, wish)
            except RedisUnavailableError as gone:
                self.note("gone", gone.why)
                if closed:
                    raise limits_unavailable_error(max(1.0, self._shared.skipped_s)) from None
        if found is None:
            found = self._local.reserve(limited, wish)
        if isinstance(found, LimitRefusal):
            self.note("refused", f"{found.scope.kind}_{found.field}")
            raise limit_reached_error(found)
        return Reservation(self, limited, found, wish, tenant=tenant, surface=surface, closed=closed)

    def _wish(
        self, scopes: Sequence[LimitScope], input_tokens: int, most_output: int, tenant: str, surface: str
    ) -> LimitRequest:
        likely = self.estimates.tokens(tenant, surface, most_output)
        second = smallest_limit(scopes, "output_tokens", 0) or UNLIMITED
        minute = smallest_limit(scopes, "output_tokens", 1) or UNLIMITED
        part = min(second, max(_LEAST_STEP, second // _PART_OF_A_SECOND))
        step = min(minute, max(_LEAST_STEP, likely // _PART_OF_AN_ANSWER))
        return LimitRequest(
            input_tokens=input_tokens,
            most_output=most_output,
            first=(min(likely, part), min(likely, minute)),
            step=(part, step),
            ahead=self.estimates.micros(tenant, surface),
        )

    def instead(
        self, scopes: Sequence[LimitScope], wish: LimitRequest, count: int, taken: int
    ) -> LimitGrant | LimitRefusal:
        """Goes on here with what the shared store no longer answers for: `count` tokens, and `taken` are out."""
        left = max(count, wish.most_output - taken)
        rest = LimitRequest(input_tokens=0, most_output=left, first=(count, count), step=wish.step, ahead=wish.ahead)
        return self._local.reserve(scopes, rest, begins=False)

    async def open(self) -> None:
        if self._shared is not None:
            await self._shared.open()

    async def close(self) -> None:
        if self._shared is not None:
            await self._shared.close()


class Reservation:
    """Of one request. To be settled or released on every way out; what comes after the first of these does nothing."""

    __slots__ = (
        "_began",
        "_closed",
        "_limiter",
        "_out",
        "_pair",
        "_scopes",
        "_settled",
        "_ticket",
        "_tickets",
        "_wish",
        "most_output",
    )

    def __init__(
        self,
        limiter: RateLimiter,
        scopes: Sequence[LimitScope],
        ticket: LimitGrant,
        wish: LimitRequest,
        *,
        tenant: str = "",
        surface: str = "",
        closed: bool = False,
    ) -> None:
        self.most_output: Final = wish.most_output  # tokens that the answer may have, as the limits on contexts are
        self._limiter = limiter
        self._scopes = scopes
        self._tickets = [ticket]
        self._ticket = ticket  # the last of these
        self._wish = wish
        self._pair = tenant, surface
        self._closed = closed
        self._out = 0
        self._began = limiter.now()
        self._settled = False

    @property
    def granted(self) -> tuple[int, int]:
        """Tokens that the ticket in use may let out in all, for limits a second and a minute."""
        return self._ticket.granted

    @property
    def out(self) -> int:
        """Tokens let out so far."""
        return self._out

    def allow(self, total: int) -> bool:
        """Whether the answer may be so many tokens long now; to be asked before they are let out. Never waits.

        False: `extend` is to be awaited first.
        """
        count = total - self._out
        if count <= 0:
            return True
        if self._settled or not self._ticket.take(count):
            return False
        self._out = total
        return True

    async def extend(self, total: int, *, wait_s: float | None = None) -> bool:
        """Has the answer granted that length. False: the answer is to stop here.

        wait_s: that it may take until there is room; the limiter's patience by default.
        """
        limiter = self._limiter
        end = limiter.now() + round((limiter.patience_s if wait_s is None else wait_s) * 1e6)
        while not self._settled:
            try:
                refusal = await self._more(total - self._out)
            except (RedisUnavailableError, LimitError):  # the store is gone, and here there is no place for it either
                limiter.note("extended", "gone")
                return False
            if refusal is None:
                limiter.note("extended", "granted")
                return True
            left = end - limiter.now()
            if refusal.wait is None or left <= 0 or (refusal.exact and refusal.wait > left):
                limiter.note("extended", f"{refusal.scope.kind}_{refusal.field}")
                return False
            await limiter.sleep(min(refusal.wait / 1e6, left / 1e6, _LONGEST_SLEEP))
        return False

    async def _more(self, count: int) -> LimitRefusal | None:
        if count <= 0:
            return None
        try:
            return await self._ticket.more(count)
        except RedisUnavailableError as gone:
            self._limiter.note("gone", gone.why)
            if self._closed:
                raise
        found = self._limiter.instead(self._scopes, self._wish, count, self._out)
        if isinstance(found, LimitRefusal):
            return found
        self._tickets.append(found)
        self._ticket = found
        return None

    def headers(self) -> dict[str, str]:
        """x-ratelimit-…, as things stand; those of a shared store as they stood at the start."""
        return rate_headers(self._tickets[0].standings())

    async def settle(self, input_tokens: int, output_tokens: int, *, whole: bool = True) -> None:
        """Counts what was used, gives back the rest. `whole`: the answer came to its own end, and is learnt from."""
        await _all(self.settle_soon(input_tokens, output_tokens, whole=whole))

    async def release(self) -> None:
        """As though the request had never been: it was refused elsewhere before anything was done for it."""
        await _all(self.release_soon())

    def settle_soon(self, input_tokens: int, output_tokens: int, *, whole: bool = True) -> list[asyncio.Future[None]]:
        """The same, and never waits: what a shared store is to be told, it is told in the background."""
        if self._settled:
            return []
        if whole and output_tokens > 0:
            self._limiter.estimates.learn(*self._pair, output_tokens, self._limiter.now() - self._began)
        return self._close(input_tokens, output_tokens - self._out, void=False)

    def release_soon(self) -> list[asyncio.Future[None]]:
        return [] if self._settled else self._close(0, -self._out, void=True)

    def _close(self, input_tokens: int, extra: int, *, void: bool) -> list[asyncio.Future[None]]:
        self._settled = True
        pending: list[asyncio.Future[None]] = []
        for ticket in reversed(self._tickets):
            # What is too much is taken from the last first, each of them down to nothing.
            own = max(extra, -ticket.taken)
            extra -= own
            first = ticket is self._tickets[0]
            telling = ticket.close(input_tokens if first else 0, own, void=void)
            if telling is not None:
                pending.append(telling)
        return pending


async def _all(pending: Sequence[asyncio.Future[None]]) -> None:
    if pending:
        await asyncio.wait(pending)


class _NoTicket:
    """Of a request that comes under no limit."""

    taken = 0
    granted = (UNLIMITED, UNLIMITED)

    def take(self, count: int) -> bool:
        return True

    async def more(self, count: int) -> LimitRefusal | None:
        return None

    def close(self, input_tokens: int, extra: int, *, void: bool = False) -> asyncio.Future[None] | None:
        return None

    def standings(self) -> tuple[WindowStatus, ...]:
        return ()


UNLIMITED_GRANT: Final = _NoTicket()


def _no_wish(input_tokens: int, most_output: int) -> LimitRequest:
    return LimitRequest(input_tokens=input_tokens, most_output=most_output, first=(0, 0), step=(0, 0), ahead=0)
