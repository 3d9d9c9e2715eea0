"""Tenants, keys, fast mode and cache invalidations of one gateway, with the state that all gateways share.

    identify ──▶ AccountDirectory ◀──┐
    flow     ──▶ FastModeSwitches  ◀──┼── AccountSync ◀──▶ AccountStore (sqlite, or Postgres)
    caches   ◀── CacheInvalidations┘      ▲
    admin API ──▶ AdminOperations ────────┘

Does not serve the admin API (server.admin).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

from headrace.config import Config, KeyConfig, names_of
from headrace.config.environment import required_secret
from headrace.config.tenant_section import AdminConfig, FastConfig, TenantConfig
from headrace.gateway.accounts.access_watch import AccessWatch
from headrace.gateway.accounts.account_store import AccountStore, AuditRetention, SqliteAccountStore
from headrace.gateway.accounts.account_sync import AccountSync
from headrace.gateway.accounts.admin_operations import AdminOperations
from headrace.gateway.accounts.cache_invalidations import CacheInvalidations, InvalidatableCache
from headrace.gateway.accounts.directory import AccountDirectory
from headrace.gateway.accounts.fast_mode import FastModeSwitches
from headrace.gateway.accounts.forward_clock import ForwardClock
from headrace.gateway.database import Database


class AccountServices:
    """All of it belongs to one event loop."""

    def __init__(
        self,
        store: AccountStore,
        environ: Mapping[str, str],
        *,
        served: Collection[str],
        keys: Sequence[KeyConfig] = (),
        tenants: Mapping[str, TenantConfig] | None = None,
        admin: AdminConfig | None = None,
        fast: FastConfig | None = None,
        caches: Mapping[str, InvalidatableCache] | None = None,
        events: Mapping[str, Sequence[str]] | None = None,
        lossless: bool = False,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`served`: variants by their full names; `events`: the cache tags that each event ends; `lossless`: no
        technique may be turned on that may change an answer. ConfigError for a key without its secret."""
        admin, fast = admin or AdminConfig(), fast or FastConfig()
        clock = ForwardClock(clock)  # an expired key must not come back when the machine's clock is set back
        self.shared = AccountSync(
            store, poll_s=admin.poll_s, taken_uses=lambda: self.directory.taken_uses(), monotonic=monotonic
        )
        self.directory = AccountDirectory(
            keys,
            tenants or {},
            environ,
            shared=self.shared,
            guarded=bool(admin.socket) or store.shared,
            stale_s=admin.stale_s,
            clock=clock,
        )
        self.access = AccessWatch(self.directory)
        self.shared.listen(self.access.take)  # after the directory
        self.switches = FastModeSwitches(fast, served=served, monotonic=monotonic)
        self.invalidations = CacheInvalidations(caches or {})
        self.shared.listen(self.switches.take)
        self.shared.listen(self.invalidations.take)
        self.operations = AdminOperations(
            self.shared,
            self.directory,
            self.switches,
            self.invalidations,
            admin,
            served=served,
            most_fast_s=fast.most_s,
            events=events,
            lossless=lossless,
            clock=clock,
        )

    @classmethod
    def from_config(
        cls,
        config: Config,
        database: Database,
        environ: Mapping[str, str],
        caches: Mapping[str, InvalidatableCache],
        *,
        store: AccountStore | None = None,
    ) -> AccountServices:
        """`caches`: those that the admin API can invalidate, by name. `store` replaces the configuration's."""
        return cls(
            _store(config.admin, database, environ) if store is None else store,
            environ,
            served=names_of(config),
            keys=config.keys,
            tenants=config.tenants,
            admin=config.admin,
            fast=config.fast,
            caches=caches,
            events=config.cache.exact.events,
            lossless=config.safety.lossless_only,
        )

    async def start(self) -> None:
        """Call before requests are taken: keys that were created earlier are known afterwards, if the storage works."""
        await self.shared.start()

    async def close(self) -> None:
        """Call before the storage is closed."""
        await self.invalidations.close()
        await self.shared.close()


def _store(admin: AdminConfig, database: Database, environ: Mapping[str, str]) -> AccountStore:
    retention = AuditRetention(admin.audit_rows, admin.audit_days)
    if admin.store == "sqlite":
        return SqliteAccountStore(database, retention=retention, answer_s=admin.answer_s)
    from headrace.gateway.accounts.postgres import PostgresAccountStore

    dsn = required_secret(environ, admin.dsn_env, "admin.dsn_env")
    return PostgresAccountStore(dsn, schema=admin.schema, retention=retention, answer_s=admin.answer_s)
