"""Stores entries of the exact cache in Redis or Valkey, shared by several gateways.

Owns RedisStore and the names of its keys. The server's own `maxmemory` bounds the memory, and each entry has a time to
live. Timeouts and the breaker are GuardedStore's.

An invalidation is one write, however many entries it covers. Every scope (all, a tenant, a tag, a tag of a tenant) has
a random token, and an entry begins with the tokens of its scopes as of the time of the request. An invalidation
replaces a scope's token; entries that begin with the old one are never served again and expire. So an answer begun
before an invalidation cannot be stored after it, whichever gateway made it. A token that Redis forgot is replaced as
well: losing data causes misses and never brings an entry back.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import secrets
from collections.abc import Sequence
from typing import Any, Final, Protocol

from headrace.gateway.caches.exact.cache_key import CacheKey
from headrace.gateway.caches.exact.entry_store import CacheSize, LookupBatcher, StoreLookup
from headrace.gateway.caches.invalidation_log import InvalidationScope

_TOKEN_BYTES: Final = 12
_MAX_WRITES: Final = 16  # at once, so that connections are left for reads


class RedisPipeline(Protocol):
    def set(self, name: str, value: bytes, *, px: int, nx: bool = False) -> Any: ...

    def get(self, name: str) -> Any: ...

    def pexpire(self, name: str, time: int) -> Any: ...

    async def execute(self) -> list[Any]: ...


class RedisClient(Protocol):
    """The used part of redis.asyncio.Redis."""

    async def mget(self, keys: Sequence[str]) -> list[bytes | None]: ...

    async def set(self, name: str, value: bytes, *, px: int) -> Any: ...

    async def unlink(self, *names: str) -> int: ...

    def pipeline(self, transaction: bool) -> RedisPipeline: ...

    async def aclose(self) -> None: ...


class RedisStore:
    def __init__(
        self,
        client: RedisClient,
        *,
        prefix: str = "headrace:exact",  # of all keys
        most_seconds: float = 86_400.0,  # the longest time to live
        entry_bytes: int = 1024**2,  # 1 MiB
        bound_s: float = 0.05,  # timeout of one lookup call
    ) -> None:
        self._client = client
        self._prefix = prefix
        self._most_seconds = most_seconds
        self._entry_bytes = entry_bytes
        self._batcher = LookupBatcher(self._find, seconds=bound_s)
        self._writes = asyncio.Semaphore(_MAX_WRITES)
        self._token_ms = math.ceil(2000 * most_seconds)  # outlives every entry that begins with the token

    async def get(self, cache_key: CacheKey) -> StoreLookup:
        return await self._batcher.get(cache_key)

    async def _find(self, cache_keys: Sequence[CacheKey]) -> Sequence[StoreLookup]:
        """Look up in one round trip, and a second one if scopes have no token yet."""
        scopes = [self._scopes_of(cache_key) for cache_key in cache_keys]
        names = [self._entry(cache_key.tenant, cache_key.digest) for cache_key in cache_keys]
        for each in scopes:
            names += each
        values = dict(zip(names, await self._client.mget(names), strict=True))
        new = dict.fromkeys(name for each in scopes for name in each if not _is_token(values[name]))
        if new:
            values.update(await self._tokens(list(new)))
        lookups: list[StoreLookup] = []
        for name, key_scopes in zip(names, scopes, strict=False):
            tokens = [values[scope] for scope in key_scopes]
            if not all(map(_is_token, tokens)):
                lookups.append(StoreLookup(None))
                continue
            head = b"".join(token or b"" for token in tokens)
            data = values[name]
            if data is None or not data.startswith(head) or len(data) > self._entry_bytes + len(head):
                lookups.append(StoreLookup(None, head))
            else:
                lookups.append(StoreLookup(data[len(head) :], head))
        return lookups

    async def _tokens(self, scopes: Sequence[str]) -> dict[str, bytes | None]:
        """Create missing tokens; another gateway may be first."""
        pipeline = self._client.pipeline(transaction=False)
        for scope in scopes:
            pipeline.set(scope, secrets.token_bytes(_TOKEN_BYTES), px=self._token_ms, nx=True)
            pipeline.get(scope)
        return dict(zip(scopes, (await pipeline.execute())[1::2], strict=True))

    async def put(self, cache_key: CacheKey, data: bytes, seconds: float, ticket: Any) -> bool:
        """Store an entry. `ticket`: from the `get` before the answer was made; without one nothing is stored."""
        if ticket is None or len(data) > self._entry_bytes:
            return False
        pipeline = self._client.pipeline(transaction=False)
        ttl_ms = max(1, int(1000 * min(seconds, self._most_seconds)))
        pipeline.set(self._entry(cache_key.tenant, cache_key.digest), ticket + data, px=ttl_ms)
        for scope in self._scopes_of(cache_key):
            pipeline.pexpire(scope, self._token_ms)
        async with self._writes:
            await pipeline.execute()
        return True

    async def remove(self, scope: InvalidationScope) -> int | None:
        """Remove a scope; its entries are not counted, because none of them is read."""
        if scope.digest is not None and scope.tenant is not None:
            return await self._client.unlink(self._entry(scope.tenant, scope.digest))
        name = self._scope(scope.tenant, scope.tag)
        await self._client.set(name, secrets.token_bytes(_TOKEN_BYTES), px=self._token_ms)
        return None

    async def sweep(self) -> int:
        """Do nothing: Redis expires entries itself."""
        return 0

    async def size(self) -> CacheSize | None:
        """Return None: Redis reports only the size of the whole database."""
        return None

    async def close(self) -> None:
        await self._batcher.close()
        await self._client.aclose()

    def _entry(self, tenant: str, key: bytes) -> str:
        return f"{self._prefix}:{_hashed(tenant)}:{key.hex()}"

    def _scope(self, tenant: str | None, tag: str | None) -> str:
        of_tenant = "" if tenant is None else f":tenant:{_hashed(tenant)}"
        of_tag = "" if tag is None else f":tag:{tag}"
        return f"{self._prefix}:scope{of_tenant}{of_tag}"

    def _scopes_of(self, cache_key: CacheKey) -> list[str]:
        scopes = [self._scope(None, None), self._scope(cache_key.tenant, None)]
        for tag in cache_key.tags:
            scopes += (self._scope(None, tag), self._scope(cache_key.tenant, tag))
        return scopes


def _is_token(token: bytes | None) -> bool:
    return token is not None and len(token) == _TOKEN_BYTES


def _hashed(tenant: str) -> str:
    """Hash a tenant, so that key names neither reveal it nor contain special characters."""
    return hashlib.sha256(tenant.encode("utf-8", "surrogatepass")).hexdigest()[:32]
