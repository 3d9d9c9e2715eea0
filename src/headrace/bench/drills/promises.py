"""What a playbook promises, and what was found.

Owns Promise. Knows no drill.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec


class Promise(msgspec.Struct, frozen=True):
    promised: str
    found: str
    kept: bool


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so large a share of them does not pass; not a number where there are none."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"
