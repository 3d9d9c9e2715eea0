"""Tests of means and shares keep their level, find what is there, and agree with exact values."""

from __future__ import annotations

import math

import numpy as np
import pytest

from headrace.lab.comparison.paired_tests import (
    binomial_tail,
    drop_interval,
    holm,
    mean_above,
    mean_interval,
    share_below,
    share_interval,
    worse_share,
)


def test_binomial_tails_are_exact() -> None:
    assert binomial_tail(3, 3, 0.5) == pytest.approx(0.125)
    assert binomial_tail(8, 10, 0.5) == pytest.approx(56 / 1024)
    assert binomial_tail(0, 5, 0.1) == 1.0
    assert binomial_tail(1, 5, 0.0) == 0.0


def test_a_share_below_its_bound_is_found() -> None:
    assert share_below(10, 10, 0.98) == 1.0
    assert share_below(90, 100, 0.98) < 1e-4
    assert share_below(0, 0, 0.98) == 1.0


def test_only_discordant_pairs_count() -> None:
    before = [True] * 100
    after = [False] * 5 + [True] * 95
    assert worse_share(after, before) == pytest.approx(1 / 32)
    assert worse_share(after + [False] * 500, before + [False] * 500) == pytest.approx(1 / 32)
    assert worse_share(before, before) == 1.0
    assert worse_share(before, after) == 1.0


def test_a_margin_makes_the_test_harder_to_fail() -> None:
    before, after = [True] * 100, [False] * 12 + [True] * 88
    assert worse_share(after, before) < 0.001
    assert worse_share(after, before, margin=0.05) > worse_share(after, before, margin=0.02) > 0.001
    assert worse_share(after, before, margin=0.12) == 1.0


def test_few_values_are_flipped_exactly() -> None:
    assert mean_above([1.0, 2.0, 3.0]) == pytest.approx(1 / 8)
    assert mean_above([1.0] * 10) == pytest.approx(1 / 1024)
    assert mean_above([0.2] * 10, 0.3) == 1.0
    assert mean_above([]) == 1.0


def test_many_values_are_tested_by_their_standard_error() -> None:
    values = np.random.default_rng(4).normal(0.1, 1.0, 501)
    few = mean_above(values[:500])
    assert mean_above(values) == pytest.approx(few, abs=0.01)
    assert mean_above(-values) > 0.9


def test_intervals_cover_the_mean_as_often_as_they_say() -> None:
    rng = np.random.default_rng(3)
    covered = sum(
        low <= 1.0 <= high for low, high in (mean_interval(rng.normal(1.0, 2.0, 60), seed=seed) for seed in range(300))
    )
    assert 0.91 <= covered / 300 <= 0.985
    assert mean_interval([1.0]) == (-math.inf, math.inf)


def test_exact_intervals_leave_room_where_nothing_was_seen() -> None:
    low, high = share_interval(60, 60)
    assert high == 1.0
    assert low == pytest.approx(0.025 ** (1 / 60))
    assert share_interval(0, 10)[1] == pytest.approx(1 - 0.025 ** (1 / 10))
    assert share_interval(5, 10)[0] == pytest.approx(1 - share_interval(5, 10)[1])
    low, high = drop_interval([True] * 100, [True] * 100)
    assert high == pytest.approx(1 - 0.025**0.01, abs=1e-6)
    assert low == -high
    low, high = drop_interval([False] * 50 + [True] * 50, [True] * 100)
    assert low < 0.5 < high
    assert low > 0.35


def test_holm_rejects_step_by_step() -> None:
    assert holm([0.01, 0.04, 0.03], 0.05) == [True, False, False]
    assert holm([0.01, 0.02, 0.03], 0.05) == [True, True, True]
    assert holm([], 0.05) == []


def test_a_permutation_test_keeps_its_level_for_skewed_pairs() -> None:
    """Differences of two values with the same skewed distribution are symmetric, as the test assumes."""
    rng = np.random.default_rng(11)
    alarms = 0
    for trial in range(1000):
        values = rng.lognormal(0.0, 1.0, (2, 40))
        alarms += mean_above(values[0] - values[1], seed=trial % 7) <= 0.05
    assert alarms <= 70  # 50 are expected; the 99.5 % bound of the binomial
