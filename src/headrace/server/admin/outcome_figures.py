"""The figures of outcomes: means with their intervals, and what the requests took and cost."""

from __future__ import annotations

import math
from typing import Any, Final

from headrace.gateway.observation.feedback_store import OutcomeGroup

_Z: Final = 1.959964  # of a 95 % interval


def outcome_json(group: OutcomeGroup) -> dict[str, Any]:
    """Return count, mean and its 95 % interval, and what the requests took and cost."""
    low, high = _interval(group)
    return {
        "count": group.count,
        "sum": group.sum,
        "mean": round(group.sum / group.count, 6),
        "mean_low": None if low is None else round(low, 6),
        "mean_high": None if high is None else round(high, 6),
        "mean_ttft_ms": None if group.ttft_ms is None else round(group.ttft_ms, 3),
        "mean_e2e_ms": None if group.e2e_ms is None else round(group.e2e_ms, 3),
        "micros": group.micros,
        "micros_per_1000_requests": round(group.micros * 1000 / group.count),
        "micros_per_unit": round(group.micros / group.sum) if group.sum > 0 else None,
    }


def _interval(group: OutcomeGroup) -> tuple[float | None, float | None]:
    """Wilson's interval for shares; the normal one for other numbers, of which it needs some."""
    count, mean = group.count, group.sum / group.count
    if group.binary:
        scale = 1.0 + _Z * _Z / count
        middle = (mean + _Z * _Z / (2 * count)) / scale
        half = _Z * math.sqrt(mean * (1.0 - mean) / count + _Z * _Z / (4 * count * count)) / scale
        return max(0.0, middle - half), min(1.0, middle + half)
    if count < 10:
        return None, None
    variance = max(0.0, group.squares - count * mean * mean) / (count - 1)
    half = _Z * math.sqrt(variance / count)
    return mean - half, mean + half
