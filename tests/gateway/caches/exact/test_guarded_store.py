"""A store that is slow, gone or broken: a miss within a bound, then left alone; an invalidation is never lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from headrace.gateway.api_errors import ApiError
from headrace.gateway.caches.exact.cache_key import CacheKey
from headrace.gateway.caches.exact.entry_store import (
    GuardedStore,
    InvalidationLog,
    InvalidationScope,
    LookupBatcher,
    StoreLookup,
)
from headrace.gateway.circuit_breaker import StoreBreaker
from tests.support.clock import Clock
from tests.support.exact_caches import Broken, turns, wanted
from tests.support.running_server import asynchronous


@asynchronous
async def test_a_store_that_hangs_costs_its_bound_and_no_more() -> None:
    failed: list[str] = []
    store = Broken(hanging=("get", "put", "sweep", "size"))
    guarded = GuardedStore(store, get_s=0.01, put_s=0.01, clock=Clock(), failed=failed.append)
    assert await guarded.get(wanted()) is None
    assert await guarded.put(wanted(), b"x", 1.0, None) is None
    assert await guarded.sweep() == 0
    assert await guarded.size() is None
    assert failed == ["get", "put", "sweep", "size"]


@asynchronous
async def test_after_some_failures_it_is_left_alone_and_then_tried_once() -> None:
    clock, failed = Clock(), list[str]()
    store = Broken("get")
    guarded = GuardedStore(store, breaker=StoreBreaker(failures=3, rest_s=5.0, clock=clock), failed=failed.append)
    for _ in range(5):
        assert await guarded.get(wanted()) is None
    assert (len(store.calls), failed) == (3, ["get"] * 3 + ["skipped"] * 2)
    clock.now += 5.0
    assert await guarded.get(wanted()) is None  # the try
    assert await guarded.get(wanted()) is None
    assert len(store.calls) == 4
    clock.now += 5.0
    store.failing.clear()
    assert await guarded.get(wanted()) == StoreLookup(None)
    assert await guarded.put(wanted(), b"x", 60.0, None)
    assert await guarded.get(wanted()) == StoreLookup(b"x")


@asynchronous
async def test_while_it_is_tried_nobody_else_waits() -> None:
    clock = Clock()
    store = Broken("get")
    guarded = GuardedStore(store, get_s=60.0, breaker=StoreBreaker(failures=1, rest_s=5.0, clock=clock))
    await guarded.get(wanted())
    clock.now += 5.0
    store.hanging = {"get"}
    trying = asyncio.create_task(guarded.get(wanted()))
    await asyncio.sleep(0)
    assert await guarded.get(wanted()) is None
    trying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await trying
    # A try that was given up says nothing, so the next one is a try again.
    store.failing.clear()
    store.hanging.clear()
    assert await guarded.get(wanted()) == StoreLookup(None)


@asynchronous
async def test_a_late_event_loop_is_no_failure_of_the_store() -> None:
    clock, failed = Clock(), list[str]()

    class Late(Broken):
        async def get(self, wanted: CacheKey) -> StoreLookup:
            clock.now += 1.0  # somebody else's work took so long
            return await super().get(wanted)

    store = Late(hanging=["get"])
    guarded = GuardedStore(
        store, get_s=0.01, breaker=StoreBreaker(failures=1, clock=clock), clock=clock, failed=failed.append
    )
    for _ in range(3):
        assert await guarded.get(wanted()) is None
    store.hanging.clear()
    assert await guarded.get(wanted()) == StoreLookup(None)
    assert failed == ["late"] * 3


@asynchronous
async def test_lookups_of_a_crowd_go_together() -> None:
    calls: list[int] = []
    going = asyncio.Event()

    async def find(wanteds: Sequence[CacheKey]) -> list[StoreLookup]:
        calls.append(len(wanteds))
        await going.wait()
        return [StoreLookup(each.key) for each in wanteds]

    gathering = LookupBatcher(find, most=32, seconds=60.0)
    crowd = [asyncio.create_task(gathering.get(wanted(number))) for number in range(100)]
    await turns()
    crowd[0].cancel()
    crowd[99].cancel()
    going.set()
    found = await asyncio.gather(*crowd, return_exceptions=True)
    assert [each for each in found if isinstance(each, StoreLookup)] == [
        StoreLookup(wanted(n).key) for n in range(1, 99)
    ]
    assert calls == [32, 32, 32, 3]
    assert await gathering.get(wanted(7)) == StoreLookup(wanted(7).key)


@asynchronous
async def test_lookups_that_went_together_fail_together_and_the_next_ones_do_not() -> None:
    failing = True

    async def find(wanteds: Sequence[CacheKey]) -> list[StoreLookup]:
        if failing:
            raise OSError("it does not work")
        return [StoreLookup(None) for _ in wanteds]

    gathering = LookupBatcher(find)
    crowd = await asyncio.gather(*(gathering.get(wanted(number)) for number in range(40)), return_exceptions=True)
    assert all(isinstance(each, OSError) for each in crowd)
    failing = False
    assert await gathering.get(wanted()) == StoreLookup(None)

    async def hang(wanteds: Sequence[CacheKey]) -> list[StoreLookup]:
        await asyncio.Event().wait()
        return []

    stuck = LookupBatcher(hang, seconds=0.01)
    with pytest.raises(TimeoutError):
        await stuck.get(wanted())
    waiting = asyncio.create_task(stuck.get(wanted()))
    await turns()
    await stuck.close()
    waiting.cancel()


@asynchronous
async def test_an_invalidation_that_fails_is_an_error() -> None:
    failed: list[str] = []
    store = Broken("remove", "get")
    guarded = GuardedStore(store, remove_s=0.01, breaker=StoreBreaker(failures=1), failed=failed.append)
    await guarded.get(wanted())
    for hanging in ((), ("remove",)):
        store.hanging = set(hanging)
        with pytest.raises(ApiError) as refused:
            await guarded.remove(InvalidationScope())
        assert (refused.value.status, refused.value.code) == (503, "cache_unavailable")
    store.failing.clear()
    store.hanging.clear()
    assert await guarded.remove(InvalidationScope()) == 0  # an open breaker does not hold it back


def test_the_latest_removals_are_known() -> None:
    removals = InvalidationLog(most=3)
    one = wanted(tags=["docs"])
    start = removals.count
    removals.add(InvalidationScope(tenant="b"))
    removals.add(InvalidationScope(tenant="a", tag="pricing"))
    assert not removals.since(start, one)
    removals.add(InvalidationScope(tag="docs"))
    assert removals.since(start, one)
    assert not removals.since(removals.count, one)
    later = removals.count
    for _ in range(3):
        removals.add(InvalidationScope(tenant="b"))
    assert not removals.since(later, one)
    removals.add(InvalidationScope(tenant="b"))
    assert removals.since(later, one)  # too long ago to tell


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
        (InvalidationScope(tenant="a", key=wanted(tags=["docs"]).key), True),
        (InvalidationScope(tenant="a", key=wanted(2, tags=["docs"]).key), False),
    ],
)
def test_a_scope_has_what_has_all_of_it(scope: InvalidationScope, has: bool) -> None:
    assert scope.has(wanted(tags=["docs"])) is has
