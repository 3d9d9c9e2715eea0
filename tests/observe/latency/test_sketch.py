"""Percentiles of a sketch against exact ones, and merging."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.observe.latency.sketch import ERROR, PER_OCTAVE, Sketch, merged

SHARES = (0.0, 0.01, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0)


def sketch_of(values: NDArray[np.float64]) -> Sketch:
    sketch = Sketch()
    sketch.extend(values)
    return sketch


def samples(kind: str, count: int = 1_000_000) -> NDArray[np.float64]:
    random = np.random.default_rng(7)
    if kind == "lognormal":
        return random.lognormal(-4.0, 1.5, count)
    if kind == "two modes":
        return np.concatenate([random.normal(0.01, 0.0005, count // 2), random.normal(2.0, 0.1, count - count // 2)])
    return random.pareto(1.5, count) * 0.001 + 0.0001


@pytest.mark.parametrize("kind", ["lognormal", "two modes", "pareto"])
def test_percentiles_of_a_million_values_are_right_within_two_percent(kind: str) -> None:
    values = samples(kind)
    exact = np.quantile(np.clip(values, 2.0**-20, 2.0**17), SHARES, method="lower")
    found = np.array(sketch_of(values).quantiles(SHARES))
    assert np.abs(found / exact - 1.0).max() <= ERROR + 1e-9
    assert ERROR < 0.02


def test_merged_sketches_are_the_sketch_of_all_values() -> None:
    values = samples("lognormal", 30_000)
    whole = sketch_of(values)
    parts = merged(sketch_of(part) for part in np.array_split(values, 7))
    assert parts.counts == whole.counts
    assert parts.count == 30_000
    assert parts.sum == pytest.approx(values.sum())


def test_single_values_count_like_many() -> None:
    values = samples("pareto", 1000)
    one = Sketch()
    for value in values.tolist():
        one.add(value)
    assert one.counts == sketch_of(values).counts


def test_it_survives_json() -> None:
    sketch = sketch_of(samples("pareto", 1000))
    again = Sketch.unpack(sketch.pack())
    assert again.counts == sketch.counts
    assert again.sum == pytest.approx(sketch.sum, abs=1e-5)


def test_values_out_of_range_count_at_its_ends() -> None:
    sketch = sketch_of(np.array([0.0, -1.0, 1e-12, 1e12]))
    assert sketch.counts == {-20 * PER_OCTAVE: 3, 17 * PER_OCTAVE: 1}


def test_values_up_to_a_bound_are_exact_where_it_is_a_buckets_end() -> None:
    values = samples("lognormal", 10_000)
    bounds = [place * PER_OCTAVE for place in range(-10, 3)]
    assert sketch_of(values).below(bounds) == [int((values <= 2.0 ** (bound / PER_OCTAVE)).sum()) for bound in bounds]


def test_an_empty_sketch_has_zeros() -> None:
    assert Sketch().quantiles((0.5, 0.99)) == [0.0, 0.0]
