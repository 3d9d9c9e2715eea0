"""Translates a tenant's settings for limits, budgets and caches.

Those packages need not know how tenants are declared. The results follow the directory: a change through the admin API
applies to the next request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from msgspec.structs import replace

from headrace.config import Config, LimitSet
from headrace.config.tenant_section import TenantConfig
from headrace.gateway.accounts.account_store import AccountChanges
from headrace.gateway.accounts.directory import STANDARD, UNLIMITED, AccountDirectory, IdentifiedCaller
from headrace.gateway.caches.cache_modes import CacheMode
from headrace.gateway.ledger.budgets import TenantBudgets
from headrace.gateway.limits.limit_scopes import LimitScope
from headrace.gateway.serving.exchange import Caller


def limit_scopes(caller: Caller, model: str, surface: str) -> tuple[LimitScope, ...]:
    """Return the limits of a request by its tenant and key. `model`: full name of the variant.

    A limit on MODEL counts its variants together, a limit on MODEL@VARIANT only that variant.
    """
    if not isinstance(caller, IdentifiedCaller):
        return ()
    settings, scopes = caller.settings, list[LimitScope]()
    if settings.limits != UNLIMITED:
        scopes.append(LimitScope("tenant", caller.tenant, settings.limits))
    if caller.limits != UNLIMITED:
        scopes.append(LimitScope("key", caller.key, caller.limits))
    names = dict.fromkeys((model.partition("@")[0], model)) if settings.model_limits else ()
    for name in names:
        if name in settings.model_limits:
            scopes.append(LimitScope("model", f"{caller.tenant}/{name}", settings.model_limits[name]))
    if surface in settings.surface_limits:
        scopes.append(LimitScope("surface", f"{caller.tenant}/{surface}", settings.surface_limits[surface]))
    return tuple(scopes)


class LimitScopes:
    """The limits that a request comes under: its tenant's and key's, and those of the model and the surface."""

    def __init__(self, models: Mapping[str, LimitSet], surfaces: Mapping[str, LimitSet]) -> None:
        self._models = {name: LimitScope("model", name, each) for name, each in models.items() if each != UNLIMITED}
        self._surfaces = {
            name: LimitScope("surface", name, each) for name, each in surfaces.items() if each != UNLIMITED
        }

    @classmethod
    def from_config(cls, config: Config) -> LimitScopes:
        return cls(
            {name: model.limits for name, model in config.models.items()},
            {name: surface.limits for name, surface in config.surfaces.items()},
        )

    def scopes(self, caller: Caller, variant: str, surface: str) -> Sequence[LimitScope]:
        own = limit_scopes(caller, variant, surface)
        if not (self._models or self._surfaces):
            return own
        server = (self._models.get(variant.partition("@")[0]), self._surfaces.get(surface))
        return (*own, *(scope for scope in server if scope is not None))


def settings_of(caller: Caller) -> TenantConfig:
    """Return the settings of the caller's tenant; the defaults for a caller without one."""
    return caller.settings if isinstance(caller, IdentifiedCaller) else STANDARD


def budget_updater(
    directory: AccountDirectory, declare: Callable[[str, TenantBudgets | None], object], *, falls: bool = True
) -> Callable[[AccountChanges], None]:
    """Declare the configured tenants' budgets and return a listener that follows changes of the others.

    `declare`: Ledger.declare. `falls`: a spent budget may fall back to another variant.
    """
    for name, settings in directory.declared_tenants.items():
        declare(name, _budgets(settings, falls))
    known: set[str] = set()

    def take(changes: AccountChanges) -> None:
        changed = {record.id for record in changes.records if record.kind == "tenant"}
        for name in changed | (known if changes.whole else set[str]()):
            if name in directory.declared_tenants:
                continue  # the configuration takes precedence
            if directory.made_tenant(name) is None:
                known.discard(name)
                declare(name, None)
            else:
                known.add(name)
                declare(name, _budgets(directory.settings_of(name), falls))

    return take


def _budgets(settings: TenantConfig, falls: bool) -> TenantBudgets:
    budgets = settings.budgets
    if not falls:
        budgets = tuple(replace(budget, then="", allowance_micros=0) for budget in budgets)
    return TenantBudgets(budgets, settings.budget_fail)


CacheName = Literal["exact", "semantic", "results"]


class CacheModes(Mapping[str, CacheMode]):
    """A cache's modes by tenant, for tenants with a mode of their own."""

    def __init__(self, directory: AccountDirectory, cache: CacheName) -> None:
        self._directory = directory
        self._cache = cache

    def _mode(self, tenant: str) -> CacheMode | None:
        return getattr(self._directory.settings_of(tenant).caches, self._cache)

    def __getitem__(self, tenant: str) -> CacheMode:
        mode = self._mode(tenant)
        if mode is None:
            raise KeyError(tenant)
        return mode

    def get(self, key: str, default: Any = None) -> Any:  # every request asks, and Mapping's raises a KeyError
        return self._mode(key) or default

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._directory.tenants() if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, tenant: object) -> bool:
        return isinstance(tenant, str) and self.get(tenant) is not None
