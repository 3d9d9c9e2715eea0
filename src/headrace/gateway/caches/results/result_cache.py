"""ResultCache: keeps intermediate results: embeddings, search results, answers of HTTP services, SQL and tools, and the
results of pipelines' stages.

A result is bytes under a key made of its kind, its tenant and whatever it depends on. Stores, modes, tags and
invalidations are those of the exact cache, in a namespace of their own. Equal computations that run at once are shared.
A broken store costs a bounded wait and is a miss.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal

import msgspec

from headrace.config.cache_section import ResultsConfig, lifetime_s
from headrace.config.pipeline_section import PipelineConfig
from headrace.config.tool_section import ToolConfig
from headrace.gateway.caches.cache_modes import CachePolicy
from headrace.gateway.caches.exact.cache_key import CacheKey
from headrace.gateway.caches.exact.configured_store import open_store
from headrace.gateway.caches.exact.entry_store import CacheSize, GuardedStore
from headrace.gateway.caches.invalidation_log import InvalidationLog, InvalidationScope
from headrace.gateway.database import Database
from headrace.observe import metrics

ResultKind = Literal["embedding", "retrieval", "http", "sql", "tool", "stage", "answer", "prefetch"]
ResultOutcome = Literal[
    "hit",
    "miss",
    "would_hit",  # in mode record
    "joined",  # shared with an equal computation under way
    "same",  # in mode record: the fresh result equals the entry
    "different",
    "stored",
    "outdated",  # invalidated while it was computed: not stored
    "too_long",  # not stored
    "unkeyed",  # what it depends on cannot be encoded
    "unreachable",  # the store was not asked, or did not answer
    "corrupt",
]

_MAGIC: Final = b"rs1"
_SEAL: Final = 16  # bytes
_FLIGHTS: Final = 4096  # computations that others may join
_encode: Final = msgspec.msgpack.Encoder(order="sorted").encode


class _Entry(msgspec.Struct, array_like=True, frozen=True):
    made: float  # seconds since 1970
    data: bytes


_decoder: Final = msgspec.msgpack.Decoder(_Entry)


class ResultLookup(msgspec.Struct, frozen=True):
    """What `look` found; pass it to `keep`."""

    data: bytes | None = None  # serve this
    age_s: float = 0.0
    key: CacheKey | None = None
    kind: ResultKind = "tool"
    recorded: bytes | None = None  # in mode record: the entry, which is not served
    old: bytes | None = None  # an entry that is older than was asked for
    writes: bool = False
    ticket: Any = None  # the store's
    mark: int = 0  # invalidations before it
    shares: bool = False


class CachedResult(msgspec.Struct, frozen=True):
    data: bytes
    hit: bool  # from the cache, or computed by another request
    age_s: float = 0.0


class ResultCache:
    """All of it belongs to one event loop. You may replace `modes` while the cache is in use."""

    def __init__(
        self,
        store: GuardedStore,
        modes: CachePolicy,
        *,
        config: ResultsConfig | None = None,
        secret: bytes = b"",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.modes = modes
        self.config = config or ResultsConfig()
        self._store = store
        self._secret = secret
        self._clock = clock
        self._ttl_s: dict[ResultKind, float] = {
            "embedding": lifetime_s(self.config.embedding_ttl),
            "retrieval": lifetime_s(self.config.retrieval_ttl),
            "http": lifetime_s(self.config.http_ttl),
            "sql": lifetime_s(self.config.sql_ttl),
            "tool": lifetime_s(self.config.tool_ttl),
        }  # others have the lifetime that they are kept with
        self._tag_ttl_s = {tag: lifetime_s(ttl) for tag, ttl in self.config.tags.items()}
        self._invalidations = InvalidationLog()
        self._flights: dict[bytes, asyncio.Task[bytes]] = {}

    @classmethod
    def from_config(
        cls,
        config: ResultsConfig,
        database: Database,
        environ: Mapping[str, str],
        *,
        is_used: bool,
        kept_s: Iterable[float] = (),
    ) -> ResultCache | None:
        """Build the cache; None if no tenant uses it. ConfigError if the environment lacks the URL of Redis.

        `kept_s`: lifetimes that results are kept with besides those of `config`.
        """
        if not is_used:
            return None
        named = (config.embedding_ttl, config.retrieval_ttl, config.http_ttl, config.sql_ttl, config.tool_ttl)
        lifetimes_s = (*map(lifetime_s, (*named, *config.tags.values())), *kept_s)
        store, secret = open_store(config, "results", lifetimes_s, database, environ)
        modes = CachePolicy(mode=config.mode, share=config.share, salt="results")
        return cls(store, modes, config=config, secret=secret)

    async def fetch(
        self,
        kind: ResultKind,
        tenant: str,
        parts: Sequence[Any],
        compute: Callable[[], Awaitable[bytes]],
        *,
        tags: Sequence[str] = (),
        ttl_s: float | None = None,
        requested: str = "on",
    ) -> CachedResult:
        """Return a result from the cache, or compute it and keep it. Errors of `compute` are raised and not kept.

        `parts`: all that the result depends on, in types that msgpack has. `ttl_s`: default, the kind's or its tags'.
        `requested`: "off" computes without the cache.
        """
        lookup = await self.look(kind, tenant, parts, tags=tags, requested=requested)
        if lookup.data is not None:
            return CachedResult(lookup.data, True, lookup.age_s)
        if lookup.key is None or not lookup.shares:
            data = await compute()
            await self.keep(lookup, data, ttl_s=ttl_s)
            return CachedResult(data, False)
        digest = lookup.key.digest
        flight = self._flights.get(digest)
        if flight is not None:
            self._note(kind, "joined")
            return CachedResult(await asyncio.shield(flight), True)
        flight = asyncio.ensure_future(self._compute(lookup, compute, ttl_s))
        if len(self._flights) < _FLIGHTS:
            self._flights[digest] = flight
            flight.add_done_callback(partial(self._landed, digest))
        # A caller that leaves does not take the result from those that have joined.
        return CachedResult(await asyncio.shield(flight), False)

    async def _compute(
        self, lookup: ResultLookup, compute: Callable[[], Awaitable[bytes]], ttl_s: float | None
    ) -> bytes:
        data = await compute()
        await self.keep(lookup, data, ttl_s=ttl_s)
        return data

    def _landed(self, digest: bytes, flight: asyncio.Task[bytes]) -> None:
        self._flights.pop(digest, None)
        if not flight.cancelled():
            flight.exception()  # it was raised where it was awaited, unless all callers have left

    async def look(
        self,
        kind: ResultKind,
        tenant: str,
        parts: Sequence[Any],
        *,
        tags: Sequence[str] = (),
        requested: str = "on",
        declared: bool = False,
        fresh_s: float | None = None,
    ) -> ResultLookup:
        """Look for a result within the store's timeout; never fails.

        `declared`: the operator has given this very result a lifetime, so it is cached in mode off too, unless the
        tenant's own mode is off. `fresh_s`: seconds after which an entry is only `old`.
        """
        access = self.modes.access(tenant, requested=requested, declared=declared)
        if not access.reads:
            return ResultLookup(kind=kind)
        key = _key(kind, tenant, parts, tags)
        if key is None:
            self._note(kind, "unkeyed")
            return ResultLookup(kind=kind)
        mark = self._invalidations.count
        stored = await self._store.get(key)
        if stored is None:
            self._note(kind, "unreachable")
            return ResultLookup(kind=kind, key=key, shares=access.serves)
        entry = None if stored.data is None else self._unpack(kind, key, stored.data)
        if entry is not None and self._invalidations.covers_since(mark, tenant, key.tags, key.digest):
            entry = None
        found = ResultLookup(
            kind=kind, key=key, writes=access.writes, ticket=stored.ticket, mark=mark, shares=access.serves
        )
        age_s = 0.0 if entry is None else max(0.0, self._clock() - entry.made)
        if entry is None or (fresh_s is not None and age_s >= fresh_s):
            self._note(kind, "miss")
            usable = entry is not None and access.serves
            return msgspec.structs.replace(found, old=entry.data) if entry is not None and usable else found
        if not access.serves:
            # Leave the entry in place, or none would reach its time to live in this mode.
            self._note(kind, "would_hit")
            return msgspec.structs.replace(found, recorded=entry.data, writes=False)
        self._note(kind, "hit")
        return msgspec.structs.replace(found, data=entry.data, age_s=age_s)

    async def keep(self, lookup: ResultLookup, data: bytes, *, ttl_s: float | None = None) -> None:
        """Store a fresh result after a miss, or compare it in mode record."""
        kind, key = lookup.kind, lookup.key
        if lookup.recorded is not None:
            self._note(kind, "same" if data == lookup.recorded else "different")
        if key is None or not lookup.writes:
            return
        if self._invalidations.covers_since(lookup.mark, key.tenant, key.tags, key.digest):
            self._note(kind, "outdated")
            return
        body = _encode(_Entry(self._clock(), data))
        if len(body) > self.config.entry_bytes:
            self._note(kind, "too_long")
            return
        packed = b"".join((_MAGIC, self._seal(body, key.digest), body))
        stored = await self._store.put(key, packed, self.ttl_s(kind, key.tags, ttl_s), lookup.ticket)
        self._note(kind, "unreachable" if stored is None else "stored" if stored else "too_long")

    def ttl_s(self, kind: ResultKind, tags: Sequence[str], wanted: float | None = None) -> float:
        """Return the time to live: the shortest of the tags', else the wanted one, else the kind's."""
        known = [self._tag_ttl_s[tag] for tag in tags if tag in self._tag_ttl_s]
        return min(known, default=self._ttl_s.get(kind, 0.0) if wanted is None else wanted)

    def _unpack(self, kind: ResultKind, key: CacheKey, packed: bytes) -> _Entry | None:
        start = len(_MAGIC) + _SEAL
        body = packed[start:]
        seal = packed[len(_MAGIC) : start]
        try:
            if packed[: len(_MAGIC)] == _MAGIC and hmac.compare_digest(seal, self._seal(body, key.digest)):
                return _decoder.decode(body)
        except (msgspec.MsgspecError, ValueError):
            pass
        self._note(kind, "corrupt")
        return None

    def _seal(self, body: bytes, digest: bytes) -> bytes:
        """Bind an entry to its key, and with a secret to writers that have it."""
        secret = digest + hashlib.sha256(self._secret).digest() if self._secret else digest
        return hashlib.blake2b(body, digest_size=_SEAL, key=secret[:64]).digest()

    def _note(self, kind: ResultKind, outcome: ResultOutcome) -> None:
        metrics.of(metrics.caches, kind, outcome).inc()

    # Administration

    async def invalidate(self, *, tenant: str | None = None, tag: str | None = None) -> int | None:
        """Remove the entries that match all given fields, or every entry without any; see ExactCache.invalidate."""
        scope = InvalidationScope(tenant=tenant, tag=tag)
        self._invalidations.add(scope)
        return await self._store.remove(scope)

    async def sweep(self) -> int:
        return await self._store.sweep()

    async def size(self) -> CacheSize | None:
        return await self._store.size()

    async def close(self) -> None:
        flights = list(self._flights.values())
        for flight in flights:
            flight.cancel()
        await asyncio.gather(*flights, return_exceptions=True)
        await self._store.close()


def declared_lifetimes_s(pipelines: Mapping[str, PipelineConfig], tools: Mapping[str, ToolConfig]) -> list[float]:
    """Return the seconds that pipelines and tools keep their own results."""
    stages = [stage for each in pipelines.values() for stage in (each.embed, each.search, each.rerank, each.generate)]
    return [each.cache_s for each in (*stages, *tools.values())]


def _key(kind: ResultKind, tenant: str, parts: Sequence[Any], tags: Sequence[str]) -> CacheKey | None:
    """Tags are part of the key: no entry without a tag may answer a request with it."""
    ordered = tuple(sorted(set(tags)))
    try:
        encoded = _encode(("result", 1, kind, tenant, ordered, list(parts)))
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None
    return CacheKey(tenant, hashlib.sha256(encoded).digest(), ordered)
