"""The exact cache: looks for the answer to the same request, or generates one, shares it and stores it.

Owns ExactCache: what is stored and for how long, what an invalidation covers, and what is counted. Does not decide
which requests are the same (cache_key), how entries are stored (entry_store) or how generations are shared (in_flight).

    look      is there an entry?       ──yes──▶ CacheHit
       │ no
    generate  is a generation running? ──yes──▶ FlightReader, a joiner
       │ no
    the source, in a new flight        ──▶ FlightReader, the leader ──▶ an entry, if it may be stored

These and UncachedAnswer, for answers without the cache, are AnswerSources: they run and are cancelled alike.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, Protocol

import msgspec

from headrace.config import Config, ExactConfig
from headrace.config.cache_section import lifetime_s
from headrace.gateway.api_errors import ApiError
from headrace.gateway.caches.cache_modes import NO_ACCESS, CacheAccess, CachePolicy
from headrace.gateway.caches.exact.cache_entry import ExactEntry, is_complete, is_same_answer, pack, unpack
from headrace.gateway.caches.exact.cache_key import CacheKey
from headrace.gateway.caches.exact.configured_store import open_store
from headrace.gateway.caches.exact.entry_store import (
    CacheSize,
    GuardedStore,
)
from headrace.gateway.caches.exact.in_flight import (
    AnswerFacts,
    Flight,
    Flights,
    JoinTerms,
    PieceSource,
    Role,
    ShareableSource,
    total_usage,
)
from headrace.gateway.caches.exact.tokenized_prompts import TokenizedPrompts
from headrace.gateway.caches.invalidation_log import InvalidationLog, InvalidationScope
from headrace.gateway.database import Database
from headrace.gateway.requests.text_request import ChoiceDelta, TakeDelta, TokenUsage
from headrace.observe import metrics

# What is counted, each by tenant.
ExactOutcome = Literal[
    "hit",
    "stale",  # an expired entry that the request accepts
    "miss",
    "would_hit",  # in mode record
    "joined",
    "would_join",
    "same",  # in mode record: the fresh answer has the content of the entry
    "different",
    "skipped",  # sampled without a seed
    "corrupt",  # an entry that is damaged or belongs elsewhere; a miss
    "unreachable",  # the store was not asked, or did not answer; a miss
    "stored",
    "unfinished",  # cut at its deadline, failed or abandoned: not stored
    "outdated",  # invalidated while it was generated: not stored
    "too_long",  # not stored
    "stood_in",  # a variant other than the key's answered: not stored
    "unstored",  # the store failed
]
OUTCOMES: Final[tuple[ExactOutcome, ...]] = ExactOutcome.__args__  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]

_BATCH: Final = 256  # deltas of a hit before others have a turn
_MAX_CLOCK_SKEW_S: Final = 60.0  # entries may come from the future: gateways' clocks differ, and clocks are set


class AnswerSource(Protocol):
    """Where a client's answer comes from."""

    @property
    def role(self) -> Role: ...

    @property
    def source(self) -> PieceSource | None:
        """The source that generates it, whichever request started it. None without a generation."""
        ...

    async def run(self, take: TakeDelta) -> bool:
        """Pass deltas to `take` as they come. True once all have, or after a cancellation; False as soon as `take`
        returns False, and then the caller may call this again."""
        ...

    def cancel(self) -> None:
        """Call this once, however the answer ends."""
        ...

    def facts(self) -> AnswerFacts: ...


class UncachedAnswer:
    """A generation without the cache."""

    role: Role = "alone"

    def __init__(self, source: PieceSource) -> None:
        self.source = source

    async def run(self, take: TakeDelta) -> bool:
        return await self.source.run(take)

    def cancel(self) -> None:
        self.source.cancel()

    def facts(self) -> AnswerFacts:
        return AnswerFacts("alone", True, TokenUsage())


class CacheHit:
    """A stored answer, delta by delta as it was made."""

    role: Role = "hit"
    source: None = None

    def __init__(
        self, pieces: Sequence[ChoiceDelta], *, n: int, age_s: float = 0.0, stale: bool = False, machine_s: float = 0.0
    ) -> None:
        """`machine_s`: compute time of the original generation."""
        self.age_s = age_s
        self.stale = stale
        self._machine_s = machine_s
        self._pieces = pieces
        self._n = n
        self._at = 0
        self._gone = False

    @property
    def over(self) -> bool:
        """True if all of it was passed on."""
        return self._at == len(self._pieces)

    @property
    def finish(self) -> str:
        return self._pieces[-1].finish or ""

    @property
    def usage(self) -> TokenUsage:
        """The original usage of all choices, without times."""
        usages = {piece.index: piece.usage for piece in self._pieces if piece.usage is not None}
        return total_usage(usages, self._n)

    async def run(self, take: TakeDelta) -> bool:
        while self._at < len(self._pieces) and not self._gone:
            piece = self._pieces[self._at]
            self._at += 1
            if not take(piece):
                return False
            if self._at % _BATCH == 0:
                await asyncio.sleep(0)
        return True

    def cancel(self) -> None:
        self._gone = True

    def facts(self) -> AnswerFacts:
        saved = self.usage
        saved.decode_s = self._machine_s
        return AnswerFacts("hit", False, saved, self.age_s)


class ExactLookup(msgspec.Struct, frozen=True):
    """The result of a lookup, which `generate` needs."""

    cache_key: CacheKey | None
    access: CacheAccess = NO_ACCESS
    hit: CacheHit | None = None
    entry: ExactEntry | None = None  # in mode record: what would have been the hit
    writes: bool = False  # store a fresh answer
    ticket: Any = None  # the store's
    mark: int = 0  # invalidations before it


class ExactCache:
    """`note` is called with every outcome and tenant. You may replace `modes` while the cache is in use."""

    def __init__(
        self,
        store: GuardedStore,
        modes: CachePolicy,
        *,
        config: ExactConfig | None = None,
        secret: bytes = b"",  # rejects entries by writers that reach the store without it
        flights: Flights | None = None,
        note: Callable[[ExactOutcome, str], None] = lambda outcome, tenant: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.modes = modes
        self.config = config or ExactConfig()
        self.flights = Flights() if flights is None else flights
        self.prompts = TokenizedPrompts()
        self._ttl_s = lifetime_s(self.config.ttl)
        self._tag_ttl_s = {tag: lifetime_s(ttl) for tag, ttl in self.config.tags.items()}
        self._stale_s = 0.0 if self.config.stale is None else lifetime_s(self.config.stale)
        self._secret = secret
        self._store = store
        self._invalidations = InvalidationLog()
        self._note = note
        self._clock = clock

    @classmethod
    def from_config(cls, config: Config, database: Database, environ: Mapping[str, str]) -> ExactCache | None:
        """Build the cache even with mode "off", because a tenant's mode can change while the server runs.

        None only if the store is Redis, no tenant uses it and the environment has no URL for it. ConfigError if the
        environment lacks a secret.
        """
        exact = config.cache.exact
        modes = [exact.mode, *(tenant.caches.exact for tenant in config.tenants.values())]
        is_used = any(mode not in (None, "off") for mode in modes)
        if exact.store == "redis" and not (is_used or environ.get(exact.redis_env)):
            return None
        stale_s = 0.0 if exact.stale is None else lifetime_s(exact.stale)
        lifetimes_s = [lifetime_s(ttl) + stale_s for ttl in (exact.ttl, *exact.tags.values())]
        store, secret = open_store(exact, "exact", lifetimes_s, database, environ)
        return cls(
            store,
            CachePolicy(mode=exact.mode, share=exact.share, salt="exact"),
            config=exact,
            secret=secret,
            note=lambda outcome, tenant: metrics.of(metrics.caches, "exact", outcome).inc(),
        )

    async def look(self, cache_key: CacheKey | None, *, requested: str = "on", stale: bool = False) -> ExactLookup:
        """Look for an entry within the store's timeout; never fails.

        `requested`: the request's `cache`. `stale`: accept an expired entry.
        """
        if cache_key is None:
            return ExactLookup(None)
        tenant = cache_key.tenant
        access = self.modes.access(tenant, requested=requested)
        if not access.reads:
            return ExactLookup(cache_key)
        if self.config.repeatable_only and not cache_key.repeatable:
            self._note("skipped", tenant)
            return ExactLookup(cache_key)
        mark = self._invalidations.count
        stored = await self._store.get(cache_key)
        if stored is None:
            self._note("unreachable", tenant)
            return ExactLookup(cache_key, access, mark=mark)
        entry = None if stored.data is None else self._entry(cache_key, stored.data)
        if entry is not None and self._is_outdated(mark, cache_key):
            entry = None
        age_s = 0.0 if entry is None else self._clock() - entry.made
        ttl_s = self.ttl_s(cache_key.tags)
        is_fresh = age_s < ttl_s
        if entry is None or age_s < -_MAX_CLOCK_SKEW_S or age_s >= ttl_s + (self._stale_s if stale else 0.0):
            self._note("miss", tenant)
            return ExactLookup(cache_key, access, writes=access.writes, ticket=stored.ticket, mark=mark)
        if not access.serves:
            # Leave the entry in place, or none would reach its time to live in this mode.
            self._note("would_hit", tenant)
            return ExactLookup(cache_key, access, entry=entry, mark=mark)
        self._note("hit" if is_fresh else "stale", tenant)
        hit = CacheHit(
            entry.pieces, n=cache_key.n, age_s=max(0.0, age_s), stale=not is_fresh, machine_s=entry.machine_s
        )
        return ExactLookup(cache_key, access, hit, mark=mark)

    def _is_outdated(self, mark: int, cache_key: CacheKey) -> bool:
        return self._invalidations.covers_since(mark, cache_key.tenant, cache_key.tags, cache_key.digest)

    def _entry(self, cache_key: CacheKey, data: bytes) -> ExactEntry | None:
        entry = unpack(data, key=cache_key.digest, secret=self._secret)
        if entry is None or not is_complete(entry.pieces, cache_key.choices):
            self._note("corrupt", cache_key.tenant)
            return None
        return entry

    def ttl_s(self, tags: Sequence[str]) -> float:
        """Return the time to live of an entry: the shortest of its tags'."""
        ttls = self._tag_ttl_s
        return min((ttls[tag] for tag in tags if tag in ttls), default=self._ttl_s)

    def generate(self, lookup: ExactLookup, terms: JoinTerms, start: Callable[[], ShareableSource]) -> AnswerSource:
        """Return the answer after a miss. `start` begins a generation; it is called at once or not at all."""
        cache_key = lookup.cache_key
        if cache_key is None or not lookup.access.reads:
            return UncachedAnswer(start())
        flight = self.flights.find(cache_key.digest, terms) if self.config.joins else None
        if flight is not None and not self._is_outdated(flight.mark, cache_key):
            if lookup.access.serves:
                self._note("joined", cache_key.tenant)
                return flight.join("joiner")
            self._note("would_join", cache_key.tenant)
        ended = partial(self._ended, cache_key, lookup)
        return self.flights.lead(cache_key.digest, terms, start(), n=cache_key.n, ended=ended, mark=lookup.mark)

    async def _ended(self, cache_key: CacheKey, lookup: ExactLookup, flight: Flight) -> None:
        """Store the answer of a finished generation if it may be stored."""
        tenant = cache_key.tenant
        if flight.error is None and not flight.source.keeps():
            self._note("stood_in", tenant)
            return
        if flight.error is not None or not (flight.whole and is_complete(flight.pieces, cache_key.choices)):
            self._note("unfinished" if flight.whole else "too_long", tenant)
            return
        if lookup.entry is not None:
            self._note("same" if is_same_answer(flight.pieces, lookup.entry.pieces) else "different", tenant)
        if not lookup.writes:
            return
        if self._is_outdated(lookup.mark, cache_key):
            self._note("outdated", tenant)
            return
        try:
            data = pack(flight.pieces, key=cache_key.digest, made=self._clock(), secret=self._secret)
        except ValueError:
            self._note("unstored", tenant)
            return
        if len(data) > self.config.entry_bytes:
            self._note("too_long", tenant)
            return
        stored = await self._store.put(cache_key, data, self.ttl_s(cache_key.tags) + self._stale_s, lookup.ticket)
        self._note("unstored" if stored is None else "stored" if stored else "too_long", tenant)

    # Administration

    async def invalidate(
        self, *, tenant: str | None = None, tag: str | None = None, key: bytes | None = None
    ) -> int | None:
        """Remove the entries that match all given fields, or every entry without any.

        Returns their number; None if the store is shared and cannot count them. ApiError if it fails. Answers under
        generation are then neither stored nor shared with later requests.
        """
        if key is not None and tenant is None:
            raise ValueError("A key needs its tenant.")
        scope = InvalidationScope(tenant=tenant, tag=tag, digest=key)
        self._invalidations.add(scope)
        return await self._store.remove(scope)

    async def happened(self, event: str, *, tenant: str | None = None) -> dict[str, int | None]:
        """Invalidate an event's tags; return the number of removed entries by tag. ApiError for an unknown event."""
        tags = self.config.events.get(event)
        if tags is None:
            events = ", ".join(sorted(self.config.events)) or "none"
            raise ApiError(
                f"Unknown event '{event[:64]}'. Configured events: {events}.",
                kind="not_found_error",
                parameter="event",
                code="event_not_found",
            )
        return {tag: await self.invalidate(tenant=tenant, tag=tag) for tag in tags}

    async def sweep(self) -> int:
        """Remove expired entries, as many as fit in a short turn; return their number."""
        return await self._store.sweep()

    async def size(self) -> CacheSize | None:
        return await self._store.size()

    async def close(self) -> None:
        await self.flights.close(ApiError("The server is shutting down.", kind="overloaded_error", code="draining"))
        await self._store.close()
