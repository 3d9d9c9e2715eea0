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

_reported: Final[set[tuple[Gauge, tuple[str, ...]]]] = set()  # series


def set_gpus(found: Sequence[Gpu]) -> None:
    """Set the gauges of all GPUs, and remove series that the driver no longer reports."""
    kept: set[tuple[Gauge, tuple[str, ...]]] = set()

    def put(gauge: Gauge, labels: tuple[str, ...], value: float | None) -> None:
        if value is not None:
            gauge.labels(*labels).set(value)
            kept.add((gauge, labels))

    for each in found:
        labels = (str(each.number), each.name)
        put(_busy, labels, each.busy)
        put(_celsius, labels, each.celsius)
        put(_watts, labels, each.watts)
        put(_memory, (*labels, "used"), each.memory_used)
        put(_memory, (*labels, "free"), each.memory_free)
    for gauge, labels in _reported - kept:
        gauge.remove(*labels)
    _reported.clear()
    _reported.update(kept)
