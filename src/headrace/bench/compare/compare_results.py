"""Compares two benchmarks: the ratio of each figure, its confidence interval, and a verdict.

A side may have several results, rounds of the same benchmark: a figure is then the median of the rounds. If both sides
have equally many, rounds are paired by position, as in alternating runs, and the ratio is the median of the pairs'
ratios: a slowdown of the machine affects both rounds of a pair.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
import numpy as np

from headrace.bench.compare.bootstrap import (
    TimeSlices,
    cut_into_slices,
    group_draws,
    interval,
    percentile_draws,
    pick_rounds,
    rate_draws,
    ratio_draws,
)
from headrace.bench.compare.comparability import warnings
from headrace.bench.compare.comparison import Comparison, LoadComparison, Ratio, RatioUnit, Verdict, show
from headrace.bench.results.benchmark_result import BenchmarkResult
from headrace.bench.results.formatting import clean
from headrace.bench.results.result_columns import LATENCIES, Floats, Indices, ResultColumns, columns
from headrace.errors import RequestError

__all__ = ["Comparison", "compare", "show"]

MOST_ROUNDS: Final = 64  # per side
MOST_STAGES: Final = 32  # loads compared
MOST_RESAMPLES: Final = 20_000
LEAST_REQUESTS: Final = 10  # per round
_LEAST_ABOVE: Final = 4  # requests of a side above a percentile: fewer would show differences that are not there
_POINTS: Final = (0.5, 0.9, 0.95, 0.99)


def compare(
    a: BenchmarkResult | Sequence[BenchmarkResult],
    b: BenchmarkResult | Sequence[BenchmarkResult],
    *,
    seed: int = 0,
    resamples: int = 2000,
    confidence: float = 0.95,
    margin: float = 0.0,
    paired: bool | None = None,
) -> Comparison:
    """Compare results, load by load if they have several. Takes seconds, however many requests they have.

    `paired`: whether to pair rounds; None: if both sides have equally many, and more than one. Raises RequestError.
    """
    left, right = _results(a, "a"), _results(b, "b")
    for name, value, least, most in (
        ("resamples", resamples, 100, MOST_RESAMPLES),
        ("confidence", confidence, 0.5, 0.9999),
        ("margin", margin, 0.0, 10.0),
    ):
        if not least <= value <= most:
            raise RequestError(f"{name} must be {least:g} to {most:g}, not {value}.", parameter=name)
    if paired and len(left) != len(right):
        raise RequestError("Paired rounds need as many results on both sides.", parameter="paired")
    is_paired = len(left) == len(right) > 1 and paired is not False
    setting = _Method(seed=seed, resamples=resamples, confidence=confidence, margin=margin, paired=is_paired)
    if all(len(result.stages) < 2 for result in (*left, *right)):
        groups = [_group("", left, right, setting)]
    else:
        groups = [
            _group(name, [_under(each, name) for each in left], [_under(each, name) for each in right], setting)
            for name in _common_loads(left, right)
        ]
    return Comparison(
        a=_name(left),
        b=_name(right),
        rounds_a=len(left),
        rounds_b=len(right),
        paired=is_paired,
        seed=seed,
        resamples=resamples,
        confidence=confidence,
        margin=margin,
        warnings=warnings(left, right),
        knees_a=_knees(left),
        knees_b=_knees(right),
        groups=groups,
    )


def _results(given: BenchmarkResult | Sequence[BenchmarkResult], name: str) -> list[BenchmarkResult]:
    found = [given] if isinstance(given, BenchmarkResult) else list(given)
    if not 1 <= len(found) <= MOST_ROUNDS:
        raise RequestError(f"A side must have 1 to {MOST_ROUNDS} results, not {len(found)}.", parameter=name)
    for result in found:
        if not result.rows:
            name_ = clean(result.label or result.model or result.url, 100)
            raise RequestError(
                f"The result of {name_} contains no rows of requests. Run bench with --detail.", parameter=name
            )
    return found


def _name(side: Sequence[BenchmarkResult]) -> str:
    first = side[0]
    return clean(" · ".join(part for part in (first.label, first.model, first.url) if part), 200)


def _knees(side: Sequence[BenchmarkResult]) -> list[str]:
    return [
        clean(result.stages[result.knee].name, 60)
        for result in side
        if result.knee is not None and result.knee < len(result.stages)
    ]


def _common_loads(left: Sequence[BenchmarkResult], right: Sequence[BenchmarkResult]) -> list[str]:
    """Return the loads for which every result has rows."""
    with_rows: list[set[str]] = []
    for result in (*left, *right):
        places = {row.stage for row in result.rows}
        with_rows.append({stage.name for place, stage in enumerate(result.stages) if place in places})
    common = set[str].intersection(*with_rows)
    return list(dict.fromkeys(stage.name for stage in left[0].stages if stage.name in common))[:MOST_STAGES]


def _under(result: BenchmarkResult, load: str) -> BenchmarkResult:
    """Return the part of a result with one load."""
    places = {place for place, stage in enumerate(result.stages) if stage.name == load}
    stage = result.stages[min(places)]
    rows = [row for row in result.rows if row.stage == min(places)]
    return msgspec.structs.replace(result, rows=rows, stages=[stage], figures=stage.figures)


class _Method(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    resamples: int
    confidence: float
    margin: float
    paired: bool


class _Side(msgspec.Struct, frozen=True, kw_only=True):
    """The rounds of one side, and the rounds that each draw takes."""

    results: list[BenchmarkResult]
    columns: list[ResultColumns]
    picks: Indices

    def rounds(self, which: str) -> list[Floats]:
        return [each.latency(which) for each in self.columns]

    def requests(self, which: str) -> list[int]:
        """Count the requests with a value, per round."""
        if which == "itl":
            return [int(np.unique(each.gap_row).size) for each in self.columns]
        return [values.size for values in self.rounds(which)]


def _group(name: str, left: list[BenchmarkResult], right: list[BenchmarkResult], setting: _Method) -> LoadComparison:
    # A load's draws do not depend on which other loads are compared.
    rng = np.random.default_rng([setting.seed, zlib.crc32(name.encode("utf-8", "replace"))])
    picks = pick_rounds(rng, len(left), setting.resamples)
    a = _Side(results=left, columns=[columns(each) for each in left], picks=picks)
    if not setting.paired:
        picks = pick_rounds(rng, len(right), setting.resamples)
    b = _Side(results=right, columns=[columns(each) for each in right], picks=picks)
    return LoadComparison(
        name=clean(name, 100),
        requests_a=sum(each.figures.requests for each in left),
        requests_b=sum(each.figures.requests for each in right),
        failed_a=sum(each.figures.failed for each in left),
        failed_b=sum(each.figures.failed for each in right),
        ratios=[
            *(ratio for which in LATENCIES for ratio in _latency(rng, which, a, b, setting)),
            *_rates(rng, a, b, setting),
        ],
    )


def _latency(rng: np.random.Generator, which: str, a: _Side, b: _Side, setting: _Method) -> Iterator[Ratio]:
    values_a, values_b = a.rounds(which), b.rounds(which)
    if not all(values.size for values in (*values_a, *values_b)):
        return
    if which == "ttfo" and all(
        np.array_equal(each.ttfo, each.ttft, equal_nan=True) for each in (*a.columns, *b.columns)
    ):
        return  # without reasoning it equals the TTFT
    requests = [a.requests(which), b.requests(which)]
    least, total = min(map(min, requests)), min(map(sum, requests))
    drawn_a, drawn_b = _drawn(rng, which, a, values_a), _drawn(rng, which, b, values_b)
    for place, point in enumerate((None, *_POINTS)):
        of_a, of_b = ([_point(values, point) for values in side] for side in (values_a, values_b))
        need = LEAST_REQUESTS if point is None else math.ceil(_LEAST_ABOVE / (1.0 - point) - 1e-6)
        yield _ratio(
            f"{which} {'mean' if point is None else f'p{100 * point:g}'}",
            "ms",
            of_a,
            of_b,
            ratio_draws(drawn_a[place], drawn_b[place], paired=setting.paired),
            values=(sum(values.size for values in values_a), sum(values.size for values in values_b)),
            enough=least >= LEAST_REQUESTS and total >= need,
            setting=setting,
        )


def _point(values: Floats, point: float | None) -> float:
    return float(values.mean()) if point is None else float(np.percentile(values, 100.0 * point))


def _drawn(rng: np.random.Generator, which: str, side: _Side, values: list[Floats]) -> list[Floats]:
    """Return draws of the mean, then of each of _POINTS."""
    if which == "itl":
        mean, points = group_draws(rng, values, [each.gap_row for each in side.columns], side.picks, _POINTS)
        return [mean, *points]
    mean, _ = group_draws(rng, values, [np.arange(each.size) for each in values], side.picks, ())
    return [mean, *(percentile_draws(rng, values, side.picks, point) for point in _POINTS)]


def _rates(rng: np.random.Generator, a: _Side, b: _Side, setting: _Method) -> Iterator[Ratio]:
    drawn_a, drawn_b = (
        rate_draws(rng, [_timed(*each) for each in zip(side.results, side.columns, strict=True)], side.picks)
        for side in (a, b)
    )
    ok = [[int(each.ok.sum()) for each in side.columns] for side in (a, b)]
    for place, (name, key) in enumerate(
        (("output tokens/s", "output_throughput"), ("requests/s", "request_throughput"), ("goodput/s", "goodput"))
    ):
        of_a, of_b = ([getattr(each.figures, key) for each in side.results] for side in (a, b))
        if None in (*of_a, *of_b):  # without objectives there is no goodput
            continue
        yield _ratio(
            name,
            "1/s",
            of_a,
            of_b,
            ratio_draws(drawn_a[:, :, place], drawn_b[:, :, place], paired=setting.paired),
            values=(sum(ok[0]), sum(ok[1])),
            enough=min(*ok[0], *ok[1]) >= LEAST_REQUESTS,
            setting=setting,
        )


def _timed(result: BenchmarkResult, each: ResultColumns) -> TimeSlices:
    """Count output tokens, successful requests and good ones over time."""
    well = each.ok[each.output_row]
    begin, end = float(each.start.min()), float(each.end.max())
    answers = each.latency("e2el")
    return cut_into_slices(
        begin,
        end,
        [
            (each.output_at[well], each.output_tokens[well]),
            (each.end[each.ok], np.ones(int(each.ok.sum()))),
            (each.end[each.good], np.ones(int(each.good.sum()))),
        ],
        lasting=float(answers.mean()) / 1e3 if answers.size else 0.0,
        seconds=result.figures.seconds or end - begin,
    )


def _ratio(
    name: str,
    unit: RatioUnit,
    a: list[float],
    b: list[float],
    draws: Floats,
    *,
    values: tuple[int, int],
    enough: bool,
    setting: _Method,
) -> Ratio:
    ratio = low = high = None
    verdict: Verdict = "unknown"
    if min(a) > 0.0:
        ratio = float(np.median(np.divide(b, a)) if setting.paired else np.median(b) / np.median(a))
        low, high = interval(draws, setting.confidence)
        verdict = _verdict(unit, ratio, low, high, setting.margin) if enough else "too few"
    return Ratio(
        figure=name,
        unit=unit,
        a=float(np.median(a)),
        b=float(np.median(b)),
        ratio=ratio,
        low=low,
        high=high,  # JSON writes infinity as null
        verdict=verdict,
        values_a=values[0],
        values_b=values[1],
    )


def _verdict(unit: RatioUnit, ratio: float, low: float, high: float, margin: float) -> Verdict:
    if low <= 1.0 <= high or 1.0 / (1.0 + margin) <= ratio <= 1.0 + margin:
        return "no difference"
    return "better" if (ratio < 1.0) == (unit == "ms") else "worse"
