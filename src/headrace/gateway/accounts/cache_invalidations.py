"""Entries of caches that an operator ends: here at once, and in every other gateway as soon as it hears of it.

Owns the removing in this gateway's caches of what the shared state says. What an operator asks for here is made at
once, so that its outcome can be told; what others ask for comes in with the epochs, and is tried until it works: what
should be gone could be served as long as it is not. Which entries a tag means is the caches'.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Final, Protocol

import structlog

from headrace.gateway.accounts.account_records import InvalidationRecord
from headrace.gateway.accounts.account_store import AccountChanges

log: Final = structlog.stdlib.get_logger("headrace.invalidations")

KEPT: Final = 256  # invalidations in the shared state; a gateway that has not heard of older ones was not there
_REPLAY_S: Final = 3600.0  # at the start: this gateway may have ended before it had made those


class InvalidatableCache(Protocol):
    """A cache of answers, of this gateway or shared."""

    async def invalidate(self, *, tenant: str | None = None, tag: str | None = None) -> int | None:
        """Removes the entries that have all of what is given. How many that were; None where it cannot be told.
        ApiError where it could not be done. Never waits without a bound."""
        ...


class CacheInvalidations:
    """All of it belongs to one event loop."""

    def __init__(self, caches: Mapping[str, InvalidatableCache], *, retry_s: float = 1.0) -> None:
        self._caches = caches
        self._retry_s = retry_s
        self._own: set[str] = set()  # made here by whoever asked for them
        self._pending: OrderedDict[str, InvalidationRecord] = OrderedDict()
        self._first = True
        self._working: asyncio.Task[None] | None = None

    @property
    def caches(self) -> frozenset[str]:
        """Those that there are, by their names."""
        return frozenset(self._caches)

    @property
    def pending(self) -> int:
        return len(self._pending)

    @contextmanager
    def own(self, id: str) -> Generator[None]:
        """Around the change that says it: this one is made here, by `make_own`."""
        self._own.add(id)
        try:
            yield
        finally:
            self._own.discard(id)

    async def make_own(self, id: str, record: InvalidationRecord) -> dict[str, int | None]:
        """As `make`; where it does not work, it is tried until it does, and the ApiError says so."""
        try:
            return await self.make(record)
        except BaseException:
            self._pending[id] = record
            self._begin()
            raise

    async def make(self, record: InvalidationRecord) -> dict[str, int | None]:
        """How many entries went, by the cache; None where a cache cannot tell. ApiError where one failed."""
        return {name: await self._forget(cache, record) for name, cache in self._caches.items()}

    async def _forget(self, cache: InvalidatableCache, record: InvalidationRecord) -> int | None:
        tags: tuple[str | None, ...] = record.tags or (None,)
        counts = [await cache.invalidate(tenant=record.tenant, tag=tag) for tag in tags]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None

    def take(self, changes: AccountChanges) -> None:
        """What has changed in the shared state."""
        first, self._first = self._first, False
        for record in changes.records:
            if record.kind != "invalidation":
                continue
            if record.id in self._own:
                continue
            if isinstance(record.value, InvalidationRecord) and (
                not first or changes.now - record.value.at < _REPLAY_S
            ):
                self._pending[record.id] = record.value
        if len(self._pending) > KEPT:  # more than there can be: everything goes, which is what they ask for and more
            self._pending.clear()
            self._pending["all"] = InvalidationRecord(at=int(changes.now))
        self._begin()

    def _begin(self) -> None:
        if self._pending and self._caches and self._working is None:
            self._working = asyncio.get_running_loop().create_task(self._work())

    async def _work(self) -> None:
        try:
            while self._pending:
                id, record = next(iter(self._pending.items()))
                try:
                    await self.make(record)
                except Exception as error:
                    log.error("a cache's entries are not removed yet", reason=str(error), waiting=len(self._pending))
                    if id in self._pending:
                        self._pending.move_to_end(id)
                    await asyncio.sleep(self._retry_s)
                else:
                    self._pending.pop(id, None)
        finally:
            self._working = None

    async def close(self) -> None:
        if self._working is not None:
            self._working.cancel()
            await asyncio.gather(self._working, return_exceptions=True)
