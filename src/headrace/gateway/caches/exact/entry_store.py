"""Where entries live: what a store does, what is removed from one, and what happens when it is not there.

Owns Store (the contract that memory, sqlite and Redis fulfil), Scope (what an invalidation means), Removals (those of
late), Gathering (many lookups as one call) and Guarded (a store with a bound on every wait, and a breaker). A store
knows bytes, keys and tags; what an entry says is entries'.

A store that is slow, gone or broken is a miss, and never an error of a request. An invalidation is different: one that
could not be made is an error, because what it should have removed may be served again.
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
from headrace.gateway.circuit_breaker import StoreBreaker

log: Final = logging.getLogger(__name__)

Result = TypeVar("Result")
_LATE: Final = 2.0  # times a bound: who comes to look so late cannot tell whether the store was in time


class InvalidationScope(msgspec.Struct, frozen=True, kw_only=True):
    """The entries that have all of what is given; nothing given is every entry."""

    tenant: str | None = None
    tag: str | None = None
    key: bytes | None = None  # with a tenant

    def has(self, wanted: CacheKey) -> bool:
        return (
            (self.tenant is None or self.tenant == wanted.tenant)
            and (self.tag is None or self.tag in wanted.tags)
            and (self.key is None or self.key == wanted.key)
        )


class StoreLookup(msgspec.Struct, frozen=True):
    data: bytes | None  # None: a miss
    ticket: Any = None  # to be shown at `put`: the store's own memory of when it was asked


class CacheSize(msgspec.Struct, frozen=True):
    entries: int
    bytes: int


class EntryStore(Protocol):
    async def get(self, wanted: CacheKey) -> StoreLookup: ...

    async def put(self, wanted: CacheKey, data: bytes, seconds: float, ticket: Any) -> bool:
        """Keeps it so long, in place of what is there. False: it is too long for this store."""
        ...

    async def remove(self, scope: InvalidationScope) -> int | None:
        """How many entries that were; None where the store cannot count them."""
        ...

    async def sweep(self) -> int:
        """Removes what has expired, as far as one short turn goes; how many entries that were."""
        ...

    async def size(self) -> CacheSize | None:
        """None where the store is shared and does not know."""
        ...

    async def close(self) -> None: ...


class InvalidationLog:
    """The latest invalidations, so that an answer begun before one of them is not stored after it."""

    def __init__(self, most: int = 1024) -> None:
        self._latest: deque[InvalidationScope] = deque(maxlen=most)
        self.count = 0  # of all; remembered by whoever wants to ask `since`

    def add(self, scope: InvalidationScope) -> None:
        self._latest.append(scope)
        self.count += 1

    def since(self, count: int, wanted: CacheKey) -> bool:
        """Whether one of those after the first `count` meant it; true, too, where it is too long ago to tell."""
        new = self.count - count
        if new > len(self._latest):
            return True
        return any(self._latest[-place].has(wanted) for place in range(1, new + 1))


class LookupBatcher:
    """Lookups that come while others are under way go together, as one call of `find`: a crowd of requests must not
    make a store look slow that answers each of them at once."""

    def __init__(
        self,
        find: Callable[[Sequence[CacheKey]], Awaitable[Sequence[StoreLookup]]],
        *,
        most: int = 32,  # in one call
        seconds: float = 0.05,  # that one call may take
    ) -> None:
        self._find = find
        self._most = most
        self._seconds = seconds
        self._waiting: deque[tuple[CacheKey, asyncio.Future[StoreLookup]]] = deque()
        self._working: asyncio.Task[None] | None = None

    async def get(self, wanted: CacheKey) -> StoreLookup:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[StoreLookup] = loop.create_future()
        self._waiting.append((wanted, future))
        if self._working is None:
            self._working = loop.create_task(self._work())
        return await future

    async def _work(self) -> None:
        try:
            while self._waiting:
                taken = [self._waiting.popleft() for _ in range(min(self._most, len(self._waiting)))]
                together = [each for each in taken if not each[1].done()]  # some do not wait any more
                if together:
                    await self._answer(together)
        finally:
            self._working = None

    async def _answer(self, together: Sequence[tuple[CacheKey, asyncio.Future[StoreLookup]]]) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                found = await self._find([wanted for wanted, _ in together])
        except Exception as error:
            for _, future in together:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), each in zip(together, found, strict=True):
            if not future.done():
                future.set_result(each)

    async def close(self) -> None:
        if self._working is not None:
            self._working.cancel()
            await asyncio.gather(self._working, return_exceptions=True)


class GuardedStore:
    """A store that may be slow, gone or broken. `failed` hears which call did not work: get, put, remove, sweep, size;
    skipped where the breaker let none pass, and late where the event loop was too busy for anybody to be in time."""

    def __init__(
        self,
        store: EntryStore,
        *,
        get_s: float | None = 0.05,  # that a request waits; None: the store answers at once
        put_s: float = 1.0,  # nobody waits for it
        remove_s: float = 5.0,  # that an administrator waits
        breaker: StoreBreaker | None = None,
        clock: Callable[[], float] = time.monotonic,
        failed: Callable[[str], None] = lambda call: None,
    ) -> None:
        self.store = store
        self._get_s = get_s
        self._put_s = put_s
        self._remove_s = remove_s
        self._breaker = breaker or StoreBreaker(clock=clock)
        self._clock = clock
        self._failed = failed

    async def get(self, wanted: CacheKey) -> StoreLookup | None:
        """None: the store could not be asked, so nothing is to be put into it either."""
        return await self._try("get", self._get_s, self.store.get, wanted)

    async def put(self, wanted: CacheKey, data: bytes, seconds: float, ticket: Any) -> bool | None:
        """None: it did not work."""
        return await self._try("put", self._put_s, self.store.put, wanted, data, seconds, ticket)

    async def remove(self, scope: InvalidationScope) -> int | None:
        """Whatever the breaker says; ApiError where it did not work."""
        try:
            async with asyncio.timeout(self._remove_s):
                return await self.store.remove(scope)
        except Exception as error:
            self._failed("remove")
            log.error("the exact cache's entries could not be removed: %r", error)
            raise ApiError(
                "the cache's store cannot be reached, so its entries are still there; try again",
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
            if seconds is not None and isinstance(error, TimeoutError) and self._clock() - begun > _LATE * seconds:
                self._breaker.dropped()
                self._failed("late")
                return None
            if self._breaker.failed():
                log.warning("the exact cache's store is left alone for a while: %s: %r", name, error)
            self._failed(name)
            return None
        self._breaker.succeeded()
        return result
