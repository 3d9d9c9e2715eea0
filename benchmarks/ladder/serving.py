"""Simulates overload with and without the degradation ladder, with the engine's own scheduler.

Traffic, step times and scheduler are those of `headrace simulate`; two variants share one machine. Worth and Traits
hold what is assumed and not measured.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from headrace.bench.simulation.baseline_orders import scheduling_parts
from headrace.bench.simulation.simulator import Hardware
from headrace.bench.simulation.synthetic_traffic import SimulatedRequest
from headrace.config.shaping_section import LadderConfig
from headrace.engine.interface.request import FinishReason, GenerationRequest
from headrace.engine.memory.block_manager import BlockManager
from headrace.engine.scheduling.policy import Policy
from headrace.engine.scheduling.scheduler import Scheduler
from headrace.engine.scheduling.step_plan import SchedulerLimits, SequenceEvent, ShareOutcome, StepPlan
from headrace.engine.scheduling.step_time import StepTimeModel
from headrace.gateway.degradation.ladder.ladder_config import preset_steps
from headrace.gateway.degradation.ladder.ladder_steps import AllowedSteps, DegradationPlan, plan_degradation
from headrace.gateway.degradation.ladder.levels import Ladder
from headrace.gateway.degradation.ladder.pressure import PressureMonitor, WaitTicket
from headrace.gateway.requests.text_request import TextRequest

Strategy = Literal["fifo", "queue", "shed", "ladder", "ladder-bare", "ladder-half"]
Kind = Literal["full", "trimmed", "cut", "half", "stale", "extracted", "refused"]

STRATEGIES: Final[dict[Strategy, str]] = {
    "fifo": "plain queueing, first come first served",
    "queue": "plain queueing, the engine's fair order",
    "shed": "plain shedding: the engine refuses what it cannot begin in time",
    "ladder": "the ladder, without a smaller variant",
    "ladder-bare": "the same where no request has sources and no cache has an answer",
    "ladder-half": "the ladder, with a variant of half the cost",
}
POLL: Final = 0.2  # seconds between two looks at the engine's statistics
AT_ONCE: Final = 0.005  # seconds to an answer that nothing is generated for
PATIENCE: Final = 120.0  # seconds after the last arrival for which a run goes on


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """The value of an answer that is complete by its deadline; a full one is 1."""

    extracted: float  # measured: right answers on the reading task's held-out questions
    trimmed: float = 0.95
    cut: float = 0.7  # of an answer that would have been longer; a shorter one is whole
    half: float = 0.8
    stale: float = 0.8


class Traits(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of the requests."""

    sourced: Mapping[str, float] = msgspec.field(default_factory=lambda: {"chat": 0.5, "agent": 0.3, "voice": 0.2})
    repeated: float = 0.1  # of which the caches have an answer that has expired
    declines: float = 0.05  # degrade: "off"


@dataclass(slots=True)
class Served:
    """The outcome of a request."""

    call: SimulatedRequest
    kinds: tuple[Kind, ...] = ()
    ttft: float = math.inf
    end: float = math.inf
    tokens: int = 0
    finish: FinishReason | None = None

    @property
    def tpot(self) -> float:
        return (self.end - self.ttft) / (self.tokens - 1) if self.tokens > 1 else 0.0

    @property
    def refused(self) -> bool:
        return "refused" in self.kinds

    @property
    def at_once(self) -> bool:
        return "stale" in self.kinds or "extracted" in self.kinds

    def whole(self) -> bool:
        """Whether it finished by its deadline."""
        if self.at_once:
            return True
        return self.finish in (FinishReason.STOP, FinishReason.LENGTH) and self.end <= (self.call.deadline or math.inf)

    def good(self, policy: Policy) -> bool:
        surface = policy.surfaces[self.call.surface]
        return self.whole() and self.ttft <= surface.ttft and self.tpot <= surface.itl

    def worth(self, worth: Worth) -> float:
        if not self.whole():
            return 0.0
        found = 1.0
        for kind in self.kinds:
            if kind not in ("full", "refused"):
                found *= getattr(worth, kind)
        return found


class Engine:
    """One variant's scheduler on the shared machine."""

    def __init__(self, name: str, hardware: Hardware, strategy: Strategy, limits: SchedulerLimits, seed: int) -> None:
        queue, policy, limits = scheduling_parts("fcfs" if strategy == "fifo" else "fair", Policy(), limits)
        if strategy == "queue":
            policy = replace(policy, refuse_unmet=False)
        self.name = name
        self.hardware = hardware
        self.blocks = BlockManager(hardware.blocks, hardware.block_tokens)
        self.scheduler = Scheduler(self.blocks, limits, policy, StepTimeModel(), queue=queue)
        self.rng = random.Random(f"{seed} {name}")
        self.plan: StepPlan | None = None
        self.left = 0.0  # seconds of the step under way, if the machine were its own
        self.began = 0.0
        self.open: dict[str, Served] = {}
        self.waits: dict[str, WaitTicket] = {}

    def start(self, now: float) -> None:
        if self.plan is None:
            self.plan = self.scheduler.plan(now)
            if self.plan is not None:
                self.left = self.hardware.seconds(self.plan.rows, self.plan.pairs, self.rng)
                self.began = now

    def finish(self, now: float) -> list[SequenceEvent]:
        plan, self.plan = self.plan, None
        assert plan is not None
        outcomes = [ShareOutcome([1] if share.wanted else []) for share in plan.shares]
        return self.scheduler.settle(plan, outcomes, now, now - self.began)

    def admit(self, served: Served, prompt: tuple[int, ...], answer: int, wait: WaitTicket | None, now: float) -> bool:
        call = served.call
        name = str(id(served))
        request = GenerationRequest(
            id=name,
            prompt=prompt,
            max_tokens=answer,
            tenant=call.tenant,
            weight=call.weight,
            salt=call.tenant,
            surface=call.surface,
            deadline=None if call.deadline is None else call.at + call.deadline,
            arrival=call.at,
        )
        if not self.scheduler.admit(request, now).accepted:
            if wait is not None:
                wait.end()
            return False
        self.open[name] = served
        if wait is not None:
            self.waits[name] = wait
        return True

    def deliver(self, events: list[SequenceEvent], now: float, pressure: PressureMonitor) -> None:
        for event in events:
            name = event.sequence.request.id
            served = self.open[name]
            if event.tokens:
                if not served.tokens:
                    served.ttft = now - served.call.at
                    if name in self.waits:
                        self.waits[name].start()
                served.tokens += len(event.tokens)
            if event.finish is not None:
                served.finish, served.end = event.finish, now - served.call.at
                if name in self.waits:
                    self.waits.pop(name).end()
                del self.open[name]
                if served.tokens:
                    seconds = served.end - served.ttft
                    pressure.record_answer(self.name, served.call.surface, tokens=served.tokens, seconds=seconds)


class Front:
    """The gateway: forwards requests to the variants, with or without the ladder."""

    def __init__(
        self, engines: Mapping[str, Engine], strategy: Strategy, traits: Traits, clock: Callable[[], float], seed: int
    ) -> None:
        self.engines = engines
        variants = ("half",) if strategy == "ladder-half" else ()
        self.ladder = Ladder(_ladders(variants) if strategy.startswith("ladder") else {}, clock=clock)
        self.pressure = PressureMonitor(clock=clock)
        self._traits = replace(traits, sourced={}, repeated=0.0) if strategy == "ladder-bare" else traits
        self._rng = random.Random(f"{seed} traits")
        self._polled = -math.inf

    def poll(self, now: float) -> None:
        if now - self._polled >= POLL:
            self._polled = now
            for name, engine in self.engines.items():
                stats = engine.blocks.stats()
                blocks = {"total": stats.total, "free": stats.free, "cached": stats.cached}
                self.pressure.record_statistics(name, [{"blocks": blocks}])

    def send(self, call: SimulatedRequest, now: float) -> Served:
        served = Served(call)
        # All drawn for each call, so that every strategy has the same ones.
        sourced = self._rng.random() < self._traits.sourced.get(call.surface, 0.0)
        repeated = self._rng.random() < self._traits.repeated
        declines = self._rng.random() < self._traits.declines
        asked = TextRequest(model="mini", messages=[{"role": "user", "content": "?"}], surface=call.surface)
        allowed = AllowedSteps.of("off" if declines else None)
        signals = self.pressure.signals("mini", call.tenant, surface=call.surface, deadline_s=call.deadline)
        level = self.ladder.decide(call.surface, signals, now, scope=call.tenant)
        plan = plan_degradation(level, asked, allowed)
        if self._at_once(served, plan, sourced, repeated):
            return served
        if plan.refuse or not self._generate(served, plan, now):
            last = plan_degradation(self.ladder.bottom(call.surface), asked, allowed)
            if not self._at_once(served, last, sourced, repeated):
                served.kinds = ("refused",)
        return served

    def _at_once(self, served: Served, plan: DegradationPlan, sourced: bool, repeated: bool) -> bool:
        if plan.stale_s is not None and repeated:
            served.kinds = ("stale",)
        elif plan.extract and sourced:
            served.kinds = ("extracted",)
        else:
            return False
        served.ttft = served.end = AT_ONCE
        return True

    def _generate(self, served: Served, plan: DegradationPlan, now: float) -> bool:
        call = served.call
        kinds: list[Kind] = []
        prompt, answer, name = call.prompt, call.answer, "mini"
        room = (plan.history_tokens or 0) + (plan.sources_tokens or 0)
        if room and len(prompt) > room:
            # What the system says stays, and the newest turns.
            prompt = prompt[: room // 4] + prompt[-(room - room // 4) :]
            kinds.append("trimmed")
        if plan.max_tokens is not None and answer > plan.max_tokens:
            answer = plan.max_tokens
            kinds.append("cut")
        if plan.variants:
            name = "mini@half"
            kinds.append("half")
        served.kinds = tuple(kinds) or ("full",)
        wait = None if call.surface == "batch" else self.pressure.wait(name, call.tenant)
        return self.engines[name].admit(served, prompt, answer, wait, now)


def _ladders(variants: tuple[str, ...]) -> dict[str, LadderConfig]:
    return {
        name: LadderConfig(steps=preset_steps(surface.patience, variants=variants))
        for name, surface in Policy().surfaces.items()
    }


def run(
    calls: Sequence[SimulatedRequest],
    strategy: Strategy,
    *,
    hardware: Hardware,
    limits: SchedulerLimits,
    traits: Traits,
    seed: int,
) -> tuple[list[Served], Front]:
    """Simulate all requests. Concurrent steps of two variants each run at half speed."""
    now = 0.0
    engines = {"mini": Engine("mini", hardware, strategy, limits, seed)}
    if strategy == "ladder-half":
        half = replace(hardware, fixed=hardware.fixed / 2, per_row=hardware.per_row / 2, per_pair=hardware.per_pair / 2)
        engines["mini@half"] = Engine("mini@half", half, strategy, limits, seed)
    front = Front(engines, strategy, traits, lambda: now, seed)
    found: list[Served] = []
    arrivals = iter(calls)
    call = next(arrivals, None)
    last = 0.0
    while True:
        for engine in engines.values():
            engine.deliver(engine.scheduler.expire(now), now, front.pressure)
            engine.start(now)
        busy = [engine for engine in engines.values() if engine.plan is not None]
        ends = now + min(engine.left for engine in busy) * len(busy) if busy else math.inf
        if call is None and (not busy or now > last + PATIENCE):
            return found, front
        if call is not None and call.at <= ends:
            _work(busy, call.at - now)
            now = last = max(now, call.at)
            front.poll(now)
            found.append(front.send(call, now))
            call = next(arrivals, None)
            continue
        _work(busy, ends - now)
        now = ends
        front.poll(now)
        for engine in busy:
            if engine.left <= 1e-12:
                engine.deliver(engine.finish(now), now, front.pressure)


def _work(busy: Sequence[Engine], seconds: float) -> None:
    for engine in busy:
        engine.left -= max(seconds, 0.0) / len(busy)
