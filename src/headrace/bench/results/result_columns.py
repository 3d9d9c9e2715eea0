"""A result's rows as arrays, for charts and resampling: percentiles, rates over time, concurrency, lanes, histograms.

Latencies are milliseconds; points in time are seconds from the run's start.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable
from typing import Final

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from headrace.bench.results.benchmark_result import BenchmarkResult, RequestRow
from headrace.bench.results.request_stats import OBJECTIVES, is_good

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

LATENCIES: Final = ("ttft", "ttfo", "itl", "tpot", "e2el")
TAIL: Final = 0.99995  # highest percentile of a curve


class ResultColumns(msgspec.Struct, frozen=True, kw_only=True):
    """One element per row; NaN is unknown. Latencies cover successful requests only."""

    start: Floats
    end: Floats
    good: NDArray[np.bool_]  # successful, and met every objective if there are any
    ok: NDArray[np.bool_]
    prompt: Floats  # tokens
    ttft: Floats
    ttfo: Floats
    tpot: Floats
    e2el: Floats
    gaps: Floats  # of all rows, concatenated
    gap_row: Indices  # the row of each gap
    output_at: Floats  # time of each streamed output, of all rows, including failed ones
    output_tokens: Floats  # tokens of each output: a request's tokens spread evenly
    output_row: Indices  # the row of each output

    @property
    def seconds(self) -> float:
        """Seconds to the last end."""
        return float(self.end.max()) if self.end.size else 0.0

    def latency(self, name: str) -> Floats:
        """Return the known values of one of LATENCIES: gaps for itl, otherwise one per request."""
        if name == "itl":
            return self.gaps
        found: Floats = getattr(self, name)
        return found[np.isfinite(found)]


def columns(result: BenchmarkResult) -> ResultColumns:
    rows = result.rows
    ok = np.fromiter((row.ok for row in rows), dtype=np.bool_, count=len(rows))

    latencies = {
        "ttft": _milliseconds(row.ttft for row in rows),
        "ttfo": _milliseconds(row.ttfo for row in rows),
        "tpot": _milliseconds(row.tpot for row in rows),
        "e2el": _milliseconds(row.e2el for row in rows),
    }
    for values in latencies.values():
        values[~ok] = np.nan
    objectives = {name: most for name, most in result.objectives.items() if name in OBJECTIVES}
    gaps = np.fromiter(itertools.chain.from_iterable(row.gaps for row in rows if row.ok), dtype=np.float64)
    counts = np.array([len(row.gaps) if row.ok else 0 for row in rows], dtype=np.intp)
    at, tokens, of = _outputs(rows)
    return ResultColumns(
        start=np.array([row.start for row in rows], dtype=np.float64),
        end=np.array([row.end for row in rows], dtype=np.float64),
        good=np.fromiter((is_good(row, objectives) for row in rows), dtype=np.bool_, count=len(rows)),
        ok=ok,
        prompt=np.array([row.prompt_tokens for row in rows], dtype=np.float64),
        gaps=1e3 * gaps,
        gap_row=np.repeat(np.arange(len(rows)), counts),
        output_at=at,
        output_tokens=tokens,
        output_row=of,
        **latencies,
    )


def _milliseconds(values: Iterable[float | None]) -> Floats:
    return 1e3 * np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _outputs(rows: list[RequestRow]) -> tuple[Floats, Floats, Indices]:
    """Return time, tokens and row of each output: evenly spaced without gaps, at the end without streaming."""
    at: list[Floats] = []
    tokens: list[Floats] = []
    of: list[int] = []
    for place, row in enumerate(rows):
        if not row.output_tokens or row.e2el is None:
            continue
        if row.ttft is None:
            times = np.array([row.e2el])
        elif row.gaps:
            times = row.ttft + np.concatenate(([0.0], np.cumsum(row.gaps)))
        else:
            times = np.linspace(row.ttft, row.e2el, max(1, min(row.chunks, 1024)))
        at.append(row.start + times)
        tokens.append(np.full(times.size, row.output_tokens / times.size))
        of.append(place)
    counts = np.array([times.size for times in at], dtype=np.intp)
    empty = np.zeros(0)
    pooled = np.repeat(np.array(of, dtype=np.intp), counts)
    return np.concatenate(at or [empty]), np.concatenate(tokens or [empty]), pooled


def percentiles(values: Floats, most: int = 400) -> tuple[Floats, Floats]:
    """Return (shares, values) of the percentile curve, with more points at its high end, where it is drawn wide."""
    ordered = np.sort(values)
    count = ordered.size
    if not count:
        return np.zeros(0), np.zeros(0)
    deepest = math.log10(max(1.0 / count, 1.0 - TAIL))
    shares = 1.0 - np.power(10.0, np.linspace(0.0, deepest, most))
    return shares, np.percentile(ordered, 100.0 * shares)


def rate(at: Floats, weights: Floats, edges: Floats) -> Floats:
    """Return the weights per second between the edges."""
    found, _ = np.histogram(at, bins=edges, weights=weights)
    return found / np.diff(edges)


def slice_width(total: float, most: int = 150) -> float:
    """Choose a round slice width for `total` seconds, at least a second if possible."""
    least = max(total / most, min(1.0, total / 40.0), 1e-6)
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def slices(total: float, width: float) -> Floats:
    """Return the edges of slices up to `total`. The last may be shorter, or longer by up to a half."""
    edges = width * np.arange(max(1, round(total / width)) + 1, dtype=np.float64)
    edges[-1] = total if total > edges[-2] else edges[-1]
    return edges


def running(start: Floats, end: Floats, edges: Floats) -> Floats:
    """Return the mean number of running requests in each slice."""

    def before(times: Floats) -> Floats:
        """Sum the seconds since the times, at each edge."""
        ordered = np.sort(times)
        passed = np.searchsorted(ordered, edges, side="right")
        sums = np.concatenate((np.zeros(1), np.cumsum(ordered)))
        return passed.astype(np.float64) * edges - sums[passed]

    busy = before(start) - before(end)
    widths: Floats = edges[1:] - edges[:-1]
    return (busy[1:] - busy[:-1]) / widths


def lanes(start: ArrayLike, end: ArrayLike) -> Indices:
    """Assign each request the lowest lane that is free when it starts. Starts must ascend."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    found: list[int] = []
    for began, ended in zip(np.asarray(start).tolist(), np.asarray(end).tolist(), strict=True):
        while busy and busy[0][0] <= began:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (ended, lane))
        found.append(lane)
    return np.array(found, dtype=np.intp)


def bins(pooled: Floats, *, log: bool, low: float, high: float, most: int = 48) -> Floats:
    """Return the edges of a histogram's bins; fewer for fewer values."""
    count = int(np.clip(2.0 * np.sqrt(pooled.size), 8, most))
    if log:
        return np.asarray(np.geomspace(low, high, count + 1), dtype=np.float64)
    return np.linspace(low, high, count + 1)
