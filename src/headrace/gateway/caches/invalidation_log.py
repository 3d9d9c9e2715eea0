"""Remembers the latest invalidations, so that an answer begun before one of them is not stored after it."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

import msgspec


class InvalidationScope(msgspec.Struct, frozen=True, kw_only=True):
    """The entries that match all given fields; without any, every entry."""

    tenant: str | None = None
    tag: str | None = None
    digest: bytes | None = None  # of one cache key; requires a tenant

    def covers(self, tenant: str, tags: Collection[str], digest: bytes | None = None) -> bool:
        return (
            (self.tenant is None or self.tenant == tenant)
            and (self.tag is None or self.tag in tags)
            and (self.digest is None or self.digest == digest)
        )


class InvalidationLog:
    def __init__(self, size: int = 1024) -> None:
        self._latest: deque[InvalidationScope] = deque(maxlen=size)
        self.count = 0  # of all invalidations so far; callers remember it as their starting point

    def add(self, scope: InvalidationScope) -> None:
        self._latest.append(scope)
        self.count += 1

    def covers_since(self, count: int, tenant: str, tags: Collection[str], digest: bytes | None = None) -> bool:
        """True if an invalidation after the first `count` covers an entry; true if it is too long ago to tell."""
        new = self.count - count
        if new > len(self._latest):
            return True
        return any(self._latest[-index].covers(tenant, tags, digest) for index in range(1, new + 1))
