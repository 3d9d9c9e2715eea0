"""Simulates the power of the gate's tests: how often a real difference is found with a given number of prompts."""

from __future__ import annotations

import math

import numpy as np

from headrace.lab.comparison.paired_tests import mean_above, worse_share

TRIALS = 1000


def power_of_drop(
    drop: float, count: int, *, margin: float, level: float, noise: float = 0.02, trials: int = TRIALS, seed: int = 0
) -> float:
    """Return how often a drop of the share of good answers is found. `noise`: share of the pairs that change for the
    better by chance, and as many more for the worse."""
    rng = np.random.default_rng([seed, count])
    draws = rng.random((trials, count))
    found = 0
    for row in draws:
        lost = row < drop + noise
        won = (row >= drop + noise) & (row < drop + 2 * noise)
        found += worse_share((~lost).tolist(), (~won).tolist(), margin=margin) <= level
    return found / trials


def power_of_ratio(
    ratio: float, count: int, *, limit: float, level: float, spread: float = 0.2, trials: int = TRIALS, seed: int = 0
) -> float:
    """Return how often a ratio above the limit is found. `spread`: standard deviation of the pairs' log ratios."""
    rng = np.random.default_rng([seed, count])
    values = rng.normal(math.log(ratio), spread, (trials, count))
    return sum(mean_above(row, math.log(limit), seed=seed) <= level for row in values) / trials
