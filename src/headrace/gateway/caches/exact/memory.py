"""Entries in this process's memory.

Owns MemoryStore: the least recently used goes first, the bytes of all entries have a bound, and those of one tenant
another, so that a tenant with many questions does not push out everybody else's answers. Knows no other process.
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
from headrace.gateway.caches.exact.entry_store import CacheSize, InvalidationScope, StoreLookup

# What an entry takes beside its data, at most, as measured with tracemalloc: the object and its places in the tables,
# and for each tag, where nobody else has it, the tag itself with its set.
_ENTRY: Final = 640  # bytes
_TAG: Final = 340
_TURN: Final = 1000  # entries that may be dropped before others have a turn


class _Entry(msgspec.Struct, eq=False):
    wanted: CacheKey
    data: bytes
    expires: float
    size: int


class MemoryStore:
    def __init__(
        self,
        *,
        most_bytes: int = 256 * 1024**2,  # 256 MiB
        tenant_bytes: int | None = None,  # of one tenant; all by default
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.most_bytes = most_bytes
        self.tenant_bytes = most_bytes if tenant_bytes is None else min(tenant_bytes, most_bytes)
        self.bytes = 0
        self._clock = clock
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # by the key; the least recently used first
        self._tenants: dict[str, OrderedDict[bytes, _Entry]] = {}  # each one's in the same order
        self._tenant_bytes: dict[str, int] = {}
        self._tags: dict[str, set[_Entry]] = {}
        # By when they expire. Entries that are gone stay here until their time, or until they are too many.
        self._expiring: list[tuple[float, int, _Entry]] = []
        self._number = 0

    def __len__(self) -> int:
        return len(self._entries)

    async def get(self, wanted: CacheKey) -> StoreLookup:
        entry = self._entries.get(wanted.key)
        if entry is None or entry.wanted.tenant != wanted.tenant:
            return StoreLookup(None)
        if entry.expires <= self._clock():
            self._drop(entry)
            return StoreLookup(None)
        self._entries.move_to_end(wanted.key)
        self._tenants[wanted.tenant].move_to_end(wanted.key)
        return StoreLookup(entry.data)

    async def put(self, wanted: CacheKey, data: bytes, seconds: float, ticket: Any = None) -> bool:
        size = sys.getsizeof(data) + _ENTRY + len(wanted.tags) * _TAG
        if size > self.tenant_bytes:
            return False
        await self.sweep()
        tenant, key = wanted.tenant, wanted.key
        if (old := self._entries.get(key)) is not None:
            self._drop(old)
        while self._tenant_bytes.get(tenant, 0) + size > self.tenant_bytes:
            self._drop(next(iter(self._tenants[tenant].values())))
        while self.bytes + size > self.most_bytes:
            self._drop(next(iter(self._entries.values())))
        entry = _Entry(wanted, data, self._clock() + seconds, size)
        self._entries[key] = entry
        self._tenants.setdefault(tenant, OrderedDict())[key] = entry
        self._tenant_bytes[tenant] = self._tenant_bytes.get(tenant, 0) + size
        self.bytes += size
        for tag in wanted.tags:
            self._tags.setdefault(tag, set()).add(entry)
        self._number += 1
        heapq.heappush(self._expiring, (entry.expires, self._number, entry))
        return True

    async def remove(self, scope: InvalidationScope) -> int:
        now, count = self._clock(), 0
        for place, entry in enumerate(self._among(scope)):
            if place % _TURN == _TURN - 1:
                await asyncio.sleep(0)
            if scope.has(entry.wanted) and self._entries.get(entry.wanted.key) is entry:
                count += entry.expires > now
                self._drop(entry)
        return count

    def _among(self, scope: InvalidationScope) -> Sequence[_Entry]:
        """Few entries, those of the scope among them."""
        if scope.key is not None:
            entry = self._entries.get(scope.key)
            return [] if entry is None else [entry]
        if scope.tag is not None:
            return list(self._tags.get(scope.tag, ()))
        if scope.tenant is not None:
            theirs = self._tenants.get(scope.tenant)
            return [] if theirs is None else list(theirs.values())
        return list(self._entries.values())

    async def sweep(self) -> int:
        before, now = len(self._entries), self._clock()
        for _ in range(_TURN):
            if not self._expiring or self._expiring[0][0] > now:
                break
            _, _, entry = heapq.heappop(self._expiring)
            if self._entries.get(entry.wanted.key) is entry:
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
        tenant, key = entry.wanted.tenant, entry.wanted.key
        del self._entries[key]
        theirs = self._tenants[tenant]
        del theirs[key]
        self.bytes -= entry.size
        self._tenant_bytes[tenant] -= entry.size
        if not theirs:
            del self._tenants[tenant], self._tenant_bytes[tenant]
        for tag in entry.wanted.tags:
            tagged = self._tags[tag]
            tagged.discard(entry)
            if not tagged:
                del self._tags[tag]
        entry.data = b""  # the heap may know it for a while
        if len(self._expiring) > 2 * len(self._entries) + 64:
            self._expiring = [each for each in self._expiring if self._entries.get(each[2].wanted.key) is each[2]]
            heapq.heapify(self._expiring)
