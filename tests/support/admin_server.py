"""A server with administrators, and the engine that a test controls, as edging has one without."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from headrace.config import Config, KeyConfig, ModelConfig, names_of
from headrace.config.tenant_section import AdminConfig, FastConfig, TenantConfig
from headrace.gateway.accounts.account_services import AccountServices
from headrace.gateway.accounts.forward_clock import ForwardClock
from headrace.gateway.output.tool_formats import detect_tool_format
from headrace.server.server import Server
from tests.support.accounts import bearer, declared
from tests.support.clock import Clock
from tests.support.running_server import CHAT, Answer, FakeEngine, FakeFleet, Running, config_of, living, tokenizer

ROOT = "root-secret"
ADMIN = declared(key=ROOT, admin="write")
READER = declared("reader", "reader-secret", admin="read")
CALLER = declared("caller", "caller-secret", tenant="red")
# A model with a small variant, and another model.
MODELS = {"mini": ModelConfig(variants={"int4": {}}), "draft": ModelConfig()}


@dataclass
class Administered(Running):
    @property
    def administration(self) -> AccountServices:
        return self.server.services.accounts

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

    async def chat(self, secret: str, **changes: Any) -> Answer:
        return await self.ask("POST", "/v1/chat/completions", CHAT | changes, **bearer(secret))

    async def new_key(self, tenant: str, **fields: Any) -> dict[str, Any]:
        return await self.did("POST", "keys", {"name": "app", "tenant": tenant, **fields})

    def set_clocks(self, wall: Clock, monotonic: Clock) -> None:
        """By which keys expire, and by which fast mode ends."""
        self.administration.directory._clock = self.administration.operations._clock = ForwardClock(wall)
        self.administration.switches._monotonic = monotonic


@contextlib.asynccontextmanager
async def administered(
    folder: Path,
    *,
    keys: Sequence[KeyConfig] = (ADMIN, READER, CALLER),
    tenants: Mapping[str, TenantConfig] | None = None,
    admin: AdminConfig | None = None,
    fast: FastConfig | None = None,
    models: Mapping[str, ModelConfig] | None = None,
    usage: Any = None,
    caches: Mapping[str, Any] | None = None,
    **sections: Any,
) -> AsyncGenerator[Administered]:
    """`usage`, `caches`: in the place of the server's own."""
    config: Config = msgspec.structs.replace(
        config_of(folder, cors_origins=("*",)),
        keys=tuple(keys),
        tenants=dict(tenants or {}),
        admin=admin or AdminConfig(poll_s=3600.0),
        fast=fast or FastConfig(max_tokens=64),
        models=dict(models or {"mini": ModelConfig()}),
        **sections,
    )
    engine = FakeEngine()
    fleet = FakeFleet(engine)
    template = tokenizer().tool_template
    tools = detect_tool_format(None if template is None else template.source, tokenizer())
    fleet.served = {name: replace(fleet.served["mini"], name=name, tools=tools) for name in names_of(config)}
    server = Server(config, fleet=fleet)
    administration = server.services.accounts
    if usage is not None:
        server.administration._routes._usage = usage
    if caches is not None:
        administration.invalidations._caches = caches
    async with living(server, lambda task: Administered(server, engine, fleet, task)) as running:
        yield running
