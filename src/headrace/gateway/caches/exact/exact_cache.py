"""The exact cache as the flow uses it: look for an answer, or generate one, share it and keep it.

Owns ExactCache and Options: what is kept and for how long, what an invalidation means, and what is counted. Which
requests are the same is key's, how entries live is stores', how generations are shared is flight's.

    look      is there an entry?  ──yes──▶ Hit
       │ no
    generate  is one under way?   ──yes──▶ Reader, a joiner's
       │ no
    the source, in a flight of its own ──▶ Reader, the leader's ──▶ an entry, if it may be one

All of these and Alone, for what the cache has no part in, are Answers: they are run and cancelled alike.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, Protocol

import msgspec

from headrace.config import Config, ExactConfig
from headrace.config.environment import required_secret
from headrace.gateway.api_errors import ApiError
from headrace.gateway.caches.cache_modes import NO_ACCESS, CacheAccess, CachePolicy
from headrace.gateway.caches.exact.cache_entry import ExactEntry, is_complete, is_same_answer, pack, unpack
from headrace.gateway.caches.exact.cache_key import CacheKey
from headrace.gateway.caches.exact.entry_store import (
    CacheSize,
    EntryStore,
    GuardedStore,
    InvalidationLog,
    InvalidationScope,
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
from headrace.gateway.caches.exact.memory import MemoryStore
from headrace.gateway.caches.exact.redis import RedisStore, connect
from headrace.gateway.caches.exact.sqlite import SqliteStore
from headrace.gateway.caches.exact.tokenized_prompts import TokenizedPrompts
from headrace.gateway.database import Database
from headrace.gateway.requests.text_request import ChoiceDelta, TakeDelta, TokenUsage
from headrace.observe import metrics

# What is counted, each with the tenant that it is about.
ExactOutcome = Literal[
    "hit",
    "stale",  # an entry beyond its time, where that was asked for
    "miss",
    "would_hit",  # in the mode record
    "joined",
    "would_join",
    "same",  # in the mode record: the fresh answer says what the entry does
    "different",
    "skipped",  # drawn at random, without a seed
    "corrupt",  # an entry that is damaged or belongs elsewhere; a miss
    "unreachable",  # the store was not asked, or did not answer; a miss
    "stored",
    "unfinished",  # cut at its deadline, failed, or left by everybody: not stored
    "outdated",  # invalidated while it was made: not stored
    "too_long",  # not stored
    "stood_in",  # another variant than the key's answered: not stored
    "unstored",  # the store did not take it
]
OUTCOMES: Final[tuple[ExactOutcome, ...]] = ExactOutcome.__args__  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]

_AT_ONCE: Final = 256  # pieces of a hit before others have a turn
_AHEAD: Final = 60.0  # seconds that an entry may be of the future: gateways' clocks differ, and clocks are set
_SPAN: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def seconds_of(span: str) -> float:
    """Of a text such as 90s, 5m, 1.5h or 7d. ValueError for any other."""
    found = _SPAN.fullmatch(span)
    if found is None or float(found[1]) <= 0:
        raise ValueError(f"'{span}' is no time span; write 90s, 5m, 1h or 7d")
    return float(found[1]) * _UNITS[found[2]]


class AnswerSource(Protocol):
    """What a client's answer comes from."""

    @property
    def role(self) -> Role: ...

    @property
    def source(self) -> PieceSource | None:
        """What generates it, whoever began it. None where nothing does."""
        ...

    async def run(self, take: TakeDelta) -> bool:
        """Hands pieces over as they come. True once all have, or it was cancelled; False as soon as `take` wants no
        more for now, and then this is to be called again."""
        ...

    def cancel(self) -> None:
        """To be called once, however it ends."""
        ...

    def facts(self) -> AnswerFacts: ...


class UncachedAnswer:
    """A generation that the cache has no part in."""

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
    """An entry, piece by piece as it was made."""

    role: Role = "hit"
    source: None = None

    def __init__(
        self, pieces: Sequence[ChoiceDelta], *, n: int, age_s: float = 0.0, stale: bool = False, machine_s: float = 0.0
    ) -> None:
        """`machine_s`: that it took to make."""
        self.age_s = age_s
        self.stale = stale
        self._machine_s = machine_s
        self._pieces = pieces
        self._n = n
        self._at = 0
        self._gone = False

    @property
    def over(self) -> bool:
        """All of it was handed over."""
        return self._at == len(self._pieces)

    @property
    def finish(self) -> str:
        return self._pieces[-1].finish or ""

    @property
    def usage(self) -> TokenUsage:
        """Of all choices together, as they were made; no times."""
        usages = {piece.index: piece.usage for piece in self._pieces if piece.usage is not None}
        return total_usage(usages, self._n)

    async def run(self, take: TakeDelta) -> bool:
        while self._at < len(self._pieces) and not self._gone:
            piece = self._pieces[self._at]
            self._at += 1
            if not take(piece):
                return False
            if self._at % _AT_ONCE == 0:
                await asyncio.sleep(0)
        return True

    def cancel(self) -> None:
        self._gone = True

    def facts(self) -> AnswerFacts:
        saved = self.usage
        saved.decode_s = self._machine_s
        return AnswerFacts("hit", False, saved, self.age_s)


class Options(msgspec.Struct, frozen=True, kw_only=True):
    ttl_s: float = 3600.0  # of an entry without tags
    tag_ttls: Mapping[str, float] = {}  # seconds; of several tags the shortest
    events: Mapping[str, tuple[str, ...]] = {}  # the tags that end then
    repeatable_only: bool = True  # answers that are drawn at random, without a seed, are neither kept nor shared
    joins: bool = True  # identical requests under way share one generation
    entry_bytes: int = 1024**2  # 1 MiB
    stale_s: float = 0.0  # that an entry stays beyond its time, for who takes a stale answer rather than none
    policy: str = ""  # a part of every key: raise it to leave all older answers behind
    secret: bytes = b""  # entries that others wrote, who can reach the store but have no secret, are none


class ExactLookup(msgspec.Struct, frozen=True):
    """What a look found, and what `generate` needs to know of it."""

    wanted: CacheKey | None
    uses: CacheAccess = NO_ACCESS
    hit: CacheHit | None = None
    entry: ExactEntry | None = None  # in the mode record: what would have been the hit
    stored: bool = False  # a fresh answer is to be stored
    ticket: Any = None  # the store's
    mark: int = 0  # invalidations before it


class ExactCache:
    """`note` hears what is counted. `modes` and `options` may be replaced while it is in use."""

    def __init__(
        self,
        store: GuardedStore,
        modes: CachePolicy,
        *,
        options: Options | None = None,
        flights: Flights | None = None,
        note: Callable[[ExactOutcome, str], None] = lambda outcome, tenant: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.modes = modes
        self.options = options or Options()
        self.flights = Flights() if flights is None else flights
        self.prompts = TokenizedPrompts()
        self._store = store
        self._removals = InvalidationLog()
        self._note = note
        self._clock = clock

    @classmethod
    def from_config(cls, config: Config, database: Database, environ: Mapping[str, str]) -> ExactCache | None:
        """Return None only where the store is Redis, no tenant uses it and the environment has no URL for it: a
        tenant's mode can be changed while the server runs. ConfigError where the environment lacks a secret."""
        exact = config.cache.exact
        modes = [exact.mode, *(tenant.caches.exact for tenant in config.tenants.values())]
        is_used = any(mode not in (None, "off") for mode in modes)
        if exact.store == "redis" and not (is_used or environ.get(exact.redis_env)):
            return None
        secret = ""
        if exact.secret_env is not None:
            secret = required_secret(environ, exact.secret_env, "cache.exact.secret_env")
        return cls(
            GuardedStore(
                _store(exact, database, environ),
                get_s=None if exact.store == "memory" else exact.wait_ms / 1e3,
                failed=lambda call: metrics.of(metrics.cache_failures, "exact", call).inc(),
            ),
            CachePolicy(mode=exact.mode, share=exact.share, salt="exact"),
            options=Options(
                ttl_s=seconds_of(exact.ttl),
                tag_ttls={tag: seconds_of(span) for tag, span in exact.tags.items()},
                events=exact.events,
                repeatable_only=exact.repeatable_only,
                joins=exact.joins,
                entry_bytes=exact.entry_bytes,
                stale_s=0.0 if exact.stale is None else seconds_of(exact.stale),
                secret=secret.encode(),
                policy=exact.policy,
            ),
            note=lambda outcome, tenant: metrics.of(metrics.caches, "exact", outcome).inc(),
        )

    async def look(self, wanted: CacheKey | None, *, wish: str = "on", stale: bool = False) -> ExactLookup:
        """Never an error, and never longer than the store's bound. `wish`: the request's `cache`. `stale`: an entry
        beyond its time will do."""
        if wanted is None:
            return ExactLookup(None)
        tenant = wanted.tenant
        uses = self.modes.uses(tenant, wish=wish)
        if not uses.looks:
            return ExactLookup(wanted)
        if self.options.repeatable_only and not wanted.repeatable:
            self._note("skipped", tenant)
            return ExactLookup(wanted)
        mark = self._removals.count
        found = await self._store.get(wanted)
        if found is None:
            self._note("unreachable", tenant)
            return ExactLookup(wanted, uses, mark=mark)
        entry = None if found.data is None else self._entry(wanted, found.data)
        if entry is not None and self._removals.since(mark, wanted):
            entry = None
        age = 0.0 if entry is None else self._clock() - entry.made
        ttl = self.ttl(wanted.tags)
        is_fresh = age < ttl
        if entry is None or age < -_AHEAD or age >= ttl + (self.options.stale_s if stale else 0.0):
            self._note("miss", tenant)
            return ExactLookup(wanted, uses, stored=uses.stores, ticket=found.ticket, mark=mark)
        if not uses.serves:
            # The entry stays as it is, or none would ever come to its time in this mode.
            self._note("would_hit", tenant)
            return ExactLookup(wanted, uses, entry=entry, mark=mark)
        self._note("hit" if is_fresh else "stale", tenant)
        hit = CacheHit(entry.pieces, n=wanted.n, age_s=max(0.0, age), stale=not is_fresh, machine_s=entry.machine_s)
        return ExactLookup(wanted, uses, hit, mark=mark)

    def _entry(self, wanted: CacheKey, data: bytes) -> ExactEntry | None:
        entry = unpack(data, key=wanted.key, secret=self.options.secret)
        if entry is None or not is_complete(entry.pieces, wanted.choices):
            self._note("corrupt", wanted.tenant)
            return None
        return entry

    def ttl(self, tags: Sequence[str]) -> float:
        """Seconds."""
        ttls = self.options.tag_ttls
        return min((ttls[tag] for tag in tags if tag in ttls), default=self.options.ttl_s)

    def generate(self, looked: ExactLookup, terms: JoinTerms, start: Callable[[], ShareableSource]) -> AnswerSource:
        """An answer where there was no hit. `start` begins a generation; it is called at once, or not at all."""
        wanted = looked.wanted
        if wanted is None or not looked.uses.looks:
            return UncachedAnswer(start())
        flight = self.flights.find(wanted.key, terms) if self.options.joins else None
        if flight is not None and not self._removals.since(flight.mark, wanted):
            if looked.uses.serves:
                self._note("joined", wanted.tenant)
                return flight.join("joiner")
            self._note("would_join", wanted.tenant)
        ended = partial(self._ended, wanted, looked)
        return self.flights.lead(wanted.key, terms, start(), n=wanted.n, ended=ended, mark=looked.mark)

    async def _ended(self, wanted: CacheKey, looked: ExactLookup, flight: Flight) -> None:
        """A generation is over."""
        tenant = wanted.tenant
        if flight.error is None and not flight.source.keeps():
            self._note("stood_in", tenant)
            return
        if flight.error is not None or not (flight.whole and is_complete(flight.pieces, wanted.choices)):
            self._note("unfinished" if flight.whole else "too_long", tenant)
            return
        if looked.entry is not None:
            self._note("same" if is_same_answer(flight.pieces, looked.entry.pieces) else "different", tenant)
        if not looked.stored:
            return
        if self._removals.since(looked.mark, wanted):
            self._note("outdated", tenant)
            return
        options = self.options
        try:
            data = pack(flight.pieces, key=wanted.key, made=self._clock(), secret=options.secret)
        except ValueError:
            self._note("unstored", tenant)
            return
        if len(data) > options.entry_bytes:
            self._note("too_long", tenant)
            return
        kept = await self._store.put(wanted, data, self.ttl(wanted.tags) + options.stale_s, looked.ticket)
        self._note("unstored" if kept is None else "stored" if kept else "too_long", tenant)

    # What an administrator may ask for.

    async def invalidate(
        self, *, tenant: str | None = None, tag: str | None = None, key: bytes | None = None
    ) -> int | None:
        """How many entries are gone: those that have all of what is given, and every entry where nothing is. None where
        the store is shared and cannot tell. ApiError where it could not be done.

        What is being generated is neither stored then nor shared with who comes after."""
        if key is not None and tenant is None:
            raise ValueError("a key is one tenant's")
        scope = InvalidationScope(tenant=tenant, tag=tag, key=key)
        self._removals.add(scope)
        return await self._store.remove(scope)

    async def happened(self, event: str, *, tenant: str | None = None) -> dict[str, int | None]:
        """How many entries an event has ended, by the tag. ApiError for an event that is not in the configuration."""
        tags = self.options.events.get(event)
        if tags is None:
            there = ", ".join(sorted(self.options.events)) or "none"
            raise ApiError(
                f"there is no event '{event[:64]}'; there are: {there}",
                kind="not_found_error",
                parameter="event",
                code="event_not_found",
            )
        return {tag: await self.invalidate(tenant=tenant, tag=tag) for tag in tags}

    async def sweep(self) -> int:
        """Removes what has expired, as far as one short turn goes."""
        return await self._store.sweep()

    async def size(self) -> CacheSize | None:
        return await self._store.size()

    async def close(self) -> None:
        await self.flights.close(ApiError("the server has ended", kind="overloaded_error", code="draining"))
        await self._store.close()


def _store(config: ExactConfig, database: Database, environ: Mapping[str, str]) -> EntryStore:
    wait_s = config.wait_ms / 1e3
    if config.store == "redis":
        url = required_secret(environ, config.redis_env, "cache.exact.redis_env")
        return RedisStore(connect(url, seconds=wait_s), entry_bytes=config.entry_bytes, bound_s=wait_s)
    if config.store == "sqlite":
        return SqliteStore(database, most_bytes=config.bytes, tenant_bytes=config.tenant_bytes, bound_s=wait_s)
    return MemoryStore(most_bytes=config.bytes, tenant_bytes=config.tenant_bytes)
