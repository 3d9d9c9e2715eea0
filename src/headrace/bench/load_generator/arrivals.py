"""When requests are sent: arrivals of an open loop, constant, Poisson or gamma, at a rate that may rise.

Owns Arrivals. Knows nothing of requests or of clocks: times are seconds from a stage's start.
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
    rate: float  # requests per second; of a ramp the first
    kind: ArrivalProcess = "poisson"
    burstiness: float = 1.0  # of gamma: below 1 in bursts, 1 is Poisson, above 1 more even
    last_rate: float | None = None  # of a ramp, reached after `seconds`, and kept
    seconds: float = 0.0

    def times(self, seed: str) -> Iterator[float]:
        """Without an end, in order."""
        if self.rate == math.inf:
            return itertools.repeat(0.0)
        return map(self._when, self._unit(random.Random(seed)))

    def _unit(self, rng: random.Random) -> Iterator[float]:
        """Arrivals at one a second."""
        match self.kind:
            case "constant":
                return (float(place) for place in itertools.count())
            case "poisson":
                return itertools.accumulate(rng.expovariate(1.0) for _ in itertools.repeat(None))
            case "gamma":
                # As vLLM defines it: shape is the burstiness, and the mean gap stays 1 / rate.
                shape = self.burstiness
                return itertools.accumulate(rng.gammavariate(shape, 1.0 / shape) for _ in itertools.repeat(None))

    def _when(self, unit: float) -> float:
        """The time by which so many arrivals are due: the inverse of the rate's integral."""
        first, last = self.rate, self.last_rate
        if last is None or last == first or self.seconds <= 0.0:
            return unit / first
        total = (first + last) / 2 * self.seconds  # due when the ramp ends
        if unit >= total:
            return self.seconds + (unit - total) / last
        if unit == 0.0:
            return 0.0
        growth = (last - first) / self.seconds
        # first * t + growth * t² / 2 = unit; this form of the root does not cancel where growth is small.
        return 2 * unit / (first + math.sqrt(max(0.0, first * first + 2 * growth * unit)))
