"""Bootstrap: draws of percentiles, means and rates by resampling what was measured.

Latencies resample requests; gaps are drawn with their request, because gaps of one request are alike. Rates resample
blocks of time, because one second depends on the previous one. With several rounds, each draw resamples rounds first,
then requests or blocks within each.

`picks` says which round each draw takes at each position: (draws, rounds). Results have its shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from headrace.bench.results.result_columns import Floats, Indices

MOST_GROUPS: Final = 512  # of requests; more requests are drawn in random groups
MOST_BINS: Final = 256  # for a round's gaps
SLICES: Final = 200  # per round
LEAST_BLOCKS: Final = 5  # per round: fewer would make an interval meaningless
_CHUNK: Final = 2048  # draws at a time


def pick_rounds(rng: np.random.Generator, rounds: int, draws: int) -> Indices:
    return rng.integers(0, rounds, (draws, rounds), dtype=np.intp)


def percentile_draws(rng: np.random.Generator, rounds: Sequence[Floats], picks: Indices, share: float) -> Floats:
    """Draw the percentile of as many values as each round has.

    The k-th smallest of n values drawn from n is the one at n times the k-th smallest of n uniform numbers, which is
    distributed as Beta(k, n + 1 - k): a draw takes two random numbers, however many values there are, and is exact.
    """
    counts = np.array([each.size for each in rounds])
    offsets = np.concatenate(([0], np.cumsum(counts)[:-1]))
    ordered = np.concatenate([np.sort(each) for each in rounds])
    count = counts[picks]
    place = (count - 1) * share
    below = np.floor(place).astype(np.intp)
    rest = place - below
    first = rng.beta(below + 1, count - below)
    # The next one, given that one: the smallest of the n - k numbers that are left above it.
    second = first + (1.0 - first) * rng.beta(1, np.maximum(count - below - 1, 1))
    low, high = (
        ordered[offsets[picks] + np.minimum((at * count).astype(np.intp), count - 1)] for at in (first, second)
    )
    return low + rest * (high - low)


def group_draws(
    rng: np.random.Generator,
    rounds: Sequence[Floats],
    owners: Sequence[Indices],
    picks: Indices,
    shares: Sequence[float],
) -> tuple[Floats, list[Floats]]:
    """Draw means, and a percentile for each of `shares`, of values that belong to requests.

    `owners`: the request of each value of a round.
    """
    means = np.zeros(picks.shape)
    points = [np.zeros(picks.shape) for _ in shares]
    for number, (values, owner) in enumerate(zip(rounds, owners, strict=True)):
        group, groups = _in_groups(rng, owner)
        sums = np.bincount(group, weights=values, minlength=groups)
        counts = np.bincount(group, minlength=groups)
        binned = _Bins.of(values, group, groups) if shares else None
        wanted = np.flatnonzero(picks.ravel() == number)
        for begin in range(0, wanted.size, _CHUNK):
            places = wanted[begin : begin + _CHUNK]
            weights = _weights(rng, groups, places.size)
            means.flat[places] = (weights @ sums) / np.maximum(weights @ counts, 1.0)
            if binned is None:
                continue
            filled = np.cumsum(weights @ binned.counts, axis=1)
            for share, found in zip(shares, points, strict=True):
                found.flat[places] = binned.percentile(filled, share)
    return means, points


def _in_groups(rng: np.random.Generator, owner: Indices) -> tuple[Indices, int]:
    """Return the group of each value, and the number of groups: single requests, or random groups of them."""
    _, request = np.unique(owner, return_inverse=True)
    requests = int(request.max()) + 1
    groups = min(requests, MOST_GROUPS)
    return (rng.permutation(requests) % groups)[request], groups


class _Bins(msgspec.Struct, frozen=True, kw_only=True):
    """A histogram per group of requests, with common bins: drawing groups means adding histograms."""

    counts: Floats  # (groups, bins)
    least: Floats  # value in each bin
    most: Floats

    @classmethod
    def of(cls, values: Floats, group: Indices, groups: int) -> _Bins:
        half = MOST_BINS // 2
        # Half of the bins hold equal shares of the values; the other half resolves the tail.
        cuts = np.concatenate((np.linspace(0.0, 1.0, half), 1.0 - np.geomspace(0.5, 1e-4, half)))
        edges, repeats = np.unique(np.quantile(values, np.sort(cuts)), return_counts=True)
        # A frequent value gets its own bin.
        edges = np.union1d(edges, np.nextafter(edges[repeats > 1], np.inf))
        place = np.searchsorted(edges, values, side="right") - 1
        counts = np.bincount(group * edges.size + place, minlength=groups * edges.size)
        ordered = np.sort(values)
        ends = np.cumsum(np.bincount(place, minlength=edges.size))
        starts = np.concatenate(([0], ends[:-1]))
        return cls(
            counts=counts.reshape(groups, edges.size).astype(np.float64),
            least=ordered[np.minimum(starts, values.size - 1)],
            most=ordered[np.maximum(ends - 1, 0)],
        )

    def percentile(self, filled: Floats, share: float) -> Floats:
        """`filled`: cumulative counts per draw. Interpolates linearly within a bin."""
        wanted = share * filled[:, -1]
        bin_ = np.minimum((filled < wanted[:, np.newaxis]).sum(axis=1), self.least.size - 1)
        rows = np.arange(len(filled))
        before = np.where(bin_ > 0, filled[rows, bin_ - 1], 0.0)
        inside = (wanted - before) / np.maximum(filled[rows, bin_] - before, 1.0)
        return self.least[bin_] + np.clip(inside, 0.0, 1.0) * (self.most[bin_] - self.least[bin_])


def _weights(rng: np.random.Generator, groups: int, draws: int) -> Floats:
    """Return how often each group occurs in each draw."""
    drawn = rng.integers(0, groups, (draws, groups)) + groups * np.arange(draws)[:, np.newaxis]
    return np.bincount(drawn.ravel(), minlength=draws * groups).reshape(draws, groups).astype(np.float64)


class TimeSlices(msgspec.Struct, frozen=True, kw_only=True):
    """A round cut into time slices of equal length."""

    seconds: float  # duration for rates
    counts: Floats  # (slices, counted quantities)
    block: int  # slices drawn together

    @property
    def blocks(self) -> int:
        return self.counts.shape[0] // self.block


def cut_into_slices(
    begin: float, end: float, happened: Sequence[tuple[Floats, Floats]], *, lasting: float, seconds: float
) -> TimeSlices:
    """Cut a round into slices. `happened`: times and amounts per counted quantity; `lasting`: seconds over which events
    are correlated, such as a request's duration, the least length of a block if the round is long enough."""
    width = max(end - begin, 1e-9) / SLICES
    edges = begin + width * np.arange(SLICES + 1)
    edges[-1] = max(edges[-1], end)
    counts = np.stack([np.histogram(at, bins=edges, weights=much)[0] for at, much in happened], axis=1)
    longest = SLICES // LEAST_BLOCKS
    block = int(np.clip(np.ceil(lasting / width), round(SLICES ** (1 / 3)), longest))
    return TimeSlices(seconds=seconds, counts=counts, block=block)


def rate_draws(rng: np.random.Generator, rounds: Sequence[TimeSlices], picks: Indices) -> Floats:
    """Draw each quantity per second: (draws, rounds, quantities). Blocks start anywhere and wrap around, so that every
    slice is equally likely."""
    things = rounds[0].counts.shape[1]
    found = np.zeros((*picks.shape, things))
    for number, each in enumerate(rounds):
        wanted = np.argwhere(picks == number)
        total = np.concatenate((np.zeros((1, things)), np.cumsum(np.concatenate((each.counts, each.counts)), axis=0)))
        starts = rng.integers(0, SLICES, (wanted.shape[0], max(1, each.blocks)))
        sums = (total[starts + each.block] - total[starts]).sum(axis=1)
        drawn = starts.shape[1] * each.block * max(each.seconds, 1e-9) / SLICES
        found[wanted[:, 0], wanted[:, 1]] = sums / drawn
    return found


def ratio_draws(a: Floats, b: Floats, *, paired: bool) -> Floats:
    """Return, per draw, the median of the rounds' ratios if paired, otherwise the ratio of the rounds' medians."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.median(b / a, axis=1) if paired else np.median(b, axis=1) / np.median(a, axis=1)
    return np.where(np.isnan(found), 1.0, found)  # 0 / 0


def interval(draws: Floats, confidence: float) -> tuple[float, float]:
    rest = (1.0 - confidence) / 2.0
    low = float(np.quantile(draws, rest, method="lower"))
    high = float(np.quantile(draws, 1.0 - rest, method="higher"))
    return low, high
