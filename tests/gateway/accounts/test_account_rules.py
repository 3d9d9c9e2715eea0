"""What must hold between tenants, keys, models and surfaces, and what settings mean to other parts."""

from __future__ import annotations

from pathlib import Path

import msgspec

from headrace.config import names_of
from headrace.config.tenant_section import BudgetConfig, CachesConfig, FastConfig, KeyConfig, TenantConfig
from headrace.gateway.accounts.account_rules import check_accounts
from headrace.gateway.accounts.directory import AccountDirectory, IdentifiedCaller
from headrace.gateway.accounts.key_secrets import make_secret
from headrace.gateway.accounts.tenant_policies import CacheModes, budget_updater, limit_scopes
from headrace.gateway.caches.cache_modes import CachePolicy
from headrace.gateway.ledger.budgets import BudgetBook, TenantBudgets
from headrace.gateway.limits.limit_scopes import LimitScope, LimitSet
from headrace.gateway.serving.exchange import Caller
from tests.support.accounts import CONFIG, WHO, declared, gateways
from tests.support.file_storage import asynchronous


def found(
    tenants: dict[str, TenantConfig] | None = None,
    keys: tuple[KeyConfig, ...] = (),
    fast: FastConfig | None = None,
) -> list[str]:
    config = msgspec.structs.replace(CONFIG, tenants=tenants or {}, keys=keys, fast=fast or FastConfig())
    return [where for where, _ in check_accounts(config, names_of(config))]


def test_a_fine_configuration_has_no_findings() -> None:
    tenants = {
        "red": TenantConfig(
            models=("mini", "draft"),
            surfaces=("chat",),
            profiles=("fast",),
            model_limits={"mini@int4": LimitSet(concurrent=1)},
            surface_limits={"voice": LimitSet(concurrent=1)},
            budgets=(
                BudgetConfig(limit_micros=5, period="day"),
                BudgetConfig(limit_micros=5, period="month", then="draft"),
                BudgetConfig(limit_micros=5, period="day", endpoint="/v1/completions"),
            ),
        )
    }
    keys = (declared("a", "a", tenant="red", surface="chat", surfaces=("chat",), models=("mini@int4",)),)
    assert found(tenants, keys, FastConfig(variant="@int4", variants={"draft": "mini@int4"})) == []


def test_each_mistake_is_found_where_it_is() -> None:
    tenants = {
        "other": TenantConfig(),
        "a b": TenantConfig(),
        make_secret(): TenantConfig(),
        "red": TenantConfig(
            models=("maxi",),
            surfaces=("radio",),
            profiles=("slow",),
            model_limits={"maxi": LimitSet()},
            surface_limits={"radio": LimitSet()},
            budgets=(
                BudgetConfig(limit_micros=5, period="day", then="maxi"),
                BudgetConfig(limit_micros=6, period="day"),
            ),
        ),
    }
    keys = (
        declared("key_0123456789abcdef", "a", surface="chat", surfaces=("voice",)),
        declared("b", "b", models=("maxi",)),
    )
    fast = FastConfig(variant="@golden2", variants={"maxi": "mini", "mini": "maxi"})
    where = found(tenants, keys, fast)
    assert sorted(where) == sorted(
        [
            "tenants.other",
            'tenants."a b"',
            f"tenants.{list(tenants)[2]}",
            "tenants.red.models",
            "tenants.red.surfaces",
            "tenants.red.profiles",
            "tenants.red.model_limits.maxi",
            "tenants.red.surface_limits.radio",
            "tenants.red.budgets[0].then",
            "tenants.red.budgets[1]",
            "keys[0].name",
            "keys[0].surface",
            "keys[1].models",
            "fast.variants.maxi",
            "fast.variants.mini",
            "fast.variant",
        ]
    )


def test_limits_of_a_request_are_the_tenants_the_keys_and_those_of_its_model_and_surface() -> None:
    one, two, three, four, five = (LimitSet(concurrent=n) for n in range(1, 6))
    caller = IdentifiedCaller(
        key="k",
        tenant="red",
        limits=two,
        settings=TenantConfig(
            limits=one, model_limits={"mini": three, "mini@int4": four}, surface_limits={"voice": five}
        ),
    )
    assert limit_scopes(caller, "mini@int4", "voice") == (
        LimitScope("tenant", "red", one),
        LimitScope("key", "k", two),
        LimitScope("model", "red/mini", three),
        LimitScope("model", "red/mini@int4", four),
        LimitScope("surface", "red/voice", five),
    )
    assert limit_scopes(caller, "draft", "chat") == (LimitScope("tenant", "red", one), LimitScope("key", "k", two))
    assert limit_scopes(IdentifiedCaller(), "mini", "chat") == ()
    assert limit_scopes(Caller(), "mini", "chat") == ()


def test_budgets_become_the_ledgers_and_follow_changes(tmp_path: Path) -> None:
    def settings(limit: int, **fields: object) -> TenantConfig:
        return TenantConfig(budgets=(BudgetConfig(limit_micros=limit, period="day"),), **fields)  # type: ignore[arg-type]

    async def test() -> None:
        async with gateways(tmp_path) as standing:
            gateway = await standing.gateway(keys=(declared(),), tenants={"blue": settings(7, budget_fail="closed")})
            accounts = BudgetBook()
            gateway.shared.listen(budget_updater(gateway.directory, accounts.declare))
            assert [each.limit_micros for each in accounts.of("blue").budgets] == [7]
            assert accounts.of("blue").when_down == "closed"
            await gateway.operations.create_tenant(WHO, "red", settings(5))
            assert [each.limit_micros for each in accounts.of("red").budgets] == [5]
            await gateway.operations.change_tenant(WHO, "red", lambda _: settings(6))
            assert accounts.of("red") == TenantBudgets(settings(6).budgets, settings(6).budget_fail)
            await gateway.operations.delete_tenant(WHO, "red")
            assert accounts.of("red").budgets == ()
            assert [each.limit_micros for each in accounts.of("blue").budgets] == [7]

    asynchronous(test)


def test_modes_of_caches_follow_the_tenants_settings() -> None:
    tenants = {
        "red": TenantConfig(caches=CachesConfig(exact="off", semantic="on")),
        "blue": TenantConfig(caches=CachesConfig(exact="record")),
        "green": TenantConfig(),
    }
    directory = AccountDirectory((declared(),), tenants, {})
    exact, semantic = CacheModes(directory, "exact"), CacheModes(directory, "semantic")
    assert dict(exact) == {"red": "off", "blue": "record"}
    assert dict(semantic) == {"red": "on"}
    assert len(exact) == 2
    modes = CachePolicy(mode="on", tenants=exact)
    assert not modes.access("red").reads
    assert not modes.access("blue").serves
    assert modes.access("green").serves
    assert modes.access("nobody").serves
