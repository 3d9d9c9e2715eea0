"""The promises of playbooks and the observations of drills. Contains no drill."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec


class Promise(msgspec.Struct, frozen=True):
    promised: str
    found: str
    kept: bool
    timed: bool = False  # whether it holds also depends on how fast the machine is


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of the values do not exceed; NaN without values."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"
