"""Arrivals: the rate that was asked for, the spread that its kind has, the same times for the same seed."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from headrace.bench.load_generator.arrivals import Arrivals


def gaps(arrivals: Arrivals, count: int = 20_000, seed: str = "0") -> np.ndarray:
    times = np.array(list(itertools.islice(arrivals.times(seed), count)))
    return np.diff(times)


def test_constant_arrivals_are_as_far_apart_as_they_can_be() -> None:
    times = list(itertools.islice(Arrivals(rate=4.0, kind="constant").times("x"), 4))
    assert times == [0.0, 0.25, 0.5, 0.75]


def test_poisson_gaps_have_the_mean_and_the_spread_of_an_exponential() -> None:
    found = gaps(Arrivals(rate=5.0, kind="poisson"))
    assert found.mean() == pytest.approx(0.2, rel=0.03)
    assert found.std() == pytest.approx(0.2, rel=0.03)
    assert np.quantile(found, 0.5) == pytest.approx(0.2 * math.log(2), rel=0.03)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_the_burstiness_as_their_shape(burstiness: float) -> None:
    found = gaps(Arrivals(rate=5.0, kind="gamma", burstiness=burstiness))
    assert found.mean() == pytest.approx(0.2, rel=0.05)
    assert (found.mean() / found.std()) ** 2 == pytest.approx(burstiness, rel=0.1)


def test_times_are_the_seeds() -> None:
    arrivals = Arrivals(rate=5.0)
    assert gaps(arrivals, 50, "a").tolist() == gaps(arrivals, 50, "a").tolist()
    assert gaps(arrivals, 50, "a").tolist() != gaps(arrivals, 50, "b").tolist()


@pytest.mark.parametrize(("low", "high"), [(2.0, 10.0), (10.0, 2.0), (0.0, 10.0), (6.0, 6.0)])
def test_a_ramp_goes_evenly_from_one_rate_to_the_other(low: float, high: float) -> None:
    arrivals = Arrivals(rate=low, kind="constant", last_rate=high, seconds=10.0)
    times = np.array(list(itertools.takewhile(lambda at: at < 10.0, arrivals.times("x"))))
    assert len(times) == pytest.approx((low + high) / 2 * 10.0, abs=1)
    for place in range(10):
        due = low + (high - low) * (place + 0.5) / 10
        assert np.sum((times >= place) & (times < place + 1)) == pytest.approx(due, abs=1.01)


def test_after_a_ramp_its_last_rate_is_kept() -> None:
    arrivals = Arrivals(rate=2.0, kind="constant", last_rate=10.0, seconds=10.0)
    later = [at for at in itertools.islice(arrivals.times("x"), 200) if at > 10.0]
    assert np.diff(later) == pytest.approx(0.1)


def test_an_infinite_rate_is_all_at_once() -> None:
    assert list(itertools.islice(Arrivals(rate=math.inf).times("x"), 3)) == [0.0, 0.0, 0.0]
