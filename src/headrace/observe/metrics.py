"""The Prometheus metrics of the server.

Label values come from the configuration and the code only (models, tenants, routes, error kinds), so clients cannot
create new series.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 30.0, 60.0, 120.0)

registry: Final = CollectorRegistry()

http_requests: Final = Counter(
    "headrace_http_requests", "HTTP requests, by route and status.", ("route", "status"), registry=registry
)
answers: Final = Counter(
    "headrace_answers",
    "Generation requests by ending: finished, limited, deadline, gone (client disconnected), or an error kind.",
    ("model", "tenant", "ended"),
    registry=registry,
)
tokens: Final = Counter(
    "headrace_tokens",
    "Tokens by kind: prompt, cached (part of the prompt), output.",
    ("model", "tenant", "kind"),
    registry=registry,
)
running: Final = Gauge("headrace_requests_running", "Generation requests in progress.", registry=registry)
connections: Final = Gauge("headrace_connections", "Open connections.", registry=registry)
cut: Final = Counter(
    "headrace_connections_cut", "Connections closed by the server, by reason.", ("why",), registry=registry
)
ttft: Final = Histogram(
    "headrace_time_to_first_token_seconds",
    "Time to first token, from a request's arrival.",
    ("model",),
    buckets=_SECONDS,
    registry=registry,
)
duration: Final = Histogram(
    "headrace_request_seconds",
    "Duration of a request, from its arrival to its last token.",
    ("model",),
    buckets=_SECONDS,
    registry=registry,
)
stages: Final = Histogram(
    "headrace_stage_seconds",
    "Duration of a request's stages: shape, queue, prefill, decode.",
    ("stage",),
    buckets=_SECONDS,
    registry=registry,
)

limits: Final = Counter(
    "headrace_limits",
    "Events of rate limits (refused, extended, gone), by limit.",
    ("event", "what"),
    registry=registry,
)
ledger: Final = Counter(
    "headrace_ledger", "Events of the ledger; see docs/explanation/ledger.md.", ("event",), registry=registry
)
alerts: Final = Counter("headrace_alerts", "Budget alerts: sent, failed.", ("outcome",), registry=registry)
caches: Final = Counter(
    "headrace_cache",
    "Requests by what a cache of answers did; see docs/how-to/cache-answers.md.",
    ("cache", "outcome"),
    registry=registry,
)
cache_failures: Final = Counter(
    "headrace_cache_failures", "Failed calls of a cache's store.", ("cache", "call"), registry=registry
)
cache_entries: Final = Gauge(
    "headrace_cache_entries",
    "Entries in an answer cache; unknown for a shared Redis.",
    ("cache",),
    registry=registry,
)
cache_bytes: Final = Gauge("headrace_cache_bytes", "Bytes in an answer cache.", ("cache",), registry=registry)
semantic: Final = Counter(
    "headrace_semantic_cache",
    "Semantic cache: outcomes, rejections by its guards, comparisons with fresh answers.",
    ("table", "name"),
    registry=registry,
)
routes: Final = Counter(
    "headrace_routes", "Routing decisions, by stage and chosen variant.", ("stage", "chosen"), registry=registry
)
breakers: Final = Counter(
    "headrace_breaker", "State changes of variants' circuit breakers.", ("model", "state"), registry=registry
)
degraded: Final = Counter(
    "headrace_degraded", "Requests by the degradation steps applied.", ("surface", "step"), registry=registry
)
answered_by: Final = Counter(
    "headrace_answered_by",
    "Answers not generated for their request, by source.",
    ("model", "by"),
    registry=registry,
)
upstreams: Final = Gauge(
    "headrace_upstream", "An upstream's state, and its counters since the start.", ("model", "what"), registry=registry
)
dropped: Final = Counter("headrace_dropped", "Work dropped because a buffer was full.", ("what",), registry=registry)

# An engine's gauges: the path in its statistics, and the help text.
_ENGINE: Final = {
    "running": (("scheduler", "running"), "Running sequences."),
    "waiting": (("scheduler", "waiting"), "Waiting sequences."),
    "admitted": (("scheduler", "admitted"), "Requests admitted since the start."),
    "refused": (("scheduler", "refused"), "Requests rejected since the start."),
    "preempted": (("scheduler", "preempted"), "Sequences preempted since the start."),
    "steps": (("steps",), "Steps since the start."),
    "step_rows": (("rows",), "Tokens computed since the start, in prompts and answers."),
    "device_seconds": (("device_seconds",), "Seconds of computation since the start."),
    "host_seconds": (("between_seconds",), "Seconds between steps since the start."),
    "blocks_used": (("blocks", "used"), "KV blocks in use."),
    "blocks_cached": (("blocks", "cached"), "KV blocks that hold cached prefixes."),
    "blocks_free": (("blocks", "free"), "Free KV blocks."),
    "evictions": (("blocks", "evictions"), "Cached KV blocks evicted since the start."),
}
_engines: Final = {
    name: Gauge(f"headrace_engine_{name}", about, ("model", "replica"), registry=registry)
    for name, (_, about) in _ENGINE.items()
}


Metric = TypeVar("Metric", Counter, Histogram)


@cache
def of(metric: Metric, *labels: str) -> Metric:
    """Return the metric with these labels; cached, because looking labels up is slow. The configuration bounds them."""
    return metric.labels(*labels)


def _plain_label(tenant: str) -> str:
    return tenant or "-"


_label: Callable[[str], str] = _plain_label


def tenant_label(tenant: str) -> str:
    """Return the value of the `tenant` label."""
    return _label(tenant)


def label_tenants(label: Callable[[str], str]) -> None:
    """Set the mapping from tenants to labels, since there may be more tenants than a metric should have series."""
    global _label
    _label = label


def forget_tenant(label: str) -> None:
    """Remove the series of a tenant label that is no longer used."""
    for metric in (answers, tokens):
        metric.remove_by_labels({"tenant": label})
    of.cache_clear()


def engine(model: str, replica: int, statistics: Mapping[str, Any]) -> None:
    """Set an engine's gauges from its statistics."""
    for name, (path, _) in _ENGINE.items():
        value: Any = statistics
        for key in path:
            value = value.get(key, {})
        if isinstance(value, int | float):
            _engines[name].labels(model, str(replica)).set(value)


def upstream(model: str, state: Mapping[str, Any]) -> None:
    """Set an upstream's gauges from its state."""
    for what, value in state.items():
        if isinstance(value, int | float):
            upstreams.labels(model, what).set(value)
    upstreams.labels(model, "breaker_open").set(state["breaker"] != "closed")
    for reason, number in state["reasons"].items():
        upstreams.labels(model, f"failed_{reason}").set(number)


def exposition() -> bytes:
    return generate_latest(registry)
