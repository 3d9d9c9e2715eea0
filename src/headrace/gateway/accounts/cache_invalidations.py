"""Applies cache invalidations of operators to this gateway's caches.

An invalidation requested here is applied at once, so that its result can be returned. Those of other gateways arrive
with the account records and are retried until they succeed, because stale entries could otherwise be served.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Final, Protocol

from headrace.gateway.accounts.account_records import InvalidationRecord
from headrace.gateway.accounts.account_store import AccountChanges
from headrace.observe.outage_log import OutageLog
from headrace.tasks import end_tasks

log: Final = logging.getLogger("headrace.invalidations")

KEPT: Final = 256  # invalidations kept in the account records
_REPLAY_S: Final = (
    3600.0  # at start, repeat invalidations of this long: the gateway may have stopped before applying them
)


class InvalidatableCache(Protocol):
    """A response cache, local or shared."""

    async def invalidate(self, *, tenant: str | None = None, tag: str | None = None) -> int | None:
        """Remove the entries that match all arguments. Return how many; None if unknown.

        Raise ApiError on failure. Every wait is bounded.
        """
        ...


class CacheInvalidations:
    """Use from one event loop only."""

    def __init__(self, caches: Mapping[str, InvalidatableCache], *, retry_s: float = 1.0) -> None:
        self._caches = caches
        self._retry_s = retry_s
        self._outage = OutageLog(log, "cache entries could not be invalidated; retrying")
        self._own: set[str] = set()  # ids of invalidations applied by the request that made them
        self._pending: OrderedDict[str, InvalidationRecord] = OrderedDict()
        self._first = True
        self._working: asyncio.Task[None] | None = None

    @property
    def caches(self) -> frozenset[str]:
        """The names of the caches."""
        return frozenset(self._caches)

    @property
    def pending(self) -> int:
        return len(self._pending)

    @contextmanager
    def own(self, id: str) -> Generator[None]:
        """Context of committing an invalidation that `make_own` will apply, so that the listener skips it."""
        self._own.add(id)
        try:
            yield
        finally:
            self._own.discard(id)

    async def make_own(self, id: str, record: InvalidationRecord) -> dict[str, int | None]:
        """Apply an invalidation of this gateway. On failure, raise and retry in the background."""
        try:
            return await self.make(record)
        except BaseException:
            self._pending[id] = record
            self._begin()
            raise

    async def make(self, record: InvalidationRecord) -> dict[str, int | None]:
        """Apply an invalidation. Return removed entries by cache, None if unknown. Raise ApiError on failure."""
        return {name: await self._forget(cache, record) for name, cache in self._caches.items()}

    async def _forget(self, cache: InvalidatableCache, record: InvalidationRecord) -> int | None:
        tags: tuple[str | None, ...] = record.tags or (None,)
        counts = [await cache.invalidate(tenant=record.tenant, tag=tag) for tag in tags]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None

    def take(self, changes: AccountChanges) -> None:
        """Apply changed account records."""
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
        if len(self._pending) > KEPT:  # too many: invalidate everything, which includes them all
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
                    self._outage.failed(error)
                    if id in self._pending:
                        self._pending.move_to_end(id)
                    await asyncio.sleep(self._retry_s)
                else:
                    self._outage.succeeded()
                    self._pending.pop(id, None)
        finally:
            self._working = None

    async def close(self) -> None:
        await end_tasks([self._working])
