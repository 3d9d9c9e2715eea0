"""The state of a running server as one JSON object, for dashboards: what docs/reference/admin-api.md describes.

Asks engines and stores with short timeouts; what does not answer is left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from headrace.errors import HeadraceError
from headrace.gateway.api_errors import ApiError
from headrace.gateway.serving.fleet import Fleet
from headrace.gateway.upstreams.managed_engine import ManagedEngine
from headrace.observe.gpus.gpu import Gpu, numbered_gpus
from headrace.observe.latency.latency_book import Row, Slice, Tick, group
from headrace.observe.traces.request_record import RequestRecord
from headrace.server.admin.admin_usage import UsageExport
from headrace.server.admin.outcome_figures import outcome_json
from headrace.server.admin.worker_routes import list_workers
from headrace.server.endpoint_context import EndpointContext
from headrace.version import __version__

WINDOW_S: Final = 300.0
_RATE_S: Final = 30.0  # rates are those of whole ticks in this time
_ENGINE_S: Final = 0.5  # timeout
_BUDGETS_S: Final = 10.0  # age of budgets, which are read from the store
_SLOWEST: Final = 20
_OUTCOMES_S: Final = 6 * 86_400.0  # before today
_LISTED: Final = 50  # rows of a list


class LiveSnapshot:
    """Makes one snapshot a second at most, however many ask. All of it belongs to one event loop."""

    def __init__(self, context: EndpointContext, usage: UsageExport | None) -> None:
        self._context = context
        self._usage = usage
        self._began = time.time()
        self._made_at = 0.0
        self._made: dict[str, Any] = {}
        self._making: asyncio.Task[dict[str, Any]] | None = None
        self._budgets: list[dict[str, Any]] = []
        self._budgets_at = 0.0
        self._outcomes: list[dict[str, Any]] = []
        self._outcomes_at = 0.0
        self._achieved: dict[tuple[str, int], tuple[tuple[float, int, int], tuple[int | None, ...]]] = {}

    async def get(self, most_age_s: float = 0.9) -> dict[str, Any]:
        if self._made and time.monotonic() - self._made_at < most_age_s:
            return self._made
        if self._making is None:
            self._making = asyncio.ensure_future(self._make())
            self._making.add_done_callback(self._done)
        return await asyncio.shield(self._making)

    def _done(self, made: asyncio.Task[dict[str, Any]]) -> None:
        self._making = None
        if not made.cancelled() and made.exception() is None:
            self._made, self._made_at = made.result(), time.monotonic()

    async def _make(self) -> dict[str, Any]:
        context = self._context
        services = context.services
        observer = services.observer
        rows = list(observer.latencies.window(WINDOW_S))
        engines, caches, budgets, outcomes, running = await asyncio.gather(
            self._engines(), self._caches(rows), self._read_budgets(), self._read_outcomes(), context.running_of_all()
        )
        texts = [(slice, row) for slice, row in rows if slice.model != "-"]
        state = "draining" if context.is_draining else "ready" if context.is_ready else "starting"
        if state == "ready" and services.capacity.overloaded:
            state = "overloaded"
        return {
            "object": "live",
            "at": round(time.time(), 3),
            "started_at": round(self._began, 3),
            "version": __version__,
            "status": state,
            "currency": context.config.ledger.currency,
            "window_s": WINDOW_S,
            "objectives": observer.objectives.as_json(),
            "traffic": _traffic(observer.latencies.ticks, sum(running)),
            "latency": {
                "all": _latency(texts, ()),
                "by_surface": _latency(texts, ("surface",)),
                "by_model": _latency(texts, ("model",)),
                "by_endpoint": _latency(texts, ("endpoint",)),
                "by_length": _latency(texts, ("length",)),
                "by_route": _latency(texts, ("route",)),
            },
            "stages": _stages(texts),
            "engines": engines,
            "gpus": gpus_json(services.fleet, services.gpus.latest),
            "workers": [each for each in list_workers(services.fleet, services.discovery) if "://" in each["address"]][
                :_LISTED
            ],
            "variants": [self._variant(name) for name in services.fleet.served],
            "caches": caches,
            "ladder": self._ladder(),
            "fast": {
                "declared": services.accounts.switches.declared,
                "switches": services.accounts.operations.fast(),
            },
            "tenants": _tenants(texts, budgets),
            "budgets": budgets,
            "outcomes": outcomes,
            "slowest": [slow_json(each) for each in _slowest(observer.recent.newest())],
        }

    async def _engines(self) -> list[dict[str, Any]]:
        fleet = self._context.services.fleet
        found: list[dict[str, Any]] = []

        async def ask(name: str) -> None:
            restarts = fleet.restarts(name)
            statistics: Sequence[dict[str, Any]] = ()
            with contextlib.suppress(TimeoutError, HeadraceError):
                async with asyncio.timeout(_ENGINE_S):
                    statistics = await fleet.served[name].engine.stats()
            for replica in range(max(len(statistics), len(restarts))):
                known = statistics[replica] if replica < len(statistics) else None
                found.append(_engine(name, replica, restarts, known))

        await asyncio.gather(*(ask(name) for name, served in fleet.served.items() if served.upstream is None))
        for name, served in fleet.served.items():
            if served.upstream is not None and served.upstream.engine is not None:
                found.append(_managed(name, served.upstream.config.kind, served.upstream.engine))
        for engine in found:
            self._add_rates(engine)
        return sorted(found, key=lambda engine: (engine["model"], engine["replica"]))

    def _add_rates(self, engine: dict[str, Any]) -> None:
        """Add what the engine achieved while it computed since the last snapshot in which it did."""
        seconds = engine.get("device_seconds")
        if seconds is None:
            return
        now = (seconds, engine.get("bytes_read") or 0, engine.get("operations") or 0)
        key = (engine["model"], engine["replica"])
        before, rates = self._achieved.get(key, ((0.0, 0, 0), (None, None)))
        if seconds < before[0]:  # its process is a new one
            before = (0.0, 0, 0)
        if seconds > before[0]:
            spent = seconds - before[0]
            rates = tuple(round((now[place] - before[place]) / spent) for place in (1, 2))
        self._achieved[key] = (now, rates)
        engine["bytes_per_s"], engine["operations_per_s"] = rates

    def _variant(self, name: str) -> dict[str, Any]:
        served = self._context.services.fleet.served[name]
        described = served.description
        return {
            "name": name,
            "kind": served.kind,
            "served_by": "engine" if served.upstream is None else "upstream",
            "responsive": served.responsive if served.upstream is None else served.upstream.available,
            "precision": None if described is None else described.precision,
            "restarts": sum(self._context.services.fleet.restarts(name)),
            "upstream": None if served.upstream is None else served.upstream.state(),
        }

    async def _caches(self, rows: Iterable[tuple[Slice, Row]]) -> list[dict[str, Any]]:
        services = self._context.services
        window, total = group(rows, ()).get((), Row()), group(services.observer.latencies.total(), ()).get((), Row())
        sizes: dict[str, Any] = {}
        for name, cache in services.caches.items():
            with contextlib.suppress(TimeoutError, HeadraceError, ApiError):
                async with asyncio.timeout(_ENGINE_S):
                    sizes[name] = await cache.size()
        found: list[dict[str, Any]] = []
        for name in sorted({*services.caches, *total.saved}):
            size = sizes.get(name)
            hits, seconds, micros = total.saved.get(name, (0, 0.0, 0))
            found.append(
                {
                    "cache": name,
                    "hits": int(hits),
                    "hit_ratio": round(hits / total.requests, 4) if total.requests else None,
                    "recent_hit_ratio": (
                        round(window.saved.get(name, (0,))[0] / window.requests, 4) if window.requests else None
                    ),
                    "saved_s": round(seconds, 3),
                    "saved_micros": int(micros),
                    "entries": None if size is None else size.entries,
                    "bytes": None if size is None else size.bytes,
                }
            )
        prompt, cached = total.prompt_tokens, total.cached_tokens
        prefix = {"cache": "prefix", "prompt_tokens": prompt, "cached_tokens": cached}
        return [*found, {**prefix, "hit_ratio": round(cached / prompt, 4) if prompt else None}]

    def _ladder(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for surface, scope, number, step in self._context.services.ladder.levels():
            variant, _, tenant = scope.partition("\n")
            found.append({"surface": surface, "model": variant, "tenant": tenant, "level": number, "step": step})
        return found[:_LISTED]

    async def _read_outcomes(self) -> list[dict[str, Any]]:
        """Return the outcomes of the last seven days by model."""
        keeper, now = self._context.services.keeper, time.monotonic()
        if keeper is None or (self._outcomes_at and now - self._outcomes_at < _BUDGETS_S):
            return self._outcomes
        first_day = datetime.fromtimestamp(time.time() - _OUTCOMES_S, UTC).date().isoformat()
        with contextlib.suppress(TimeoutError, ApiError):
            async with asyncio.timeout(_ENGINE_S):
                groups = await keeper.feedback.summary(("outcome", "model"), first_day=first_day)
            self._outcomes = [
                {"outcome": each.key[0], "model": each.key[1], **outcome_json(each)} for each in groups[:_LISTED]
            ]
        self._outcomes_at = now
        return self._outcomes

    async def _read_budgets(self) -> list[dict[str, Any]]:
        """Return the budgets that are nearest to their end."""
        now = time.monotonic()
        if self._usage is None or (self._budgets_at and now - self._budgets_at < _BUDGETS_S):
            return self._budgets
        directory = self._context.services.accounts.directory
        settings = {name: directory.settings_of(name).budgets for name in sorted(directory.tenants())}
        with contextlib.suppress(TimeoutError, HeadraceError, ApiError, OSError):
            async with asyncio.timeout(_ENGINE_S):
                lines = (await self._usage.budgets({name: each for name, each in settings.items() if each}))["data"]
            self._budgets = heapq.nsmallest(_LISTED, lines, key=_share_left)
        self._budgets_at = now
        return self._budgets


def _traffic(ticks: Iterable[Tick], running: int) -> dict[str, Any]:
    now = time.monotonic()
    history = [
        {
            "age_s": round(now - tick.at, 1),
            "requests": tick.requests,
            "failed": tick.failed,
            "good": tick.good,
            "prompt_tokens": tick.prompt_tokens,
            "output_tokens": tick.output_tokens,
            "ttft_p50_ms": _ms(tick.ttft.quantiles((0.5,))[0]),
            "ttft_p95_ms": _ms(tick.ttft.quantiles((0.95,))[0]),
        }
        for tick in ticks
    ]
    recent = [tick for tick in ticks if now - tick.at < _RATE_S]
    seconds = max(1.0, now - recent[0].at) if recent else 1.0
    return {
        "running": running,
        "requests_per_s": round(sum(tick.requests for tick in recent) / seconds, 3),
        "failed_per_s": round(sum(tick.failed for tick in recent) / seconds, 3),
        "goodput_per_s": round(sum(tick.good for tick in recent) / seconds, 3),
        "prompt_tokens_per_s": round(sum(tick.prompt_tokens for tick in recent) / seconds, 1),
        "output_tokens_per_s": round(sum(tick.output_tokens for tick in recent) / seconds, 1),
        "tick_s": 10,
        "history": history,
    }


def _latency(rows: Sequence[tuple[Slice, Row]], by: Sequence[str]) -> Any:
    """Return percentiles and costs; with dimensions a list of them, the busiest first."""
    found = sorted(group(rows, by).items(), key=lambda each: -each[1].requests)[:_LISTED]
    if not by:
        return row_json(found[0][1]) if found else row_json(Row())
    return [{**dict(zip(by, key, strict=True)), **row_json(row)} for key, row in found]


def row_json(row: Row) -> dict[str, Any]:
    """Return a row's counts, percentiles and its cost per thousand requests."""
    per_thousand = 1000.0 / row.requests if row.requests else 0.0
    return {
        "requests": row.requests,
        "failed": row.failed,
        "good": row.good,
        "prompt_tokens": row.prompt_tokens,
        "cached_tokens": row.cached_tokens,
        "output_tokens": row.output_tokens,
        "cache_hits": int(sum(each[0] for each in row.saved.values())),
        "saved_s": round(sum(each[1] for each in row.saved.values()), 3),
        "saved_micros": int(sum(each[2] for each in row.saved.values())),
        "draft_acceptance": round(row.accepted / row.drafted, 4) if row.drafted else None,
        "micros": row.micros,
        "micros_per_1000_requests": round(row.micros * per_thousand),
        "machine_s_per_1000_requests": round(row.machine_s * per_thousand, 3),
        "percentiles": row.percentiles(),
    }


def _stages(rows: Sequence[tuple[Slice, Row]]) -> list[dict[str, Any]]:
    """Return the mean milliseconds of each stage: they add up to the mean duration."""
    row = group(rows, ()).get((), Row())
    return [
        {"stage": name, "mean_ms": _ms(seconds / row.requests), "share": round(seconds / total, 4) if total else 0.0}
        for total in (sum(row.stages.values()),)
        for name, seconds in row.stages.items()
    ]


def gpus_json(fleet: Fleet, gpus: Sequence[Gpu]) -> list[dict[str, Any]]:
    """Return GPUs with the models whose managed engines may use them."""
    users = [
        (name, managed.gpus)
        for name, served in fleet.served.items()
        if (upstream := served.upstream) is not None
        and (managed := upstream.config.managed) is not None
        and upstream.config.kind != "openvino"  # it counts Intel's GPUs
    ]
    numbered = numbered_gpus(gpus).values()

    def models(gpu: Gpu) -> list[str]:
        return [name for name, numbers in users if gpu in numbered and (numbers is None or gpu.number in numbers)]

    return [{**gpu.as_json(), "models": models(gpu)} for gpu in gpus]


def _managed(model: str, kind: str, engine: ManagedEngine) -> dict[str, Any]:
    """Return the server of another engine as one of ours is shown."""
    state = engine.state()
    shown = {name: state[name] for name in ("restarts", "running", "waiting", "kv_used_share", "status")}
    return {"model": model, "replica": 0, "engine": kind, "answers": state["status"] == "ready", **shown}


def _engine(model: str, replica: int, restarts: Sequence[int], known: dict[str, Any] | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "model": model,
        "replica": replica,
        "restarts": restarts[replica] if replica < len(restarts) else 0,
        "answers": known is not None,
    }
    if known is None:
        return found
    scheduler, blocks = known.get("scheduler", {}), known.get("blocks", {})
    total, used = blocks.get("total", 0), blocks.get("used", 0)
    found |= {name: scheduler.get(name) for name in ("running", "waiting", "admitted", "refused", "preempted")}
    found |= {f"kv_{name}": blocks.get(name) for name in ("total", "used", "cached", "free", "pinned", "evictions")}
    found["kv_used_share"] = round(used / total, 4) if total else None
    found["kv_block_tokens"] = blocks.get("block_tokens")
    found["kv_unfilled_tokens"] = blocks.get("unfilled")  # reserved in blocks, not used yet
    found["kv_waste_share"] = round(blocks.get("fragmentation", 0.0), 4)
    counted = ("steps", "rows", "tokens", "device_seconds", "between_seconds", "bytes_read", "operations")
    found |= {name: known.get(name) for name in counted}
    if "core" in known:
        found["core"] = known["core"]
    return found


def _tenants(rows: Sequence[tuple[Slice, Row]], budgets: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    found = _latency(rows, ("tenant",))
    for each in found:
        own = [line for line in budgets if line["tenant"] == each["tenant"]]
        left = [_share_left(line) for line in own]
        each["budget_left"] = round(min(left), 4) if left else None
    return found


def _share_left(budget: dict[str, Any]) -> float:
    return budget["left_micros"] / max(1, budget["limit_micros"])


def _slowest(records: Iterable[RequestRecord]) -> list[RequestRecord]:
    now = time.time()
    recent = (each for each in records if now - each.ended_at < WINDOW_S)
    return heapq.nlargest(_SLOWEST, recent, key=lambda record: record.seconds)


def slow_json(record: RequestRecord) -> dict[str, Any]:
    fields = record.fields
    return {
        "request_id": record.request_id,
        "id": record.id or None,
        "tenant": record.tenant,
        "endpoint": record.endpoint,
        "status": record.status,
        "error": record.error or None,
        "model": fields.get("model"),
        "surface": record.facts.get("surface"),
        "ended_at": round(record.ended_at, 3),
        "duration_ms": _ms(record.seconds),
        "ttft_ms": fields.get("ttft_ms"),
        "prompt_tokens": fields.get("prompt_tokens"),
        "output_tokens": fields.get("output_tokens"),
        "stages_ms": fields.get("stages_ms"),
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
