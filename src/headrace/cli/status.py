"""`headrace status`: a live view of a running server in the terminal: variants, queue, throughput, TTFT and tenants.

Reads /health and /metrics, so it needs no key unless `metrics_need_key` is set (then HEADRACE_ADMIN_KEY).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final

import msgspec
from cyclopts import Parameter
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headrace.cli.admin.admin_client import request, request_json

_TTFT: Final = "headrace_time_to_first_token_seconds_bucket"
_WORKERS: Final = "headrace_worker_requests"
_TENANTS: Final = 10  # with the most output

Sample = tuple[str, Mapping[str, str], float]  # name, labels, value


class VariantStatus(msgspec.Struct, frozen=True):
    model: str
    responsive: bool
    running: int
    waiting: int
    kv_used: float | None  # share of the KV blocks; None without an engine of ours
    ttft_p50_ms: float | None  # of the requests since the view before, or since the start of the server
    ttft_p95_ms: float | None
    output_tokens_per_s: float | None


class TenantStatus(msgspec.Struct, frozen=True):
    tenant: str
    output_tokens: int  # since the start of the server
    output_tokens_per_s: float | None


class WorkerStatus(msgspec.Struct, frozen=True):
    """A worker on another host."""

    model: str
    address: str
    state: str
    requests: int  # of this server


class ServerStatus(msgspec.Struct, frozen=True):
    state: str  # ready, starting, draining or unavailable
    running: int
    connections: int
    requests_per_s: float | None
    variants: list[VariantStatus]
    tenants: list[TenantStatus]
    workers: list[WorkerStatus] = []


class Snapshot:
    """The metrics of a server at one moment."""

    def __init__(self, health: Mapping[str, Any], exposition: str, at: float) -> None:
        self.health = health
        self.at = at
        self.samples: list[Sample] = [
            (sample.name, sample.labels, float(sample.value))
            for family in text_string_to_metric_families(exposition)
            for sample in family.samples
        ]

    def total(self, name: str, **labels: str) -> float:
        return sum(value for each, found, value in self.samples if each == name and labels.items() <= found.items())

    def values(self, name: str, label: str) -> set[str]:
        return {found[label] for each, found, _ in self.samples if each == name and label in found}


def status(
    url: Annotated[str, Parameter(env_var="HEADRACE_URL")] = "http://127.0.0.1:8000",
    *,
    once: bool = False,
    json: bool = False,
    interval_s: Annotated[float, Parameter(name=["--interval-s", "-n"])] = 2.0,
) -> None:
    """Show a running server: its variants, queue, throughput, time to first token, workers on other hosts and tenants.

    Usage: headrace status, or headrace status http://10.0.0.5:8000 --once

    The view is renewed until Ctrl-C. Rates and times to first token are those since the view before, or of the last
    interval with --once and --json.

    Parameters
    ----------
    url
        Server to ask. `unix:PATH` asks the admin socket.
    once
        Print one view and end.
    json
        Print one view as JSON and end.
    interval_s
        Seconds between two views.
    """
    pause = max(0.1, interval_s)
    console = Console(soft_wrap=True)
    before = take_snapshot(url)
    if once or json:
        time.sleep(pause)
        found = compare(before, take_snapshot(url))
        if json:
            print(msgspec.json.encode(found).decode())
        else:
            console.print(render(url, found), highlight=False)
        return
    with Live(render(url, compare(None, before)), console=console, screen=console.is_terminal) as live:
        while True:
            time.sleep(pause)
            after = take_snapshot(url)
            live.update(render(url, compare(before, after)))
            before = after


def take_snapshot(url: str) -> Snapshot:
    exposition = request(url, "GET", "metrics", root="/").decode()
    try:
        health = request_json(url, "GET", "health", root="/")
    except ConnectionError:  # 503: it starts, shuts down, or no variant works
        health = {"status": "not ready"}
    return Snapshot(health, exposition, time.monotonic())


def compare(before: Snapshot | None, after: Snapshot) -> ServerStatus:
    """Return the state after, with what happened in between. Without a snapshot before, there are no rates."""
    seconds = 0.0 if before is None else after.at - before.at

    def rate(name: str, **labels: str) -> float | None:
        if before is None or seconds <= 0:
            return None
        return max(0.0, after.total(name, **labels) - before.total(name, **labels)) / seconds

    responsive = set(after.health.get("models", ()))
    models = responsive | set(after.health.get("unavailable", ())) | after.values("headrace_engine_running", "model")
    variants = [_variant(model, model in responsive, before, after, rate) for model in sorted(models)]
    tokens = "headrace_tokens_total"
    tenants = [
        TenantStatus(
            tenant,
            int(after.total(tokens, tenant=tenant, kind="output")),
            rate(tokens, tenant=tenant, kind="output"),
        )
        for tenant in after.values(tokens, "tenant")
    ]
    tenants.sort(key=lambda each: (-(each.output_tokens_per_s or 0.0), -each.output_tokens, each.tenant))
    return ServerStatus(
        state=str(after.health.get("status", "unknown")),
        running=int(after.total("headrace_requests_running")),
        connections=int(after.total("headrace_connections")),
        requests_per_s=rate("headrace_answers_total"),
        variants=variants,
        tenants=tenants[:_TENANTS],
        workers=[
            WorkerStatus(labels["model"], labels["address"], labels["state"], int(value))
            for name, labels, value in after.samples
            if name == _WORKERS
        ],
    )


def _variant(
    model: str, responsive: bool, before: Snapshot | None, after: Snapshot, rate: Callable[..., float | None]
) -> VariantStatus:
    used = after.total("headrace_engine_blocks_used", model=model)
    free = after.total("headrace_engine_blocks_free", model=model)
    cached = after.total("headrace_engine_blocks_cached", model=model)
    blocks = used + free + cached
    buckets = _buckets(after, model)
    if before is not None:
        earlier = _buckets(before, model)
        fresh = {bound: count - earlier.get(bound, 0.0) for bound, count in buckets.items()}
        buckets = fresh if fresh.get(math.inf) else buckets
    return VariantStatus(
        model=model,
        responsive=responsive,
        running=int(after.total("headrace_engine_running", model=model)),
        waiting=int(after.total("headrace_engine_waiting", model=model)),
        kv_used=used / blocks if blocks else None,
        ttft_p50_ms=_in_ms(quantile(buckets, 0.5)),
        ttft_p95_ms=_in_ms(quantile(buckets, 0.95)),
        output_tokens_per_s=rate("headrace_tokens_total", model=model, kind="output"),
    )


def _buckets(snapshot: Snapshot, model: str) -> dict[float, float]:
    """Return the cumulative counts of times to first token by their upper bound in seconds."""
    found: dict[float, float] = {}
    for name, labels, value in snapshot.samples:
        if name == _TTFT and labels.get("model") == model:
            bound = float(labels["le"])
            found[bound] = found.get(bound, 0.0) + value
    return found


def quantile(buckets: Mapping[float, float], share: float) -> float | None:
    """Return a quantile of cumulative counts by upper bound, interpolated within its bucket as Prometheus does."""
    total = buckets.get(math.inf, 0.0)
    if total <= 0:
        return None
    wanted, lower, below = share * total, 0.0, 0.0
    for bound in sorted(buckets):
        count = buckets[bound]
        if count >= wanted:
            if math.isinf(bound):
                return lower
            return lower + (bound - lower) * (wanted - below) / max(count - below, 1e-9)
        lower, below = bound, count
    return lower


def _in_ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 1)


def render(url: str, found: ServerStatus) -> Group:
    colour = "green" if found.state == "ready" else "yellow"
    head = Text.assemble(
        (url, "bold"), "  ", (found.state, colour), f"  {found.running} running, {found.connections} connections"
    )
    if found.requests_per_s is not None:
        head.append(f", {found.requests_per_s:,.1f} requests/s")
    variants = _table("variant", "state", "running", "waiting", "KV used", "TTFT p50", "TTFT p95", "tokens/s")
    for each in found.variants:
        variants.add_row(
            each.model,
            "up" if each.responsive else "down",
            str(each.running),
            str(each.waiting),
            "" if each.kv_used is None else f"{each.kv_used:.0%}",
            _number(each.ttft_p50_ms, " ms"),
            _number(each.ttft_p95_ms, " ms"),
            _number(each.output_tokens_per_s),
        )
    workers = _table("worker", "state", "model", "requests")
    for each in found.workers:
        workers.add_row(each.address, each.state, each.model, str(each.requests))
    tenants = _table("tenant", "output tokens", "tokens/s")
    for each in found.tenants:
        tenants.add_row(each.tenant or "(none)", f"{each.output_tokens:,}", _number(each.output_tokens_per_s))
    further = (table for table, rows in ((workers, found.workers), (tenants, found.tenants)) if rows)
    return Group(head, "", variants, *(part for table in further for part in ("", table)))


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place == 0 or heading == "state" else "right", overflow="fold")
    return table


def _number(value: float | None, unit: str = "") -> str:
    return "" if value is None else f"{value:,.1f}{unit}"
