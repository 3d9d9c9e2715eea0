"""`safety.lossless_only` holds for what is made through the admin API, also before it was set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.config import ModelConfig
from headrace.config.lab.safety_section import SafetyConfig
from headrace.gateway.accounts.account_store import AccountChanges
from headrace.gateway.accounts.canary_policies import canary_updater
from headrace.gateway.accounts.tenant_policies import budget_updater
from headrace.gateway.ledger.budgets import TenantBudgets
from headrace.gateway.routing.canary_routes import CanaryRoutes
from tests.support.admin_server import ADMIN, Administered, administered
from tests.support.running_server import asynchronous

MODELS = {"mini": ModelConfig(variants={"int4": {}})}
FALLING = {"limit_micros": 1000, "period": "day", "then": "mini@int4"}
CANARY = {"control": "mini", "candidate": "mini@int4"}


def canaries(running: Administered) -> dict[str, float]:
    routes = running.server.services.dispatcher.canaries.by_control
    return {control: each.percent for control, each in routes.items()}


@asynchronous
async def test_an_administrator_cannot_turn_on_what_may_change_answers(tmp_path: Path) -> None:
    lossless = SafetyConfig(lossless_only=True)
    async with administered(tmp_path, keys=(ADMIN,), models=MODELS, safety=lossless) as running:

        async def refused(path: str, body: dict[str, Any], why: str) -> int:
            answer = await running.admin("POST", path, body)
            message = answer.json["error"]["message"]
            assert why in message
            assert "lossless_only" in message
            return answer.status

        assert await refused("tenants", {"name": "acme", "budgets": [FALLING]}, "budgets[0].then") == 400
        assert await refused("tenants", {"name": "acme", "caches": {"semantic": "on"}}, "caches.semantic") == 400
        assert await refused("canary", CANARY, "A canary sends requests to another variant") == 409


@asynchronous
async def test_what_was_made_before_changes_no_answer_either(tmp_path: Path) -> None:
    async with administered(tmp_path, keys=(ADMIN,), models=MODELS) as running:
        await running.did("POST", "tenants", {"name": "acme", "budgets": [FALLING]})
        await running.did("POST", "canary", CANARY)
        assert canaries(running) == {"mini": 5.0}
    lossless = SafetyConfig(lossless_only=True)
    async with administered(tmp_path, keys=(ADMIN,), models=MODELS, safety=lossless) as running:
        assert canaries(running) == {}
        declared: dict[str, TenantBudgets | None] = {}
        take = budget_updater(running.administration.directory, declared.__setitem__, falls=False)
        record = running.administration.shared.get("tenant", "acme")
        take(AccountChanges(epoch=1, now=0.0, records=(record,), whole=True))
        found = declared["acme"]
        assert found is not None
        assert [(each.limit_micros, each.then) for each in found.budgets] == [(1000, "")]
        # With several processes, nothing compares the arms: only what was promoted is routed.
        routes, canary = CanaryRoutes(), running.administration.shared.get("canary", "mini")
        follow = canary_updater(routes, ("mini", "mini@int4"), measured=False)
        follow(AccountChanges(epoch=1, now=0.0, records=(canary,), whole=True))
        assert routes.by_control == {}
