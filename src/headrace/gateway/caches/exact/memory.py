"""Stores entries of the exact cache in this process's memory.

Evicts the least recently used entry. One bound covers all entries and another each tenant's, so that a tenant with many
questions does not evict everybody else's answers.
"""

from __future__ import annotations

import asyncio
import heapq
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from headrace.gateway.caches.exact.cache_key import CacheKey
from headrace.gateway.caches.exact.entry_store import CacheSize, StoreLookup
from headrace.gateway.caches.invalidation_log import InvalidationScope

# Overhead of an entry, measured with tracemalloc: the object with its places in the tables, and for each tag the tag
# with its set, as if no other entry had it.
_ENTRY_BYTES: Final = 640
_TAG_BYTES: Final = 340
_BATCH: Final = 1000  # entries dropped before others have a turn


class _Entry(msgspec.Struct, eq=False):
    cache_key: CacheKey
    data: bytes
    expires: float
    size: int


class MemoryStore:
    def __init__(
        self,
        *,
        most_bytes: int = 256 * 1024**2,  # 256 MiB
        tenant_bytes: int | None = None,  # of one tenant; by default the same
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.most_bytes = most_bytes
        self.tenant_bytes = most_bytes if tenant_bytes is None else min(tenant_bytes, most_bytes)
        self.bytes = 0
        self._clock = clock
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # by digest; the least recently used first
        self._tenants: dict[str, OrderedDict[bytes, _Entry]] = {}  # each in the same order
        self._tenant_bytes: dict[str, int] = {}
        self._tags: dict[str, set[_Entry]] = {}
        # By expiry. Dropped entries stay here until they expire, or until there are too many.
        self._expiring: list[tuple[float, int, _Entry]] = []
        self._number = 0

    def __len__(self) -> int:
        return len(self._entries)

    async def get(self, cache_key: CacheKey) -> StoreLookup:
        entry = self._entries.get(cache_key.digest)
        if entry is None or entry.cache_key.tenant != cache_key.tenant:
            return StoreLookup(None)
        if entry.expires <= self._clock():
            self._drop(entry)
            return StoreLookup(None)
        self._entries.move_to_end(cache_key.digest)
        self._tenants[cache_key.tenant].move_to_end(cache_key.digest)
        return StoreLookup(entry.data)

    async def put(self, cache_key: CacheKey, data: bytes, seconds: float, ticket: Any = None) -> bool:
        size = sys.getsizeof(data) + _ENTRY_BYTES + len(cache_key.tags) * _TAG_BYTES
        if size > self.tenant_bytes:
            return False
        await self.sweep()
        tenant, key = cache_key.tenant, cache_key.digest
        if (old := self._entries.get(key)) is not None:
            self._drop(old)
        while self._tenant_bytes.get(tenant, 0) + size > self.tenant_bytes:
            self._drop(next(iter(self._tenants[tenant].values())))
        while self.bytes + size > self.most_bytes:
            self._drop(next(iter(self._entries.values())))
        entry = _Entry(cache_key, data, self._clock() + seconds, size)
        self._entries[key] = entry
        self._tenants.setdefault(tenant, OrderedDict())[key] = entry
        self._tenant_bytes[tenant] = self._tenant_bytes.get(tenant, 0) + size
        self.bytes += size
        for tag in cache_key.tags:
            self._tags.setdefault(tag, set()).add(entry)
        self._number += 1
        heapq.heappush(self._expiring, (entry.expires, self._number, entry))
        return True

    async def remove(self, scope: InvalidationScope) -> int:
        now, count = self._clock(), 0
        for index, entry in enumerate(self._candidates(scope)):
            if index % _BATCH == _BATCH - 1:
                await asyncio.sleep(0)
            if (
                scope.covers(entry.cache_key.tenant, entry.cache_key.tags, entry.cache_key.digest)
                and self._entries.get(entry.cache_key.digest) is entry
            ):
                count += entry.expires > now
                self._drop(entry)
        return count

    def _candidates(self, scope: InvalidationScope) -> Sequence[_Entry]:
        """Return a small superset of the entries in a scope."""
        if scope.digest is not None:
            entry = self._entries.get(scope.digest)
            return [] if entry is None else [entry]
        if scope.tag is not None:
            return list(self._tags.get(scope.tag, ()))
        if scope.tenant is not None:
            theirs = self._tenants.get(scope.tenant)
            return [] if theirs is None else list(theirs.values())
        return list(self._entries.values())

    async def sweep(self) -> int:
        before, now = len(self._entries), self._clock()
        for _ in range(_BATCH):
            if not self._expiring or self._expiring[0][0] > now:
                break
            _, _, entry = heapq.heappop(self._expiring)
            if self._entries.get(entry.cache_key.digest) is entry:
                self._drop(entry)
        return before - len(self._entries)

    async def size(self) -> CacheSize:
        return CacheSize(len(self._entries), self.bytes)

    async def close(self) -> None:
        self._entries.clear()
        self._tenants.clear()
        self._tenant_bytes.clear()
        self._tags.clear()
        self._expiring.clear()
        self.bytes = 0

    def _drop(self, entry: _Entry) -> None:
        tenant, key = entry.cache_key.tenant, entry.cache_key.digest
        del self._entries[key]
        theirs = self._tenants[tenant]
        del theirs[key]
        self.bytes -= entry.size
        self._tenant_bytes[tenant] -= entry.size
        if not theirs:
            del self._tenants[tenant], self._tenant_bytes[tenant]
        for tag in entry.cache_key.tags:
            tagged = self._tags[tag]
            tagged.discard(entry)
            if not tagged:
                del self._tags[tag]
        entry.data = b""  # the heap may hold the entry for a while
        if len(self._expiring) > 2 * len(self._entries) + 64:
            self._expiring = [each for each in self._expiring if self._entries.get(each[2].cache_key.digest) is each[2]]
            heapq.heapify(self._expiring)
