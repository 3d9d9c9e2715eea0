"""StageCache: results of stages and tools in memory, bounded in bytes, each for one tenant and a time.

A key includes the tenant, so that no entry of one tenant is visible to another. Expired entries stay until they are
evicted, for stages that may use an old result when they are late.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec

_ENTRY_BYTES = 256  # of an entry beside its value, about


class CachedStage(msgspec.Struct):
    value: bytes
    expires: float
    stored: float
    tag: str  # who put it there: `prefetch`, or nothing


class StageCache:
    def __init__(self, most_bytes: int, clock: Callable[[], float]) -> None:
        self._most = most_bytes
        self._clock = clock
        self._entries: OrderedDict[bytes, CachedStage] = OrderedDict()
        self.bytes = 0

    @staticmethod
    def key(tenant: str, kind: str, *parts: Any) -> bytes:
        """Return the key of a result: everything that it depends on."""
        return hashlib.blake2b(msgspec.json.encode([tenant, kind, parts], order="sorted"), digest_size=24).digest()

    def get(self, key: bytes, *, stale: bool = False) -> CachedStage | None:
        """Return a result; with `stale`, also an expired one."""
        entry = self._entries.get(key)
        if entry is None or (entry.expires <= self._clock() and not stale):
            return None
        self._entries.move_to_end(key)
        return entry

    def put(self, key: bytes, value: bytes, ttl_s: float, *, tag: str = "") -> None:
        """Keep a result. What was used least recently makes room; a value that is too long is not kept."""
        size = len(value) + _ENTRY_BYTES
        self.drop(key)
        if ttl_s <= 0 or size > self._most:
            return
        while self.bytes + size > self._most:
            _, oldest = self._entries.popitem(last=False)
            self.bytes -= len(oldest.value) + _ENTRY_BYTES
        now = self._clock()
        self._entries[key] = CachedStage(value, now + ttl_s, now, tag)
        self.bytes += size

    def now(self) -> float:
        return self._clock()

    def drop(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.bytes -= len(entry.value) + _ENTRY_BYTES

    def __len__(self) -> int:
        return len(self._entries)
