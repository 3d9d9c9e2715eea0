"""Simulates the engine's scheduler with a step-time model in place of hardware: hours of traffic in minutes.

Scheduler and blocks are the engine's own, so findings apply to the engine. Tokens carry no meaning: every answer has
the length that its request states.
"""

from __future__ import annotations

import math
import random
from array import array
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from headrace.bench.simulation.baseline_orders import Order, batch_size, scheduling_parts
from headrace.bench.simulation.synthetic_traffic import SimulatedRequest
from headrace.engine.interface.request import FinishReason, GenerationRequest
from headrace.engine.memory.block_manager import BlockManager
from headrace.engine.scheduling.policy import Policy
from headrace.engine.scheduling.scheduler import Scheduler, SchedulerStats
from headrace.engine.scheduling.step_plan import SchedulerLimits, SequenceEvent, ShareOutcome
from headrace.engine.scheduling.step_time import StepTimeModel


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """Step times; the defaults are about those of a 0.5B model at int8 on two cores."""

    fixed: float = 12e-3  # seconds
    per_row: float = 0.7e-3
    per_pair: float = 30e-9  # per KV token that a row reads
    noise: float = 0.05  # standard deviation of the logarithm
    blocks: int = 8192
    block_tokens: int = 16

    def seconds(self, rows: int, pairs: int, rng: random.Random) -> float:
        seconds = self.fixed + self.per_row * rows + self.per_pair * pairs
        return seconds * math.exp(rng.gauss(0.0, self.noise)) if self.noise else seconds


class RequestOutcome(msgspec.Struct):
    """The outcome of one request. Times are seconds; `inf` if there is none."""

    request: SimulatedRequest
    refused: bool = False
    retry_after: float = 0.0
    predicted: float = 0.0  # TTFT predicted at admission
    ttft: float = math.inf
    end: float = math.inf  # from its arrival
    gap: float = 0.0  # longest between two tokens
    tokens: int = 0
    cached: int = 0
    finish: FinishReason | None = None

    @property
    def tpot(self) -> float:
        return (self.end - self.ttft) / (self.tokens - 1) if self.tokens > 1 else 0.0


class SimulationResult(msgspec.Struct):
    outcomes: list[RequestOutcome]
    seconds: float  # until the last request ended
    busy: float  # of those, spent in steps
    stats: SchedulerStats
    gaps: dict[str, array[float]] = {}  # between tokens, by surface
    unserved: int = 0  # waiting when the run was stopped
    wasted: float = 0.0  # share of the held KV slots without a token, mean over the busy time


def simulate(
    calls: Iterable[SimulatedRequest],
    hardware: Hardware,
    *,
    policy: Policy | None = None,
    limits: SchedulerLimits | None = None,
    order: Order = "fair",
    seed: int = 0,
    drain: float = math.inf,
    progress: Callable[[float], None] | None = None,
) -> SimulationResult:
    """Serve the requests in order of arrival; stop `drain` seconds after the last one, even if requests still wait."""
    limits = msgspec.structs.replace(limits or SchedulerLimits(), block_tokens=hardware.block_tokens)
    queue, policy, limits = scheduling_parts(order, policy or Policy(), limits)
    blocks = BlockManager(hardware.blocks, hardware.block_tokens)
    scheduler = Scheduler(blocks, limits, policy, StepTimeModel(), queue=queue)
    together = batch_size(order, limits)
    clients = _Clients(scheduler)
    held: deque[SimulatedRequest] = deque()  # until the batch before has ended

    def send(call: SimulatedRequest, now: float) -> None:
        if together is None:
            clients.send(call, now)
        else:
            held.append(call)

    rng = random.Random(f"{seed} machine")
    now = busy = wasted = 0.0
    arrivals = iter(calls)
    call = next(arrivals, None)
    last = 0.0
    while call is not None or held or not scheduler.idle:
        while call is not None and call.at <= now:
            last = call.at
            send(call, now)
            call = next(arrivals, None)
        if held and together is not None and scheduler.idle:
            for _ in range(min(together, len(held))):
                clients.send(held.popleft(), now)
        clients.deliver(scheduler.expire(now), now)
        plan = scheduler.plan(now)
        if plan is None:
            if call is None:
                break
            now = max(now, call.at)
            continue
        seconds = hardware.seconds(plan.rows, plan.pairs, rng)
        now += seconds
        busy += seconds
        wasted += seconds * blocks.fragmentation
        while call is not None and call.at <= now:
            last = call.at
            send(call, call.at)
            call = next(arrivals, None)
        outcomes = [ShareOutcome([_TOKEN] if share.wanted else []) for share in plan.shares]
        clients.deliver(scheduler.settle(plan, outcomes, now, seconds), now)
        if progress is not None:
            progress(now)
        if call is None and now > last + drain:
            break
    stats = scheduler.stats()
    unserved = stats.waiting + len(held)
    return SimulationResult(clients.outcomes, now, busy, stats, clients.gaps, unserved, wasted / busy if busy else 0.0)


_TOKEN = 1


class _Clients:
    """The clients: send requests and record their outcomes."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.outcomes: list[RequestOutcome] = []
        self.gaps: dict[str, array[float]] = {}
        self._scheduler = scheduler
        self._open: dict[str, tuple[RequestOutcome, float]] = {}  # with the time of the last token

    def send(self, call: SimulatedRequest, now: float) -> None:
        name = str(len(self.outcomes))
        request = GenerationRequest(
            id=name,
            prompt=call.prompt,
            max_tokens=call.answer,
            tenant=call.tenant,
            weight=call.weight,
            salt=call.tenant,
            surface=call.surface,
            priority=call.priority,
            deadline=None if call.deadline is None else call.at + call.deadline,
            arrival=call.at,
        )
        record = RequestOutcome(call)
        self.outcomes.append(record)
        admission = self._scheduler.admit(request, now)
        record.refused = not admission.accepted
        record.retry_after = admission.retry_after
        record.predicted = admission.predicted
        if admission.accepted:
            self._open[name] = (record, math.nan)

    def deliver(self, events: list[SequenceEvent], now: float) -> None:
        for event in events:
            name = event.sequence.request.id
            record, before = self._open[name]
            count = len(event.tokens)
            if count:
                if not record.tokens:
                    record.ttft = now - record.request.at
                    record.cached = event.sequence.cached
                else:
                    gap = now - before
                    record.gap = max(record.gap, gap)
                    self.gaps.setdefault(record.request.surface, array("f")).append(gap)
                record.tokens += count
                self._open[name] = (record, now)
            if event.finish is not None:
                record.finish = event.finish
                record.end = now - record.request.at
                del self._open[name]
