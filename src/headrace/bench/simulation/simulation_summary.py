"""Summarises a simulated run per surface and tenant: latency, goodput and fairness."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec
import numpy as np

from headrace.bench.simulation.simulator import RequestOutcome, SimulationResult
from headrace.engine.interface.request import FinishReason
from headrace.engine.scheduling.policy import Policy


class LatencyPercentiles(msgspec.Struct, frozen=True):
    """In seconds."""

    p50: float
    p90: float
    p95: float
    p99: float
    most: float


class GroupSummary(msgspec.Struct, frozen=True):
    """Requests of one surface or tenant."""

    name: str
    requests: int
    refused: int
    cut: int  # at their deadline
    unfinished: int  # when the run was stopped
    ttft: LatencyPercentiles | None  # of requests with a token
    itl: LatencyPercentiles | None
    good: int  # met every objective
    goodput: float  # good requests per second
    output_tokens: int
    cached: float  # share of prompt tokens from the cache


class SimulationSummary(msgspec.Struct, frozen=True):
    order: str
    seconds: float
    busy: float  # share of the time in steps
    steps: int
    rows: int  # tokens computed, prompts and answers together
    output_tokens: int
    preempted: int
    wasted: float  # share of the held KV slots without a token
    fairness: float  # Jain's index of the tenants' shares of good requests: 1 if all are equal
    worst: float  # the smallest of those shares
    all: GroupSummary
    surfaces: list[GroupSummary]
    tenants: list[GroupSummary]  # with the most requests


def spread(values: Iterable[float]) -> LatencyPercentiles | None:
    known = np.fromiter((value for value in values if value < math.inf), dtype=np.float64)
    if not known.size:
        return None
    p50, p90, p95, p99 = np.percentile(known, [50, 90, 95, 99])
    return LatencyPercentiles(float(p50), float(p90), float(p95), float(p99), float(known.max()))


def is_good(record: RequestOutcome, policy: Policy) -> bool:
    """True if a request finished in time and met its surface's TTFT and mean ITL."""
    surface = policy.surfaces[record.request.surface]
    whole = record.finish in (FinishReason.STOP, FinishReason.LENGTH)
    in_time = record.request.deadline is None or record.end <= record.request.deadline
    return whole and in_time and record.ttft <= surface.ttft and record.tpot <= surface.itl


def jain(values: Iterable[float]) -> float:
    """Jain's fairness index, (sum)² / (n · sum of squares): 1 if all are equal, 1/n if one has everything."""
    known = np.fromiter(values, dtype=np.float64)
    squares = float((known**2).sum())
    return float(known.sum()) ** 2 / (len(known) * squares) if squares else 1.0


def summarise(
    run: SimulationResult, order: str, policy: Policy, *, offered: float, most_tenants: int = 10
) -> SimulationSummary:
    """Summarise a run. `offered`: seconds in which requests arrived, the basis of goodput."""
    by_surface: dict[str, list[RequestOutcome]] = {}
    by_tenant: dict[str, list[RequestOutcome]] = {}
    for record in run.outcomes:
        by_surface.setdefault(record.request.surface, []).append(record)
        by_tenant.setdefault(record.request.tenant, []).append(record)
    pooled = np.concatenate([np.frombuffer(gaps, dtype=np.float32) for gaps in run.gaps.values()] or [np.zeros(0)])
    shares = [sum(is_good(record, policy) for record in records) / len(records) for records in by_tenant.values()] or [
        1.0
    ]
    busiest = sorted(by_tenant, key=lambda name: (-len(by_tenant[name]), name))[:most_tenants]
    return SimulationSummary(
        order=order,
        seconds=run.seconds,
        busy=run.busy / run.seconds if run.seconds else 0.0,
        steps=run.stats.steps,
        rows=run.stats.rows,
        output_tokens=sum(record.tokens for record in run.outcomes),
        preempted=run.stats.preempted,
        wasted=run.wasted,
        fairness=jain(shares),
        worst=min(shares),
        all=_group("all", run.outcomes, pooled, policy, offered),
        surfaces=[
            _group(name, records, run.gaps.get(name, ()), policy, offered)
            for name, records in sorted(by_surface.items())
        ],
        tenants=[_group(name, by_tenant[name], (), policy, offered) for name in busiest],
    )


def _group(
    name: str, records: list[RequestOutcome], gaps: Iterable[float], policy: Policy, offered: float
) -> GroupSummary:
    good = sum(is_good(record, policy) for record in records)
    started = [record for record in records if record.tokens]
    prompts = sum(len(record.request.prompt) for record in started)
    return GroupSummary(
        name=name,
        requests=len(records),
        refused=sum(record.refused for record in records),
        cut=sum(record.finish is FinishReason.DEADLINE for record in records),
        unfinished=sum(not record.refused and record.finish is None for record in records),
        ttft=spread(record.ttft for record in started),
        itl=spread(gaps),
        good=good,
        goodput=good / offered if offered else 0.0,
        output_tokens=sum(record.tokens for record in records),
        cached=sum(record.cached for record in started) / prompts if prompts else 0.0,
    )
