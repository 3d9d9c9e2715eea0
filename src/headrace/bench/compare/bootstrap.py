"""What figures might as well have been: draws of percentiles, means and rates, by resampling what was measured.

Owns the resampling. Requests are drawn with replacement for latencies; a gap goes with its request, for the gaps of one
request are alike. Rates are drawn from blocks of time, for what happens in one second depends on the second before.
Where there are several rounds, each draw takes rounds with replacement first, then requests or blocks within each.
Knows nothing of results, ratios or verdicts.

In all of it `picks` says which round stands at each place of each draw: (draws, rounds). What comes back has its shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from headrace.bench.results.result_columns import Floats, Indices

MOST_GROUPS: Final = 512  # of requests; more requests are drawn in groups made by chance
MOST_BINS: Final = 256  # of a round's gaps
SLICES: Final = 200  # of a round's time
LEAST_BLOCKS: Final = 5  # that a round's time must hold: of fewer, an interval says nothing
_CHUNK: Final = 2048  # draws at a time


def pick_rounds(rng: np.random.Generator, rounds: int, draws: int) -> Indices:
    return rng.integers(0, rounds, (draws, rounds), dtype=np.intp)


def percentile_draws(rng: np.random.Generator, rounds: Sequence[Floats], picks: Indices, share: float) -> Floats:
    """The percentile of as many values as each round has, drawn from it.

    The k-th smallest of n values drawn from n is the one at n times the k-th smallest of n uniform numbers, which has
    the distribution Beta(k, n + 1 - k): so a draw costs two numbers, however many values there are, and is exact.
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
    """Means, and a percentile for each of `shares`, of values of which one request may have many.

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
    """The group of each value, and how many groups there are: requests as they are, or put together by chance."""
    _, request = np.unique(owner, return_inverse=True)
    requests = int(request.max()) + 1
    groups = min(requests, MOST_GROUPS)
    return (rng.permutation(requests) % groups)[request], groups


class _Bins(msgspec.Struct, frozen=True, kw_only=True):
    """A histogram for each group of requests, all with the same bins: drawing groups is adding these up."""

    counts: Floats  # (groups, bins)
    least: Floats  # value in each bin
    most: Floats

    @classmethod
    def of(cls, values: Floats, group: Indices, groups: int) -> _Bins:
        half = MOST_BINS // 2
        # Half of the bins hold equal shares of the values; half are for the tail, and hold less the higher they are.
        cuts = np.concatenate((np.linspace(0.0, 1.0, half), 1.0 - np.geomspace(0.5, 1e-4, half)))
        edges, repeats = np.unique(np.quantile(values, np.sort(cuts)), return_counts=True)
        # A value that many share has a bin of its own.
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
        """`filled`: for each draw how many values lie up to the end of each bin. Even within a bin."""
        wanted = share * filled[:, -1]
        bin_ = np.minimum((filled < wanted[:, np.newaxis]).sum(axis=1), self.least.size - 1)
        rows = np.arange(len(filled))
        before = np.where(bin_ > 0, filled[rows, bin_ - 1], 0.0)
        inside = (wanted - before) / np.maximum(filled[rows, bin_] - before, 1.0)
        return self.least[bin_] + np.clip(inside, 0.0, 1.0) * (self.most[bin_] - self.least[bin_])


def _weights(rng: np.random.Generator, groups: int, draws: int) -> Floats:
    """How often each group is in each draw."""
    drawn = rng.integers(0, groups, (draws, groups)) + groups * np.arange(draws)[:, np.newaxis]
    return np.bincount(drawn.ravel(), minlength=draws * groups).reshape(draws, groups).astype(np.float64)


class TimeSlices(msgspec.Struct, frozen=True, kw_only=True):
    """A round cut into slices of time, all of the same length."""

    seconds: float  # that its rates are of
    counts: Floats  # (slices, things that are counted)
    block: int  # slices that are drawn together

    @property
    def blocks(self) -> int:
        return self.counts.shape[0] // self.block


def timed(
    begin: float, end: float, happened: Sequence[tuple[Floats, Floats]], *, lasting: float, seconds: float
) -> TimeSlices:
    """`happened`: for each thing that is counted when it happened, and how much of it. `lasting`: seconds for which
    what happens hangs together, such as those of a request: a block is at least as long, if the time allows."""
    width = max(end - begin, 1e-9) / SLICES
    edges = begin + width * np.arange(SLICES + 1)
    edges[-1] = max(edges[-1], end)
    counts = np.stack([np.histogram(at, bins=edges, weights=much)[0] for at, much in happened], axis=1)
    longest = SLICES // LEAST_BLOCKS
    block = int(np.clip(np.ceil(lasting / width), round(SLICES ** (1 / 3)), longest))
    return TimeSlices(seconds=seconds, counts=counts, block=block)


def rate_draws(rng: np.random.Generator, rounds: Sequence[TimeSlices], picks: Indices) -> Floats:
    """Of each counted thing, a second: (draws, rounds, things). Blocks begin anywhere; past the end they go on at the
    start, so that each slice is drawn as often as any other."""
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
    """Of each draw: the median of the rounds' ratios where each round of b belongs to one of a, otherwise the ratio of
    the rounds' medians."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.median(b / a, axis=1) if paired else np.median(b, axis=1) / np.median(a, axis=1)
    return np.where(np.isnan(found), 1.0, found)  # 0 / 0: neither has any


def interval(draws: Floats, confidence: float) -> tuple[float, float]:
    rest = (1.0 - confidence) / 2.0
    low = float(np.quantile(draws, rest, method="lower"))
    high = float(np.quantile(draws, 1.0 - rest, method="higher"))
    return low, high
