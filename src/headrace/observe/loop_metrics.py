"""Prometheus metrics that only the thread of the event loop changes, so that they need no lock.

For what every request counts. All other metrics may be counted in any thread: they are prometheus_client's own.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

from prometheus_client import Counter, Gauge, Histogram


class _Value:
    __slots__ = ("amount",)

    def __init__(self) -> None:
        self.amount = 0.0

    def get(self) -> float:
        return self.amount

    def get_exemplar(self) -> None:
        """There are none."""


class LoopCounter(Counter):
    def _metric_init(self) -> None:
        super()._metric_init()
        self._value: Any = _Value()

    def inc(self, amount: float = 1.0, exemplar: dict[str, str] | None = None) -> None:
        self._value.amount += amount


class LoopGauge(Gauge):
    def _metric_init(self) -> None:
        super()._metric_init()
        self._value: Any = _Value()

    def set(self, value: float) -> None:
        self._value.amount = value


class LoopHistogram(Histogram):
    def _metric_init(self) -> None:
        super()._metric_init()
        self._sum: Any = _Value()
        self._buckets: list[Any] = [_Value() for _ in self._upper_bounds]

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        self._sum.amount += amount
        self._buckets[bisect_left(self._upper_bounds, amount)].amount += 1.0
