"""Services: everything that the stages of the flow use, built elsewhere. Starts and closes it in order."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.config.shaping_section import ProfileConfig, ShapingConfig
from headrace.gateway.accounts.account_services import AccountServices
from headrace.gateway.accounts.adapter_operations import AdapterOperations
from headrace.gateway.accounts.pin_operations import PinOperations
from headrace.gateway.accounts.tenant_policies import LimitScopes
from headrace.gateway.background_tasks import BackgroundTasks
from headrace.gateway.caches.cache_maintenance import sweep_forever
from headrace.gateway.caches.exact.exact_cache import ExactCache
from headrace.gateway.caches.results.result_cache import ResultCache
from headrace.gateway.degradation.ladder.levels import Ladder
from headrace.gateway.degradation.ladder.pressure import PressureMonitor, poll_statistics
from headrace.gateway.flow.answer_flow import PipelineHost
from headrace.gateway.flow.answer_observer import AnswerObserver
from headrace.gateway.ledger.prices import PriceBook
from headrace.gateway.ledger.request_ledger import RequestLedger
from headrace.gateway.limits.rate_limiter import RateLimiter
from headrace.gateway.observation.objective_watch import ObjectiveWatch
from headrace.gateway.observation.observation_keeper import ObservationKeeper
from headrace.gateway.observation.request_observer import RequestObserver
from headrace.gateway.routing.dispatcher import Dispatcher
from headrace.gateway.serving.capacity import CapacityMonitor
from headrace.gateway.serving.fleet import Fleet
from headrace.observe.gpus.gpu_watch import GpuWatch

if TYPE_CHECKING:
    from headrace.gateway.caches.catalogues.catalogues import Catalogues
    from headrace.gateway.caches.semantic.semantic_cache import SemanticCache
    from headrace.gateway.serving.registry.worker_discovery import WorkerDiscovery


class Services(msgspec.Struct, kw_only=True):
    """All of it belongs to one event loop."""

    fleet: Fleet
    accounts: AccountServices
    limiter: RateLimiter
    limit_scopes: LimitScopes
    ledger: RequestLedger | None  # None: nothing is charged
    prices: PriceBook
    currency: str
    exact: ExactCache | None
    semantic: SemanticCache | None
    results: ResultCache | None
    catalogues: Catalogues | None = None
    dispatcher: Dispatcher
    ladder: Ladder
    pressure: PressureMonitor
    shaping: ShapingConfig
    fast: ProfileConfig
    background: BackgroundTasks
    observer: RequestObserver
    capacity: CapacityMonitor
    gpus: GpuWatch
    discovery: WorkerDiscovery | None = None  # None: no model takes workers from a registry
    objective_watch: ObjectiveWatch | None = None
    answer_observers: tuple[AnswerObserver, ...] = ()
    loops: tuple[Callable[[], Coroutine[Any, Any, None]], ...] = ()  # further work, from start to close
    adapters: AdapterOperations | None = None
    pins: PinOperations | None = None  # None: another process pins prompts
    keeper: ObservationKeeper | None = None  # None: another process of this server stores what was observed
    pipelines: PipelineHost | None = None
    answer_tokens: Mapping[str, int] = {}  # by surface, of requests that set no max_tokens
    # The measured price of a faster option of a variant, in short; None in front processes.
    option_note: Callable[[str, str], dict[str, Any] | None] | None = None

    @property
    def caches(self) -> Mapping[str, ExactCache | SemanticCache | ResultCache]:
        named = (("exact", self.exact), ("semantic", self.semantic), ("results", self.results))
        return {name: cache for name, cache in named if cache is not None}

    async def start(self) -> None:
        """Call before requests are taken. A disk that cannot be used does not fail the start; it is retried later."""
        await self.accounts.start()
        await self.limiter.open()
        if self.ledger is not None:
            await self.ledger.open()
        run = self.background.run_until_close
        if self.pins is not None:
            await self.pins.prompts.start()
            run(self.pins.prompts.run())
        if self.ladder.is_used:
            served = self.fleet.served.items()
            run(poll_statistics(self.pressure, {name: each for name, each in served if each.upstream is None}))
        run(self.capacity.run())
        if not self.dispatcher.router.idle:
            run(self.dispatcher.watch_health())
        run(sweep_forever(self.caches))
        if self.observer.exporter is not None:
            run(self.observer.exporter.run())
        if self.keeper is not None:
            run(self.keeper.run())
        if self.objective_watch is not None:
            run(self.objective_watch.run())
        for loop in self.loops:
            run(loop())
        if self.pipelines is not None:
            await self.pipelines.start()

    async def close(self) -> None:
        """Call after the last request. Writes down what was used, within bounded time."""
        await self.background.close()
        if self.pipelines is not None:
            await self.pipelines.close()
        await self.observer.close()
        if self.keeper is not None:
            await self.keeper.close()
        for cache in self.caches.values():
            await cache.close()
        if self.ledger is not None:
            await self.ledger.close()
        await self.limiter.close()
        await self.accounts.close()
