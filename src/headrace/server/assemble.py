"""Builds the services of a gateway from its configuration and connects them. Starts nothing."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from headrace.config import Config
from headrace.gateway.accounts.account_services import AccountServices
from headrace.gateway.accounts.tenant_labels import TenantLabels
from headrace.gateway.accounts.tenant_policies import CacheModes, LimitScopes, budget_updater
from headrace.gateway.background_tasks import BackgroundTasks
from headrace.gateway.caches.exact.exact_cache import ExactCache
from headrace.gateway.caches.semantic.semantic_cache import SemanticCache
from headrace.gateway.database import Database
from headrace.gateway.degradation.ladder.levels import Ladder
from headrace.gateway.degradation.ladder.pressure import PressureMonitor
from headrace.gateway.flow.services import Services
from headrace.gateway.ledger.ledger import Ledger
from headrace.gateway.limits.rate_limiter import RateLimiter
from headrace.gateway.routing.dispatcher import Dispatcher
from headrace.gateway.serving.fleet import Fleet
from headrace.observe import metrics


def assemble(config: Config, fleet: Fleet, database: Database, environ: Mapping[str, str]) -> Services:
    """ConfigError where the environment lacks what the configuration names."""
    ledger = Ledger.from_config(config, database, environ)
    exact = ExactCache.from_config(config, database, environ)
    semantic = SemanticCache.from_config(config.cache.semantic, database, fleet)
    caches = {name: cache for name, cache in (("exact", exact), ("semantic", semantic)) if cache is not None}
    accounts = AccountServices.from_config(config, database, environ, caches)
    if exact is not None:
        exact.modes = replace(exact.modes, tenants=CacheModes(accounts.directory, "exact"))
    if semantic is not None:
        semantic.modes = replace(semantic.modes, tenants=CacheModes(accounts.directory, "semantic"))
    if ledger is not None:
        accounts.shared.listen(budget_updater(accounts.directory, ledger.declare))
    metrics.label_tenants(TenantLabels(config.admin.tenant_labels, given_up=metrics.forget_tenant).label)
    return Services(
        fleet=fleet,
        accounts=accounts,
        limiter=RateLimiter.from_config(config.limiting, environ),
        limit_scopes=LimitScopes.from_config(config),
        ledger=ledger,
        exact=exact,
        semantic=semantic,
        dispatcher=Dispatcher(config.routing, fleet),
        ladder=Ladder.from_config(config.surfaces),
        pressure=PressureMonitor(),
        shaping=config.shaping,
        fast=config.profiles.fast,
        background=BackgroundTasks(),
    )
