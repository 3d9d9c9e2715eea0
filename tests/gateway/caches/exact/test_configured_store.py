"""The store that a cache's section names: its kind, its bounds, how long Redis keeps entries, and missing secrets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.config import Config
from headrace.config.cache_section import CacheConfig, ExactConfig, ResultsConfig
from headrace.errors import HeadraceError
from headrace.gateway.caches.exact import configured_store
from headrace.gateway.caches.exact.configured_store import open_store
from headrace.gateway.caches.exact.entry_store import GuardedStore
from headrace.gateway.caches.exact.exact_cache import ExactCache
from headrace.gateway.caches.exact.memory import MemoryStore
from headrace.gateway.caches.exact.sqlite import SqliteStore
from headrace.gateway.caches.results.result_cache import ResultCache, declared_lifetimes_s
from headrace.gateway.database import Database
from tests.gateway.caches.exact.test_redis_store import Fake
from tests.support.running_server import asynchronous
from tests.support.stores.exact_caches import Caching, cache_key

REDIS = {"HEADRACE_CACHE_REDIS": "redis://localhost:1"}
DAY = 86_400.0


def opened(
    section: ExactConfig | ResultsConfig, name: str, folder: Path, *lifetimes_s: float, **environ: str
) -> tuple[GuardedStore, bytes]:
    return open_store(section, name, lifetimes_s, Database(folder / "cache.sqlite"), environ)


@pytest.mark.parametrize(("lifetime_s", "kept_s"), [(7 * DAY, 7 * DAY), (600.0, 600.0)])
@asynchronous
async def test_redis_keeps_an_entry_as_long_as_the_configuration_says(
    lifetime_s: float, kept_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake()
    monkeypatch.setattr(configured_store, "connect", lambda url, seconds: fake)
    store, _ = opened(ExactConfig(store="redis"), "exact", tmp_path, 60.0, lifetime_s, **REDIS)
    looked = await store.get(cache_key())
    assert looked is not None
    assert await store.put(cache_key(), b"x", lifetime_s, looked.ticket)
    scopes = [expires for name, (_, expires) in fake.values.items() if ":scope" in name]
    [entry] = [expires for name, (_, expires) in fake.values.items() if ":scope" not in name]
    assert entry - fake.clock.now == kept_s
    assert min(scopes) - fake.clock.now >= 2 * kept_s


def entry_of(fake: Fake) -> float:
    """Return the seconds that Redis keeps its one entry."""
    [expires] = [expires for name, (_, expires) in fake.values.items() if ":scope" not in name]
    return expires - fake.clock.now


@asynchronous
async def test_the_exact_cache_keeps_an_answer_in_redis_for_its_own_lifetime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake()
    monkeypatch.setattr(configured_store, "connect", lambda url, seconds: fake)
    exact = ExactConfig(mode="on", store="redis", ttl="7d", stale="1d")
    config = Config(cache=CacheConfig(exact=exact))
    cache = ExactCache.from_config(config, Database(tmp_path / "cache.sqlite"), REDIS)
    assert cache is not None
    caching = Caching(modes=cache.modes)
    caching.cache = cache
    await caching.ask(cache_key())
    assert entry_of(fake) == 8 * DAY


@pytest.mark.parametrize("place", ["embed", "search", "rerank", "generate", "tool"])
@asynchronous
async def test_redis_keeps_a_result_for_its_own_lifetime(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake()
    monkeypatch.setattr(configured_store, "connect", lambda url, seconds: fake)
    month = {"cache_s": 30 * DAY}
    tools = {"add": {"kind": "python", **month}} if place == "tool" else {}
    pipeline = {"stages": ["generate"], **({} if place == "tool" else {place: month})}
    declared = msgspec.convert({"pipelines": {"docs": pipeline}, "tools": tools}, Config)
    kept_s = declared_lifetimes_s(declared.pipelines, declared.tools)
    database = Database(tmp_path / "cache.sqlite")
    cache = ResultCache.from_config(ResultsConfig(store="redis"), database, REDIS, is_used=True, kept_s=kept_s)
    assert cache is not None
    lookup = await cache.look("stage", "", ["x"], declared=True)
    await cache.keep(lookup, b"data", ttl_s=30 * DAY)
    assert entry_of(fake) == 30 * DAY


@pytest.mark.parametrize(("section", "name"), [(ExactConfig, "exact"), (ResultsConfig, "results")])
def test_each_cache_names_its_own_keys_in_errors(section: Any, name: str, tmp_path: Path) -> None:
    for given, key in (({"store": "redis"}, "redis_env"), ({"secret_env": "GONE"}, "secret_env")):
        with pytest.raises(HeadraceError, match=rf"cache\.{name}\.{key}"):
            opened(section(**given), name, tmp_path, 60.0)


def test_a_section_names_the_store_its_bounds_and_the_secret(tmp_path: Path) -> None:
    store, secret = opened(
        ExactConfig(secret_env="SIGN", bytes=1000, tenant_bytes=100), "exact", tmp_path, 60.0, SIGN="s3"
    )
    assert secret == b"s3"
    assert isinstance(store.store, MemoryStore)
    store, secret = opened(ResultsConfig(store="sqlite", bytes=1000, tenant_bytes=100), "results", tmp_path)
    assert secret == b""
    assert isinstance(store.store, SqliteStore)
    assert (store.store.most_bytes, store.store.tenant_bytes) == (1000, 100)
