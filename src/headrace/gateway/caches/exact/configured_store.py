"""Opens the store that a cache's section of the configuration names, behind its guard, and reads the signing secret."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from headrace.config.cache_section import ExactConfig, ResultsConfig
from headrace.config.environment import required_secret
from headrace.gateway.caches.exact.entry_store import EntryStore, GuardedStore
from headrace.gateway.caches.exact.memory import MemoryStore
from headrace.gateway.caches.exact.redis import RedisStore
from headrace.gateway.caches.exact.sqlite import SqliteStore
from headrace.gateway.database import Database
from headrace.gateway.redis_client import connect
from headrace.observe import metrics

_LEAST_LONGEST_S: Final = 86_400.0  # seconds that a Redis store allows for an entry in any case


def open_store(
    section: ExactConfig | ResultsConfig,
    name: str,
    lifetimes_s: Iterable[float],
    database: Database,
    environ: Mapping[str, str],
) -> tuple[GuardedStore, bytes]:
    """Return the store of the cache `name` and its secret, which may be empty. `lifetimes_s`: of all kinds of entries.

    ConfigError if the environment lacks the secret or the URL of Redis.
    """
    secret = ""
    if section.secret_env is not None:
        secret = required_secret(environ, section.secret_env, f"cache.{name}.secret_env")
    guarded = GuardedStore(
        _store(section, name, max((_LEAST_LONGEST_S, *lifetimes_s)), database, environ),
        name=name,
        get_s=None if section.store == "memory" else section.wait_ms / 1e3,
        failed=lambda call: metrics.of(metrics.cache_failures, name, call).inc(),
    )
    return guarded, secret.encode()


def _store(
    section: ExactConfig | ResultsConfig,
    name: str,
    most_seconds: float,
    database: Database,
    environ: Mapping[str, str],
) -> EntryStore:
    wait_s = section.wait_ms / 1e3
    match section.store:
        case "redis":
            url = required_secret(environ, section.redis_env, f"cache.{name}.redis_env")
            return RedisStore(
                connect(url, seconds=wait_s),
                prefix=f"headrace:{name}",
                most_seconds=most_seconds,
                entry_bytes=section.entry_bytes,
                bound_s=wait_s,
            )
        case "sqlite":
            return SqliteStore(
                database, name=name, most_bytes=section.bytes, tenant_bytes=section.tenant_bytes, bound_s=wait_s
            )
        case "memory":
            return MemoryStore(most_bytes=section.bytes, tenant_bytes=section.tenant_bytes)
