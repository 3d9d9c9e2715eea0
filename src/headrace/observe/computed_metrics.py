"""The latencies, tokens and savings of the LatencyBook, and the events of objectives, as Prometheus metrics.

They are computed when they are scraped. One table has their names, which the reference is generated from; names that
begin with `vllm:` mean the same as in vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from headrace.observe.latency.latency_book import LATENCIES, LatencyBook, Row, group
from headrace.observe.latency.sketch import PER_OCTAVE, Sketch
from headrace.observe.metrics import registry
from headrace.observe.slo.objectives import WINDOWS, Objectives

_STEP: Final = PER_OCTAVE // 2  # bucket ends are powers of the square root of 2, so they are exact
_BOUNDS: Final = tuple(range(-12 * PER_OCTAVE, 9 * PER_OCTAVE + 1, _STEP))  # 0.24 ms to 512 s
_NAMES: Final = [(f"{2.0 ** (bound / PER_OCTAVE):.6g}") for bound in _BOUNDS]
_WINDOW_S: Final = 300.0


class LatencyMetric(NamedTuple):
    name: str
    type: str
    labels: tuple[str, ...]
    about: str


METRICS: Final = (
    LatencyMetric(
        "headrace_latency_seconds",
        "histogram",
        ("latency", "model", "surface", "tenant"),
        "Latencies of requests for text: ttft, itl, tpot, queue, prefill, decode, post, tokenise, hop, e2e.",
    ),
    LatencyMetric(
        "headrace_latency_quantile_seconds",
        "gauge",
        ("latency", "model", "surface", "quantile"),
        "Percentiles of the last five minutes, right within 1.1 %.",
    ),
    LatencyMetric(
        "headrace_slice_requests", "counter", ("endpoint", "length", "route"), "Requests by slices of the traffic."
    ),
    LatencyMetric("headrace_draft_tokens", "counter", ("model", "outcome"), "Draft tokens: accepted, rejected."),
    LatencyMetric("headrace_cache_answers", "counter", ("cache", "tenant"), "Requests that a cache answered."),
    LatencyMetric("headrace_cache_saved_seconds", "counter", ("cache", "tenant"), "Machine time saved by a cache."),
    LatencyMetric(
        "headrace_cache_saved_micros", "counter", ("cache", "tenant"), "Millionths of the currency saved by a cache."
    ),
    LatencyMetric("headrace_cost_micros", "counter", ("model", "tenant"), "Price of all requests, in millionths."),
    LatencyMetric("headrace_slo_events", "counter", ("slo", "objective", "outcome"), "Events by objective: good, bad."),
    LatencyMetric(
        "headrace_slo_burn_rate",
        "gauge",
        ("slo", "objective", "window"),
        "How fast an error budget is used; at 1 it lasts exactly 30 days.",
    ),
    LatencyMetric("headrace_slo_target", "gauge", ("slo", "objective"), "Share of events that is to be good."),
    LatencyMetric("vllm:time_to_first_token_seconds", "histogram", ("model_name",), "As in vLLM."),
    LatencyMetric("vllm:inter_token_latency_seconds", "histogram", ("model_name",), "As in vLLM."),
    LatencyMetric("vllm:request_time_per_output_token_seconds", "histogram", ("model_name",), "As in vLLM."),
    LatencyMetric("vllm:e2e_request_latency_seconds", "histogram", ("model_name",), "As in vLLM."),
    LatencyMetric("vllm:request_queue_time_seconds", "histogram", ("model_name",), "As in vLLM."),
    LatencyMetric("vllm:request_prefill_time_seconds", "histogram", ("model_name",), "As in vLLM."),
    LatencyMetric("vllm:request_decode_time_seconds", "histogram", ("model_name",), "As in vLLM."),
    LatencyMetric("vllm:prompt_tokens", "counter", ("model_name",), "As in vLLM."),
    LatencyMetric("vllm:generation_tokens", "counter", ("model_name",), "As in vLLM."),
)
_VLLM: Final = {
    "vllm:time_to_first_token_seconds": "ttft",
    "vllm:inter_token_latency_seconds": "itl",
    "vllm:request_time_per_output_token_seconds": "tpot",
    "vllm:e2e_request_latency_seconds": "e2e",
    "vllm:request_queue_time_seconds": "queue",
    "vllm:request_prefill_time_seconds": "prefill",
    "vllm:request_decode_time_seconds": "decode",
}
_KINDS: Final[dict[str, Any]] = {
    "histogram": HistogramMetricFamily,
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
}


class LatencyCollector(Collector):
    """Set `book` and `objectives` to what is to be exposed."""

    def __init__(self) -> None:
        self.book: LatencyBook | None = None
        self.objectives: Objectives | None = None

    def forget_tenant(self, label: str) -> None:
        """Drop the series of a tenant label that is no longer used; sums over tenants stay."""
        if self.book is not None:
            self.book.forget_tenant(label)

    def describe(self) -> list[Metric]:
        return list(_families().values())

    def collect(self) -> Iterator[Metric]:
        families = _families()
        if self.book is not None:
            _add_book(families, self.book)
        if self.objectives is not None:
            _add_objectives(families, self.objectives)
        yield from families.values()


def _families() -> dict[str, Any]:
    return {each.name: _KINDS[each.type](each.name, each.about, labels=each.labels) for each in METRICS}


def _add_book(families: dict[str, Any], book: LatencyBook) -> None:
    total = [(slice, row) for slice, row in book.total() if slice.model != "-"]
    for labels, row in group(total, ("model", "surface", "tenant")).items():
        for name in LATENCIES:
            if (sketch := row.sketches.get(name)) is not None:
                _add_histogram(families["headrace_latency_seconds"], (name, *labels), sketch)
    for labels, row in group(book.window(_WINDOW_S), ("model", "surface")).items():
        for name, sketch in row.sketches.items():
            for quantile, value in zip(("0.5", "0.95", "0.99"), sketch.quantiles((0.5, 0.95, 0.99)), strict=True):
                families["headrace_latency_quantile_seconds"].add_metric((name, *labels, quantile), value)
    for labels, row in group(book.total(), ("endpoint", "length", "route")).items():
        families["headrace_slice_requests"].add_metric(labels, row.requests)
    for (model,), row in group(total, ("model",)).items():
        _add_model(families, model, row)
    for (model, tenant), row in group(total, ("model", "tenant")).items():
        families["headrace_cost_micros"].add_metric((model, tenant), row.micros)
    for (tenant,), row in group(total, ("tenant",)).items():
        for cache, (answers, seconds, micros) in row.saved.items():
            families["headrace_cache_answers"].add_metric((cache, tenant), answers)
            families["headrace_cache_saved_seconds"].add_metric((cache, tenant), seconds)
            families["headrace_cache_saved_micros"].add_metric((cache, tenant), micros)


def _add_model(families: dict[str, Any], model: str, row: Row) -> None:
    for name, latency in _VLLM.items():
        if (sketch := row.sketches.get(latency)) is not None:
            _add_histogram(families[name], (model,), sketch)
    families["vllm:prompt_tokens"].add_metric((model,), row.prompt_tokens)
    families["vllm:generation_tokens"].add_metric((model,), row.output_tokens)
    if row.drafted:
        families["headrace_draft_tokens"].add_metric((model, "accepted"), row.accepted)
        families["headrace_draft_tokens"].add_metric((model, "rejected"), row.drafted - row.accepted)


def _add_objectives(families: dict[str, Any], objectives: Objectives) -> None:
    for objective, good, total in objectives.events():
        for outcome, count in (("good", good), ("bad", total - good)):
            families["headrace_slo_events"].add_metric((*objective.key, outcome), count)
        families["headrace_slo_target"].add_metric(objective.key, objective.target)
    for each in objectives.as_json():
        for window in WINDOWS:
            labels = (each["slo"], each["objective"], window)
            families["headrace_slo_burn_rate"].add_metric(labels, each["burn_rate"][window])


def _add_histogram(family: Any, labels: tuple[str, ...], sketch: Sketch) -> None:
    buckets = [*zip(_NAMES, sketch.below(_BOUNDS), strict=True), ("+Inf", sketch.count)]
    family.add_metric(labels, buckets, sketch.sum)


collector: Final = LatencyCollector()
registry.register(collector)
