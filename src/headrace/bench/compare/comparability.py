"""Warns if two benchmarks are not comparable: different workloads, loads or models, or too many failures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from headrace.bench.results.benchmark_result import BenchmarkResult
from headrace.bench.results.formatting import clean, number, share

MOST_WARNINGS: Final = 40
_APART: Final = 0.05  # relative difference of lengths and counts
_FAILED: Final = 0.01  # share of failed requests
_CACHED: Final = 0.1  # share of prompt tokens

_SAME: Final[tuple[tuple[str, Callable[[BenchmarkResult], Any]], ...]] = (
    ("workload", lambda result: result.workload),
    ("model", lambda result: result.model),
    ("kind of load", lambda result: [result.load, result.arrivals, result.burstiness, result.ramp]),
    ("endpoint", lambda result: result.endpoint),
    ("streaming", lambda result: "streamed" if result.streamed else "whole"),
    ("objectives", lambda result: result.objectives),
    ("source of token counts", lambda result: sorted({row.tokens_from for row in result.rows if row.ok})),
)


def warnings(left: Sequence[BenchmarkResult], right: Sequence[BenchmarkResult]) -> list[str]:
    """Collect the warnings for two sides, each with one round or more."""
    found: list[str] = []
    first = left[0]
    for what, of in _SAME:
        others = [of(each) for each in (*left[1:], *right)]
        other = next((each for each in others if each != of(first)), None)
        if other is not None:
            found.append(f"different {what}: {_quote(of(first))} and {_quote(other)}")
    if first.load != "sweep":  # a sweep's stages depend on the server
        loads = [[stage.name for stage in result.stages] for result in (*left, *right)]
        other = next((each for each in loads if each != loads[0]), None)
        if other is not None:
            found.append(f"different loads: {_quote(loads[0])} and {_quote(other)}")
    seeds = [sorted(result.seed for result in side) for side in (left, right)]
    if seeds[0] != seeds[1]:
        written = [", ".join(map(str, sorted(set(side)))) for side in seeds]
        found.append(f"different seeds, and so different lengths and arrivals: {written[0]} and {written[1]}")
    found += _amounts(left, right)
    for name, side in (("A", left), ("B", right)):
        failed = sum(result.figures.failed for result in side)
        requests = sum(result.figures.requests for result in side)
        if failed > _FAILED * requests:
            found.append(f"{name} failed {share(failed / requests)} of its requests; latencies cover the others")
        found += [f"{name} warns: {clean(warning, 300)}" for result in side for warning in result.warnings]
    return found[:MOST_WARNINGS]


def _amounts(left: Sequence[BenchmarkResult], right: Sequence[BenchmarkResult]) -> list[str]:
    found: list[str] = []
    for what, key in (("prompt tokens", "prompt_tokens"), ("output tokens", "output_tokens")):
        means = [
            sum(getattr(result.figures, key) for result in side)
            / max(1, sum(result.figures.completed for result in side))
            for side in (left, right)
        ]
        if abs(means[1] - means[0]) > _APART * max(means):
            found.append(f"{what} per request differ: {number(means[0])} and {number(means[1])}")
    cached = [
        sum(result.figures.cached_tokens for result in side)
        / max(1, sum(result.figures.prompt_tokens for result in side))
        for side in (left, right)
    ]
    if abs(cached[1] - cached[0]) > _CACHED:
        found.append(f"prompt tokens from a cache differ: {share(cached[0])} and {share(cached[1])}")
    return found


def _quote(value: Any) -> str:
    return f"'{clean(value if isinstance(value, str) else msgspec.json.encode(value).decode(), 160)}'"
