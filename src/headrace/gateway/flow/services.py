"""Everything that a request meets on its way, put together from a configuration.

Owns which parts there are, the order in which they are started and ended, and the small translations between them (a
tenant's settings, a variant's name, a price). What a part does is its own package's, and what a request meets first the
flow's. All of it belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from msgspec.structs import replace

from headrace.config import Config, ConfigError, SurfaceConfig, names_of
from headrace.config.tenant_section import TenantConfig
from headrace.engine.interface.sampling import SamplingParams
from headrace.gateway.accounts.account_store import AccountStore
from headrace.gateway.accounts.directory import STANDARD, UNLIMITED, IdentifiedCaller
from headrace.gateway.accounts.tenant_labels import TenantLabels
from headrace.gateway.accounts.tenant_policies import CacheModes, budget_updater, limit_scopes
from headrace.gateway.api_errors import ApiError
from headrace.gateway.caches.cache_modes import CachePolicy
from headrace.gateway.caches.exact.entry_store import EntryStore as CacheStore
from headrace.gateway.caches.exact.entry_store import GuardedStore
from headrace.gateway.caches.exact.exact_cache import ExactCache, Options, seconds_of
from headrace.gateway.caches.exact.memory import MemoryStore
from headrace.gateway.caches.exact.redis import RedisStore
from headrace.gateway.caches.exact.redis import connect as connect_redis
from headrace.gateway.caches.exact.sqlite import SqliteStore
from headrace.gateway.caches.semantic.embedder import ServedEmbedder
from headrace.gateway.caches.semantic.semantic_cache import SemanticCache, SemanticLookup
from headrace.gateway.caches.semantic.semantic_entry import StoredAnswer as Kept
from headrace.gateway.caches.semantic.semantic_entry import storable_answer
from headrace.gateway.caches.semantic.semantic_options import SemanticOptions
from headrace.gateway.caches.semantic.semantic_store import SemanticStore
from headrace.gateway.database import Database
from headrace.gateway.degradation.ladder.ladder_config import resolve_ladder
from headrace.gateway.degradation.ladder.levels import Ladder
from headrace.gateway.degradation.ladder.pressure import PressureMonitor, poll_statistics
from headrace.gateway.degradation.shaping.conversation import ChatMessage
from headrace.gateway.degradation.shaping.history import Summariser
from headrace.gateway.ledger.budget_alerts import AlertSender, AlertWebhook
from headrace.gateway.ledger.ledger import Ledger, LedgerError
from headrace.gateway.ledger.ledger_bounds import LedgerBounds
from headrace.gateway.ledger.ledger_records import LedgerEntry
from headrace.gateway.ledger.periods import Calendar
from headrace.gateway.ledger.prices import PriceBook, make_price
from headrace.gateway.ledger.sqlite import SqliteLedgerStore
from headrace.gateway.limits.limit_scopes import LimitScope
from headrace.gateway.limits.lua_script import script
from headrace.gateway.limits.rate_limiter import RateLimiter
from headrace.gateway.limits.redis_calls import RedisCallBatcher
from headrace.gateway.limits.redis_limits import RedisLimitStore
from headrace.gateway.requests.text_request import Choice, TextRequest, TokenUsage
from headrace.gateway.routing.composite_answerer import Answerer, collect_choices, derive_exchange
from headrace.gateway.routing.health import VariantHealth
from headrace.gateway.routing.plan_composer import PlanComposer, hedge_policies
from headrace.gateway.routing.router import RoutePlan, Router
from headrace.gateway.serving.engine_answering import EngineAnswering
from headrace.gateway.serving.exchange import Caller, Exchange
from headrace.gateway.serving.fleet import Engine, Fleet
from headrace.gateway.serving.upstreams.upstream_generation import UpstreamGeneration
from headrace.gateway.serving.upstreams.upstream_generation import count_prompt_tokens as upstream_prompt_tokens
from headrace.observe import metrics
from headrace.server.admin.administration import Administration, sqlite_store
from headrace.server.admin.usage_query import LedgerUsage
from headrace.surfaces import SURFACES

log: Final = logging.getLogger(__name__)

_BACKGROUND: Final = 1024  # pieces of work that nobody waits for, at once; further ones are left out
_SWEEP: Final = 60.0  # seconds between two looks at what has expired in the caches
_DRAIN: Final = 5.0  # seconds that such work has at the end
_SUMMARY: Final = (
    "Summarise the conversation below in a few short sentences. Keep names, numbers, decisions and open questions."
)


class Parts:
    """ConfigError where the environment lacks what the configuration names."""

    def __init__(self, config: Config, fleet: Fleet, database: Database, environ: Mapping[str, str]) -> None:
        self.config = config
        self.fleet = fleet
        self._environ = environ
        self._work: set[asyncio.Task[Any]] = set()  # that nobody waits for
        self._running: list[asyncio.Task[None]] = []  # for as long as the server does

        self.ledger = self._ledger(database)
        self.limiter = self._limiter()
        self.exact, self.semantic = self._exact(database), self._semantic(database)
        self.administration = Administration(
            config,
            self._tenants(database),
            environ,
            keys=config.keys,
            tenants=config.tenants,
            admin=config.admin,
            fast=config.fast,
            served=names_of(config),
            usage=None if self.ledger is None else LedgerUsage(self.ledger),
            caches={
                name: cache for name, cache in (("exact", self.exact), ("semantic", self.semantic)) if cache is not None
            },
            events=config.cache.exact.events,
        )
        self.directory = self.administration.directory
        self.switches = self.administration.switches
        self._set_modes()
        if self.ledger is not None:
            self.administration.shared.listen(budget_updater(self.directory, self.ledger.declare))
        labels = TenantLabels(config.admin.tenant_labels, given_up=metrics.forget_tenant)
        metrics.label_tenants(labels.label)

        self.health = VariantHealth(config.routing.breaker, config.routing.health, changed=_breaker_changed)
        self.router = Router(config.routing, self._why_not)
        self._hedgings = hedge_policies(config.routing.hedges, self._idle)
        upstreams = [name for name, served in fleet.served.items() if served.upstream is not None]
        self._composer = PlanComposer(self._make, self.health, self._hedgings, own_breakers=upstreams)

        ladders = {name: resolve_ladder(name, config.surfaces.get(name) or SurfaceConfig()) for name in SURFACES}
        self._ladders = {name: options for name, options in ladders.items() if options.steps}
        self.ladder = Ladder(self._ladders)
        self.pressure = PressureMonitor()
        self.shaping = config.shaping
        self.fast_options = config.profiles.fast
        self._model_scopes = {
            name: LimitScope("model", name, model.limits)
            for name, model in config.models.items()
            if model.limits != UNLIMITED
        }
        self._surface_scopes = {
            name: LimitScope("surface", name, surface.limits)
            for name, surface in config.surfaces.items()
            if surface.limits != UNLIMITED
        }

    # Made of the configuration

    def _secret(self, variable: str, what: str) -> str:
        found = self._environ.get(variable)
        if not found:
            raise ConfigError(f"{what}: the environment variable {variable} is not set, or empty")
        return found

    def _ledger(self, database: Database) -> Ledger | None:
        config = self.config
        ledger = config.ledger
        wanted = (
            bool(config.prices or config.tenants or config.keys) if ledger.keeps == "auto" else ledger.keeps == "on"
        )
        if not wanted:
            return None
        prices = PriceBook(
            {
                name: make_price(
                    input=each.input,
                    cached=each.cached,
                    output=each.output,
                    second=each.second,
                    hit_percent=each.hit_percent,
                )
                for name, each in config.prices.items()
            }
        )
        store: Any
        if ledger.store == "postgres":
            from headrace.gateway.ledger.postgres import PostgresLedgerStore

            dsn = self._secret(ledger.dsn_env, "ledger.dsn_env")
            store = PostgresLedgerStore(dsn, schema=ledger.schema, wait_s=ledger.wait_ms / 1e3)
        else:
            store = SqliteLedgerStore(database)
        webhook = None
        if ledger.webhook_url_env is not None:
            headers: dict[str, str] = {}
            if ledger.webhook_header_env is not None:
                headers["authorization"] = self._secret(ledger.webhook_header_env, "ledger.webhook_header_env")
            webhook = AlertWebhook(url=self._secret(ledger.webhook_url_env, "ledger.webhook_url_env"), headers=headers)
        return Ledger(
            store,
            prices=prices,
            calendar=Calendar(offset_minutes=ledger.utc_offset_minutes),
            journal=config.storage.path / "ledger.journal",
            bounds=LedgerBounds(
                exchanges=ledger.exchanges,
                wait_s=ledger.wait_ms / 1e3,
                gather_s=ledger.gather_ms / 1e3,
                sync_s=ledger.sync_s,
                keep_days=ledger.keep_days,
            ),
            courier=AlertSender(store, webhook, count=lambda outcome: metrics.of(metrics.alerts, outcome).inc()),
            count=lambda event, number: metrics.of(metrics.ledger, event).inc(number),
        )

    def _limiter(self) -> RateLimiter:
        limiting = self.config.limiting
        shared = None
        if limiting.redis_env is not None:
            url = self._secret(limiting.redis_env, "limiting.redis_env")
            calls = RedisCallBatcher(url, script(), bound_s=limiting.wait_ms / 1e3)
            shared = RedisLimitStore(calls, prefix=limiting.namespace)
        return RateLimiter(
            shared=shared,
            patience_s=limiting.patience_s,
            note=lambda event, what: metrics.of(metrics.limits, event, what).inc(),
        )

    def _exact(self, database: Database) -> ExactCache | None:
        """Also where nobody uses it yet: a tenant's mode can be changed while the server runs."""
        config = self.config.cache.exact
        modes = [config.mode, *(tenant.caches.exact for tenant in self.config.tenants.values())]
        used = any(mode not in (None, "off") for mode in modes)
        store: CacheStore
        if config.store == "redis":
            if not (used or self._environ.get(config.redis_env)):
                return None
            url = self._secret(config.redis_env, "cache.exact.redis_env")
            store = RedisStore(
                connect_redis(url, seconds=config.wait_ms / 1e3),
                entry_bytes=config.entry_bytes,
                bound_s=config.wait_ms / 1e3,
            )
        elif config.store == "sqlite":
            store = SqliteStore(
                database, most_bytes=config.bytes, tenant_bytes=config.tenant_bytes, bound_s=config.wait_ms / 1e3
            )
        else:
            store = MemoryStore(most_bytes=config.bytes, tenant_bytes=config.tenant_bytes)
        secret = "" if config.secret_env is None else self._secret(config.secret_env, "cache.exact.secret_env")
        return ExactCache(
            GuardedStore(
                store,
                get_s=None if config.store == "memory" else config.wait_ms / 1e3,
                failed=lambda call: metrics.of(metrics.cache_failures, "exact", call).inc(),
            ),
            CachePolicy(mode=config.mode, share=config.share, salt="exact"),
            options=Options(
                ttl_s=seconds_of(config.ttl),
                tag_ttls={tag: seconds_of(span) for tag, span in config.tags.items()},
                events=config.events,
                repeatable_only=config.repeatable_only,
                joins=config.joins,
                entry_bytes=config.entry_bytes,
                stale_s=0.0 if config.stale is None else seconds_of(config.stale),
                secret=secret.encode(),
            ),
            note=lambda outcome, tenant: metrics.of(metrics.caches, "exact", outcome).inc(),
        )

    def _semantic(self, database: Database) -> SemanticCache | None:
        """Wherever there is an encoder for it: a tenant's mode can be changed while the server runs."""
        config = self.config.cache.semantic
        if not config.embedder:
            return None
        encoder = self.fleet.served.get(config.embedder)
        if encoder is None or encoder.kind != "encoder":
            raise ConfigError(f"cache.semantic.embedder: expected a served encoder, found '{config.embedder}'")
        options = SemanticOptions(
            mode=config.mode,
            share=config.share,
            serve=config.serve,
            delta=config.delta,
            per=config.per,
            threshold=config.threshold,
            floor=config.floor,
            nearest=config.nearest,
            guards=config.guards,
            check_share=config.check_share,
            sampled=config.sampled,
            tools=config.tools,
            surfaces=config.surfaces,
            policy=config.policy,
            entries=config.entries,
            tenant_bytes=config.tenant_bytes,
            total_bytes=config.total_bytes,
            ttl_s=seconds_of(config.ttl),
            tag_ttl_s={tag: seconds_of(span) for tag, span in config.tags.items()},
            vectors=config.vectors,
            embed_wait_s=config.wait_ms / 1e3,
        )
        return SemanticCache(
            options,
            store=SemanticStore(database),
            counted=lambda table, name: metrics.of(metrics.semantic, table, name).inc(),
        )

    def _tenants(self, database: Database) -> AccountStore:
        admin = self.config.admin
        if admin.store == "sqlite":
            return sqlite_store(database, admin)
        from headrace.gateway.accounts.account_store import AuditRetention
        from headrace.gateway.accounts.postgres import PostgresAccountStore

        return PostgresAccountStore(
            self._secret(admin.dsn_env, "admin.dsn_env"),
            schema=admin.schema,
            retention=AuditRetention(admin.audit_rows, admin.audit_days),
            answer_s=admin.answer_s,
        )

    def _set_modes(self) -> None:
        if self.exact is not None:
            self.exact.modes = replace(self.exact.modes, tenants=CacheModes(self.directory, "exact"))
        if self.semantic is not None:
            self.semantic.modes = replace(self.semantic.modes, tenants=CacheModes(self.directory, "semantic"))

    # Life

    async def start(self, application: Any) -> None:
        """Before requests are taken. What cannot be opened for want of a disk is found again later."""
        await self.administration.start(application)
        await self.limiter.open()
        if self.ledger is not None:
            await self.ledger.open()
        engines = {name: served.engine for name, served in self.fleet.served.items() if served.upstream is None}
        if self._ladders:
            self._running.append(asyncio.create_task(poll_statistics(self.pressure, engines)))
        if not self.router.idle:
            probes = {name: partial(_probe, engine) for name, engine in engines.items()}
            self._running.append(asyncio.create_task(self.health.watch(probes)))
        self._running.append(asyncio.create_task(self._sweep()))

    async def close(self) -> None:
        """After the last request. What was used is written down, within its time."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        if self._work:
            _, late = await asyncio.wait(self._work, timeout=_DRAIN)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        if self.exact is not None:
            await self.exact.close()
        if self.semantic is not None:
            await self.semantic.close()
        if self.ledger is not None:
            await self.ledger.close()
        await self.limiter.close()
        await self.administration.close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP)
            for cache in (self.exact, self.semantic):
                if cache is not None:
                    try:
                        await cache.sweep()
                    except Exception as error:
                        log.warning("what has expired in a cache is still there: %s", error)

    async def measure(self) -> None:
        """What the caches of answers hold, for the metrics."""
        for name, cache in (("exact", self.exact), ("semantic", self.semantic)):
            if cache is not None and (size := await cache.size()) is not None:
                metrics.cache_entries.labels(name).set(size.entries)
                metrics.cache_bytes.labels(name).set(size.bytes)

    def later(self, work: Coroutine[Any, Any, Any]) -> None:
        """What nobody waits for. Where there is too much of it, it is left out."""
        if len(self._work) >= _BACKGROUND:
            work.close()
            metrics.of(metrics.dropped, "background").inc()
            return
        task = asyncio.get_running_loop().create_task(work)
        self._work.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._work.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("work in the background failed", exc_info=error)

    # Whose it is

    def settings_of(self, caller: Caller) -> TenantConfig:
        return caller.settings if isinstance(caller, IdentifiedCaller) else STANDARD

    def scopes(self, caller: Caller, variant: str, surface: str) -> Sequence[LimitScope]:
        """All limits that a request comes under: its tenant's and key's, and the server's own."""
        found = limit_scopes(caller, variant, surface)
        if not (self._model_scopes or self._surface_scopes):
            return found
        own = (self._model_scopes.get(variant.partition("@")[0]), self._surface_scopes.get(surface))
        return (*found, *(scope for scope in own if scope is not None))

    def budget_left(self, tenant: str, endpoint: str) -> float | None:
        """Share of the tightest of a tenant's budgets; None where it has none."""
        if self.ledger is None:
            return None
        shares = [
            max(0.0, 1.0 - (standing.spent + standing.held) / max(1, standing.budget.limit_micros))
            for standing in self.ledger.standings(tenant)
            if standing.budget.endpoint in ("", endpoint)
        ]
        return min(shares, default=None)

    def charge(
        self,
        id: str,
        usage: TokenUsage,
        *,
        ended: str,
        variant: str = "",
        hit: str = "",
        instead_of: str = "",
        entry: LedgerEntry | None = None,
    ) -> None:
        """Into the journal, before this returns."""
        assert self.ledger is not None
        try:
            self.ledger.settle(id, usage, ended=ended, variant=variant, hit=hit, instead_of=instead_of, entry=entry)
        except LedgerError as error:
            log.error("an exchange was not charged: %s", error)

    # Which variant

    def _why_not(self, variant: str) -> str | None:
        served = self.fleet.served[variant]
        if served.upstream is not None:
            return None if served.upstream.ready else "it does not answer"
        return self.health.why_not(variant)

    def _idle(self, variant: str) -> bool:
        return self.fleet.served[variant].idle

    def answers(self, exchange: Exchange, plan: RoutePlan) -> Answerer:
        """What carries out a plan; nothing of it runs yet."""
        plain = not plan.steps and plan.cascade is None and plan.variant not in self._hedgings
        if plain and self.router.idle:
            return self._plain(exchange)
        for decision in plan.decisions:
            metrics.of(metrics.routes, decision.stage, decision.chosen).inc()
        return self._composer.answering(exchange, plan)

    def _make(self, variant: str, exchange: Exchange, asked: TextRequest, alone: bool) -> Answerer:
        return self._plain(derive_exchange(exchange, self.fleet.served[variant], asked), alone)

    def _plain(self, exchange: Exchange, alone: bool = True) -> Answerer:
        """`alone`: nothing else takes part in the answer, so that it can begin anew while nobody has heard of it."""
        upstream = exchange.served.upstream
        if upstream is None:
            return EngineAnswering(exchange)
        return UpstreamGeneration(exchange, upstream, anew=alone and not exchange.asked.stream)

    async def prompt_tokens(self, exchange: Exchange) -> int:
        """Of an exchange that an upstream answers."""
        assert exchange.served.upstream is not None
        return sum(await upstream_prompt_tokens(exchange, exchange.served.upstream))

    # Before it is a prompt

    def degrades(self, surface: str) -> bool:
        return surface in self._ladders

    def patience(self, surface: str) -> float:
        """Seconds that a request waits for its first token at most."""
        declared = self.config.surfaces.get(surface)
        found = None if declared is None else declared.patience_s
        return SURFACES[surface].patience if found is None else found

    def summariser(self, exchange: Exchange) -> Summariser | None:
        return (
            _Summarising(self, exchange)
            if self.config.shaping.overflow == "summarise" or (exchange.asked.overflow == "summarise")
            else None
        )

    # The semantic cache

    def _embedder(self, caller: Caller, surface: str) -> ServedEmbedder:
        encoder = self.fleet.served[self.config.cache.semantic.embedder]
        return ServedEmbedder(encoder, caller, surface=surface)

    async def recall(self, exchange: Exchange, plan: RoutePlan) -> SemanticLookup:
        assert self.semantic is not None
        return await self.semantic.recall(
            exchange.caller.tenant,
            exchange.asked,
            self._embedder(exchange.caller, exchange.surface),
            variant="\n".join((exchange.served.name, exchange.served.fingerprint, plan.small or "")),
            surface=exchange.surface,
        )

    def keep_later(self, exchange: Exchange, recall: SemanticLookup, answer: Kept) -> None:
        assert self.semantic is not None
        self.later(self.semantic.settle(recall, answer, self._embedder(exchange.caller, "batch")))

    def check_later(self, exchange: Exchange, recall: SemanticLookup) -> None:
        """A fresh answer to what a hit was served for, made with what interactive work leaves. Nobody pays for it."""
        self.later(self._check(exchange, recall))

    async def _check(self, exchange: Exchange, recall: SemanticLookup) -> None:
        assert self.semantic is not None
        asked = exchange.asked.but(surface="batch", deadline_s=None, stream=False)
        with suppress(ApiError):
            fresh = storable_answer(await self.whole(derive_exchange(exchange, exchange.served, asked)))
            await self.semantic.check(recall, fresh, self._embedder(exchange.caller, "batch"))

    async def whole(self, exchange: Exchange) -> list[Choice]:
        """What answers an exchange, without any stage around it."""
        answers = self._plain(exchange)
        try:
            await answers.begin()
            return await collect_choices(answers)
        finally:
            answers.settle()


class _Summarising:
    """Asks a variant for a summary."""

    def __init__(self, parts: Parts, exchange: Exchange) -> None:
        self._parts = parts
        self._exchange = exchange

    async def summarise(self, messages: Sequence[ChatMessage], *, tokens: int) -> str:
        parts, exchange = self._parts, self._exchange
        name = parts.config.shaping.summary_model
        served = parts.fleet.find(name) if name else exchange.served
        turns = "\n".join(f"{message['role']}: {message.get('content') or ''}" for message in messages)
        asked = TextRequest(
            model=served.name,
            messages=[{"role": "user", "content": f"{_SUMMARY}\n\n{turns}"}],
            sampling=SamplingParams(temperature=0.0),
            max_tokens=tokens,
            surface=exchange.surface,
        )
        part = derive_exchange(exchange, served, asked)
        part.prompts = {}
        return (await parts.whole(part))[0].content


async def _probe(engine: Engine) -> None:
    await engine.stats()


def _breaker_changed(variant: str, state: str) -> None:
    log.warning("the breaker of a variant changed: %s is %s", variant, state)
    metrics.of(metrics.breakers, variant, state).inc()
