"""The stores of the exact cache through the server: restarts, several gateways, and what is gone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from headrace.config.cache_section import ExactConfig
from headrace.config.ledger_section import LedgerConfig
from tests.support.caching_server import BOSS, RED, Caching, caching
from tests.support.programs.redis_server import MISSING, PROGRAM, redis_server
from tests.support.running_server import asynchronous, words
from tests.support.stores.exact_caches import Broken


async def asked_twice(running: Caching) -> list[bool]:
    running.engine.answer = words("ok")
    return ["x-headrace-cache" in (await running.chat(key=RED)).headers for _ in range(2)]


@asynchronous
async def test_entries_in_sqlite_outlive_a_restart(tmp_path: Path) -> None:
    exact = ExactConfig(mode="on", store="sqlite", wait_ms=2000.0)
    async with caching(tmp_path, exact=exact) as running:
        assert await asked_twice(running) == [False, True]
    async with caching(tmp_path, exact=exact) as running:
        assert await asked_twice(running) == [True, True]
        assert not running.engine.streams
        removed = await running.ask("POST", "/admin/v1/cache/invalidate", {"all": True}, **BOSS)
        assert removed.json["removed"] == {"exact": 1}
        assert await asked_twice(running) == [False, True]


@pytest.mark.skipif(PROGRAM is None, reason=MISSING)
def test_gateways_share_entries_in_redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = ExactConfig(mode="on", store="redis", wait_ms=2000.0, secret_env="CACHE_SECRET")
    monkeypatch.setenv("CACHE_SECRET", "a secret of both")

    async def test() -> None:
        async with (
            caching(tmp_path / "one", exact=exact) as one,
            caching(tmp_path / "two", exact=exact) as two,
        ):
            assert await asked_twice(one) == [False, True]
            assert await asked_twice(two) == [True, True]
            removed = await two.ask("POST", "/admin/v1/cache/invalidate", {"all": True}, **BOSS)
            assert removed.json["removed"] == {"exact": None}
            assert await asked_twice(one) == [False, True]

    with redis_server(tmp_path) as redis:
        monkeypatch.setenv("HEADRACE_CACHE_REDIS", redis.url)
        asynchronous(test)()


@asynchronous
async def test_a_store_that_is_gone_costs_a_bounded_wait_and_then_nothing(tmp_path: Path) -> None:
    async with caching(tmp_path, exact=ExactConfig(mode="on", store="sqlite", wait_ms=20.0)) as running:
        cache = running.server.services.exact
        assert cache is not None
        running.engine.answer = words("ok")
        cache._store.store = Broken(hanging=("get", "size"))
        assert (await running.chat(key=RED)).status == 200
        cache._store._breaker.succeeded()
        failing = cache._store.store = Broken("get", "size")
        for _ in range(8):
            assert (await running.chat(key=RED)).status == 200
        assert failing.calls == ["get"] * 5
        assert running.counted("headrace_cache_failures_total", "exact", "get") in (5, 6)
        assert running.counted("headrace_cache_failures_total", "exact", "skipped") == 3
        assert (await running.ask("GET", "/metrics", **RED)).status == 200
        cache._store.store = Broken("remove")
        refused = await running.ask("POST", "/admin/v1/cache/invalidate", {"all": True}, **BOSS)
        assert (refused.status, refused.error["code"]) == (503, "cache_unavailable")


@asynchronous
async def test_a_disk_that_is_gone_makes_misses(tmp_path: Path) -> None:
    exact = ExactConfig(mode="on", store="sqlite", wait_ms=500.0)
    folder = tmp_path / "storage"
    async with caching(folder, exact=exact, ledger=LedgerConfig(keeps="off")) as running:
        assert await asked_twice(running) == [False, True]
        await running.server.database.close()
        shutil.rmtree(folder)
        folder.write_text("no folder")
        assert await asked_twice(running) == [False, False]
        folder.unlink()
