"""The search for the knee: which rate comes next, and whether a server kept up with one.

Owns Climb and `shortfall`. Pure: figures in, a rate or a reason out. Knows nothing of requests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec

from headrace.bench.results.benchmark_result import RequestStats

MOST_DOWN: Final = 3  # times that the rate is lowered where the server cannot keep up with the first
_FAILED: Final = 0.01  # share of requests that may fail
_TAIL: Final = 1.5  # times the first stage's p99 E2EL that may pass after the last request, a tenth of the stage apart


class RateSearch(msgspec.Struct):
    """Rates go up by `factor` from `low` until one is too high, and then between that and the last good one."""

    low: float
    high: float = math.inf  # no rate is above
    factor: float = 2.0
    refine: int = 2  # stages between the last good rate and the first bad one
    good: list[float] = []
    bad: list[float] = []

    def next(self) -> float | None:
        """The rate to try; None when the knee is known."""
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
    found: RequestStats,
    *,
    sending: float,
    first: RequestStats | None,
    objectives: Mapping[str, float],
    good_share: float,
    latency: float,
) -> str:
    """Why a server did not keep up with a stage; empty where it did.

    `sending`: seconds in which requests were sent; `first`: figures of the first stage, None where this is it;
    `good_share`: of the requests that must meet the objectives; `latency`: times the first stage's p90 TTFT (or E2EL,
    where nothing was streamed) that is too long, where there are no objectives.
    """
    if not found.requests:
        return "no request was sent"
    failed = found.failed / found.requests
    if failed > _FAILED:
        return f"{failed:.1%} of the requests failed"
    if objectives:
        share = (found.good or 0) / found.requests
        if share < good_share:
            return f"{share:.0%} of the requests met the objectives, fewer than {good_share:.0%}"
        return ""
    if first is None:
        return ""
    name = "ttft" if found.ttft is not None and first.ttft is not None else "e2el"
    now, then = getattr(found, name), getattr(first, name)
    if now is not None and then is not None and now.p90 > latency * then.p90:
        return f"p90 {name.upper()} is {now.p90 / then.p90:.1f} times that of the first stage"
    tail = found.seconds - sending
    if first.e2el is not None and tail > 0.1 * sending + _TAIL * first.e2el.p99 / 1e3:
        return f"it took {tail:.1f} s to finish after the last request"
    return ""
