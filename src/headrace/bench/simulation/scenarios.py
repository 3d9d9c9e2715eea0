"""Scenarios that compare schedulers on the same traffic: an abusive tenant, cold prefixes, and overload.

Also measures the machine's capacity, so that "twice the load" is defined.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from msgspec.structs import replace

from headrace.bench.simulation.baseline_orders import Order
from headrace.bench.simulation.simulation_summary import SimulationSummary, is_good, summarise
from headrace.bench.simulation.simulator import Hardware, RequestOutcome, SimulationResult, simulate
from headrace.bench.simulation.synthetic_traffic import SimulatedRequest, TrafficMix, abuser, generate
from headrace.engine.scheduling.policy import Policy
from headrace.engine.scheduling.step_plan import SchedulerLimits

DRAIN_S = 600.0  # seconds that a run continues after the last arrival


class ScenarioSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The setup that all compared orders share."""

    mix: TrafficMix
    hardware: Hardware
    limits: SchedulerLimits
    policy: Policy
    orders: Sequence[Order]
    report_progress: Callable[[str], None] = lambda _text: None

    def run(self, calls: Sequence[SimulatedRequest], order: Order) -> SimulationResult:
        return simulate(
            calls,
            self.hardware,
            policy=self.policy,
            limits=self.limits,
            order=order,
            seed=self.mix.seed,
            drain=DRAIN_S,
        )

    def summary(self, run: SimulationResult, order: Order) -> SimulationSummary:
        return summarise(run, order, self.policy, offered=self.mix.seconds)


class AbuseResult(msgspec.Struct, frozen=True):
    """The other tenants' p99 TTFT in the foreground, without and with abuse."""

    order: str
    factor: float
    requests: int  # of the other tenants
    before: float
    after: float  # inf: some got no token
    change: float  # 0.1: a tenth longer
    abuser_served: float  # share of the abuser's requests that were answered


class ColdPrefixResult(msgspec.Struct, frozen=True):
    """TTFT of foreground requests with a unique prefix, and of the rest."""

    order: str
    requests: int
    p50: float
    p99: float
    most: float  # inf: some got no token
    rest_p99: float
    rest_most: float


class OverloadResult(msgspec.Struct, frozen=True):
    order: str
    load: float  # as a multiple of the capacity
    rate: float  # requests per second
    goodput: float  # foreground requests per second that met every objective
    share: float  # of the capacity
    refused: float  # share of the requests
    p99: float  # TTFT of answered foreground requests
    most: float


def capacity(setting: ScenarioSetup) -> float:
    """Measure requests per second under saturation, with warm prefixes, first come first served."""
    mix = replace(
        setting.mix, abuse=1.0, deadlines=False, rate=10.0, seconds=max(60.0, 1.5 * setting.mix.tenants / 10.0)
    )
    calls = [replace(call, at=0.0) for call in generate(mix)]
    limits = replace(
        setting.limits, queued_sequences=2 * len(calls), queued_per_tenant=2 * len(calls), queued_tokens=1 << 40
    )
    run = simulate(calls, setting.hardware, policy=setting.policy, limits=limits, order="fcfs", seed=mix.seed)
    ends = np.sort([record.end for record in run.outcomes])
    first, last = int(0.4 * len(ends)), int(0.9 * len(ends))
    return (last - first) / float(ends[last] - ends[first])


def abuse(setting: ScenarioSetup, factor: float) -> list[AbuseResult]:
    name = abuser(setting.mix)
    calm = list(generate(replace(setting.mix, abuse=1.0)))
    wild = list(generate(replace(setting.mix, abuse=factor)))
    found: list[AbuseResult] = []
    for order in setting.orders:
        setting.report_progress(f"abuse: {order}")
        before = _foreground(setting.run(calm, order), setting.policy, but=name)
        run = setting.run(wild, order)
        after = _foreground(run, setting.policy, but=name)
        mine = [record for record in run.outcomes if record.request.tenant == name]
        p_before, p_after = _p99(before), _p99(after)
        served = sum(record.tokens > 0 for record in mine) / max(len(mine), 1)
        found.append(AbuseResult(order, factor, len(after), p_before, p_after, p_after / p_before - 1.0, served))
    return found


def cold(setting: ScenarioSetup) -> list[ColdPrefixResult]:
    calls = list(generate(setting.mix))
    found: list[ColdPrefixResult] = []
    for order in setting.orders:
        setting.report_progress(f"cold prefixes: {order}")
        records = _foreground(setting.run(calls, order), setting.policy)
        alone = [record for record in records if record.request.cold]
        rest = [record for record in records if not record.request.cold]
        values = sorted(record.ttft for record in alone)
        found.append(
            ColdPrefixResult(
                order,
                len(alone),
                values[len(values) // 2] if values else 0.0,
                _p99(alone),
                values[-1] if values else 0.0,
                _p99(rest),
                max((record.ttft for record in rest), default=0.0),
            )
        )
    return found


def overload(setting: ScenarioSetup, loads: Sequence[float], most: float) -> list[OverloadResult]:
    """Run each load; `most`: the capacity in requests per second."""
    found: list[OverloadResult] = []
    for load in loads:
        mix = replace(setting.mix, rate=load * most)
        calls = list(generate(mix))
        for order in setting.orders:
            setting.report_progress(f"overload {load:g}: {order}")
            run = setting.run(calls, order)
            waited_for = _foreground(run, setting.policy)
            good = sum(is_good(record, setting.policy) for record in waited_for) / mix.seconds
            answered = [record for record in waited_for if record.ttft < math.inf]
            refused = sum(record.refused for record in run.outcomes) / max(len(calls), 1)
            longest = max((record.ttft for record in answered), default=0.0)
            found.append(OverloadResult(order, load, mix.rate, good, good / most, refused, _p99(answered), longest))
    return found


def _foreground(run: SimulationResult, policy: Policy, *, but: str | None = None) -> list[RequestOutcome]:
    """Select admitted foreground requests."""
    return [
        record
        for record in run.outcomes
        if not record.refused
        and record.request.tenant != but
        and not policy.surfaces[record.request.surface].background
    ]


def _p99(records: Sequence[RequestOutcome]) -> float:
    """Return p99 by rank, so that requests without a token count as the longest."""
    values = sorted(record.ttft for record in records)
    return values[min(math.ceil(0.99 * len(values)), len(values)) - 1] if values else 0.0
