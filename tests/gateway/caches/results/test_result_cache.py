"""Intermediate results are kept by kind, tenant and what they depend on; modes, tags and invalidations hold."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from headrace.config.cache_section import CacheMode, ResultsConfig
from headrace.gateway.caches.cache_modes import CachePolicy
from headrace.gateway.caches.exact.entry_store import EntryStore, GuardedStore
from headrace.gateway.caches.exact.memory import MemoryStore
from headrace.gateway.caches.exact.sqlite import SqliteStore
from headrace.gateway.caches.results.result_cache import CachedResult, ResultCache, ResultKind
from headrace.gateway.database import Database
from headrace.observe import metrics
from tests.support.running_server import count


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Shop:
    """A result cache in front of a computation that is counted."""

    def __init__(self, store: EntryStore | None = None, mode: CacheMode = "on", **config: Any) -> None:
        self.clock = Clock()
        self.store = store or MemoryStore(clock=self.clock)
        self.cache = ResultCache(
            GuardedStore(self.store, get_s=None),
            CachePolicy(mode=mode),
            config=ResultsConfig(**config),
            clock=self.clock,
        )
        self.computed = 0
        self.answer = b"answer"
        self.held: asyncio.Event | None = None
        self.error: Exception | None = None

    async def compute(self) -> bytes:
        self.computed += 1
        if self.held is not None:
            await self.held.wait()
        if self.error is not None:
            raise self.error
        return self.answer

    async def fetch(self, *parts: Any, kind: ResultKind = "http", tenant: str = "anna", **options: Any) -> CachedResult:
        return await self.cache.fetch(kind, tenant, parts or ("GET", "/a"), self.compute, **options)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 120))


def test_an_equal_request_gets_the_kept_result_and_another_does_not() -> None:
    async def it() -> None:
        shop = Shop()
        assert await shop.fetch() == CachedResult(b"answer", False)
        shop.clock.now += 10
        assert await shop.fetch() == CachedResult(b"answer", True, 10.0)
        others = [
            shop.fetch("GET", "/b"),
            shop.fetch("GET/a"),
            shop.fetch(kind="sql"),
            shop.fetch(tenant="bert"),
            shop.fetch(tags=("prices",)),
            shop.fetch({"b": 1, "a": [2]}),
        ]
        for other in others:
            assert not (await other).hit
        assert (await shop.fetch({"a": [2], "b": 1})).hit  # the order of keys does not matter
        assert shop.computed == 7

    run(it())


def test_results_expire_by_kind_tag_and_wish() -> None:
    async def it() -> None:
        shop = Shop(http_ttl="10s", tags={"prices": "2s"})
        await shop.fetch()
        await shop.fetch("priced", tags=("prices",))
        await shop.fetch("brief", ttl_s=1.0)
        shop.clock.now += 1.5
        assert not (await shop.fetch("brief", ttl_s=1.0)).hit
        assert (await shop.fetch("priced", tags=("prices",))).hit
        shop.clock.now += 1.0
        assert not (await shop.fetch("priced", tags=("prices",))).hit
        assert (await shop.fetch()).hit
        shop.clock.now += 10.0
        assert not (await shop.fetch()).hit

    run(it())


def test_an_invalidation_removes_by_tag_and_tenant_and_stops_what_is_under_way() -> None:
    async def it() -> None:
        shop = Shop()
        for tenant in ("anna", "bert"):
            await shop.fetch(tenant=tenant, tags=("prices",))
        assert await shop.cache.invalidate(tenant="anna", tag="prices") == 1
        assert not (await shop.fetch(tags=("prices",))).hit
        assert (await shop.fetch(tenant="bert", tags=("prices",))).hit
        shop.held = asyncio.Event()
        under_way = asyncio.create_task(shop.fetch("slow", tags=("prices",)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await shop.cache.invalidate(tag="prices")
        shop.held.set()
        assert (await under_way).data == b"answer"
        assert not (await shop.fetch("slow", tags=("prices",))).hit

    run(it())


def test_the_record_mode_serves_fresh_results_and_compares_them() -> None:
    async def it() -> None:
        shop = Shop(mode="record")
        before = {name: count(metrics.caches, "tool", name) for name in ("would_hit", "same", "different", "hit")}
        await shop.fetch(kind="tool")
        assert not (await shop.fetch(kind="tool")).hit
        shop.answer = b"another"
        assert (await shop.fetch(kind="tool")).data == b"another"
        assert shop.computed == 3
        counted = {name: count(metrics.caches, "tool", name) - value for name, value in before.items()}
        assert counted == {"would_hit": 2, "same": 1, "different": 1, "hit": 0}

    run(it())


def test_equal_requests_at_once_share_one_computation() -> None:
    async def it() -> None:
        shop = Shop()
        shop.held = asyncio.Event()
        tasks = [asyncio.create_task(shop.fetch()) for _ in range(5)]
        await asyncio.sleep(0.01)
        tasks[0].cancel()  # who began it leaves; the others get the result all the same
        await asyncio.sleep(0)
        shop.held.set()
        assert [(await task).data for task in tasks[1:]] == [b"answer"] * 4
        assert shop.computed == 1

    run(it())


def test_an_error_reaches_all_who_wait_and_is_not_kept() -> None:
    async def it() -> None:
        shop = Shop()
        shop.held, shop.error = asyncio.Event(), ValueError("broken")
        tasks = [asyncio.create_task(shop.fetch()) for _ in range(3)]
        await asyncio.sleep(0.01)
        shop.held.set()
        for task in tasks:
            with pytest.raises(ValueError, match="broken"):
                await task
        shop.error = None
        assert not (await shop.fetch()).hit
        assert shop.computed == 2

    run(it())


def test_off_neither_reads_nor_writes_and_what_cannot_be_encoded_is_computed() -> None:
    async def it() -> None:
        shop = Shop()
        await shop.fetch(requested="off")
        assert not (await shop.fetch()).hit
        assert not (await shop.fetch(requested="off")).hit
        for _ in range(2):
            assert not (await shop.fetch(object())).hit
        assert not (await Shop(mode="off").fetch()).hit
        long = Shop(entry_bytes=100)
        long.answer = b"0" * 200
        await long.fetch()
        assert not (await long.fetch()).hit

    run(it())


def test_a_damaged_or_exchanged_entry_is_a_miss() -> None:
    async def it() -> None:
        shop = Shop()
        await shop.fetch("one")
        await shop.fetch("two")
        entries = list(shop.store._entries.values())  # type: ignore[attr-defined]
        entries[0].data, entries[1].data = entries[1].data, entries[0].data[:-1]
        assert not (await shop.fetch("one")).hit
        assert not (await shop.fetch("two")).hit

    run(it())


def test_results_in_sqlite_survive_a_restart_and_are_apart_from_answers(tmp_path: Path) -> None:
    async def it() -> None:
        database = Database(tmp_path)
        await Shop(SqliteStore(database, name="results", bound_s=5.0)).fetch()
        exact = SqliteStore(database, bound_s=5.0)
        assert (await exact.size()).entries == 0
        await database.close()
        database = Database(tmp_path)
        shop = Shop(SqliteStore(database, name="results", bound_s=5.0))
        assert (await shop.fetch()).hit
        assert await shop.cache.invalidate() == 1
        assert not (await shop.fetch()).hit
        await shop.cache.close()
        await database.close()

    run(it())
