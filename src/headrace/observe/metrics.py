"""The Prometheus metrics of the server.

Label values come from the configuration and the code only (models, tenants, routes, error kinds), so clients cannot
create new series.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Final, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric as MetricFamily

from headrace.observe.loop_metrics import LoopCounter, LoopGauge, LoopHistogram

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 30.0, 60.0, 120.0)

_MOST_OUTCOMES: Final = 64  # names of outcomes with a label of their own

registry: Final = CollectorRegistry()

http_requests: Final = LoopCounter(
    "headrace_http_requests", "HTTP requests, by route and status.", ("route", "status"), registry=registry
)
ignored_parameters: Final = Counter(
    "headrace_ignored_parameters",
    "Requests with a parameter that was ignored, by name; other: names that Headrace does not know.",
    ("parameter",),
    registry=registry,
)
answers: Final = LoopCounter(
    "headrace_answers",
    "Generation requests by ending: finished, limited, deadline, gone (client disconnected), or an error kind.",
    ("model", "tenant", "ended"),
    registry=registry,
)
tokens: Final = LoopCounter(
    "headrace_tokens",
    "Tokens by kind: prompt, cached (part of the prompt), output.",
    ("model", "tenant", "kind"),
    registry=registry,
)
pipeline_stages: Final = Counter(
    "headrace_pipeline_stages",
    "Stages of pipelines by outcome: done, fewer, cached, skipped, stopped.",
    ("pipeline", "stage", "outcome"),
    registry=registry,
)
pipeline_prefetches: Final = Counter(
    "headrace_pipeline_prefetches",
    "Searches for questions that may come next: fetched, used, dropped (too many waited), failed.",
    ("pipeline", "outcome"),
    registry=registry,
)
pipeline_prompts: Final = Counter(
    "headrace_pipeline_prompts",
    "Answers of models in pipelines with assemble.warm: the KV of the first passage was kept (warm), or not (cold).",
    ("pipeline", "outcome"),
    registry=registry,
)
tool_calls: Final = Counter(
    "headrace_tool_calls",
    "Tool calls of pipelines by outcome: done, cached, failed, late, refused, repeated.",
    ("tool", "outcome"),
    registry=registry,
)
running: Final = LoopGauge("headrace_requests_running", "Generation requests in progress.", registry=registry)
background_responses: Final = Gauge(
    "headrace_background_responses", "Background responses that wait or run.", registry=registry
)
processes_replaced: Final = Counter(
    "headrace_processes_replaced",
    "Front processes that ended and were replaced, by cause: signal, exit.",
    ("why",),
    registry=registry,
)
feedback: Final = Counter(
    "headrace_feedback",
    "Outcomes that clients attached to their requests, by the sign of the value: positive, zero, negative.",
    ("outcome", "model", "tenant", "sign"),
    registry=registry,
)
connections: Final = Gauge("headrace_connections", "Open connections.", registry=registry)
cut: Final = Counter(
    "headrace_connections_cut", "Connections closed by the server, by reason.", ("why",), registry=registry
)
bodies_refused: Final = Counter(
    "headrace_bodies_refused",
    "Request bodies rejected by a limit: values, fields, a parameter's name (its items), key_bytes, bytes, wait.",
    ("what",),
    registry=registry,
)
body_bytes: Final = Gauge("headrace_body_bytes", "Bytes of large request bodies in memory.", registry=registry)
bodies_paced: Final = Counter(
    "headrace_bodies_paced", "Times that reading a body waited for its key's pace.", registry=registry
)
ttft: Final = LoopHistogram(
    "headrace_time_to_first_token_seconds",
    "Time to first token, from a request's arrival.",
    ("model",),
    buckets=_SECONDS,
    registry=registry,
)
duration: Final = LoopHistogram(
    "headrace_request_seconds",
    "Duration of a request, from its arrival to its last token.",
    ("model",),
    buckets=_SECONDS,
    registry=registry,
)
stages: Final = LoopHistogram(
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
slo_alerts: Final = Counter(
    "headrace_slo_alerts", "Alerts of objectives: page, ticket, resolved.", ("slo", "state"), registry=registry
)
alerts: Final = Counter("headrace_alerts", "Alerts to webhooks: sent, failed.", ("outcome",), registry=registry)
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
image_features: Final = Counter(
    "headrace_image_features",
    "Look-ups of images' features: hit (in the cache), miss (to be encoded).",
    ("model", "outcome"),
    registry=registry,
)
image_feature_bytes: Final = Gauge(
    "headrace_image_features_bytes", "Bytes of images' features in the cache.", ("model",), registry=registry
)
images_waiting: Final = Gauge(
    "headrace_images_waiting", "Images that are encoded or wait for it.", ("model",), registry=registry
)
image_seconds: Final = Histogram(
    "headrace_image_encode_seconds",
    "Time from the request for an image's features to their arrival: waiting, decoding and encoding.",
    ("model",),
    registry=registry,
    buckets=(0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
)
collections: Final = Counter(
    "headrace_collections",
    "Events of collections: document_added, document_ready, document_failed, document_removed, chunk_embedded, "
    "chunk_duplicate, embedding_failed, search, and a search's keyword_skipped, vector_skipped, rerank_skipped.",
    ("event",),
    registry=registry,
)
semantic: Final = Counter(
    "headrace_semantic_cache",
    "Semantic cache: outcomes, rejections by guards and verifier, verifications, comparisons with fresh answers.",
    ("table", "name"),
    registry=registry,
)
semantic_verify_seconds: Final = Histogram(
    "headrace_semantic_verify_seconds",
    "Time that the semantic cache's verifier took for a pair of questions.",
    registry=registry,
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5),
)
routes: Final = Counter(
    "headrace_routes", "Routing decisions, by stage and chosen variant.", ("stage", "chosen"), registry=registry
)
shadows: Final = Counter(
    "headrace_shadow",
    "Copies of requests for shadows: copied, exact (the same answer), asked_again (to keep a pair), failed, timeout, "
    "queue_full, budget.",
    ("shadow", "outcome"),
    registry=registry,
)
_SHARES: Final = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
shadow_similarity: Final = Histogram(
    "headrace_shadow_similarity",
    "Similarity of served answers and their shadows, 0 to 1.",
    ("shadow",),
    buckets=_SHARES,
    registry=registry,
)
route_quality: Final = Histogram(
    "headrace_route_quality",
    "Agreement of served answers with a better variant's, 0 to 1, from double-checks.",
    ("model", "route"),
    buckets=_SHARES,
    registry=registry,
)
golden: Final = Counter(
    "headrace_golden",
    "Answers by the golden variant, by the variant that failed a check and the check: json, citations, confidence.",
    ("model", "check"),
    registry=registry,
)
canary_percent: Final = Gauge(
    "headrace_canary_percent",
    "Share of the control's requests that the candidate gets.",
    ("control", "candidate"),
    registry=registry,
)
canary_events: Final = Counter(
    "headrace_canary",
    "Canaries by what the server did: advanced, promoted, rolled_back.",
    ("candidate", "event"),
    registry=registry,
)
breakers: Final = Counter(
    "headrace_breaker", "State changes of variants' circuit breakers.", ("model", "state"), registry=registry
)
degraded: Final = Counter(
    "headrace_degraded", "Requests by the degradation steps applied.", ("surface", "step"), registry=registry
)
answered_by: Final = LoopCounter(
    "headrace_answered_by",
    "Answers not generated for their request, by source.",
    ("model", "by"),
    registry=registry,
)
upstreams: Final = Gauge(
    "headrace_upstream", "An upstream's state, and its counters since the start.", ("model", "what"), registry=registry
)
gpu_busy: Final = Gauge(
    "headrace_gpu_busy_share", "Share of the time in which a GPU computes.", ("gpu", "name"), registry=registry
)
gpu_memory: Final = Gauge(
    "headrace_gpu_memory_bytes",
    "A GPU's memory by state: used (by all processes), free.",
    ("gpu", "name", "state"),
    registry=registry,
)
gpu_celsius: Final = Gauge("headrace_gpu_celsius", "Temperature of a GPU.", ("gpu", "name"), registry=registry)
gpu_watts: Final = Gauge("headrace_gpu_watts", "Power that a GPU takes.", ("gpu", "name"), registry=registry)
traces: Final = Counter(
    "headrace_traces", "Traces by what the collector did: sent, rejected.", ("outcome",), registry=registry
)
recorded: Final = Counter(
    "headrace_recorded",
    "Requests for recordings: written, too_long, unsupported (no OpenAI request says the same), failed.",
    ("outcome",),
    registry=registry,
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
    "gathered_steps": (("scheduler", "gather", "steps"), "Steps since the start that waited for more prompts."),
    "gathered_rows": (("scheduler", "gather", "rows"), "Tokens computed in those steps."),
    "gathered_sequences": (("scheduler", "gather", "sequences"), "Sequences in those steps."),
    "gather_seconds": (("scheduler", "gather", "seconds"), "Seconds that those steps waited."),
    "step_rows": (("rows",), "Tokens computed since the start, in prompts and answers."),
    "device_seconds": (("device_seconds",), "Seconds of computation since the start."),
    "bytes_read": (("bytes_read",), "Bytes of weights and KV that the steps since the start had to read at least."),
    "operations": (("operations",), "Operations that the steps since the start had to do at least."),
    "host_seconds": (("between_seconds",), "Seconds between steps since the start."),
    "blocks_used": (("blocks", "used"), "KV blocks in use."),
    "blocks_cached": (("blocks", "cached"), "KV blocks that hold cached prefixes."),
    "blocks_free": (("blocks", "free"), "Free KV blocks."),
    "block_tokens": (("blocks", "block_tokens"), "Tokens of a KV block."),
    "blocks_unfilled_tokens": (("blocks", "unfilled"), "Tokens reserved in KV blocks and not used yet."),
    "evictions": (("blocks", "evictions"), "Cached KV blocks evicted since the start."),
    "contiguous_tokens": (
        ("contiguous_tokens",),
        "Tokens that running sequences would reserve if each had one range for all it may become.",
    ),
    "tier_memory_bytes": (("tiers", "memory_bytes"), "KV in the host memory tier."),
    "tier_memory_hits": (("tiers", "memory_hits"), "KV blocks that came back from host memory since the start."),
    "tier_disk_bytes": (("tiers", "disk", "bytes"), "KV in the disk tier."),
    "tier_disk_hits": (("tiers", "disk_hits"), "KV blocks that came back from disk since the start."),
    "tier_disk_written": (("tiers", "disk", "written"), "KV blocks written to disk since the start."),
    "tier_disk_corrupt": (("tiers", "disk", "corrupt"), "Damaged or foreign files of KV that were removed."),
    "tier_disk_failed": (("tiers", "disk", "failed"), "Reads and writes of KV that the disk failed."),
    "tier_dropped": (("tiers", "dropped"), "KV blocks that left the tiers unwritten since the start."),
    "tier_recalled_tokens": (("tiers", "recalled_tokens"), "Tokens that tiers saved from being computed again."),
    "tier_recall_seconds": (("tiers", "recall_seconds"), "Seconds spent bringing KV back."),
}
_core_seconds: Final = Gauge(
    "headrace_engine_core_seconds",
    "Seconds of computation by stage of the core, read every 64 steps.",
    ("model", "replica", "stage"),
    registry=registry,
)
_workers: Final = Gauge(
    "headrace_worker_requests",
    "Requests that this server has at a worker, by the worker's state.",
    ("model", "address", "state"),
    registry=registry,
)
# What vLLM calls the same.
_vllm_running: Final = Gauge("vllm:num_requests_running", "As in vLLM.", ("model_name", "engine"), registry=registry)
_vllm_waiting: Final = Gauge("vllm:num_requests_waiting", "As in vLLM.", ("model_name", "engine"), registry=registry)
_vllm_kv: Final = Gauge(
    "vllm:kv_cache_usage_perc",
    "As in vLLM: 1 means that all KV blocks are used.",
    ("model_name", "engine"),
    registry=registry,
)
_engines: Final = {
    name: Gauge(f"headrace_engine_{name}", about, ("model", "replica"), registry=registry)
    for name, (_, about) in _ENGINE.items()
}


Metric = TypeVar("Metric", Counter, Gauge, Histogram)


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


_outcome_names: Final[set[str]] = set()


def count_outcome(name: str, value: float, model: str, tenant: str) -> None:
    """Count an outcome. Clients choose the names, so only the first ones have a label of their own."""
    if name not in _outcome_names:
        if len(_outcome_names) >= _MOST_OUTCOMES:
            name = "other"
        else:
            _outcome_names.add(name)
    sign = "positive" if value > 0 else "negative" if value < 0 else "zero"
    of(feedback, name, model, tenant_label(tenant), sign).inc()


def forget_tenant(label: str) -> None:
    """Remove the series of a tenant label that is no longer used."""
    for metric in (answers, tokens, feedback):
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
    labels = (model, str(replica))
    scheduler, blocks = statistics.get("scheduler", {}), statistics.get("blocks", {})
    _vllm_running.labels(*labels).set(scheduler.get("running", 0))
    _vllm_waiting.labels(*labels).set(scheduler.get("waiting", 0))
    if blocks.get("total"):
        _vllm_kv.labels(*labels).set(blocks.get("used", 0) / blocks["total"])
    for stage, seconds in statistics.get("core", {}).items():
        _core_seconds.labels(*labels, stage).set(seconds)


def workers(found: Iterable[tuple[str, str, str, int]]) -> None:
    """Set the gauges of all workers: model, address, state and requests. Those of former ones go."""
    _workers.clear()
    for model, address, state, requests in found:
        _workers.labels(model, address, state).set(requests)


def upstream(model: str, state: Mapping[str, Any]) -> None:
    """Set an upstream's gauges from its state."""
    for what, value in state.items():
        if isinstance(value, int | float):
            upstreams.labels(model, what).set(value)
    for what, value in state.get("engine", {}).items():
        if isinstance(value, int | float):
            upstreams.labels(model, f"engine_{what}").set(value)
    for what, value in state.get("capacity", {}).items():
        if isinstance(value, int | float):
            upstreams.labels(model, f"capacity_{what}").set(value)
    upstreams.labels(model, "breaker_open").set(state["breaker"] != "closed")
    for reason, number in state["reasons"].items():
        upstreams.labels(model, f"failed_{reason}").set(number)


def exposition() -> bytes:
    return generate_latest(registry)


Sample = tuple[str, dict[str, str], float]
Family = tuple[str, str, str, list[Sample]]  # name, type, help text, samples


def families() -> list[Family]:
    """Return all metrics of this process, to be added up with those of others."""
    return [
        (each.name, each.type, each.documentation, [(one.name, dict(one.labels), one.value) for one in each.samples])
        for each in registry.collect()
    ]


class _Sums:
    """A registry of the sums of several processes' metrics."""

    def __init__(self, processes: Iterable[Iterable[Family]]) -> None:
        self._families: dict[str, tuple[str, str]] = {}
        self._values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
        for each in processes:
            for name, kind, about, samples in each:
                self._families.setdefault(name, (kind, about))
                values = self._values.setdefault(name, {})
                for sample, labels, value in samples:
                    key = sample, tuple(labels.items())
                    if sample.endswith("_created"):
                        values[key] = min(values.get(key, value), value)
                    else:
                        values[key] = values.get(key, 0.0) + value

    def collect(self) -> Iterator[Any]:
        for name, (kind, about) in self._families.items():
            family = MetricFamily(name, about, kind)
            for (sample, labels), value in self._values[name].items():
                family.add_sample(sample, dict(labels), value)
            yield family


def exposition_of(processes: Iterable[Iterable[Family]]) -> bytes:
    """Return the sums of the metrics of several processes."""
    return generate_latest(_Sums(processes))  # pyright: ignore[reportArgumentType] - it only collects
