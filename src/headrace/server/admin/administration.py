"""Everything of tenants, keys and the admin API, put together from a configuration.

Owns the order in which the parts are made, started and ended; what each of them does is its own. All of it belongs to
one event loop.

    identify ──▶ Directory ◀──┐
    flow     ──▶ Switches  ◀──┼── Shared ◀──▶ Store (sqlite, or Postgres)
    caches   ◀── Invalidations┘      ▲
    /admin/v1 ──▶ AdminRoutes ──▶ Operations
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.config import Config, KeyConfig, names_of
from headrace.config.tenant_section import AdminConfig, FastConfig, TenantConfig
from headrace.gateway.accounts.account_store import AccountStore, AuditRetention, SqliteAccountStore
from headrace.gateway.accounts.account_sync import AccountSync
from headrace.gateway.accounts.admin_operations import AdminOperations
from headrace.gateway.accounts.cache_invalidations import CacheInvalidations, InvalidatableCache
from headrace.gateway.accounts.directory import AccountDirectory
from headrace.gateway.accounts.fast_mode import FastModeSwitches
from headrace.gateway.database import Database
from headrace.server.admin.admin_protocols import UsageExport
from headrace.server.admin.admin_routes import AdminRoutes
from headrace.server.admin.admin_socket import AdminSocket
from headrace.server.http.edge import Application, ConnectionBounds

if TYPE_CHECKING:
    from headrace.server.http.route import Route


class Administration:
    def __init__(
        self,
        config: Config,
        store: AccountStore,
        environ: Mapping[str, str],
        *,
        keys: Sequence[KeyConfig] = (),
        tenants: Mapping[str, TenantConfig] | None = None,
        admin: AdminConfig | None = None,
        fast: FastConfig | None = None,
        served: Collection[str] | None = None,
        usage: UsageExport | None = None,
        caches: Mapping[str, InvalidatableCache] | None = None,
        events: Mapping[str, Sequence[str]] | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`served`: variants by their full names, the configuration's models by default; `events`: the tags that each
        event of the caches ends. ConfigError for a key without its secret."""
        self._config = config
        self._admin = admin = admin or AdminConfig()
        fast, served = fast or FastConfig(), names_of(config) if served is None else served
        self.shared = AccountSync(store, poll_s=admin.poll_s, taken_uses=self._taken_uses, monotonic=monotonic)
        self.directory = AccountDirectory(
            keys,
            tenants or {},
            environ,
            shared=self.shared,
            guarded=bool(admin.socket) or store.shared,
            stale_s=admin.stale_s,
            clock=clock,
        )
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
            clock=clock,
        )
        listed = self.directory.administered or bool(admin.socket)
        self._routes = AdminRoutes(self.operations, admin, usage=usage, listed=listed)
        self._socket: AdminSocket | None = None

    def _taken_uses(self) -> Mapping[str, int]:
        return self.directory.taken_uses()

    def routes(self) -> tuple[Route, ...]:
        return self._routes.routes()

    async def start(self, application: Application) -> None:
        """Before requests are taken: keys that were made are known from here on, where the storage answers.

        SocketError where the administrators' socket cannot be."""
        await self.shared.start()
        if self._admin.socket:
            self._socket = AdminSocket(Path(self._admin.socket), application, ConnectionBounds.of(self._config.server))
            await self._socket.start()

    async def close(self) -> None:
        """Before the storage is closed."""
        if self._socket is not None:
            await self._socket.close()
        await self.invalidations.close()
        await self.shared.close()


def sqlite_store(
    database: Database, admin: AdminConfig, *, clock: Callable[[], float] = time.time
) -> SqliteAccountStore:
    retention = AuditRetention(admin.audit_rows, admin.audit_days)
    return SqliteAccountStore(database, retention=retention, answer_s=admin.answer_s, clock=clock)
