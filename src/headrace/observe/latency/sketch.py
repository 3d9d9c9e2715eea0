"""Sketch: a mergeable histogram of durations whose percentiles are right within 1.1 %.

Bucket i holds values in (2^((i-1)/32), 2^(i/32)] seconds, which is schema 5 of Prometheus' native histograms and
scale 5 of OpenTelemetry's exponential histograms. New values wait in a short buffer and are counted together.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

PER_OCTAVE: Final = 32
_LEAST: Final = 2.0**-20  # seconds, about 1 µs; shorter ones count as this
_MOST: Final = 2.0**17  # about a day and a half
_BUFFERED: Final = 256
ERROR: Final = (2 ** (1 / PER_OCTAVE) - 1) / (2 ** (1 / PER_OCTAVE) + 1)  # relative, of any percentile


class Sketch:
    __slots__ = ("_counts", "_new", "_sum")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._new = array("d")
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._new.append(seconds)
        if len(self._new) >= _BUFFERED:
            self._fold()

    def extend(self, seconds: Iterable[float]) -> None:
        self._new.extend(seconds)
        if len(self._new) >= _BUFFERED:
            self._fold()

    def _fold(self) -> None:
        if not self._new:
            return
        values = np.frombuffer(self._new)
        self._sum += float(values.sum())
        places = np.ceil(np.log2(np.clip(values, _LEAST, _MOST)) * PER_OCTAVE).astype(np.int64)
        counts = self._counts
        for place, count in zip(*(each.tolist() for each in np.unique(places, return_counts=True)), strict=True):
            counts[place] = counts.get(place, 0) + count
        self._new = array("d")

    @property
    def counts(self) -> dict[int, int]:
        """Values by bucket."""
        self._fold()
        return self._counts

    @property
    def count(self) -> int:
        return sum(self.counts.values())

    @property
    def sum(self) -> float:
        self._fold()
        return self._sum

    def merge(self, other: Sketch) -> None:
        counts = self.counts
        for place, count in other.counts.items():
            counts[place] = counts.get(place, 0) + count
        self._sum += other.sum

    def quantiles(self, shares: Sequence[float]) -> list[float]:
        """Return the values that these shares of all values do not exceed, in seconds; zeros without any value."""
        counts = self.counts
        if not counts:
            return [0.0] * len(shares)
        places = sorted(counts)
        ends = np.cumsum([counts[place] for place in places])
        last = int(ends[-1]) - 1
        found: list[float] = []
        for share in shares:
            place = places[int(np.searchsorted(ends, share * last, side="right"))]
            above = 2.0 ** (place / PER_OCTAVE)
            below = 2.0 ** ((place - 1) / PER_OCTAVE)
            found.append(2.0 * above * below / (above + below))
        return found

    def below(self, bounds: Sequence[int]) -> list[int]:
        """Return for each bucket index how many values are at most its upper end. `bounds` ascend."""
        places = sorted(self.counts.items())
        found: list[int] = []
        at = total = 0
        for bound in bounds:
            while at < len(places) and places[at][0] <= bound:
                total += places[at][1]
                at += 1
            found.append(total)
        return found

    def pack(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {"sum": round(self.sum, 6), "counts": sorted(self.counts.items())}

    @classmethod
    def unpack(cls, packed: dict[str, Any]) -> Sketch:
        sketch = cls()
        sketch._sum = packed["sum"]
        sketch._counts = {place: count for place, count in packed["counts"]}
        return sketch


def merged(sketches: Iterable[Sketch]) -> Sketch:
    result = Sketch()
    for sketch in sketches:
        result.merge(sketch)
    return result
