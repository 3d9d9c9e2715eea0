"""Tenants, keys and shared state for tests: clocks that are set by hand, stores that fail or wait when told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from headrace.config import Config, ModelConfig, names_of
from headrace.config.tenant_section import AdminConfig, FastConfig, KeyConfig, TenantConfig
from headrace.gateway.accounts.account_services import AccountServices
from headrace.gateway.accounts.account_store import AccountChange, AccountChanges, CommitResult, SqliteAccountStore
from headrace.gateway.accounts.admin_operations import Actor
from headrace.gateway.accounts.audit_log import AuditEntry
from headrace.gateway.database import Database, storage_unavailable
from tests.support.clock import Clock

WHO = Actor("ops", "req_1")
CONFIG = Config(models={"mini": ModelConfig(variants={"int4": {}, "golden": {}}), "draft": ModelConfig()})


class Faulty(SqliteAccountStore):
    """May be gone."""

    gone = False
    asked = 0

    async def changes(self, since: int) -> AccountChanges:
        self.asked += 1
        if self.gone:
            raise storage_unavailable("the server's storage cannot be used")
        return await super().changes(since)

    async def commit(self, change: AccountChange) -> CommitResult:
        if self.gone:
            raise storage_unavailable("the server's storage cannot be used")
        return await super().commit(change)


def entry(what: str = "test", **fields: Any) -> AuditEntry:
    given: dict[str, Any] = {"at": 1_700_000_000, "who": "ops", "what": what, **fields}
    return AuditEntry(**given)


class Gateways:
    """Several that share one storage, each with clocks of its own for durations."""

    def __init__(self, folder: Path) -> None:
        self.database = Database(folder)
        self.clock = Clock()
        self.monotonic = Clock(1000.0)
        self.made: list[AccountServices] = []

    def store(self, **options: Any) -> Faulty:
        return Faulty(self.database, clock=self.clock, **options)

    async def gateway(
        self,
        *,
        keys: Sequence[KeyConfig] = (),
        tenants: Mapping[str, TenantConfig] | None = None,
        admin: AdminConfig | None = None,
        fast: FastConfig | None = None,
        store: Faulty | None = None,
        **options: Any,
    ) -> AccountServices:
        made = AccountServices(
            store or self.store(),
            {},
            served=names_of(CONFIG),
            keys=keys,
            tenants=tenants,
            admin=admin or AdminConfig(poll_s=3600.0),  # tests look for themselves
            fast=fast or FastConfig(max_tokens=64),
            clock=self.clock,
            monotonic=self.monotonic,
            **options,
        )
        await made.shared.start()
        self.made.append(made)
        return made

    async def close(self) -> None:
        for each in self.made:
            await each.close()
        await self.database.close()


@asynccontextmanager
async def gateways(folder: Path) -> AsyncGenerator[Gateways]:
    found = Gateways(folder)
    try:
        async with asyncio.timeout(120.0):
            yield found
    finally:
        await found.close()


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


def declared(name: str = "root", key: str = "root-secret", **fields: Any) -> KeyConfig:
    return KeyConfig(name=name, key=key, **fields)
