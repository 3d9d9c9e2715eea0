"""Computes the statistics of groups of requests: percentiles, throughput, goodput, peaks, prompt-length buckets.

Pure: rows in, numbers out. Times cover the successful requests.
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
MOST_SECONDS: Final = 7 * 86_400  # longest run whose tokens are counted per second: a week


def distribution(values: Iterable[float] | NDArray[np.float64], *, scale: float = 1.0) -> Distribution | None:
    """Compute a distribution, with numpy's linear percentiles; None without values."""
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


def compute_stats(
    name: str, rows: Sequence[RequestRow], objectives: Mapping[str, float], *, seconds: float | None = None
) -> RequestStats:
    """Compute statistics. `objectives`: milliseconds; `seconds`: duration for rates; default: start to end."""
    ok_rows = [row for row in rows if row.ok]
    if seconds is None:
        seconds = span(rows)
    each = 1.0 / seconds if seconds > 0.0 else 0.0
    prompts = sum(row.prompt_tokens for row in ok_rows)
    outputs = sum(row.output_tokens for row in ok_rows)
    good = sum(is_good(row, objectives) for row in ok_rows) if objectives else None
    errors: dict[str, int] = {}
    for row in rows:
        if not row.ok:
            errors[row.error] = errors.get(row.error, 0) + 1
    chunks = sum(row.chunks for row in ok_rows)
    gaps = np.fromiter(itertools.chain.from_iterable(row.gaps for row in ok_rows), dtype=np.float64)
    return RequestStats(
        name=name,
        requests=len(rows),
        completed=len(ok_rows),
        failed=len(rows) - len(ok_rows),
        seconds=seconds,
        prompt_tokens=prompts,
        cached_tokens=sum(row.cached_tokens or 0 for row in ok_rows),
        output_tokens=outputs,
        request_throughput=len(ok_rows) * each,
        output_throughput=outputs * each,
        total_throughput=(prompts + outputs) * each,
        good=good,
        goodput=None if good is None else good * each,
        peak_running=peak_running(rows),
        peak_output_per_s=peak_output(ok_rows),
        ttft=distribution(_known(ok_rows, lambda row: row.ttft), scale=1e3),
        ttfo=distribution(_known(ok_rows, lambda row: row.ttfo), scale=1e3),
        itl=distribution(gaps, scale=1e3),
        tpot=distribution(_known(ok_rows, lambda row: row.tpot), scale=1e3),
        e2el=distribution(_known(ok_rows, lambda row: row.e2el), scale=1e3),
        queue=distribution(_known(ok_rows, lambda row: row.queue_ms)),
        prefill=distribution(_known(ok_rows, lambda row: row.prefill_ms)),
        decode=distribution(_known(ok_rows, lambda row: row.decode_ms)),
        lag=distribution((row.lag for row in rows), scale=1e3) if any(row.lag for row in rows) else None,
        chunk_tokens=distribution(row.output_tokens / row.chunks for row in ok_rows if row.chunks),
        together=sum(row.together for row in ok_rows) / chunks if chunks else 0.0,
        errors=dict(sorted(errors.items())),
    )


def span(rows: Sequence[RequestRow]) -> float:
    """Return the seconds from the first start to the last end."""
    return max((row.end for row in rows), default=0.0) - min((row.start for row in rows), default=0.0)


def is_good(row: RequestRow, objectives: Mapping[str, float]) -> bool:
    """True if a request succeeded and met every objective. TPOT needs two tokens: an answer of one meets any."""
    if not row.ok:
        return False
    for name, most in objectives.items():
        value = {"ttft": row.ttft, "ttfo": row.ttfo, "tpot": row.tpot or 0.0, "e2el": row.e2el}[name]
        if value is None or value * 1e3 > most:
            return False
    return True


def stats_by(
    rows: Sequence[RequestRow], key: Callable[[RequestRow], str], objectives: Mapping[str, float], *, seconds: float
) -> list[RequestStats]:
    """Compute statistics for each value of `key`; empty if there is only one."""
    found: dict[str, list[RequestRow]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    if len(found) < 2:
        return []
    return [compute_stats(name or "-", found[name], objectives, seconds=seconds) for name in sorted(found)]


def stats_by_length(
    rows: Sequence[RequestRow], edges: Sequence[int], objectives: Mapping[str, float], *, seconds: float
) -> list[RequestStats]:
    """Compute statistics by prompt tokens: up to each edge and beyond the last, without empty buckets."""
    found: list[list[RequestRow]] = [[] for _ in range(len(edges) + 1)]
    for row in rows:
        tokens = row.prompt_tokens or row.asked_input
        found[next((place for place, edge in enumerate(edges) if tokens <= edge), len(edges))].append(row)
    names = [f"to {edge:,}" for edge in edges] + [f"over {edges[-1]:,}" if edges else "all"]
    return [
        compute_stats(f"{name} tokens", each, objectives, seconds=seconds)
        for name, each in zip(names, found, strict=True)
        if each
    ]


def peak_running(rows: Iterable[RequestRow]) -> int:
    """Return the most concurrent requests; one that ends when another starts does not overlap it."""
    events = sorted(event for row in rows if row.e2el is not None for event in ((row.start, 1), (row.end, -1)))
    running = most = 0
    for _, change in events:
        running += change
        most = max(most, running)
    return most


def peak_output(rows: Sequence[RequestRow]) -> float:
    """Return the output tokens of the best second; each chunk counts as its request's average of tokens."""
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
        # All rows' gaps in one array, a zero before each row's; the sum at that zero is the total of earlier rows.
        gaps = np.fromiter(itertools.chain.from_iterable((0.0, *row.gaps) for row in timed), dtype=np.float64)
        sums = np.cumsum(gaps)
        at = sums - np.repeat(sums[np.cumsum(chunks) - chunks], chunks) + np.repeat(begins, chunks)
        places = np.clip(at.astype(np.int64), 0, len(seconds) - 1)
        seconds += np.bincount(places, weights=np.repeat(tokens, chunks), minlength=len(seconds))
    return float(seconds.max())


def _known(rows: Iterable[RequestRow], value: Callable[[RequestRow], float | None]) -> Iterable[float]:
    return (found for row in rows if (found := value(row)) is not None)
