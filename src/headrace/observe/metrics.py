"""What the server counts: requests, tokens and times, as Prometheus reads them.

Owns the metrics and their labels. Labels take values from the configuration and the code alone (models, tenants,
routes, kinds of errors), so that no client can make new ones.
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
    "Requests for text that have ended: finished, limited, deadline, gone (the client left), or an error's kind.",
    ("model", "tenant", "ended"),
    registry=registry,
)
tokens: Final = Counter(
    "headrace_tokens", "Tokens: prompt, cached (of the prompt), output.", ("model", "tenant", "kind"), registry=registry
)
running: Final = Gauge("headrace_requests_running", "Requests for text under way.", registry=registry)
connections: Final = Gauge("headrace_connections", "Open connections.", registry=registry)
cut: Final = Counter(
    "headrace_connections_cut", "Connections closed by the server, by why.", ("why",), registry=registry
)
ttft: Final = Histogram(
    "headrace_time_to_first_token_seconds", "From a request's arrival.", ("model",), buckets=_SECONDS, registry=registry
)
duration: Final = Histogram(
    "headrace_request_seconds",
    "From a request's arrival to its last token.",
    ("model",),
    buckets=_SECONDS,
    registry=registry,
)
stages: Final = Histogram(
    "headrace_stage_seconds",
    "Of one request: shape, queue, prefill, decode.",
    ("stage",),
    buckets=_SECONDS,
    registry=registry,
)

limits: Final = Counter(
    "headrace_limits",
    "What limits did (refused, extended, gone), and which.",
    ("event", "what"),
    registry=registry,
)
ledger: Final = Counter(
    "headrace_ledger", "What the ledger did; see docs/explanation/ledger.md.", ("event",), registry=registry
)
alerts: Final = Counter("headrace_alerts", "Alerts of budgets: sent, failed.", ("outcome",), registry=registry)
caches: Final = Counter(
    "headrace_cache",
    "Requests by what a cache of answers did; see docs/how-to/cache-answers.md.",
    ("cache", "outcome"),
    registry=registry,
)
cache_failures: Final = Counter(
    "headrace_cache_failures", "Calls of a cache's store that did not work.", ("cache", "call"), registry=registry
)
cache_entries: Final = Gauge(
    "headrace_cache_entries",
    "Entries of a cache of answers; of a Redis that gateways share nobody here knows.",
    ("cache",),
    registry=registry,
)
cache_bytes: Final = Gauge("headrace_cache_bytes", "Bytes that they take.", ("cache",), registry=registry)
semantic: Final = Counter(
    "headrace_semantic_cache",
    "What the semantic cache did: outcomes, refusals of its guards, comparisons with fresh answers.",
    ("table", "name"),
    registry=registry,
)
routes: Final = Counter(
    "headrace_routes", "Decisions on who answers, by stage and what was chosen.", ("stage", "chosen"), registry=registry
)
breakers: Final = Counter(
    "headrace_breaker", "Changes of the breakers of variants.", ("model", "state"), registry=registry
)
degraded: Final = Counter(
    "headrace_degraded", "Requests by the steps of the ladder that were taken.", ("surface", "step"), registry=registry
)
answered_by: Final = Counter(
    "headrace_answered_by",
    "Answers that no engine made for this request, by what did.",
    ("model", "by"),
    registry=registry,
)
upstreams: Final = Gauge(
    "headrace_upstream", "An upstream's state, and its counts since the start.", ("model", "what"), registry=registry
)
dropped: Final = Counter("headrace_dropped", "Work that was left out for want of room.", ("what",), registry=registry)

# What an engine says of itself: where it stands in its statistics, and what it is.
_ENGINE: Final = {
    "running": (("scheduler", "running"), "Sequences that run."),
    "waiting": (("scheduler", "waiting"), "Sequences that wait."),
    "admitted": (("scheduler", "admitted"), "Requests taken since its start."),
    "refused": (("scheduler", "refused"), "Requests refused since its start."),
    "preempted": (("scheduler", "preempted"), "Sequences that gave up their memory to others, since its start."),
    "steps": (("steps",), "Steps since its start."),
    "step_rows": (("rows",), "Tokens computed since its start, of prompts and answers."),
    "device_seconds": (("device_seconds",), "Seconds that the core computed, since its start."),
    "host_seconds": (("between_seconds",), "Seconds between steps, since its start."),
    "blocks_used": (("blocks", "used"), "Blocks of KV memory in use."),
    "blocks_cached": (("blocks", "cached"), "Blocks that hold prefixes for later."),
    "blocks_free": (("blocks", "free"), "Blocks that hold nothing."),
    "evictions": (("blocks", "evictions"), "Cached blocks that were given up, since its start."),
}
_engines: Final = {
    name: Gauge(f"headrace_engine_{name}", about, ("model", "replica"), registry=registry)
    for name, (_, about) in _ENGINE.items()
}


Metric = TypeVar("Metric", Counter, Histogram)


@cache
def of(metric: Metric, *labels: str) -> Metric:
    """The metric of those labels, found faster than by itself: there are no more than the configuration makes."""
    return metric.labels(*labels)


def _plain_label(tenant: str) -> str:
    return tenant or "-"


_label: Callable[[str], str] = _plain_label


def tenant_label(tenant: str) -> str:
    """The value of the label `tenant`."""
    return _label(tenant)


def label_tenants(label: Callable[[str], str]) -> None:
    """From now on tenants have these labels: there may be more tenants than a metric should have series."""
    global _label
    _label = label


def forget_tenant(label: str) -> None:
    """Removes the series of a label that was given up."""
    for metric in (answers, tokens):
        metric.remove_by_labels({"tenant": label})
    of.cache_clear()


def engine(model: str, replica: int, statistics: Mapping[str, Any]) -> None:
    """What an engine said of itself just now."""
    for name, (path, _) in _ENGINE.items():
        value: Any = statistics
        for key in path:
            value = value.get(key, {})
        if isinstance(value, int | float):
            _engines[name].labels(model, str(replica)).set(value)


def upstream(model: str, state: Mapping[str, Any]) -> None:
    """What an upstream is like just now."""
    for what, value in state.items():
        if isinstance(value, int | float):
            upstreams.labels(model, what).set(value)
    upstreams.labels(model, "breaker_open").set(state["breaker"] != "closed")
    for reason, number in state["reasons"].items():
        upstreams.labels(model, f"failed_{reason}").set(number)


def exposition() -> bytes:
    return generate_latest(registry)
