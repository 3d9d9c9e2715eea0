"""Baseline scheduling orders to compare with the fair one: first come first served, and longest cached prefix first.

Both ignore tenants and surfaces. Two references batch as older servers did: `static` starts a batch when the one before
has ended, `serial` computes one request at a time. For measurements only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, Literal

from msgspec.structs import replace

from headrace.engine.scheduling.policy import Policy
from headrace.engine.scheduling.step_plan import SchedulerLimits
from headrace.engine.scheduling.waiting_queue import SHORT, FairQueue, SequenceJob

Order = Literal["fair", "fcfs", "longest-prefix", "static", "serial"]
ORDERS: Final[tuple[Order, ...]] = ("fair", "fcfs", "longest-prefix")
REFERENCES: Final[tuple[Order, ...]] = ("static", "serial")
_SAME: Final = 64  # tokens compared to find requests whose prefix is now cached


class ArrivalQueue(FairQueue):
    """First come, first served."""

    def push(self, job: SequenceJob, now: float) -> None:
        job.line = SHORT
        job.late = math.inf
        job.urgency = job.request.arrival
        super().push(job, now)

    def charge(self, job: SequenceJob, tokens: float) -> None:
        pass

    def computed(self, job: SequenceJob, tokens: float) -> None:
        pass


class LongestPrefixQueue(ArrivalQueue):
    """The request with the most cached prefix tokens first, without ageing."""

    def __init__(self, policy: Policy, *, idle_tenants: int) -> None:
        super().__init__(policy, idle_tenants=idle_tenants)
        self._groups: dict[tuple[str, tuple[int, ...]], dict[SequenceJob, None]] = {}

    def push(self, job: SequenceJob, now: float) -> None:
        super().push(job, now)
        self._groups.setdefault(_begins(job), {})[job] = None
        self._rank(job, job.match.cached_tokens if job.match is not None else 0)

    def drop(self, job: SequenceJob) -> None:
        super().drop(job)
        group = self._groups.get(_begins(job))
        if group is not None:
            group.pop(job, None)
            if not group:
                del self._groups[_begins(job)]

    def prefilled(self, job: SequenceJob) -> None:
        prompt = job.request.prompt
        for other in self._groups.get(_begins(job), ()):
            common = 0
            for mine, others in zip(prompt, other.request.prompt, strict=False):
                if mine != others:
                    break
                common += 1
            if -common < other.urgency:
                self._rank(other, common)

    def _rank(self, job: SequenceJob, cached: int) -> None:
        turn = job.turn
        assert turn is not None
        turn.line.drop(job)
        job.urgency = -float(cached)
        turn.line.push(job, job.urgency)


def _begins(job: SequenceJob) -> tuple[str, tuple[int, ...]]:
    return job.request.salt, job.request.prompt[:_SAME]


def batch_size(order: Order, limits: SchedulerLimits) -> int | None:
    """Return how many requests a reference starts together when nothing runs; None: requests start as they come."""
    return {"static": limits.max_sequences, "serial": 1}.get(order)


def scheduling_parts(
    order: Order, policy: Policy, limits: SchedulerLimits
) -> tuple[FairQueue | None, Policy, SchedulerLimits]:
    """Return the queue, policy and limits of an order; no queue means the scheduler's own."""
    if order == "fair":
        return None, policy, limits
    surfaces: Mapping[str, object] = policy.surfaces
    plain = replace(
        policy,
        surfaces={name: replace(policy.surfaces[name], background=False, stretch=math.inf) for name in surfaces},
        share_cold=False,
        rescue=False,
        refuse_unmet=False,
    )
    # All prompts belong to one class.
    limits = replace(limits, short_rows=limits.context)
    queue = LongestPrefixQueue if order == "longest-prefix" else ArrivalQueue
    return queue(plain, idle_tenants=limits.idle_tenants), plain, limits
