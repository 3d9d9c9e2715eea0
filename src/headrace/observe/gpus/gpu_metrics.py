"""The Prometheus metrics of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from prometheus_client import Gauge

from headrace.observe.gpus.gpu import Gpu
from headrace.observe.metrics import registry

_busy: Final = Gauge(
    "headrace_gpu_busy_share", "Share of the time in which a GPU computes.", ("gpu", "name"), registry=registry
)
_memory: Final = Gauge(
    "headrace_gpu_memory_bytes",
    "A GPU's memory by state: used (by all processes), free.",
    ("gpu", "name", "state"),
    registry=registry,
)
_celsius: Final = Gauge("headrace_gpu_celsius", "Temperature of a GPU.", ("gpu", "name"), registry=registry)
_watts: Final = Gauge("headrace_gpu_watts", "Power that a GPU takes.", ("gpu", "name"), registry=registry)


def set_gpus(found: Sequence[Gpu]) -> None:
    """Set the gauges of all GPUs. Those of former ones, and of what a driver no longer says, go."""
    for gauge in (_busy, _memory, _celsius, _watts):
        gauge.clear()
    for each in found:
        labels = (str(each.number), each.name)
        for gauge, value in ((_busy, each.busy), (_celsius, each.celsius), (_watts, each.watts)):
            if value is not None:
                gauge.labels(*labels).set(value)
        for state, size in (("used", each.memory_used), ("free", each.memory_free)):
            if size is not None:
                _memory.labels(*labels, state).set(size)
