"""A store that is slow, gone or broken: a miss within a bound, then left alone; an invalidation is never lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from headrace.gateway.api_errors import ApiError
from headrace.gateway.caches.exact.cache_key import CacheKey
from headrace.gateway.caches.exact.entry_store import GuardedStore, LookupBatcher, StoreLookup
from headrace.gateway.caches.invalidation_log import InvalidationLog, InvalidationScope
from headrace.gateway.circuit_breaker import StoreBreaker
from tests.support.clock import Clock
from tests.support.running_server import asynchronous
from tests.support.stores.exact_caches import Broken, cache_key, turns


@asynchronous
async def test_a_store_that_hangs_costs_its_bound_and_no_more() -> None:
    failed: list[str] = []
    store = Broken(hanging=("get", "put", "sweep", "size"))
    guarded = GuardedStore(store, get_s=0.01, put_s=0.01, clock=Clock(), failed=failed.append)
    assert await guarded.get(cache_key()) is None
    assert await guarded.put(cache_key(), b"x", 1.0, None) is None
    assert await guarded.sweep() == 0
    assert await guarded.size() is None
    assert failed == ["get", "put", "sweep", "size"]


@asynchronous
async def test_after_some_failures_it_is_left_alone_and_then_tried_once() -> None:
    clock, failed = Clock(), list[str]()
    store = Broken("get")
    guarded = GuardedStore(store, breaker=StoreBreaker(failures=3, rest_s=5.0, clock=clock), failed=failed.append)
    for _ in range(5):
        assert await guarded.get(cache_key()) is None
    assert (len(store.calls), failed) == (3, ["get"] * 3 + ["skipped"] * 2)
    clock.now += 5.0
    assert await guarded.get(cache_key()) is None  # the try
    assert await guarded.get(cache_key()) is None
    assert len(store.calls) == 4
    clock.now += 5.0
    store.failing.clear()
    assert await guarded.get(cache_key()) == StoreLookup(None)
    assert await guarded.put(cache_key(), b"x", 60.0, None)
    assert await guarded.get(cache_key()) == StoreLookup(b"x")


@asynchronous
async def test_while_it_is_tried_nobody_else_waits() -> None:
    clock = Clock()
    store = Broken("get")
    guarded = GuardedStore(store, get_s=60.0, breaker=StoreBreaker(failures=1, rest_s=5.0, clock=clock))
    await guarded.get(cache_key())
    clock.now += 5.0
    store.hanging = {"get"}
    trying = asyncio.create_task(guarded.get(cache_key()))
    await asyncio.sleep(0)
    assert await guarded.get(cache_key()) is None
    trying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await trying
    # A try that was given up says nothing, so the next one is a try again.
    store.failing.clear()
    store.hanging.clear()
    assert await guarded.get(cache_key()) == StoreLookup(None)


@asynchronous
async def test_a_late_event_loop_is_no_failure_of_the_store() -> None:
    clock, failed = Clock(), list[str]()

    class Late(Broken):
        async def get(self, cache_key: CacheKey) -> StoreLookup:
            clock.now += 1.0  # somebody else's work took so long
            return await super().get(cache_key)

    store = Late(hanging=["get"])
    guarded = GuardedStore(
        store, get_s=0.01, breaker=StoreBreaker(failures=1, clock=clock), clock=clock, failed=failed.append
    )
    for _ in range(3):
        assert await guarded.get(cache_key()) is None
    store.hanging.clear()
    assert await guarded.get(cache_key()) == StoreLookup(None)
    assert failed == ["late"] * 3


@asynchronous
async def test_lookups_of_a_crowd_go_together() -> None:
    calls: list[int] = []
    going = asyncio.Event()

    async def find(cache_keys: Sequence[CacheKey]) -> list[StoreLookup]:
        calls.append(len(cache_keys))
        await going.wait()
        return [StoreLookup(each.digest) for each in cache_keys]

    gathering = LookupBatcher(find, most=32, seconds=60.0)
    crowd = [asyncio.create_task(gathering.get(cache_key(number))) for number in range(100)]
    await turns()
    crowd[0].cancel()
    crowd[99].cancel()
    going.set()
    found = await asyncio.gather(*crowd, return_exceptions=True)
    assert [each for each in found if isinstance(each, StoreLookup)] == [
        StoreLookup(cache_key(n).digest) for n in range(1, 99)
    ]
    assert calls == [32, 32, 32, 3]
    assert await gathering.get(cache_key(7)) == StoreLookup(cache_key(7).digest)


@asynchronous
async def test_lookups_that_went_together_fail_together_and_the_next_ones_do_not() -> None:
    failing = True

    async def find(cache_keys: Sequence[CacheKey]) -> list[StoreLookup]:
        if failing:
            raise OSError("it does not work")
        return [StoreLookup(None) for _ in cache_keys]

    gathering = LookupBatcher(find)
    crowd = await asyncio.gather(*(gathering.get(cache_key(number)) for number in range(40)), return_exceptions=True)
    assert all(isinstance(each, OSError) for each in crowd)
    failing = False
    assert await gathering.get(cache_key()) == StoreLookup(None)

    async def hang(cache_keys: Sequence[CacheKey]) -> list[StoreLookup]:
        await asyncio.Event().wait()
        return []

    stuck = LookupBatcher(hang, seconds=0.01)
    with pytest.raises(TimeoutError):
        await stuck.get(cache_key())
    waiting = asyncio.create_task(stuck.get(cache_key()))
    await turns()
    await stuck.close()
    waiting.cancel()


@asynchronous
async def test_an_invalidation_that_fails_is_an_error() -> None:
    failed: list[str] = []
    store = Broken("remove", "get")
    guarded = GuardedStore(store, remove_s=0.01, breaker=StoreBreaker(failures=1), failed=failed.append)
    await guarded.get(cache_key())
    for hanging in ((), ("remove",)):
        store.hanging = set(hanging)
        with pytest.raises(ApiError) as refused:
            await guarded.remove(InvalidationScope())
        assert (refused.value.status, refused.value.code) == (503, "cache_unavailable")
    store.failing.clear()
    store.hanging.clear()
    assert await guarded.remove(InvalidationScope()) == 0  # an open breaker does not hold it back


def test_the_latest_removals_are_known() -> None:
    log = InvalidationLog(size=3)
    one = cache_key(tags=["docs"])
    start = log.count
    log.add(InvalidationScope(tenant="b"))
    log.add(InvalidationScope(tenant="a", tag="pricing"))
    assert not log.covers_since(start, one.tenant, one.tags, one.digest)
    log.add(InvalidationScope(tag="docs"))
    assert log.covers_since(start, one.tenant, one.tags, one.digest)
    assert not log.covers_since(log.count, one.tenant, one.tags, one.digest)
    later = log.count
    for _ in range(3):
        log.add(InvalidationScope(tenant="b"))
    assert not log.covers_since(later, one.tenant, one.tags, one.digest)
    log.add(InvalidationScope(tenant="b"))
    assert log.covers_since(later, one.tenant, one.tags, one.digest)  # too long ago to tell


@pytest.mark.parametrize(
    ("scope", "has"),
    [
        (InvalidationScope(), True),
        (InvalidationScope(tenant="a"), True),
        (InvalidationScope(tenant="b"), False),
        (InvalidationScope(tag="docs"), True),
        (InvalidationScope(tag="pricing"), False),
        (InvalidationScope(tenant="a", tag="docs"), True),
        (InvalidationScope(tenant="b", tag="docs"), False),
        (InvalidationScope(tenant="a", digest=cache_key(tags=["docs"]).digest), True),
        (InvalidationScope(tenant="a", digest=cache_key(2, tags=["docs"]).digest), False),
    ],
)
def test_a_scope_covers_entries_that_match_all_fields(scope: InvalidationScope, has: bool) -> None:
    one = cache_key(tags=["docs"])
    assert scope.covers(one.tenant, one.tags, one.digest) is has
