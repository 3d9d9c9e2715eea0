"""Percentiles and durations of a drill's report."""

from __future__ import annotations

from math import isnan

from headrace.bench.drills.promises import milliseconds, percentile


def test_percentiles_are_observed_values() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([3.0, 1.0, 2.0], 1.0) == 3.0
    assert percentile([1.0], 0.99) == 1.0
    assert isnan(percentile([], 0.5))


def test_durations_are_whole_milliseconds() -> None:
    assert milliseconds(0.0123) == "12 ms"
