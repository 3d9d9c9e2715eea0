"""Condenses results: medians and spreads per engine, the best peer, and shares of the floors."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from probes import share_of_moment

OURS: Final = frozenset({"headrace", "bare core"})
HIGHER_IS_BETTER: Final = frozenset({"decode", "batch-8", "batch-32"})
FLOORED: Final = frozenset({"decode", "prefill-512", "prefill-2048"})
Key = tuple[str, str, str]  # shape, precision, metric


@dataclass(frozen=True, slots=True)
class Row:
    """The values of one metric for one engine."""

    engine: str
    peer: str
    metric: str
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def spread(self) -> tuple[float, float]:
        return min(self.values), max(self.values)


class Summary:
    def __init__(self, results: dict[str, Any]) -> None:
        self.results = results
        grouped: dict[tuple[str, str, str, str, str], list[float]] = defaultdict(list)
        for timing in results["timings"]:
            key = timing["shape"], timing["precision"], timing["metric"], timing["engine"], timing["peer"]
            grouped[key].append(timing["value"])
        self.rows: dict[Key, list[Row]] = defaultdict(list)
        for (shape, precision, metric, engine, peer), values in grouped.items():
            self.rows[shape, precision, metric].append(Row(engine, peer, metric, tuple(values)))

    def ours(self, key: Key, engine: str | None = None) -> Row | None:
        """Return Headrace's row at a precision, or that of `engine`."""
        wanted = engine or f"headrace {key[1]}"
        return next((row for row in self.rows.get(key, []) if row.engine == wanted), None)

    def best_peer(self, key: Key) -> Row | None:
        peers = [row for row in self.rows.get(key, []) if row.peer not in OURS]
        if not peers:
            return None
        choose = max if key[2] in HIGHER_IS_BETTER else min
        return choose(peers, key=lambda row: row.median)

    def floor(self, key: Key) -> float | None:
        """Return the best floor of any round: tokens/s for decode, seconds for a prefill.

        A round in which others kept the machine busy would make a floor that is easy to beat.
        """
        shape, precision, metric = key
        if metric not in FLOORED:
            return None
        found = [
            entry[metric]
            for entry in self.results["floors"]
            if entry["shape"] == shape and entry["precision"] == precision
        ]
        choose = max if metric in HIGHER_IS_BETTER else min
        return choose(found, default=None)

    def share_of_floor(self, key: Key, row: Row) -> float | None:
        least = self.floor(key)
        if least is None:
            return None
        return row.median / least if key[2] in HIGHER_IS_BETTER else least / row.median

    def share_of_moment(self, key: Key, row: Row) -> float | None:
        """Like share_of_floor, but relative to the probes next to each timing; the median of the shares."""
        shape, precision, metric = key
        entry = next(
            (each for each in self.results["floors"] if each["shape"] == shape and each["precision"] == precision), None
        )
        if entry is None:
            return None
        shares: list[float] = []
        for timing in self.results["timings"]:
            same = timing["shape"] == shape and timing["engine"] == row.engine and timing["metric"] == metric
            share = share_of_moment(metric, timing["value"], entry, timing["probes"]) if same else None
            if share is not None:
                shares.append(share)
        return median(shares) if shares else None

    def probe_spread(self) -> dict[str, tuple[float, float, float]]:
        """Return minimum, median and maximum of each probed rate."""
        found: dict[str, list[float]] = defaultdict(list)
        for timing in self.results["timings"]:
            for probe in timing["probes"]:
                for kind, value in probe.items():
                    found[kind].append(value)
        return {kind: (min(values), median(values), max(values)) for kind, values in found.items()}
