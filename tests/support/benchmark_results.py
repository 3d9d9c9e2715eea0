"""Results as a benchmark would have written them, made from a seed: what reports and comparisons are tested on."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

import numpy as np

from headrace.bench.results.benchmark_result import BenchmarkResult, RequestRow, StageResult
from headrace.bench.results.request_stats import compute_stats, stats_by, stats_by_length


def measured(
    *,
    seed: int = 0,
    requests: int = 120,
    users: int = 4,
    slower: float = 1.0,
    drift: float = 1.0,
    tokens: int = 16,
    failing: float = 0.0,
    tenants: Sequence[str] = ("",),
    objectives: Mapping[str, float] | None = None,
    begin: float = 0.0,
    stage: int = 0,
    **fields: object,
) -> BenchmarkResult:
    """A closed loop. `slower`: times as slow; `drift`: times as slow by how the machine fares in this round."""
    rng = np.random.default_rng([seed, 7])
    rows: list[RequestRow] = []
    free = [begin] * users
    for number in range(requests):
        start = heapq.heappop(free)
        pace = slower * drift
        ttft = 0.2 * pace * float(np.exp(0.4 * rng.standard_normal()))
        alike = float(np.exp(0.2 * rng.standard_normal()))  # gaps of one request are
        gaps = (0.02 * pace * alike * np.exp(0.1 * rng.standard_normal(tokens - 1))).tolist()
        ok = bool(rng.random() >= failing)
        e2el = ttft + sum(gaps) if ok else 0.05
        rows.append(
            RequestRow(
                number=number,
                stage=stage,
                tenant=tenants[number % len(tenants)],
                surface="chat",
                planned=start,
                start=start,
                ok=ok,
                error="" if ok else ("timeout" if number % 3 else "http 429"),
                why="" if ok else "the server said no",
                prompt_tokens=int(rng.integers(20, 400)),
                output_tokens=tokens if ok else 0,
                tokens_from="usage",
                ttft=ttft if ok else None,
                ttfo=ttft if ok else None,
                e2el=e2el,
                gaps=gaps if ok else [],
                chunks=tokens if ok else 0,
            )
        )
        heapq.heappush(free, start + e2el)
    wanted = dict(objectives or {})
    total = compute_stats("all", rows, wanted)
    given = {
        "label": "ours",
        "model": "mini",
        "url": "http://127.0.0.1:8000",
        "endpoint": "/v1/chat/completions",
        "workload": "fixed, 100 + 16 tokens",
        "load": "closed",
        "seed": seed,
        "started_at": "2026-01-01T00:00:00.000+00:00",
    } | fields
    return BenchmarkResult(
        figures=total,
        duration=total.seconds,
        objectives=wanted,
        stages=[
            StageResult(
                name=f"{users} at once", concurrency=users, began=begin, ended=begin + total.seconds, figures=total
            )
        ],
        tenants=stats_by(rows, lambda row: row.tenant, wanted, seconds=total.seconds),
        lengths=stats_by_length(rows, [128, 512], wanted, seconds=total.seconds),
        rows=rows,
        **given,  # pyright: ignore[reportArgumentType]
    )


def swept(
    *, seed: int = 0, slower: float = 1.0, rates: Sequence[float] = (1.0, 2.0, 4.0, 8.0), **fields: object
) -> BenchmarkResult:
    """A sweep over rates; the last one is too much."""
    rows: list[RequestRow] = []
    stages: list[StageResult] = []
    begin = 0.0
    for place, rate in enumerate(rates):
        part = measured(seed=seed + place, users=place + 1, slower=slower * (1.0 + place), begin=begin, stage=place)
        rows += part.rows
        kept_up = place < len(rates) - 1
        end = begin + part.duration
        found = compute_stats(f"{rate:g} requests/s", part.rows, {})
        stages.append(
            StageResult(
                name=found.name,
                rate=rate,
                began=begin,
                ended=end,
                figures=found,
                kept_up=kept_up,
                why="" if kept_up else "it fell behind",
            )
        )
        begin = end
    for number, row in enumerate(rows):
        row.number = number
    total = compute_stats("all", rows, {})
    given = {
        "label": "ours",
        "model": "mini",
        "url": "http://127.0.0.1:8000",
        "workload": "fixed",
        "seed": seed,
    } | fields
    return BenchmarkResult(
        figures=total,
        duration=begin,
        load="sweep",
        stages=stages,
        knee=len(rates) - 2,
        rows=rows,
        **given,  # pyright: ignore[reportArgumentType]
    )
