"""Entries in Redis or Valkey, shared by several gateways.

Owns RedisStore and the names of its keys. How much memory entries may take is the server's own `maxmemory`; each one
has a time to live. Knows neither bounds on waits nor breakers: they are stores.Guarded's.

An invalidation is one write, however many entries it means. For every scope (all, a tenant, a tag, a tag of a tenant)
there is a random token, and an entry begins with the tokens of its scopes as they were when the request came. An
invalidation puts a new token in the place of a scope's; what begins with the old one is never served again, and goes
when its time is over. So an answer that was begun before an invalidation cannot be stored after it, whichever gateway
made it. A token that Redis forgot is a new one, too: what is lost makes misses, and never brings anything back.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import math
import secrets
from collections.abc import Sequence
from typing import Any, Final, Protocol

from headrace.errors import HeadraceError
from headrace.gateway.caches.exact.cache_key import CacheKey
from headrace.gateway.caches.exact.entry_store import CacheSize, InvalidationScope, LookupBatcher, StoreLookup

_TOKEN: Final = 12  # bytes
_PUTTING: Final = 16  # entries that are written at once, so that there is a connection for who reads
_CONNECTIONS: Final = 24


class RedisPipeline(Protocol):
    def set(self, name: str, value: bytes, *, px: int, nx: bool = False) -> Any: ...

    def get(self, name: str) -> Any: ...

    def pexpire(self, name: str, time: int) -> Any: ...

    async def execute(self) -> list[Any]: ...


class RedisClient(Protocol):
    """What is used of a redis.asyncio.Redis."""

    async def mget(self, keys: Sequence[str]) -> list[bytes | None]: ...

    async def set(self, name: str, value: bytes, *, px: int) -> Any: ...

    async def unlink(self, *names: str) -> int: ...

    def pipeline(self, transaction: bool) -> RedisPipeline: ...

    async def aclose(self) -> None: ...


def connect(url: str, *, seconds: float = 0.05) -> RedisClient:
    """A client that connects when it is first used. `seconds`: of one connecting, writing or reading. HeadraceError
    where the package is missing or the URL is none."""
    try:
        client: Any = importlib.import_module("redis.asyncio")
        retry: Any = importlib.import_module("redis.asyncio.retry")
        backoff: Any = importlib.import_module("redis.backoff")
    except ImportError:
        raise HeadraceError("the cache is to be in Redis: install headrace[redis]") from None
    try:
        pool = client.BlockingConnectionPool.from_url(
            url,
            max_connections=_CONNECTIONS,
            timeout=1.0,  # seconds for a connection that is free
            socket_timeout=seconds,
            socket_connect_timeout=seconds,
            # One try: who waits has a bound, and whether to try again is the breaker's.
            retry=retry.Retry(backoff.NoBackoff(), 0),
        )
        return client.Redis.from_pool(pool)
    except ValueError as error:
        raise HeadraceError(f"the cache's Redis URL cannot be used: {error}") from None


class RedisStore:
    def __init__(
        self,
        client: RedisClient,
        *,
        prefix: str = "headrace:exact",  # of all its keys
        most_seconds: float = 86_400.0,  # that any entry is kept
        entry_bytes: int = 1024**2,  # 1 MiB
        bound_s: float = 0.05,  # of one call that looks for entries
    ) -> None:
        self._client = client
        self._prefix = prefix
        self._most_seconds = most_seconds
        self._entry_bytes = entry_bytes
        self._gathering = LookupBatcher(self._find, seconds=bound_s)
        self._putting = asyncio.Semaphore(_PUTTING)
        self._token_ms = math.ceil(2000 * most_seconds)  # longer than any entry that begins with the token

    async def get(self, wanted: CacheKey) -> StoreLookup:
        return await self._gathering.get(wanted)

    async def _find(self, wanteds: Sequence[CacheKey]) -> Sequence[StoreLookup]:
        """In one round trip, and a second one where scopes have no token yet."""
        scopes = [self._scopes_of(wanted) for wanted in wanteds]
        names = [self._entry(wanted.tenant, wanted.key) for wanted in wanteds]
        for each in scopes:
            names += each
        values = dict(zip(names, await self._client.mget(names), strict=True))
        new = dict.fromkeys(name for each in scopes for name in each if not _is_token(values[name]))
        if new:
            values.update(await self._tokens(list(new)))
        found: list[StoreLookup] = []
        for name, theirs in zip(names, scopes, strict=False):
            tokens = [values[scope] for scope in theirs]
            if not all(map(_is_token, tokens)):
                found.append(StoreLookup(None))
                continue
            head = b"".join(token or b"" for token in tokens)
            data = values[name]
            if data is None or not data.startswith(head) or len(data) > self._entry_bytes + len(head):
                found.append(StoreLookup(None, head))
            else:
                found.append(StoreLookup(data[len(head) :], head))
        return found

    async def _tokens(self, scopes: Sequence[str]) -> dict[str, bytes | None]:
        """Those that are missing are made; another gateway's may come first."""
        pipeline = self._client.pipeline(transaction=False)
        for scope in scopes:
            pipeline.set(scope, secrets.token_bytes(_TOKEN), px=self._token_ms, nx=True)
            pipeline.get(scope)
        return dict(zip(scopes, (await pipeline.execute())[1::2], strict=True))

    async def put(self, wanted: CacheKey, data: bytes, seconds: float, ticket: Any) -> bool:
        """`ticket`: from the `get` that the answer was made after; without one nothing is kept."""
        if ticket is None or len(data) > self._entry_bytes:
            return False
        pipeline = self._client.pipeline(transaction=False)
        lasting = max(1, int(1000 * min(seconds, self._most_seconds)))
        pipeline.set(self._entry(wanted.tenant, wanted.key), ticket + data, px=lasting)
        for scope in self._scopes_of(wanted):
            pipeline.pexpire(scope, self._token_ms)
        async with self._putting:
            await pipeline.execute()
        return True

    async def remove(self, scope: InvalidationScope) -> int | None:
        """Entries of a scope are not counted: nothing looks at them."""
        if scope.key is not None and scope.tenant is not None:
            return await self._client.unlink(self._entry(scope.tenant, scope.key))
        name = self._scope(scope.tenant, scope.tag)
        await self._client.set(name, secrets.token_bytes(_TOKEN), px=self._token_ms)
        return None

    async def sweep(self) -> int:
        """Redis does it."""
        return 0

    async def size(self) -> CacheSize | None:
        """Redis knows, of all that is in it."""
        return None

    async def close(self) -> None:
        await self._gathering.close()
        await self._client.aclose()

    def _entry(self, tenant: str, key: bytes) -> str:
        return f"{self._prefix}:{_short(tenant)}:{key.hex()}"

    def _scope(self, tenant: str | None, tag: str | None) -> str:
        of_tenant = "" if tenant is None else f":tenant:{_short(tenant)}"
        of_tag = "" if tag is None else f":tag:{tag}"
        return f"{self._prefix}:scope{of_tenant}{of_tag}"

    def _scopes_of(self, wanted: CacheKey) -> list[str]:
        scopes = [self._scope(None, None), self._scope(wanted.tenant, None)]
        for tag in wanted.tags:
            scopes += (self._scope(None, tag), self._scope(wanted.tenant, tag))
        return scopes


def _is_token(token: bytes | None) -> bool:
    return token is not None and len(token) == _TOKEN


def _short(tenant: str) -> str:
    """In a key's name nothing of a tenant is to be read, and no character of it is to mean anything."""
    return hashlib.sha256(tenant.encode("utf-8", "surrogatepass")).hexdigest()[:32]
