"""Sets the metrics of GPUs to what their drivers report."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

from prometheus_client import Gauge

from headrace.observe import metrics
from headrace.observe.gpus.gpu import Gpu

_lock: Final = threading.Lock()  # a driver may answer while its last values are taken back
_reported: Final[set[tuple[Gauge, tuple[str, ...]]]] = set()  # series


def set_gpus(found: Sequence[Gpu]) -> None:
    """Set the gauges of all GPUs, and remove series that the driver no longer reports."""
    kept: set[tuple[Gauge, tuple[str, ...]]] = set()

    def put(gauge: Gauge, labels: tuple[str, ...], value: float | None) -> None:
        if value is not None:
            gauge.labels(*labels).set(value)
            kept.add((gauge, labels))

    with _lock:
        for each in found:
            labels = (str(each.number), each.name)
            put(metrics.gpu_busy, labels, each.busy)
            put(metrics.gpu_celsius, labels, each.celsius)
            put(metrics.gpu_watts, labels, each.watts)
            put(metrics.gpu_memory, (*labels, "used"), each.memory_used)
            put(metrics.gpu_memory, (*labels, "free"), each.memory_free)
        for gauge, labels in _reported - kept:
            gauge.remove(*labels)
        _reported.clear()
        _reported.update(kept)
