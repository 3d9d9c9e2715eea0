"""Figures of requests: what each group of rows comes to.

Owns percentiles, throughput, goodput, peaks and the buckets of prompt lengths. Pure: rows in, numbers out. Times of
figures are of the requests that ended well; TPOT, E2EL and the others are what the architecture calls so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headrace.bench.results.benchmark_result import Distribution, RequestRow, RequestStats

OBJECTIVES: Final = ("ttft", "ttfo", "tpot", "e2el")
MOST_SECONDS: Final = 7 * 86_400  # of a run, in whose seconds tokens are counted: a week


def spread(values: Iterable[float] | NDArray[np.float64], *, scale: float = 1.0) -> Distribution | None:
    """Percentiles as numpy's linear ones; None of nothing."""
    raw: NDArray[np.float64] = (
        np.asarray(values, dtype=np.float64) if isinstance(values, np.ndarray) else np.fromiter(values, np.float64)
    )
    found = raw * scale
    if not found.size:
        return None
    p50, p90, p95, p99 = (float(value) for value in np.percentile(found, [50, 90, 95, 99]))
    return Distribution(
        count=int(found.size),
        mean=float(found.mean()),
        std=float(found.std()),
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        least=float(found.min()),
        most=float(found.max()),
    )


def figures(
    name: str, rows: Sequence[RequestRow], objectives: Mapping[str, float], *, seconds: float | None = None
) -> RequestStats:
    """`objectives`: milliseconds; `seconds`: what rates are of, from the first start to the last end by default."""
    well = [row for row in rows if row.ok]
    if seconds is None:
        seconds = span(rows)
    each = 1.0 / seconds if seconds > 0.0 else 0.0
    prompts = sum(row.prompt_tokens for row in well)
    outputs = sum(row.output_tokens for row in well)
    good = sum(is_good(row, objectives) for row in well) if objectives else None
    errors: dict[str, int] = {}
    for row in rows:
        if not row.ok:
            errors[row.error] = errors.get(row.error, 0) + 1
    chunks = sum(row.chunks for row in well)
    gaps = np.fromiter(itertools.chain.from_iterable(row.gaps for row in well), dtype=np.float64)
    return RequestStats(
        name=name,
        requests=len(rows),
        completed=len(well),
        failed=len(rows) - len(well),
        seconds=seconds,
        prompt_tokens=prompts,
        cached_tokens=sum(row.cached_tokens or 0 for row in well),
        output_tokens=outputs,
        request_throughput=len(well) * each,
        output_throughput=outputs * each,
        total_throughput=(prompts + outputs) * each,
        good=good,
        goodput=None if good is None else good * each,
        peak_running=peak_running(rows),
        peak_output_per_s=peak_output(well),
        ttft=spread(_known(well, lambda row: row.ttft), scale=1e3),
        ttfo=spread(_known(well, lambda row: row.ttfo), scale=1e3),
        itl=spread(gaps, scale=1e3),
        tpot=spread(_known(well, lambda row: row.tpot), scale=1e3),
        e2el=spread(_known(well, lambda row: row.e2el), scale=1e3),
        queue=spread(_known(well, lambda row: row.queue_ms)),
        prefill=spread(_known(well, lambda row: row.prefill_ms)),
        decode=spread(_known(well, lambda row: row.decode_ms)),
        lag=spread((row.lag for row in rows), scale=1e3) if any(row.lag for row in rows) else None,
        chunk_tokens=spread(row.output_tokens / row.chunks for row in well if row.chunks),
        together=sum(row.together for row in well) / chunks if chunks else 0.0,
        errors=dict(sorted(errors.items())),
    )


def span(rows: Sequence[RequestRow]) -> float:
    """Seconds from the first start to the last end."""
    return max((row.end for row in rows), default=0.0) - min((row.start for row in rows), default=0.0)


def is_good(row: RequestRow, objectives: Mapping[str, float]) -> bool:
    """It ended well and met every objective. A TPOT needs two tokens: an answer of one meets any."""
    if not row.ok:
        return False
    for name, most in objectives.items():
        value = {"ttft": row.ttft, "ttfo": row.ttfo, "tpot": row.tpot or 0.0, "e2el": row.e2el}[name]
        if value is None or value * 1e3 > most:
            return False
    return True


def groups(
    rows: Sequence[RequestRow], key: Callable[[RequestRow], str], objectives: Mapping[str, float], *, seconds: float
) -> list[RequestStats]:
    """Of each value of `key`, where there is more than one."""
    found: dict[str, list[RequestRow]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    if len(found) < 2:
        return []
    return [figures(name or "-", found[name], objectives, seconds=seconds) for name in sorted(found)]


def lengths(
    rows: Sequence[RequestRow], edges: Sequence[int], objectives: Mapping[str, float], *, seconds: float
) -> list[RequestStats]:
    """By prompt tokens: up to each edge, and beyond the last. Only buckets that hold requests."""
    found: list[list[RequestRow]] = [[] for _ in range(len(edges) + 1)]
    for row in rows:
        tokens = row.prompt_tokens or row.asked_input
        found[next((place for place, edge in enumerate(edges) if tokens <= edge), len(edges))].append(row)
    names = [f"to {edge:,}" for edge in edges] + [f"over {edges[-1]:,}" if edges else "all"]
    return [
        figures(f"{name} tokens", each, objectives, seconds=seconds)
        for name, each in zip(names, found, strict=True)
        if each
    ]


def peak_running(rows: Iterable[RequestRow]) -> int:
    """Most requests at once; one that ends when another starts makes room for it."""
    events = sorted(event for row in rows if row.e2el is not None for event in ((row.start, 1), (row.end, -1)))
    running = most = 0
    for _, change in events:
        running += change
        most = max(most, running)
    return most


def peak_output(rows: Sequence[RequestRow]) -> float:
    """Output tokens of the best second, counted from the first start; a chunk has its request's mean of tokens."""
    first = min((row.start for row in rows), default=0.0)
    last = max((row.end for row in rows), default=0.0)
    if not 0.0 < last - first < MOST_SECONDS:
        return 0.0
    seconds = np.zeros(math.floor(last - first) + 2)
    timed: list[RequestRow] = []
    for row in rows:
        if row.ttft is None or not row.chunks or len(row.gaps) != row.chunks - 1:
            seconds[int(row.end - first)] += row.output_tokens
        else:
            timed.append(row)
    if timed:
        chunks = np.array([row.chunks for row in timed])
        begins = np.array([row.start - first + (row.ttft or 0.0) for row in timed])
        tokens = np.array([row.output_tokens for row in timed]) / chunks
        # All rows' gaps in one line, a zero before each row's; the sum at that zero is what earlier rows have added.
        gaps = np.fromiter(itertools.chain.from_iterable((0.0, *row.gaps) for row in timed), dtype=np.float64)
        sums = np.cumsum(gaps)
        at = sums - np.repeat(sums[np.cumsum(chunks) - chunks], chunks) + np.repeat(begins, chunks)
        places = np.clip(at.astype(np.int64), 0, len(seconds) - 1)
        seconds += np.bincount(places, weights=np.repeat(tokens, chunks), minlength=len(seconds))
    return float(seconds.max())


def _known(rows: Iterable[RequestRow], value: Callable[[RequestRow], float | None]) -> Iterable[float]:
    return (found for row in rows if (found := value(row)) is not None)
