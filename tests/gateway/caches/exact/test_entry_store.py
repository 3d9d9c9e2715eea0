"""Stores against a plain dictionary: what is there, for how long, for whom, and what goes for want of room."""

from __future__ import annotations

import asyncio
import sqlite3
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.gateway.api_errors import ApiError
from headrace.gateway.caches.exact.cache_key import CacheKey
from headrace.gateway.caches.exact.entry_store import CacheSize, EntryStore, InvalidationScope
from headrace.gateway.caches.exact.memory import MemoryStore
from headrace.gateway.caches.exact.sqlite import SqliteStore
from headrace.gateway.database import Database
from tests.support.clock import Clock
from tests.support.running_server import asynchronous

TAGS = ("docs", "pricing")
TENANTS = ("a", "b")
BOUND_S = 60.0  # of a lookup: no test here is about time
MOST, OF_A_TENANT = 12_000, 8_000  # bytes; an entry takes some hundreds


def known(number: int, tenant: str = "a", tags: tuple[str, ...] = ()) -> CacheKey:
    return CacheKey(tenant, f"{tenant} {tags} {number}".encode().ljust(32, b"."), tags)


@dataclass
class Kept:
    cache_key: CacheKey
    data: bytes
    expires: float
    size: int


class Oracle:
    """The same by looking at everything each time. The order of the dictionary is that of use."""

    def __init__(self, size: Callable[[CacheKey, bytes], int]) -> None:
        self.entries: dict[bytes, Kept] = {}
        self.size = size

    def live(self, now: float) -> dict[bytes, Kept]:
        self.entries = {key: kept for key, kept in self.entries.items() if kept.expires > now}
        return self.entries

    def get(self, cache_key: CacheKey, now: float) -> bytes | None:
        kept = self.live(now).pop(cache_key.digest, None)
        if kept is None:
            return None
        self.entries[cache_key.digest] = kept
        return kept.data

    def put(self, cache_key: CacheKey, data: bytes, seconds: float, now: float) -> bool:
        size = self.size(cache_key, data)
        if size > OF_A_TENANT:
            return False
        self.live(now).pop(cache_key.digest, None)
        while sum(each.size for each in self._of(cache_key.tenant)) + size > OF_A_TENANT:
            del self.entries[self._of(cache_key.tenant)[0].cache_key.digest]
        while sum(each.size for each in self.entries.values()) + size > MOST:
            del self.entries[next(iter(self.entries))]
        self.entries[cache_key.digest] = Kept(cache_key, data, now + seconds, size)
        return True

    def _of(self, tenant: str) -> list[Kept]:
        return [each for each in self.entries.values() if each.cache_key.tenant == tenant]

    def remove(self, scope: InvalidationScope, now: float) -> int:
        gone = [
            key
            for key, kept in self.live(now).items()
            if scope.covers(kept.cache_key.tenant, kept.cache_key.tags, kept.cache_key.digest)
        ]
        for key in gone:
            del self.entries[key]
        return len(gone)


wanteds = st.builds(
    known,
    st.integers(0, 5),
    st.sampled_from(TENANTS),
    st.sampled_from([(), ("docs",), ("pricing",), ("docs", "pricing")]),
)


def by_its_key(cache_key: CacheKey) -> InvalidationScope:
    return InvalidationScope(tenant=cache_key.tenant, digest=cache_key.digest)


scopes = st.one_of(
    st.builds(InvalidationScope, tenant=st.none() | st.sampled_from(TENANTS), tag=st.none() | st.sampled_from(TAGS)),
    st.builds(by_its_key, wanteds),
)
acts = st.one_of(
    st.tuples(st.just("get"), wanteds),
    st.tuples(st.just("put"), wanteds, st.integers(0, 3000), st.sampled_from([5.0, 60.0, 3600.0])),
    st.tuples(st.just("put"), wanteds, st.just(9000), st.just(60.0)),
    st.tuples(st.just("remove"), scopes),
    st.tuples(st.just("wait"), st.sampled_from([1.0, 5.0, 100.0])),
    st.tuples(st.just("sweep")),
)


async def agree(store: EntryStore, clock: Clock, wished: list[Any], size: Callable[[CacheKey, bytes], int]) -> None:
    oracle = Oracle(size)
    for number, (act, *given_) in enumerate(wished):
        match act:
            case "get":
                assert (await store.get(given_[0])).data == oracle.get(given_[0], clock.now)
            case "put":
                data = bytes([number % 256]) * given_[1]
                kept = await store.put(given_[0], data, given_[2], None)
                assert kept == oracle.put(given_[0], data, given_[2], clock.now)
            case "remove":
                assert await store.remove(given_[0]) == oracle.remove(given_[0], clock.now)
            case "wait":
                clock.now += given_[0]
            case _:
                await store.sweep()
                live = oracle.live(clock.now).values()
                assert await store.size() == CacheSize(len(live), sum(each.size for each in live))
        there = await store.size()
        assert there is not None
        assert there.bytes <= MOST
    for kept in list(oracle.live(clock.now).values()):
        assert (await store.get(kept.cache_key)).data == kept.data
    await store.sweep()
    assert await store.size() == CacheSize(len(oracle.entries), sum(each.size for each in oracle.entries.values()))


async def size_in(store: EntryStore, cache_key: CacheKey, data: bytes) -> int:
    await store.remove(InvalidationScope())
    await store.put(cache_key, data, 1e9, None)
    found = await store.size()
    assert found is not None
    await store.remove(InvalidationScope())
    return found.bytes


def in_memory(cache_key: CacheKey, data: bytes) -> int:
    return asyncio.run(size_in(MemoryStore(), cache_key, data))


@given(st.lists(acts, max_size=60))
@settings(max_examples=60, deadline=None)
def test_memory_keeps_what_a_dictionary_would(wished: list[Any]) -> None:
    base, per_tag = in_memory(known(1), b""), in_memory(known(1, tags=("docs",)), b"") - in_memory(known(1), b"")
    clock = Clock()
    store = MemoryStore(most_bytes=MOST, tenant_bytes=OF_A_TENANT, clock=clock)
    asyncio.run(agree(store, clock, wished, lambda cache_key, data: base + len(data) + per_tag * len(cache_key.tags)))


@given(wished=st.lists(acts, max_size=40))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_sqlite_keeps_what_a_dictionary_would(tmp_path: Path, wished: list[Any]) -> None:
    async def test() -> None:
        database = Database(tmp_path)
        clock = Clock()
        store = SqliteStore(database, most_bytes=MOST, tenant_bytes=OF_A_TENANT, bound_s=BOUND_S, clock=clock)
        try:
            base = await size_in(store, known(1), b"")
            per_tag = await size_in(store, known(1, tags=("docs",)), b"") - base
            await agree(store, clock, wished, lambda cache_key, data: base + len(data) + per_tag * len(cache_key.tags))
        finally:
            await store.remove(InvalidationScope())
            await database.close()

    asyncio.run(test())


def test_memory_counts_what_entries_really_take() -> None:
    async def fill(store: MemoryStore, count: int) -> None:
        for number in range(count):
            tags = ("docs", "pricing") if number % 2 else ()
            await store.put(known(number, TENANTS[number % 2], tags), bytes(200), 3600.0)

    store = MemoryStore(most_bytes=10**9)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        asyncio.run(fill(store, 2500))
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.6 * store.bytes <= taken <= store.bytes


async def check_whose_entries_go(store: MemoryStore | SqliteStore) -> None:
    """A tenant with many questions pushes out its own answers, those used least of late first, and nobody else's."""
    for number, tenant in enumerate("aaab"):
        await store.put(known(number, tenant), bytes(100), 60.0)
    there = await store.size()
    one = there.bytes // there.entries
    store.tenant_bytes, store.most_bytes = 3 * one, 4 * one
    await store.get(known(0))
    await store.put(known(4), bytes(100), 60.0)
    found = [(await store.get(known(number, tenant))).data is not None for number, tenant in enumerate("aaaba")]
    assert found == [True, False, True, True, True]
    await store.get(known(0))
    await store.put(known(5, "c"), bytes(100), 60.0)  # the whole is full: now it is whoever was used least of late
    assert (await store.get(known(2))).data is None


@asynchronous
async def test_in_memory_a_tenant_pushes_out_its_own_entries() -> None:
    await check_whose_entries_go(MemoryStore())


def test_in_sqlite_a_tenant_pushes_out_its_own_entries(tmp_path: Path) -> None:
    @asynchronous
    async def test() -> None:
        database, store = sqlite(tmp_path)
        await check_whose_entries_go(store)
        await database.close()

    test()


@asynchronous
async def test_memory_forgets_what_it_dropped() -> None:
    store = MemoryStore(most_bytes=50_000)
    for number in range(5000):
        await store.put(known(number, f"tenant-{number}", (f"tag-{number}",)), bytes(500), 1e9)
    assert store.bytes <= 50_000
    kept = vars(store)
    for name in ("_entries", "_tenants", "_tenant_bytes", "_tags"):
        assert len(kept[name]) == len(store)
    assert len(kept["_expiring"]) <= 2 * len(store) + 64
    await store.remove(InvalidationScope())
    assert (len(store), store.bytes, kept["_tags"], kept["_tenants"]) == (0, 0, {}, {})


@asynchronous
async def test_a_tenant_cannot_read_anothers_entry_even_by_its_key() -> None:
    store = MemoryStore()
    theirs = known(1, "a")
    await store.put(theirs, b"secret", 60.0)
    assert (await store.get(CacheKey("b", theirs.digest))).data is None
    assert await store.remove(InvalidationScope(tenant="b", digest=theirs.digest)) == 0
    assert (await store.get(theirs)).data == b"secret"


def sqlite(folder: Path, **options: Any) -> tuple[Database, SqliteStore]:
    database = Database(folder)
    return database, SqliteStore(database, bound_s=BOUND_S, **options)


def test_in_sqlite_too_a_tenant_cannot_read_anothers_entry(tmp_path: Path) -> None:
    @asynchronous
    async def test() -> None:
        database, store = sqlite(tmp_path)
        theirs = known(1, "a")
        await store.put(theirs, b"secret", 60.0)
        assert (await store.get(CacheKey("b", theirs.digest))).data is None
        assert await store.remove(InvalidationScope(tenant="b", digest=theirs.digest)) == 0
        assert (await store.get(theirs)).data == b"secret"
        await database.close()

    test()


def test_sqlite_entries_outlive_a_restart_with_the_order_of_their_use(tmp_path: Path) -> None:
    @asynchronous
    async def test() -> None:
        clock = Clock()
        database, store = sqlite(tmp_path, clock=clock)
        for number in range(3):
            await store.put(known(number), bytes(100), 60.0 if number else 5.0)
        await store.get(known(1))  # so number 2 is the one that was used least of late
        await store.put(known(3), bytes(100), 60.0)
        await database.close()
        clock.now += 10
        database, store = sqlite(tmp_path, clock=clock)
        size = await store.size()
        one = size.bytes // size.entries
        assert (await store.get(known(0))).data is None  # its time is over
        store.most_bytes = store.tenant_bytes = 3 * one
        await store.put(known(4), bytes(100), 60.0)
        there = [number for number in range(5) if (await store.get(known(number))).data is not None]
        assert there == [1, 3, 4]
        await database.close()

    test()


def test_sqlite_makes_its_tables_anew_where_they_are_gone(tmp_path: Path) -> None:
    @asynchronous
    async def test() -> None:
        database, store = sqlite(tmp_path)
        await store.put(known(1), b"x", 60.0)

        def drop(connection: sqlite3.Connection) -> None:
            connection.execute("DROP TABLE exact_tags")
            connection.execute("DROP TABLE exact_entries")

        await database.run(drop)
        with pytest.raises(sqlite3.OperationalError):
            await store.get(known(1))
        assert (await store.get(known(1))).data is None
        # The totals speak of entries that are not there any more; there is room all the same.
        store.most_bytes = store.tenant_bytes = 600
        assert await store.put(known(2), b"y", 60.0)
        assert (await store.get(known(2))).data == b"y"
        assert (await store.size()).entries == 1
        await database.close()

    test()


def test_sqlite_removes_many_entries_bit_by_bit(tmp_path: Path) -> None:
    @asynchronous
    async def test() -> None:
        clock = Clock()
        database, store = sqlite(tmp_path, clock=clock)
        await store.open()
        rows = [(number.to_bytes(32, "big"), "a", clock.now + number - 99.5, number, 10, b"") for number in range(2500)]

        def fill(connection: sqlite3.Connection) -> None:
            connection.executemany(
                "INSERT INTO exact_entries (key, tenant, expires, used, bytes, answer) VALUES (?, ?, ?, ?, ?, ?)", rows
            )

        await database.run(fill)
        assert await store.size() == CacheSize(2500, 25_000)
        assert await store.remove(InvalidationScope(tenant="a")) == 2400  # the first hundred had expired
        assert await store.size() == CacheSize(0, 0)
        await database.close()

    test()


def test_a_database_that_ends_is_an_error_and_no_hang(tmp_path: Path) -> None:
    @asynchronous
    async def test() -> None:
        database, store = sqlite(tmp_path)
        await store.put(known(1), b"x", 60.0)
        await database.close()
        with pytest.raises(ApiError):
            await store.get(known(1))
        with pytest.raises(ApiError):
            await store.put(known(2), b"x", 60.0)

    test()
