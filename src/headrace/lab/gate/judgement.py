"""Tests every metric against its limit and reaches a verdict. Pure: the same values give the same verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np

from headrace.bench.evaluation.evaluation_report import Distance, Estimate
from headrace.lab.comparison.paired_tests import (
    Doubles,
    drop_interval,
    holm,
    mean_above,
    mean_interval,
    share_below,
    share_interval,
    worse_share,
)
from headrace.lab.gate.metrics import ESTIMATES, METRICS, EstimateMetric, Judged, Metric, Value
from headrace.lab.gate.thresholds import GateSection, GateThresholds

MetricVerdict = Literal["pass", "fail", "inconclusive", "too few", "not tested"]


class MetricResult(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    title: str
    kind: str
    about: str
    limit: float | None
    count: int  # cases, or tokens of likelihood metrics
    candidate: float | None = None  # share or mean of the candidate
    baseline: float | None = None
    value: float | None = None  # what the limit is about: a share, a drop, a ratio
    low: float | None = None  # interval of the value, at the gate's confidence
    high: float | None = None
    p: float | None = None  # chance of such answers if the candidate kept the limit exactly
    verdict: MetricVerdict


def judge(
    judged: Sequence[Judged], thresholds: GateThresholds, distance: Distance | None = None, tokens: int = 0
) -> list[MetricResult]:
    """Test all metrics together, so that the level holds for the whole gate. Metrics without a value are left out."""
    values = values_of(judged)
    p_values = p_values_of(values, thresholds)
    failing = failing_of(p_values, thresholds)
    results = [
        _measure(metric, values[metric.name], thresholds, p_values.get(metric.name), fails=metric.name in failing)
        for metric in METRICS
        if values[metric.name]
    ]
    return results + _estimates(distance, tokens, thresholds.limits)


def values_of(judged: Sequence[Judged]) -> dict[str, list[Value]]:
    """Return the values of each metric, on the cases that it applies to."""
    found: dict[str, list[Value]] = {}
    for metric in METRICS:
        values = (metric.of(each) for each in judged)
        found[metric.name] = [value for value in values if value is not None]
    return found


def p_values_of(values: Mapping[str, Sequence[Value]], thresholds: GateThresholds) -> dict[str, float]:
    """Return the p-value of each metric that has a limit and enough values."""
    found: dict[str, float] = {}
    for metric in METRICS:
        limit, given = thresholds.limits[metric.name], values[metric.name]
        if limit is not None and len(given) >= thresholds.gate.few:
            found[metric.name] = _p_value(metric, given, limit, thresholds.gate.seed)
    return found


def failing_of(p_values: Mapping[str, float], thresholds: GateThresholds) -> set[str]:
    """Return the metrics that fail, with Holm's correction."""
    rejected = holm(list(p_values.values()), thresholds.gate.level)
    return {name for name, fails in zip(p_values, rejected, strict=True) if fails}


def passes(results: Sequence[MetricResult], *, strict: bool) -> bool:
    failing = {"fail", "inconclusive", "too few"} if strict else {"fail"}
    return bool(results) and not any(result.verdict in failing for result in results)


def _measure(
    metric: Metric, values: Sequence[Value], thresholds: GateThresholds, p: float | None, *, fails: bool
) -> MetricResult:
    gate, limit = thresholds.gate, thresholds.limits[metric.name]
    candidate = np.array([value.candidate for value in values])
    baseline = np.array([value.baseline for value in values])
    measured = baseline - candidate if metric.kind in ("drop", "mean_drop") else candidate
    low, high = _interval(metric, measured, values, gate)
    value = float(measured.mean())
    if metric.kind in ("ratio", "drift"):
        value, low, high = math.exp(value), math.exp(low), math.exp(min(high, 700.0))
    is_paired = metric.kind in ("drop", "mean_drop")
    is_ratio = metric.kind in ("ratio", "drift")
    result = MetricResult(
        name=metric.name,
        title=metric.title,
        kind=metric.kind,
        about=metric.about,
        limit=limit,
        count=len(values),
        candidate=None if is_ratio else float(candidate.mean()),
        baseline=float(baseline.mean()) if is_paired else None,
        value=value,
        low=_finite(low),
        high=_finite(high),
        p=p,
        verdict="not tested" if limit is None else "too few",
    )
    if p is None:
        return result
    return msgspec.structs.replace(result, verdict="fail" if fails else _unproven(result))


def _interval(metric: Metric, measured: Doubles, values: Sequence[Value], gate: GateSection) -> tuple[float, float]:
    confidence = 1.0 - gate.level
    match metric.kind:
        case "share":
            return share_interval(int((measured >= 0.5).sum()), len(values), confidence)
        case "drop":
            good = [(value.candidate >= 0.5, value.baseline >= 0.5) for value in values]
            return drop_interval([a for a, _ in good], [b for _, b in good], seed=gate.seed, confidence=confidence)
        case _:
            return mean_interval(measured, seed=gate.seed, confidence=confidence)


def _p_value(metric: Metric, values: Sequence[Value], limit: float, seed: int) -> float:
    candidate = [value.candidate for value in values]
    match metric.kind:
        case "share":
            return share_below(sum(value >= 0.5 for value in candidate), len(candidate), limit)
        case "mean":
            return mean_above([-value for value in candidate], -limit, seed=seed)
        case "drop":
            good = [(value.candidate >= 0.5, value.baseline >= 0.5) for value in values]
            return worse_share([each[0] for each in good], [each[1] for each in good], margin=limit)
        case "mean_drop":
            return mean_above([value.baseline - value.candidate for value in values], limit, seed=seed)
        case "ratio":
            return mean_above(candidate, math.log(limit), seed=seed)
        case "drift":
            longer = mean_above(candidate, math.log(limit), seed=seed)
            shorter = mean_above([-value for value in candidate], math.log(limit), seed=seed)
            return min(1.0, 2.0 * min(longer, shorter))


def _unproven(result: MetricResult) -> MetricVerdict:
    """Pass if the interval excludes a breach of the limit, too."""
    limit = result.limit
    if limit is None or result.low is None or result.high is None:
        return "inconclusive"
    match result.kind:
        case "share" | "mean":
            kept = result.low >= limit
        case "drift":
            kept = result.high <= limit and result.low >= 1.0 / limit
        case _:
            kept = result.high <= limit
    return "pass" if kept else "inconclusive"


def _estimates(distance: Distance | None, tokens: int, limits: Mapping[str, float | None]) -> list[MetricResult]:
    if distance is None:
        return []
    found = {"perplexity": distance.perplexity_change, "kl": distance.kl, "top1": distance.top1}
    return [_estimate(metric, found[metric.name], tokens, limits[metric.name]) for metric in ESTIMATES]


def _estimate(metric: EstimateMetric, estimate: Estimate, tokens: int, limit: float | None) -> MetricResult:
    low = estimate.value if estimate.low is None else estimate.low
    high = estimate.value if estimate.high is None else estimate.high
    verdict: MetricVerdict = "not tested"
    if limit is not None:
        kept, broken = (high <= limit, low > limit) if metric.kind == "at most" else (low >= limit, high < limit)
        verdict = "fail" if broken else "pass" if kept else "inconclusive"
    return MetricResult(
        name=metric.name,
        title=metric.title,
        kind=metric.kind,
        about=metric.about,
        limit=limit,
        count=tokens,
        value=estimate.value,
        low=low,
        high=high,
        verdict=verdict,
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
