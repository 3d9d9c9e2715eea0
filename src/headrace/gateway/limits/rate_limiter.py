"""Reserves rate limits before a request starts and settles them when it ends.

Decides how much output to hold for a response of unknown length, what to do when the shared store is down, and that
each request settles once. The stores count: local_limits in this process, redis_limits for several gateways.

    reserve ──▶ Reservation ──allow──allow──(extend)──allow──▶ settle
                input tokens: used     output tokens: held ──▶ used, as they are delivered     the rest: given back

Invariant: in any interval as long as a limit's window, no more than the limit passes. An output token is held before it
is delivered and counts from the moment it is delivered.
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

# A stream holds 1/32 of a per-second limit at a time, so that many streams can share the limit.
_PART_OF_A_SECOND: Final = 32
_LEAST_STEP: Final = 16  # tokens
_PART_OF_AN_ANSWER: Final = 4  # an extension holds 1/4 of the estimated response
_LONGEST_SLEEP: Final = 0.25  # seconds; other requests may give back in between

CountEvent = Callable[[str, str], None]


class LimitGrant(Protocol):
    """The amounts that a store granted one request."""

    taken: int

    @property
    def granted(self) -> tuple[int, int]: ...

    def take(self, count: int) -> bool: ...

    async def more(self, count: int) -> LimitRefusal | None: ...

    def close(self, input_tokens: int, extra: int, *, void: bool = False) -> asyncio.Future[None] | None: ...

    def statuses(self) -> tuple[WindowStatus, ...]: ...


class SharedLimitStore(Protocol):
    """Counts for several processes. RedisUnavailableError if it does not answer."""

    @property
    def skipped_s(self) -> float: ...

    async def reserve(self, scopes: Sequence[LimitScope], request: LimitRequest) -> LimitGrant | LimitRefusal: ...

    async def open(self) -> None: ...

    async def close(self) -> None: ...


class RateLimiter:
    def __init__(
        self,
        *,
        local: LocalLimitStore | None = None,
        shared: SharedLimitStore | None = None,
        closed: bool = False,  # when Redis is down: True rejects requests, False counts in this process
        patience_s: float = 2.0,  # how long a stream may wait for more before it is stopped
        estimates: OutputEstimates | None = None,
        note: CountEvent = lambda event, what: None,  # counts an event for metrics; see docs/explanation/limits.md
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

    @property
    def local(self) -> LocalLimitStore:
        return self._local

    @classmethod
    def from_config(
        cls, config: LimitingConfig, environ: Mapping[str, str], *, shared: SharedLimitStore | None = None
    ) -> RateLimiter:
        """`shared` counts in place of Redis. ConfigError where the environment lacks Redis's URL."""
        if shared is None and config.redis_env is not None:
            url = required_secret(environ, config.redis_env, "limiting.redis_env")
            calls = RedisCallBatcher(url, script(), timeout_s=config.wait_ms / 1e3)
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
        most_output: int,  # output tokens of all choices together
        tenant: str = "",
        surface: str = "",
        closed: bool | None = None,  # overrides the default of the limiter
        runs: bool = True,  # counts as a running request; Redis counts every request as one until it is settled
    ) -> Reservation:
        """Reserve all limits of all scopes, or none. Raise LimitError if a limit has no room."""
        context = shortest_context(scopes)
        if context is not None:
            check_context(*context, input_tokens)
            most_output = min(most_output, context[0] - input_tokens)
        limited = scopes_to_count(scopes)
        if not limited:
            request = _no_request(input_tokens, most_output)
            return Reservation(self, (), UNLIMITED_GRANT, request, tenant=tenant, surface=surface)
        check_size(limited, input_tokens)
        request = self._request(limited, input_tokens, most_output, tenant, surface, runs=runs)
        found: LimitGrant | LimitRefusal | None = None
        closed = self._closed if closed is None else closed
        if self._shared is not None:
            try:
                found = await self._shared.reserve(limited, request)
            except RedisUnavailableError as gone:
                self.note("gone", gone.why)
                if closed:
                    raise limits_unavailable_error(max(1.0, self._shared.skipped_s)) from None
        if found is None:
            found = self._local.reserve(limited, request)
        if isinstance(found, LimitRefusal):
            self.note("refused", f"{found.scope.kind}_{found.field}")
            raise limit_reached_error(found, request)
        return Reservation(self, limited, found, request, tenant=tenant, surface=surface, closed=closed)

    def _request(
        self,
        scopes: Sequence[LimitScope],
        input_tokens: int,
        most_output: int,
        tenant: str,
        surface: str,
        *,
        runs: bool,
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
            runs=runs,
        )

    def check_requests(self, scopes: Sequence[LimitScope]) -> None:
        """Raise LimitError if a limit on requests has no room, as far as this process counts. Count nothing."""
        if self._shared is None and (refusal := self._local.requests_left(scopes)) is not None:
            self.note("refused", f"{refusal.scope.kind}_{refusal.field}")
            raise limit_reached_error(refusal)

    def continue_locally(
        self, scopes: Sequence[LimitScope], request: LimitRequest, count: int, taken: int
    ) -> LimitGrant | LimitRefusal:
        """Count the rest of a request in this process after Redis went down: `count` tokens now, `taken` delivered."""
        left = max(count, request.most_output - taken)
        rest = LimitRequest(
            input_tokens=0, most_output=left, first=(count, count), step=request.step, ahead=request.ahead
        )
        return self._local.reserve(scopes, rest, begins=False)

    async def open(self) -> None:
        if self._shared is not None:
            await self._shared.open()

    async def close(self) -> None:
        if self._shared is not None:
            await self._shared.close()


class Reservation:
    """The limits of one request. Settle or release it on every path; only the first call has an effect."""

    __slots__ = (
        "_began",
        "_closed",
        "_grant",
        "_grants",
        "_limiter",
        "_out",
        "_pair",
        "_request",
        "_scopes",
        "_settled",
        "counted",
        "most_output",
    )

    def __init__(
        self,
        limiter: RateLimiter,
        scopes: Sequence[LimitScope],
        grant: LimitGrant,
        request: LimitRequest,
        *,
        tenant: str = "",
        surface: str = "",
        closed: bool = False,
    ) -> None:
        self.most_output: Final = request.most_output  # output tokens, as context limits allow
        self._limiter = limiter
        self._scopes = scopes
        self._grants = [grant]
        self._grant = grant  # the current one, the last of _grants
        self._request = request
        self._pair = tenant, surface
        self._closed = closed
        self._out = 0
        self._began = limiter.now()
        self._settled = False
        self.counted = False  # settled, and the request itself counts

    @property
    def granted(self) -> tuple[int, int]:
        """Output tokens that the current grant allows in total, for per-second and per-minute limits."""
        return self._grant.granted

    @property
    def out(self) -> int:
        """Output tokens delivered so far."""
        return self._out

    def allow(self, total: int) -> bool:
        """Return whether the response may reach `total` output tokens. Call before delivering them; never waits.

        If False, await `extend` first.
        """
        count = total - self._out
        if count <= 0:
            return True
        if self._settled or not self._grant.take(count):
            return False
        self._out = total
        return True

    async def extend(self, total: int, *, wait_s: float | None = None) -> bool:
        """Wait until the response may reach `total` output tokens. Return False if it must stop here.

        wait_s: longest wait for room; default: the limiter's patience.
        """
        limiter = self._limiter
        end = limiter.now() + round((limiter.patience_s if wait_s is None else wait_s) * 1e6)
        while not self._settled:
            try:
                refusal = await self._more(total - self._out)
            except (
                RedisUnavailableError,
                LimitError,
            ):  # Redis is down, and this process cannot count the request either
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
            return await self._grant.more(count)
        except RedisUnavailableError as gone:
            self._limiter.note("gone", gone.why)
            if self._closed:
                raise
        found = self._limiter.continue_locally(self._scopes, self._request, count, self._out)
        if isinstance(found, LimitRefusal):
            return found
        self._grants.append(found)
        self._grant = found
        return None

    def headers(self) -> dict[str, str]:
        """Return the x-ratelimit-… headers: current for local limits, as of the start for Redis."""
        return rate_headers(self._grants[0].statuses())

    async def settle(self, input_tokens: int, output_tokens: int, *, whole: bool = True) -> None:
        """Count what was used and give back the rest. `whole`: the response is complete, so estimates learn from it."""
        await _all(self.settle_soon(input_tokens, output_tokens, whole=whole))

    async def release(self) -> None:
        """Undo the reservation of a request that was rejected before any work was done."""
        await _all(self.release_soon())

    def settle_soon(self, input_tokens: int, output_tokens: int, *, whole: bool = True) -> list[asyncio.Future[None]]:
        """Settle without waiting; Redis is updated in the background."""
        if self._settled:
            return []
        if whole and output_tokens > 0:
            self._limiter.estimates.learn(*self._pair, output_tokens, self._limiter.now() - self._began)
        return self._close(input_tokens, output_tokens - self._out, void=False)

    def release_soon(self) -> list[asyncio.Future[None]]:
        return [] if self._settled else self._close(0, -self._out, void=True)

    def _close(self, input_tokens: int, extra: int, *, void: bool) -> list[asyncio.Future[None]]:
        self._settled, self.counted = True, not void
        pending: list[asyncio.Future[None]] = []
        for grant in reversed(self._grants):
            # Take a surplus from the latest grants first.
            own = max(extra, -grant.taken)
            extra -= own
            first = grant is self._grants[0]
            update = grant.close(input_tokens if first else 0, own, void=void)
            if update is not None:
                pending.append(update)
        return pending


async def _all(pending: Sequence[asyncio.Future[None]]) -> None:
    if pending:
        await asyncio.wait(pending)


class _UnlimitedGrant:
    """The grant of a request without limits."""

    taken = 0
    granted = (UNLIMITED, UNLIMITED)

    def take(self, count: int) -> bool:
        return True

    async def more(self, count: int) -> LimitRefusal | None:
        return None

    def close(self, input_tokens: int, extra: int, *, void: bool = False) -> asyncio.Future[None] | None:
        return None

    def statuses(self) -> tuple[WindowStatus, ...]:
        return ()


UNLIMITED_GRANT: Final = _UnlimitedGrant()


def _no_request(input_tokens: int, most_output: int) -> LimitRequest:
    return LimitRequest(input_tokens=input_tokens, most_output=most_output, first=(0, 0), step=(0, 0), ahead=0)
