"""Searches for the knee: chooses the next rate, and judges whether the server kept up with a stage.

Pure: statistics in, a rate or a reason out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec

from headrace.bench.results.benchmark_result import RequestStats

MOST_DOWN: Final = 3  # times the rate is lowered if the server cannot keep up with the first one
_FAILED: Final = 0.01  # share of requests that may fail
_TAIL: Final = 1.5  # how long a stage may drain: this many p99 E2EL of the first stage, plus a tenth of the stage


class RateSearch(msgspec.Struct):
    """Raise the rate by `factor` from `low` until the server falls behind, then bisect."""

    low: float
    high: float = math.inf  # the highest rate to try
    factor: float = 2.0
    refine: int = 2  # stages for bisecting
    good: list[float] = []
    bad: list[float] = []

    def next(self) -> float | None:
        """Return the next rate; None once the knee is stats."""
        if not self.good and not self.bad:
            return self.low
        if not self.bad:
            last = max(self.good)
            return min(last * self.factor, self.high) if last < self.high else None
        if not self.good:
            return min(self.bad) / self.factor if len(self.bad) <= MOST_DOWN else None
        if self.refine <= 0:
            return None
        self.refine -= 1
        return math.sqrt(max(self.good) * min(self.bad))

    def note(self, rate: float, *, kept_up: bool) -> None:
        (self.good if kept_up else self.bad).append(rate)


def shortfall(
    stats: RequestStats,
    *,
    sending: float,
    first: RequestStats | None,
    objectives: Mapping[str, float],
    good_share: float,
    latency: float,
) -> str:
    """Return why a server fell behind in a stage; empty if it kept up.

    `sending`: seconds in which requests were sent; `first`: statistics of the first stage, None if this is it;
    `good_share`: share of the requests that must meet the objectives; `latency`: without objectives, the multiple of
    the first stage's p90 TTFT (or E2EL, without streaming) at which the server has fallen behind.
    """
    if not stats.requests:
        return "no request was sent"
    failed = stats.failed / stats.requests
    if failed > _FAILED:
        return f"{failed:.1%} of the requests failed"
    if objectives:
        share = (stats.good or 0) / stats.requests
        if share < good_share:
            return f"{share:.0%} of the requests met the objectives, fewer than {good_share:.0%}"
        return ""
    if first is None:
        return ""
    name = "ttft" if stats.ttft is not None and first.ttft is not None else "e2el"
    now, then = getattr(stats, name), getattr(first, name)
    if now is not None and then is not None and now.p90 > latency * then.p90:
        return f"p90 {name.upper()} is {now.p90 / then.p90:.1f} times that of the first stage"
    tail = stats.seconds - sending
    if first.e2el is not None and tail > 0.1 * sending + _TAIL * first.e2el.p99 / 1e3:
        return f"took {tail:.1f} s to finish after the last request"
    return ""
