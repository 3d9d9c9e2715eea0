"""Entries that an operator ends: here at once, elsewhere as soon as it is heard of, and never forgotten on an error."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace.config.tenant_section import TenantConfig
from headrace.gateway.accounts import admin_operations as operations
from headrace.gateway.api_errors import ApiError
from tests.support.accounts import WHO, declared, gateways
from tests.support.file_storage import asynchronous, refused


class Cache:
    def __init__(self, count: int | None = 3) -> None:
        self.heard: list[tuple[str | None, str | None]] = []
        self.count = count
        self.gone = False

    async def invalidate(self, *, tenant: str | None = None, tag: str | None = None) -> int | None:
        if self.gone:
            raise ApiError("the cache's store cannot be reached", kind="overloaded_error")
        self.heard.append((tenant, tag))
        return self.count


EVENTS = {"prices": ("pricing", "plans"), "nothing": ()}


async def idle(*caches: Cache, count: int) -> None:
    while not all(len(cache.heard) >= count for cache in caches):
        await asyncio.sleep(0.005)


def test_every_gateway_ends_the_entries_and_each_once(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateways(tmp_path) as standing:
            caches = [Cache(), Cache()]
            one, other = [
                await standing.gateway(keys=(declared(),), caches={"exact": cache}, events=EVENTS) for cache in caches
            ]
            await one.operations.create_tenant(WHO, "red", TenantConfig())
            found = await one.operations.invalidate(WHO, tags=("a",), events=("prices",), tenant="red", all=False)
            assert found["removed"] == {"exact": 9}
            expected = [("red", "a"), ("red", "pricing"), ("red", "plans")]
            assert caches[0].heard == expected
            assert caches[1].heard == []
            await other.shared.refresh()
            await idle(caches[1], count=3)
            await one.shared.refresh()
            await one.operations.invalidate(WHO, tags=(), events=(), tenant=None, all=True)
            assert caches[0].heard == [*expected, (None, None)]

    asynchronous(test)


def test_what_could_not_be_ended_is_told_and_tried_until_it_is(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateways(tmp_path) as standing:
            caches = [Cache(), Cache()]
            one, other = [await standing.gateway(keys=(declared(),), caches={"exact": cache}) for cache in caches]
            for each in (one, other):
                each.invalidations._retry_s = 0.01
            for cache in caches:
                cache.gone = True
            error = await refused(one.operations.invalidate(WHO, tags=("a",), events=(), tenant=None, all=False))
            assert error.status == 503
            await other.shared.refresh()
            await asyncio.sleep(0.03)
            assert (one.invalidations.pending, other.invalidations.pending) == (1, 1)
            for cache in caches:
                cache.gone = False
            await idle(*caches, count=1)
            assert [cache.heard for cache in caches] == [[(None, "a")]] * 2

    asynchronous(test)


def test_at_the_start_only_what_is_young_is_made_again(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateways(tmp_path) as standing:
            one = await standing.gateway(keys=(declared(),))
            await one.operations.invalidate(WHO, tags=("old",), events=(), tenant=None, all=False)
            standing.clock.now += 3600.0
            await one.shared.refresh()
            await one.operations.invalidate(WHO, tags=("young",), events=(), tenant=None, all=False)
            cache = Cache(None)
            await standing.gateway(keys=(declared(),), caches={"exact": cache})
            await idle(cache, count=1)
            assert cache.heard == [(None, "young")]

    asynchronous(test)


def test_nothing_is_ended_by_mistake(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateways(tmp_path) as standing:
            cache = Cache()
            gateway = await standing.gateway(keys=(declared(),), caches={"exact": cache}, events=EVENTS)

            async def wrong(
                *,
                tags: tuple[str, ...] = (),
                events: tuple[str, ...] = (),
                tenant: str | None = None,
                all: bool = False,
            ) -> tuple[int, str | None]:
                error = await refused(
                    gateway.operations.invalidate(WHO, tags=tags, events=events, tenant=tenant, all=all)
                )
                return error.status, error.parameter

            assert await wrong() == (400, "all")
            assert await wrong(tags=("a",), all=True) == (400, "all")
            assert await wrong(events=("nothing",)) == (400, "events")
            assert await wrong(events=("unknown",)) == (404, "events")
            assert await wrong(tags=("a",), tenant="nobody") == (404, "tenant")
            assert cache.heard == []
            assert gateway.shared.epoch == 0

    asynchronous(test)


def test_how_many_are_remembered_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "KEPT", 4)

    async def test() -> None:
        async with gateways(tmp_path) as standing:
            one = await standing.gateway(keys=(declared(),))
            for number in range(10):
                await one.operations.invalidate(WHO, tags=(f"t{number}",), events=(), tenant=None, all=False)
            held = one.shared.held("invalidation")
            assert sorted(record.version for record in held.values()) == [7, 8, 9, 10]

    asynchronous(test)
