"""Arrival times of an open loop: constant, Poisson or gamma, at a fixed or rising rate.

Times are seconds from a stage's start; no clock is involved.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from typing import Literal

import msgspec

ArrivalProcess = Literal["constant", "poisson", "gamma"]


class Arrivals(msgspec.Struct, frozen=True, kw_only=True):
    rate: float  # requests per second; for a ramp, at its start
    kind: ArrivalProcess = "poisson"
    burstiness: float = 1.0  # of gamma: below 1 is burstier than Poisson, above 1 more even
    last_rate: float | None = None  # for a ramp: reached after `seconds` and kept
    seconds: float = 0.0

    def times(self, seed: str) -> Iterator[float]:
        """Yield arrival times in order, without end."""
        if self.rate == math.inf:
            return itertools.repeat(0.0)
        return map(self._time_of, self._unit_arrivals(random.Random(seed)))

    def _unit_arrivals(self, rng: random.Random) -> Iterator[float]:
        """Yield arrivals at a rate of one per second."""
        match self.kind:
            case "constant":
                return (float(place) for place in itertools.count())
            case "poisson":
                return itertools.accumulate(rng.expovariate(1.0) for _ in itertools.repeat(None))
            case "gamma":
                # As vLLM defines it: shape is the burstiness, and the mean gap stays 1 / rate.
                shape = self.burstiness
                return itertools.accumulate(rng.gammavariate(shape, 1.0 / shape) for _ in itertools.repeat(None))

    def _time_of(self, unit: float) -> float:
        """Return the time by which `unit` arrivals are due: the inverse of the rate's integral."""
        first, last = self.rate, self.last_rate
        if last is None or last == first or self.seconds <= 0.0:
            return unit / first
        total = (first + last) / 2 * self.seconds  # due when the ramp ends
        if unit >= total:
            return self.seconds + (unit - total) / last
        if unit == 0.0:
            return 0.0
        growth = (last - first) / self.seconds
        # first * t + growth * t² / 2 = unit; this form of the root does not cancel for small growth.
        return 2 * unit / (first + math.sqrt(max(0.0, first * first + 2 * growth * unit)))
