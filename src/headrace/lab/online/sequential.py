"""Sequential tests that stay valid however often you look: betting martingales, and comparisons of two arms with them.

BettingTest tests the hypothesis "the mean of these values is at most zero". It starts with a wealth of 1 and bets a
share of it on each value being positive. If the hypothesis is true, the wealth is a supermartingale, whatever happens
in between, so by Ville's inequality it ever reaches 1 / alpha with a probability of at most alpha. That holds for all
looks together: after every value, at any stopping time, without a planned sample size. Several bets run side by side
and their mean is the wealth (a mixture), because the best bet depends on the size of an effect that is not known.
After Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting" (2023).

The comparisons turn two arms into such values. RateComparison takes values from 0 to 1 (failed or not). TailComparison
takes durations: it asks at three quantiles of the control whether the candidate exceeds them more often, once its
durations are divided by 1 + tolerance. MeanComparison takes amounts such as costs, whose sum is what matters: it
compares means, cut at a multiple of the control's. Thresholds and scales come from earlier values only. Each has two
tests: `breach` (the candidate is worse by more than the tolerance) and `proof` (it is not). Nearby values of the arms
are compared with one another, so a change of load that hits both arms cancels out.
"""

from __future__ import annotations

import math
from typing import Any, Final, Protocol

import msgspec

from headrace.observe.latency.sketch import Sketch

_BETS: Final = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9)  # shares of the wealth
QUANTILES: Final = (0.5, 0.8, 0.95)
_BURN_IN: Final = 30  # durations of the control before the first threshold
_REFRESH: Final = 1.15  # growth of the control after which thresholds are computed anew


class BettingTest(msgspec.Struct):
    """Tests that the mean of values in [-bound, bound] is at most zero."""

    bound: float
    wealth: list[float] = msgspec.field(default_factory=lambda: [0.0] * len(_BETS))  # logarithms, by bet
    values: int = 0
    peak: float = 0.0  # highest logarithm of the mixture's wealth

    def add(self, value: float) -> None:
        """Take the next value; beyond the bound it counts as the bound."""
        scaled = max(-1.0, min(1.0, value / self.bound))
        self.values += 1
        if scaled:
            wealth = self.wealth = [
                each + math.log1p(bet * scaled) for each, bet in zip(self.wealth, _BETS, strict=True)
            ]
            if max(wealth) > self.peak:  # the mean is never above the highest
                self.peak = max(self.peak, self.evidence)

    @property
    def evidence(self) -> float:
        """Return the logarithm of the mixture's wealth."""
        return _log_mean(self.wealth)


class ArmComparison(Protocol):
    """Takes values of both arms."""

    @property
    def breach(self) -> float:
        """Return the highest evidence so far that the candidate is worse by more than the tolerance; a logarithm."""
        ...

    @property
    def proof(self) -> float:
        """Return the highest evidence so far that it is not."""
        ...

    def control(self, value: float) -> None: ...

    def candidate(self, value: float) -> None: ...


class RateComparison(msgspec.Struct):
    """Compares the means of values from 0 to 1, of which low ones are good. `worse` is candidate minus control."""

    tolerance: float
    worse: BettingTest
    better: BettingTest
    sums: list[float] = msgspec.field(default_factory=lambda: [0.0, 0.0, 0.0, 0.0])  # waiting: control, candidate

    @classmethod
    def of(cls, tolerance: float) -> RateComparison:
        return cls(tolerance, BettingTest(1.0 + tolerance), BettingTest(1.0 + tolerance))

    @property
    def breach(self) -> float:
        return self.worse.peak

    @property
    def proof(self) -> float:
        return self.better.peak

    def control(self, value: float) -> None:
        self.sums[0] += value
        self.sums[1] += 1.0
        self._step()

    def candidate(self, value: float) -> None:
        self.sums[2] += value
        self.sums[3] += 1.0
        self._step()

    def pair(self, control: float, candidate: float) -> None:
        """Take values of both arms for the same request."""
        difference = candidate - control - self.tolerance
        self.worse.add(difference)
        self.better.add(-difference)

    def _step(self) -> None:
        controls, count, candidates, number = self.sums
        if count and number:
            self.sums = [0.0, 0.0, 0.0, 0.0]
            self.pair(controls / count, candidates / number)


class TailComparison(msgspec.Struct):
    """Compares durations in seconds at several quantiles."""

    tolerance: float  # share by which the candidate may be slower
    worse: list[BettingTest]
    better: list[BettingTest]
    seen: Sketch = msgspec.field(default_factory=Sketch)  # of the control
    thresholds: list[float] = []  # seconds, by quantile
    _waiting: list[list[float]] = msgspec.field(default_factory=lambda: [[], []])
    _refreshed_at: int = 0
    _count: int = 0
    _peak: float = 0.0  # highest evidence of all quantiles together

    @classmethod
    def of(cls, tolerance: float) -> TailComparison:
        return cls(tolerance, [BettingTest(1.0) for _ in QUANTILES], [BettingTest(1.0) for _ in QUANTILES])

    @property
    def breach(self) -> float:
        return self._peak

    @property
    def proof(self) -> float:
        return min(each.peak for each in self.better)  # it must hold at every quantile

    def control(self, value: float) -> None:
        self.seen.add(value)
        self._count += 1
        self._take(0, value)

    def candidate(self, value: float) -> None:
        self._take(1, value / (1.0 + self.tolerance))

    def _take(self, arm: int, value: float) -> None:
        if not self.thresholds:
            self._refresh()
            return
        waiting = self._waiting
        if len(waiting[arm]) < _MOST_WAITING:
            waiting[arm].append(value)
        if not (waiting[0] and waiting[1]):
            return
        for place, threshold in enumerate(self.thresholds):
            control, candidate = (sum(each > threshold for each in values) / len(values) for values in waiting)
            self.worse[place].add(candidate - control)
            self.better[place].add(control - candidate)
        self._waiting = [[], []]
        if max(each.peak for each in self.worse) > self._peak:
            self._peak = max(self._peak, _log_mean([each.evidence for each in self.worse]))
        self._refresh()  # only between steps: both arms of a step meet the same thresholds

    def _refresh(self) -> None:
        if self._count >= max(_BURN_IN, self._refreshed_at * _REFRESH):
            self._refreshed_at = self._count
            self.thresholds = self.seen.quantiles(QUANTILES)

    def pack(self) -> dict[str, Any]:
        return {
            "worse": [msgspec.to_builtins(each) for each in self.worse],
            "better": [msgspec.to_builtins(each) for each in self.better],
            "seen": self.seen.pack(),
            "peak": self._peak,
        }

    def unpack(self, packed: dict[str, Any]) -> None:
        self.worse = msgspec.convert(packed["worse"], list[BettingTest])
        self.better = msgspec.convert(packed["better"], list[BettingTest])
        self.seen, self._peak = Sketch.unpack(packed["seen"]), packed["peak"]
        self._count, self._refreshed_at, self.thresholds = self.seen.count, 0, []
        self._refresh()


class MeanComparison(msgspec.Struct):
    """Compares the means of amounts above zero. An amount beyond three times the control's mean counts as that."""

    tolerance: float  # share by which the candidate's mean may be higher
    rates: RateComparison = msgspec.field(default_factory=lambda: RateComparison.of(0.0))
    count: int = 0  # of the control's amounts
    total: float = 0.0
    scale: float = 0.0  # that amounts are divided by
    scaled_at: int = 0

    @property
    def breach(self) -> float:
        return self.rates.breach

    @property
    def proof(self) -> float:
        return self.rates.proof

    def control(self, value: float) -> None:
        self._rescale()
        if self.scale:
            self.rates.control(min(1.0, value / self.scale))
        self.count += 1
        self.total += value

    def candidate(self, value: float) -> None:
        self._rescale()
        if self.scale:
            self.rates.candidate(min(1.0, value / (1.0 + self.tolerance) / self.scale))

    def _rescale(self) -> None:
        is_between = not any(self.rates.sums)  # both arms of a step have the same scale
        if is_between and self.total and self.count >= max(_BURN_IN, self.scaled_at * _REFRESH):
            self.scaled_at = self.count
            self.scale = _CUT * self.total / self.count


_CUT: Final = 3.0  # times the control's mean
_MOST_WAITING: Final = 256  # values of one arm while there is none of the other


def is_decided(evidence: float, alpha: float) -> bool:
    """Return whether the evidence suffices at the level `alpha`."""
    return evidence >= -math.log(alpha)


def _log_mean(logarithms: list[float]) -> float:
    """Return the logarithm of the mean of values given by their logarithms."""
    most = max(logarithms)
    return most + math.log(math.fsum(math.exp(each - most) for each in logarithms) / len(logarithms))
