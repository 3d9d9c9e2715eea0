"""Paired tests and intervals over prompts: is a candidate worse than the baseline by more than a margin?

Binary outcomes use the exact conditional test on discordant pairs (McNemar's, with a margin). Means use a sign-flip
permutation test, which assumes nothing but symmetry, and intervals come from the bootstrap of `bench.compare`. Holm's
correction keeps the chance of any false alarm, over all metrics together, at the level.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headrace.bench.compare.bootstrap import group_draws, interval

Doubles = NDArray[np.float64]

DRAWS: Final = 2000
FLIPS: Final = 2000
_MOST_FLIPPED: Final = 500  # values; for more, the mean is as good as normal
_SLACK: Final = 1e-12  # relative, for sums that are equal but for their order


def mean_interval(values: Sequence[float] | Doubles, *, seed: int = 0, confidence: float = 0.95) -> tuple[float, float]:
    """Return the bootstrap interval of a mean over prompts; of fewer than two values, the widest."""
    given = np.asarray(values, dtype=np.float64)
    if given.size < 2:
        return -math.inf, math.inf
    picks = np.zeros((DRAWS, 1), dtype=np.intp)
    owners = np.arange(given.size, dtype=np.intp)
    means, _ = group_draws(np.random.default_rng(seed), [given], [owners], picks, ())
    return interval(means[:, 0], confidence)


def binomial_tail(count: int, total: int, share: float) -> float:
    """Return the probability of at least `count` successes among `total`."""
    if count <= 0:
        return 1.0
    if share <= 0.0:
        return 0.0
    if share >= 1.0:
        return 1.0
    logs = [
        math.lgamma(total + 1) - math.lgamma(k + 1) - math.lgamma(total - k + 1)
        + k * math.log(share) + (total - k) * math.log1p(-share)
        for k in range(count, total + 1)
    ]  # fmt: skip
    return min(1.0, math.fsum(math.exp(each) for each in logs))


def share_interval(good: int, total: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the exact interval of a share (Clopper and Pearson), which is not empty even if all outcomes are good."""
    rest = (1.0 - confidence) / 2.0
    low = _solve(lambda share: binomial_tail(good, total, share), rest) if good else 0.0
    high = 1.0 - _solve(lambda share: binomial_tail(total - good, total, share), rest) if good < total else 1.0
    return low, high


def drop_interval(
    candidate: Sequence[bool], baseline: Sequence[bool], *, seed: int = 0, confidence: float = 0.95
) -> tuple[float, float]:
    """Return the interval of the drop of a share. Few changed pairs widen it as far as they allow: no loss among n
    pairs still allows a drop of about 3 / n."""
    total = len(candidate)
    if not total:
        return -math.inf, math.inf
    drops = [float(before) - float(after) for after, before in zip(candidate, baseline, strict=True)]
    low, high = mean_interval(drops, seed=seed, confidence=confidence)
    lost, won = sum(drop > 0 for drop in drops), sum(drop < 0 for drop in drops)
    _, most_lost = share_interval(lost, total, confidence)
    _, most_won = share_interval(won, total, confidence)
    return min(low, lost / total - most_won), max(high, most_lost - won / total)


def _solve(rising: Callable[[float], float], value: float) -> float:
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if rising(middle) < value else (low, middle)
    return (low + high) / 2.0


def share_below(good: int, total: int, least: float) -> float:
    """Return the p-value of "the share of good outcomes is at least `least`". Exact."""
    return binomial_tail(total - good, total, 1.0 - least) if total else 1.0


def worse_share(candidate: Sequence[bool], baseline: Sequence[bool], *, margin: float = 0.0) -> float:
    """Return the p-value of "the candidate's share of good outcomes is at most `margin` below the baseline's".

    Exact given the number of discordant pairs: without a margin it is McNemar's exact test, one-sided.
    """
    lost = sum(before and not after for after, before in zip(candidate, baseline, strict=True))
    won = sum(after and not before for after, before in zip(candidate, baseline, strict=True))
    discordant = lost + won
    if not discordant:
        return 1.0
    share = (1.0 + margin * len(candidate) / discordant) / 2.0  # of losses, where the drop equals the margin
    return binomial_tail(lost, discordant, share)


def mean_above(values: Sequence[float] | Doubles, most: float = 0.0, *, seed: int = 0) -> float:
    """Return the p-value of "the mean is at most `most`", by flipping signs around it.

    With up to 12 values that differ from `most` every combination of signs is tried, up to 500 values 2,000 random
    ones; more values are tested by their mean and its standard error.
    """
    moved = np.asarray(values, dtype=np.float64) - most
    moved = moved[moved != 0.0]
    if not moved.size:
        return 1.0
    total = float(moved.sum())
    if moved.size > _MOST_FLIPPED:
        return 0.5 * math.erfc(total / math.sqrt(2.0 * float(moved @ moved)))
    sums = _signs(moved.size, seed) @ moved
    reached = int(np.count_nonzero(sums >= total - _SLACK * float(np.abs(moved).sum())))
    if moved.size <= 12:
        return reached / sums.size
    return (reached + 1) / (sums.size + 1)


@cache
def _all_signs(count: int) -> Doubles:
    bits = (np.arange(1 << count)[:, np.newaxis] >> np.arange(count)) & 1
    return 2.0 * bits.astype(np.float64) - 1.0


@lru_cache(maxsize=16)
def _signs(count: int, seed: int) -> Doubles:
    if count <= 12:
        return _all_signs(count)
    rng = np.random.default_rng([seed, count])
    return 2.0 * rng.integers(0, 2, (FLIPS, count), dtype=np.int8).astype(np.float64) - 1.0


def holm(p_values: Sequence[float], level: float) -> list[bool]:
    """Return which hypotheses are rejected, so that the chance of any false rejection is at most `level`."""
    rejected = [False] * len(p_values)
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        if p_values[place] > level / (len(p_values) - rank):
            break
        rejected[place] = True
    return rejected
