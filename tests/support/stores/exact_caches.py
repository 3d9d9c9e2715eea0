"""What the tests of the exact cache have in common: a clock, requests, answers by hand, stores that misbehave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from headrace.config.cache_section import ExactConfig
from headrace.gateway.caches.cache_modes import CachePolicy
from headrace.gateway.caches.exact.cache_key import CacheKey, cache_key_for
from headrace.gateway.caches.exact.entry_store import (
    CacheSize,
    EntryStore,
    GuardedStore,
    InvalidationScope,
    StoreLookup,
)
from headrace.gateway.caches.exact.exact_cache import AnswerSource, ExactCache, ExactLookup, ExactOutcome
from headrace.gateway.caches.exact.in_flight import Flights, JoinTerms
from headrace.gateway.caches.exact.memory import MemoryStore
from headrace.gateway.requests.text_request import ChoiceDelta, TextRequest, TokenUsage
from headrace.gateway.serving.served_variant import ServedVariant
from tests.support.clock import Clock
from tests.support.dialect_exchanges import NoEngine, tokenizer

USAGE = TokenUsage(prompt_tokens=20, output_tokens=3, cached_tokens=16, queue_s=0.1, prefill_s=0.2, decode_s=0.3)


def served(**changes: Any) -> ServedVariant:
    return replace(
        ServedVariant(name="mini@int4", engine=NoEngine(), tokenizer=tokenizer(), context=2048, fingerprint="fp_1"),
        **changes,
    )


def asked(**changes: Any) -> TextRequest:
    given: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], **changes}
    return TextRequest(model="mini", **given)


def cache_key(
    number: int = 1, *, tenant: str = "a", tags: Sequence[str] = (), seeded: bool = False, **changes: Any
) -> CacheKey:
    """Another `number` is another prompt."""
    if tags:
        changes["metadata"] = {"cache_tags": ",".join(tags)}
    found = cache_key_for(
        tenant=tenant, served=served(), text_request=asked(**changes), prompts=[(1, 2, number)], seeded=seeded
    )
    assert found is not None
    return found


def said(*texts: str, index: int = 0, usage: TokenUsage = USAGE, **last: Any) -> list[ChoiceDelta]:
    """The pieces of one choice."""
    pieces = [ChoiceDelta(index, text) for text in texts]
    return [*pieces, ChoiceDelta(index, finish=last.pop("finish", "stop"), usage=usage, **last)]


def text_of(pieces: Sequence[ChoiceDelta]) -> str:
    return "".join(piece.content for piece in pieces)


class Mouth:
    """A source that says what the test lets it say."""

    def __init__(self, *pieces: ChoiceDelta) -> None:
        self.cancelled = False
        self.own = True  # it is whom the key names that speaks
        self.runs = 0
        self._waiting: list[ChoiceDelta | Exception | None] = []
        self._came = asyncio.Event()
        self.say(*pieces)

    def say(self, *pieces: ChoiceDelta) -> None:
        self._waiting += pieces
        self._came.set()

    def end(self, error: Exception | None = None) -> None:
        self._waiting.append(error)
        self._came.set()

    def cancel(self) -> None:
        self.cancelled = True
        self.end()

    def keeps(self) -> bool:
        return self.own

    async def run(self, take: Callable[[ChoiceDelta], bool]) -> bool:
        self.runs += 1
        while True:
            while self._waiting:
                match self._waiting.pop(0):
                    case ChoiceDelta() as piece:
                        if not take(piece):
                            return False
                    case None:
                        return True
                    case Exception() as error:
                        raise error
            self._came.clear()
            await self._came.wait()


def saying(*texts: str, **last: Any) -> Mouth:
    """All of one answer at once."""
    mouth = Mouth(*said(*texts, **last))
    mouth.end()
    return mouth


async def heard(answer: AnswerSource) -> list[ChoiceDelta]:
    """All of it, by a client that then leaves."""
    pieces: list[ChoiceDelta] = []

    def take(piece: ChoiceDelta) -> bool:
        pieces.append(piece)
        return True

    try:
        assert await answer.run(take)
    finally:
        answer.cancel()
    return pieces


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class Broken:
    """A store that fails at what it is told to fail at, and hangs at what it is told to hang at."""

    def __init__(self, *failing: str, hanging: Sequence[str] = ()) -> None:
        self.inner = MemoryStore()
        self.failing = set(failing)
        self.hanging = set(hanging)
        self.calls: list[str] = []

    async def _maybe(self, call: str) -> None:
        self.calls.append(call)
        if call in self.hanging:
            await asyncio.Event().wait()
        if call in self.failing:
            raise OSError(f"{call} does not work")

    async def get(self, cache_key: CacheKey) -> StoreLookup:
        await self._maybe("get")
        return await self.inner.get(cache_key)

    async def put(self, cache_key: CacheKey, data: bytes, seconds: float, ticket: Any) -> bool:
        await self._maybe("put")
        return await self.inner.put(cache_key, data, seconds, ticket)

    async def remove(self, scope: InvalidationScope) -> int | None:
        await self._maybe("remove")
        return await self.inner.remove(scope)

    async def sweep(self) -> int:
        await self._maybe("sweep")
        return await self.inner.sweep()

    async def size(self) -> CacheSize | None:
        await self._maybe("size")
        return await self.inner.size()

    async def close(self) -> None:
        await self._maybe("close")


@dataclass
class Caching:
    """An exact cache, with what it counts."""

    modes: CachePolicy = field(default_factory=lambda: CachePolicy(mode="on"))
    config: ExactConfig = field(default_factory=ExactConfig)
    secret: bytes = b""
    clock: Clock = field(default_factory=Clock)
    store: EntryStore | None = None
    flights: Flights | None = None
    counts: dict[tuple[ExactOutcome, str], int] = field(default_factory=dict[tuple[ExactOutcome, str], int])
    failures: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self.store = MemoryStore(clock=self.clock) if self.store is None else self.store
        guarded = GuardedStore(self.store, get_s=60.0, put_s=60.0, clock=self.clock, failed=self.failures.append)
        self.cache = ExactCache(
            guarded,
            self.modes,
            config=self.config,
            secret=self.secret,
            flights=self.flights,
            note=self._note,
            clock=self.clock,
        )

    def _note(self, outcome: ExactOutcome, tenant: str) -> None:
        self.counts[outcome, tenant] = self.counts.get((outcome, tenant), 0) + 1

    def counted(self, outcome: ExactOutcome, tenant: str = "a") -> int:
        return self.counts.get((outcome, tenant), 0)

    async def look(self, found: CacheKey | None, **options: Any) -> ExactLookup:
        return await self.cache.look(found, **options)

    async def ask(self, found: CacheKey, mouth: Mouth | None = None, **options: Any) -> list[ChoiceDelta]:
        """What a client hears; `mouth` says it where the cache does not."""
        lookup = await self.cache.look(found, **options)
        mouth = mouth or saying("fresh")
        answer = lookup.hit or self.cache.generate(lookup, JoinTerms(), lambda: mouth)
        pieces = await heard(answer)
        while self.cache.flights:
            await asyncio.sleep(0)
        return pieces
