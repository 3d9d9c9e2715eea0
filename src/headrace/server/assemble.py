"""Builds the services of a gateway from its configuration and connects them. Starts nothing.

A part that only some configurations have is imported by the function that builds it: a start takes as long as its
imports. Whether its section makes sense is checked before, by `config_checks`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from headrace.config import Config, names_of
from headrace.config.environment import required_secret
from headrace.gateway.accounts.access import allows_model
from headrace.gateway.accounts.account_services import AccountServices
from headrace.gateway.accounts.account_store import AccountStore
from headrace.gateway.accounts.adapter_operations import AdapterOperations
from headrace.gateway.accounts.admin_operations import Actor
from headrace.gateway.accounts.canary_policies import canary_updater
from headrace.gateway.accounts.pin_operations import PinOperations
from headrace.gateway.accounts.tenant_labels import TenantLabels
from headrace.gateway.accounts.tenant_policies import CacheModes, CacheName, LimitScopes, budget_updater
from headrace.gateway.background_tasks import BackgroundTasks
from headrace.gateway.caches.exact.exact_cache import ExactCache
from headrace.gateway.caches.results.result_cache import ResultCache, declared_lifetimes_s
from headrace.gateway.database import Database
from headrace.gateway.degradation.ladder.levels import Ladder
from headrace.gateway.degradation.ladder.pressure import PressureMonitor
from headrace.gateway.flow.services import Services
from headrace.gateway.ledger.ledger import Ledger
from headrace.gateway.ledger.prices import PriceBook
from headrace.gateway.ledger.request_ledger import RequestLedger
from headrace.gateway.limits.rate_limiter import RateLimiter, SharedLimitStore
from headrace.gateway.observation.feedback_store import FeedbackStore
from headrace.gateway.observation.latency_history import LatencyHistory
from headrace.gateway.observation.objective_watch import ObjectiveWatch
from headrace.gateway.observation.observation_keeper import ObservationKeeper
from headrace.gateway.observation.request_observer import RequestObserver
from headrace.gateway.routing.dispatcher import Dispatcher
from headrace.gateway.serving.capacity import CapacityMonitor
from headrace.gateway.serving.fleet import Fleet
from headrace.gateway.serving.pinned_prompts import PinnedPrompts
from headrace.lab.online.lab_store import SqliteLabStore
from headrace.lab.online.online_checks import failed_check
from headrace.lab.online.online_lab import OnlineLab
from headrace.lab.recording.recorder import Recorder
from headrace.observe import computed_metrics, metrics
from headrace.observe.gpus.gpu_watch import GpuWatch

if TYPE_CHECKING:
    from headrace.gateway.caches.catalogues.catalogues import Catalogues
    from headrace.gateway.caches.semantic.semantic_cache import SemanticCache
    from headrace.gateway.serving.registry.worker_discovery import WorkerDiscovery

Loop = Callable[[], Coroutine[Any, Any, None]]


class SharedState(NamedTuple):
    """State that another process of this server owns."""

    limits: SharedLimitStore | None  # None: the configuration's Redis
    ledger: RequestLedger
    accounts: AccountStore


def assemble(
    config: Config, fleet: Fleet, database: Database, environ: Mapping[str, str], *, shared: SharedState | None = None
) -> Services:
    """ConfigError where the environment lacks what the configuration names. `shared` replaces the stores of a front
    process."""
    own_ledger = None if shared is not None else Ledger.from_config(config, database, environ)
    ledger = shared.ledger if shared is not None and Ledger.is_kept(config) else own_ledger
    exact = ExactCache.from_config(config, database, environ)
    semantic = _semantic_cache(config, database, fleet)
    used = (
        config.cache.results.mode != "off"
        or bool(config.pipelines)
        or any(each.caches.results not in (None, "off") for each in config.tenants.values())
    )
    kept_s = declared_lifetimes_s(config.pipelines, config.tools)
    results = ResultCache.from_config(config.cache.results, database, environ, is_used=used, kept_s=kept_s)
    named: tuple[tuple[CacheName, ExactCache | SemanticCache | ResultCache | None], ...] = (
        ("exact", exact),
        ("semantic", semantic),
        ("results", results),
    )
    caches = {name: cache for name, cache in named if cache is not None}
    store = None if shared is None else shared.accounts
    accounts = AccountServices.from_config(config, database, environ, caches, store=store)
    for name, cache in named:
        if cache is not None:
            cache.modes = replace(cache.modes, tenants=CacheModes(accounts.directory, name))
    lossless = config.safety.lossless_only  # also for what was made through the admin API before
    if own_ledger is not None:
        accounts.shared.listen(budget_updater(accounts.directory, own_ledger.declare, falls=not lossless))
    capacity = CapacityMonitor(fleet, shed_ttft_s=config.server.shed_ttft_s)
    dispatcher = Dispatcher(config.routing, fleet, capacity=capacity.of)
    dispatcher.check_answers(failed_check)
    dispatcher.canaries.may_use = allows_model
    if not lossless:
        measured = config.server.processes == 1
        accounts.shared.listen(canary_updater(dispatcher.canaries, fleet.served, measured=measured))
    directory = accounts.directory
    recorder = Recorder.from_config(config, environ, is_recorded=lambda tenant: directory.settings_of(tenant).record)
    recorder.follow(accounts.shared)
    metrics.label_tenants(TenantLabels(config.admin.tenant_labels, given_up=_forget_tenant).label)
    observer = RequestObserver.from_config(config, environ)
    computed_metrics.collector.book, computed_metrics.collector.objectives = observer.latencies, observer.objectives
    keeper = None
    if shared is None:
        keeper = _keeper(config, observer, database)
        observer.remember = keeper.feedback.note
    autoscaling = _autoscaling(config, fleet) if shared is None else ()
    discovery = _worker_discovery(config, fleet, environ)
    discovering = () if discovery is None else (discovery.run,)
    catalogues = _catalogues(config)
    gpus = GpuWatch()
    watching = (gpus.run,) if shared is None else ()
    services = Services(
        fleet=fleet,
        accounts=accounts,
        limiter=RateLimiter.from_config(config.limiting, environ, shared=None if shared is None else shared.limits),
        limit_scopes=LimitScopes.from_config(config),
        ledger=ledger,
        prices=PriceBook.from_config(config.prices, config.models),
        currency=config.ledger.currency,
        exact=exact,
        semantic=semantic,
        results=results,
        catalogues=catalogues,
        dispatcher=dispatcher,
        ladder=Ladder.from_config(config.surfaces),
        pressure=PressureMonitor(),
        shaping=config.shaping,
        fast=config.profiles.fast,
        background=BackgroundTasks(),
        observer=observer,
        discovery=discovery,
        capacity=capacity,
        gpus=gpus,
        # A front process forwards its requests, and the process that owns the state watches them.
        answer_observers=(recorder,),
        loops=(recorder.run, *watching, *autoscaling, *discovering, *(() if catalogues is None else (catalogues.run,))),
        objective_watch=None if shared is not None else _objective_watch(config, observer, accounts, environ),
        adapters=AdapterOperations(accounts.shared, accounts.directory, fleet, config.models),
        pins=None if shared is not None else _pins(config, fleet, accounts),
        keeper=keeper,
        answer_tokens={name: each.max_tokens for name, each in config.surfaces.items() if each.max_tokens is not None},
    )
    if config.pipelines:
        from headrace.pipelines.pipelines import Pipelines

        services.pipelines = Pipelines.from_config(config, services, environ)
    return services


def assemble_lab(config: Config, services: Services, database: Database, is_idle: Callable[[], bool]) -> OnlineLab:
    """Build what proves itself on live traffic, and let it see the answers of these services. `is_idle`: whether the
    server runs no request."""
    lab = OnlineLab.from_config(config, services, SqliteLabStore(database), is_idle=is_idle)
    services.answer_observers += lab.observers
    services.loops += lab.loops
    if services.keeper is not None and lab.canaries is not None:
        services.keeper.feedback.heard = lab.canaries.hear
    return lab


def _semantic_cache(config: Config, database: Database, fleet: Fleet) -> SemanticCache | None:
    if not config.cache.semantic.embedder:
        return None
    from headrace.gateway.caches.semantic.semantic_cache import SemanticCache

    return SemanticCache.from_config(config.cache.semantic, database, fleet)


def _catalogues(config: Config) -> Catalogues | None:
    if not config.catalogues:
        return None
    from headrace.gateway.caches.catalogues.catalogues import Catalogues

    return Catalogues(config.catalogues)


def _autoscaling(config: Config, fleet: Fleet) -> tuple[Loop, ...]:
    if all(model.autoscale is None for model in config.models.values()):
        return ()
    from headrace.gateway.serving.autoscaler import Autoscaler

    return (Autoscaler.from_config(config, fleet).run,)


def _worker_discovery(config: Config, fleet: Fleet, environ: Mapping[str, str]) -> WorkerDiscovery | None:
    if not any(model.discover_workers for model in config.models.values()):
        return None
    from headrace.gateway.serving.registry.worker_discovery import WorkerDiscovery

    return WorkerDiscovery.from_config(config, fleet, environ)


def _forget_tenant(label: str) -> None:
    metrics.forget_tenant(label)
    computed_metrics.collector.forget_tenant(label)


def _pins(config: Config, fleet: Fleet, accounts: AccountServices) -> PinOperations:
    prompts = PinnedPrompts(fleet, config.models, start_s=config.server.worker_s)
    return PinOperations(accounts.shared, accounts.directory, prompts, served=names_of(config))


def _keeper(config: Config, observer: RequestObserver, database: Database) -> ObservationKeeper:
    observe = config.observe
    history = LatencyHistory(
        database,
        observer.latencies,
        observer.objectives,
        days=observe.history_days,
        total_bytes=observe.history_bytes,
    )
    feedback = FeedbackStore(database, requests=observe.feedback_requests, outcomes=observe.feedback_outcomes)
    return ObservationKeeper(history, feedback, restores=bool(config.slo))


def _objective_watch(
    config: Config, observer: RequestObserver, accounts: AccountServices, environ: Mapping[str, str]
) -> ObjectiveWatch | None:
    if not config.slo:
        return None
    alerts, headers = config.observe.alerts, dict[str, str]()
    url = ""
    if alerts.webhook_url_env is not None:
        url = required_secret(environ, alerts.webhook_url_env, "observe.alerts.webhook_url_env")
        if (header := alerts.webhook_header_env) is not None:
            headers["authorization"] = required_secret(environ, header, "observe.alerts.webhook_header_env")

    async def set_fast(seconds: float, reason: str) -> None:
        await accounts.operations.set_fast(Actor("objectives", ""), None, on=True, ttl_s=seconds, reason=reason)

    return ObjectiveWatch(
        observer.objectives,
        url=url,
        headers=headers,
        fast=[name for name, each in config.slo.items() if each.fast_mode],
        set_fast=set_fast,
    )
