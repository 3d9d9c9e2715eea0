"""A server with its admin API and the engine that a test controls, as edging has one without."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.cli import app
from millrace.config import KeyConfig
from millrace.gateway.admin.administration import Administration, sqlite_store
from millrace.gateway.app import App
from millrace.gateway.server import Server
from millrace.gateway.tenants.settings import AdminConfig, FastConfig, TenantConfig
from tests.gateway.edging import Answer, FakeEngine, FakeFleet, Running, config_of, until
from tests.gateway.tenants.standing import bearer, declared

if "admin" not in list(app):
    app.command("millrace.cli.admin:admin", name="admin")

ROOT = "root-secret"
ADMIN = declared(key=ROOT, admin="write")
READER = declared("reader", "reader-secret", admin="read")
CALLER = declared("caller", "caller-secret", tenant="red")


@dataclass
class Administered(Running):
    administration: Any = None

    @property
    def url(self) -> str:
        return self.server.url

    async def admin(self, method: str, path: str, body: Any = None, *, key: str = ROOT, **headers: str) -> Answer:
        if key:
            headers |= bearer(key)
        return await self.ask(method, f"/admin/v1/{path}", body, **headers)

    async def did(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        """What was answered, where it worked."""
        answer = await self.admin(method, path, body, **headers)
        assert answer.status == 200, answer.body
        return answer.json

    async def refused(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, Any]:
        """Status, code and parameter, where it did not."""
        answer = await self.admin(method, path, body, **headers)
        assert answer.status >= 400, answer.body
        return answer.status, answer.error["code"], answer.error["param"]


@contextlib.asynccontextmanager
async def administered(
    folder: Path,
    *,
    keys: Sequence[KeyConfig] = (ADMIN, READER, CALLER),
    tenants: Mapping[str, TenantConfig] | None = None,
    admin: AdminConfig | None = None,
    fast: FastConfig | None = None,
    **options: Any,
) -> AsyncGenerator[Administered]:
    engine = FakeEngine()
    fleet = FakeFleet(engine)
    config = config_of(folder, cors_origins=("*",))
    server = Server(config, fleet=fleet)
    admin = admin or AdminConfig(poll_s=3600.0)
    administration = Administration(
        config,
        sqlite_store(server.state._database, admin),
        {},
        keys=keys,
        tenants=tenants,
        admin=admin,
        fast=fast,
        **options,
    )
    routes = (*server.state.routes(), *administration.routes())
    server.app = App(config, fleet, administration.directory, routes=routes)  # type: ignore[arg-type]
    server.state.attach(server.app)
    server.edge.application = server.app
    await administration.start(server.app)
    task = asyncio.create_task(server.run(signals=False))
    running = Administered(server, engine, fleet, task, administration=administration)
    try:
        await until(lambda: server.app.ready or task.done())
        yield running
        await running.settled()
    finally:
        for client in running.clients:
            client.leave()
        await administration.close()
        server.end()
        await task
