"""Latency objectives as commands take them: `ttft_p95=300ms,itl_p95=50ms`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Final

from headrace.errors import RequestError

LATENCIES: Final = ("ttft", "itl", "tpot", "e2el")
POINTS: Final = ("p50", "p90", "p95", "p99")
_ENTRY: Final = re.compile(r"(?P<name>[a-z0-9]+)(?:_(?P<point>p[0-9]+))?\s*=\s*(?P<value>[0-9.]+)\s*(?P<unit>ms|s)?")

Objectives = Mapping[str, float]  # seconds, by names such as ttft_p95


def parse_objectives(given: Sequence[str] | str | None) -> dict[str, float]:
    """Parse objectives into seconds. A latency without a percentile means its p95, a number without a unit is in ms."""
    texts = [given] if isinstance(given, str) else list(given or ())
    found: dict[str, float] = {}
    for entry in (part.strip() for text in texts for part in text.split(",")):
        if not entry:
            continue
        match = _ENTRY.fullmatch(entry)
        name, point = (match["name"], match["point"] or "p95") if match else ("", "")
        if match is None or name not in LATENCIES or point not in POINTS:
            raise RequestError(
                f"Invalid objective '{entry}'. Expected NAME_POINT=TIME, such as ttft_p95=300ms, with a name from "
                f"{', '.join(LATENCIES)} and a point from {', '.join(POINTS)}.",
                parameter="slo",
            )
        try:
            value = float(match["value"]) / (1.0 if match["unit"] == "s" else 1e3)
        except ValueError:
            value = math.nan
        if not 0.0 < value < math.inf:
            raise RequestError(f"Objective '{entry}' must be above 0.", parameter="slo")
        found[f"{name}_{point}"] = value
    return found


def missed(objectives: Objectives, measured: Mapping[str, float]) -> list[str]:
    """Return the names of the objectives that a measurement exceeds or does not have."""
    return [name for name, most in objectives.items() if not measured.get(name, math.inf) <= most]
