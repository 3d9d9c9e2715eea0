"""The contract of entry stores, and guards around one that is slow, unreachable or broken.

Owns EntryStore (implemented in memory, sqlite and Redis), LookupBatcher and GuardedStore. A store knows bytes, keys and
tags, not answers.

A failing store is a miss and never an error of a request. A failed invalidation is an error, because the entries that
it should have removed may be served again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final, Protocol, TypeVar

import msgspec

from headrace.gateway.api_errors import ApiError
from headrace.gateway.caches.exact.cache_key import CacheKey
from headrace.gateway.caches.invalidation_log import InvalidationScope
from headrace.gateway.circuit_breaker import StoreBreaker
from headrace.observe.outage_log import OutageLog
from headrace.tasks import end_tasks

log: Final = logging.getLogger(__name__)

Result = TypeVar("Result")
_LATE_FACTOR: Final = 2.0  # a timeout noticed this much too late says nothing about the store


class StoreLookup(msgspec.Struct, frozen=True):
    data: bytes | None  # None: a miss
    ticket: Any = None  # pass it to `put`: the store's record of when the lookup happened


class CacheSize(msgspec.Struct, frozen=True):
    entries: int
    bytes: int


class EntryStore(Protocol):
    async def get(self, cache_key: CacheKey) -> StoreLookup: ...

    async def put(self, cache_key: CacheKey, data: bytes, seconds: float, ticket: Any) -> bool:
        """Store an entry for so many seconds, replacing an old one. False: it is too large for this store."""
        ...

    async def remove(self, scope: InvalidationScope) -> int | None:
        """Remove the entries of a scope; return their number, or None if the store cannot count them."""
        ...

    async def sweep(self) -> int:
        """Remove expired entries, as many as fit in a short turn; return their number."""
        ...

    async def size(self) -> CacheSize | None:
        """Return the size; None if the store is shared and cannot tell."""
        ...

    async def close(self) -> None: ...


class LookupBatcher:
    """Batches lookups that arrive while others are under way into one call of `find`, so that a burst of requests does
    not make a fast store look slow."""

    def __init__(
        self,
        find: Callable[[Sequence[CacheKey]], Awaitable[Sequence[StoreLookup]]],
        *,
        most: int = 32,  # in one call
        seconds: float = 0.05,  # timeout of one call
    ) -> None:
        self._find = find
        self._most = most
        self._seconds = seconds
        self._waiting: deque[tuple[CacheKey, asyncio.Future[StoreLookup]]] = deque()
        self._task: asyncio.Task[None] | None = None

    async def get(self, cache_key: CacheKey) -> StoreLookup:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[StoreLookup] = loop.create_future()
        self._waiting.append((cache_key, future))
        if self._task is None:
            self._task = loop.create_task(self._work())
        return await future

    async def _work(self) -> None:
        try:
            while self._waiting:
                batch = [self._waiting.popleft() for _ in range(min(self._most, len(self._waiting)))]
                pending = [each for each in batch if not each[1].done()]  # others have timed out
                if pending:
                    await self._answer(pending)
        finally:
            self._task = None

    async def _answer(self, pending: Sequence[tuple[CacheKey, asyncio.Future[StoreLookup]]]) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                found = await self._find([cache_key for cache_key, _ in pending])
        except Exception as error:
            for _, future in pending:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), each in zip(pending, found, strict=True):
            if not future.done():
                future.set_result(each)

    async def close(self) -> None:
        await end_tasks([self._task])


class GuardedStore:
    """A store with timeouts and a breaker.

    `failed` is called with the name of each failed call: get, put, remove, sweep, size; "skipped" if the breaker
    rejected it, and "late" if the event loop was too busy to judge the timeout.
    """

    def __init__(
        self,
        store: EntryStore,
        *,
        name: str = "exact",  # of the cache, for the log
        get_s: float | None = 0.05,  # timeout while a request waits; None: the store answers at once
        put_s: float = 1.0,  # timeout in the background
        remove_s: float = 5.0,  # timeout while an administrator waits
        breaker: StoreBreaker | None = None,
        clock: Callable[[], float] = time.monotonic,
        failed: Callable[[str], None] = lambda call: None,
    ) -> None:
        self.store = store
        self._get_s = get_s
        self._put_s = put_s
        self._remove_s = remove_s
        self._breaker = breaker or StoreBreaker(clock=clock)
        self._outage = OutageLog(
            log, f"the {name} cache skips its store for a while after failures", level=logging.WARNING
        )
        self._clock = clock
        self._failed = failed

    async def get(self, cache_key: CacheKey) -> StoreLookup | None:
        """Return None if the store cannot be reached; then do not put anything into it either."""
        return await self._try("get", self._get_s, self.store.get, cache_key)

    async def put(self, cache_key: CacheKey, data: bytes, seconds: float, ticket: Any) -> bool | None:
        """Return None if it failed."""
        return await self._try("put", self._put_s, self.store.put, cache_key, data, seconds, ticket)

    async def remove(self, scope: InvalidationScope) -> int | None:
        """Remove entries whatever the state of the breaker. ApiError if it fails."""
        try:
            async with asyncio.timeout(self._remove_s):
                return await self.store.remove(scope)
        except Exception as error:
            self._failed("remove")
            log.error("Entries of the exact cache could not be removed: %r", error)
            raise ApiError(
                "The cache's store cannot be reached, so its entries are still there. Try again.",
                kind="overloaded_error",
                code="cache_unavailable",
                retry_after=1.0,
            ) from None

    async def sweep(self) -> int:
        return await self._try("sweep", self._put_s, self.store.sweep) or 0

    async def size(self) -> CacheSize | None:
        return await self._try("size", self._get_s, self.store.size)

    async def close(self) -> None:
        await self.store.close()

    async def _try(
        self, name: str, seconds: float | None, call: Callable[..., Coroutine[Any, Any, Result]], *arguments: Any
    ) -> Result | None:
        if not self._breaker.passes():
            self._failed("skipped")
            return None
        begun = self._clock()
        try:
            if seconds is None:
                result = await call(*arguments)
            else:
                async with asyncio.timeout(seconds):
                    result = await call(*arguments)
        except asyncio.CancelledError:
            self._breaker.dropped()
            raise
        except Exception as error:
            if (
                seconds is not None
                and isinstance(error, TimeoutError)
                and self._clock() - begun > _LATE_FACTOR * seconds
            ):
                self._breaker.dropped()
                self._failed("late")
                return None
            if self._breaker.failed():
                self._outage.failed(f"{name}: {error!r}")
            self._failed(name)
            return None
        self._breaker.succeeded()
        self._outage.succeeded()
        return result
