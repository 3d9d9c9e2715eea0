"""Metrics without a lock say what prometheus_client's own say."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from headrace.observe.loop_metrics import LoopCounter, LoopGauge, LoopHistogram

SECONDS = (0.005, 0.1, 1.0)


def said(counters: type[Counter], gauges: type[Gauge], histograms: type[Histogram]) -> list[str]:
    registry = CollectorRegistry()
    requests = counters("requests", "Requests.", ("model", "ended"), registry=registry)
    running = gauges("running", "Running.", registry=registry)
    seconds = histograms("seconds", "Seconds.", ("model",), buckets=SECONDS, registry=registry)
    requests.labels("mini", "finished").inc()
    requests.labels("mini", "finished").inc(41)
    requests.labels("mini", "gone").inc(0)
    running.set(3)
    running.set(2)
    for value in (0.0, 0.005, 0.006, 1.0, 1.5, 100.0):
        seconds.labels("mini").observe(value)
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


def test_they_say_what_metrics_with_a_lock_say() -> None:
    lines = said(LoopCounter, LoopGauge, LoopHistogram)
    assert lines == said(Counter, Gauge, Histogram)
    assert 'seconds_bucket{le="0.005",model="mini"} 2.0' in lines
    assert 'requests_total{ended="finished",model="mini"} 42.0' in lines
