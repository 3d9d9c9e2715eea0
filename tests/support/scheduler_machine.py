"""A scheduler with an exact machine: steps take as long as the model says, and answers say what they are told to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from headrace.engine.interface.request import FinishReason, GenerationRequest, SequenceState
from headrace.engine.memory.block_manager import BlockManager
from headrace.engine.scheduling.policy import Policy
from headrace.engine.scheduling.scheduler import Scheduler
from headrace.engine.scheduling.step_plan import (
    AdmissionDecision,
    SchedulerLimits,
    SequenceEvent,
    Share,
    ShareOutcome,
    StepPlan,
)
from headrace.engine.scheduling.step_time import StepTimeModel, pairs_of

FIXED, PER_ROW, PER_PAIR = 10e-3, 1e-3, 20e-9
Answers = Callable[[Share], ShareOutcome]


def exact(rows: int, pairs: int) -> float:
    return FIXED + PER_ROW * rows + PER_PAIR * pairs


def prompt(count: int, seed: int = 0) -> tuple[int, ...]:
    return tuple((seed * 7919 + place * (seed % 89 + 1)) % 50_021 for place in range(count))


def one_token(share: Share) -> ShareOutcome:
    return ShareOutcome([7] if share.wanted and share.sequence.request.kind == "generate" else [])


@dataclass
class Machine:
    blocks: BlockManager
    limits: SchedulerLimits = field(default_factory=lambda: SchedulerLimits(max_sequences=16))
    policy: Policy = field(default_factory=Policy)
    answers: Answers = one_token
    now: float = 0.0

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.blocks, self.limits, self.policy, StepTimeModel(FIXED, PER_ROW, PER_PAIR))
        self.plans: list[StepPlan] = []
        self.shares: list[list[tuple[SequenceState, int, int]]] = []  # sequence, count, wanted of each step's
        self.rows: dict[SequenceState, int] = {}
        self.times: dict[SequenceState, list[float]] = {}  # of each token
        self.endings: dict[SequenceState, list[tuple[FinishReason, str, float]]] = {}

    def send(self, id: str, tokens: int | tuple[int, ...] = 100, **wishes: Any) -> AdmissionDecision:
        output = wishes.pop("output", ())
        made = prompt(tokens, seed=len(self.times) + 1) if isinstance(tokens, int) else tokens
        wishes.setdefault("arrival", self.now)
        wishes.setdefault("max_tokens", 8)
        admission = self.scheduler.admit(GenerationRequest(id=id, prompt=made, **wishes), self.now, output=output)
        for sequence in admission.sequences:
            self.times[sequence] = []
        return admission

    def must(self, id: str, tokens: int | tuple[int, ...] = 100, **wishes: Any) -> SequenceState:
        """Sends a request of one sequence that must be admitted."""
        admission = self.send(id, tokens, **wishes)
        assert admission.accepted, admission.why
        return admission.sequences[0]

    def plan(self) -> StepPlan | None:
        self.take(self.scheduler.expire(self.now))
        plan = self.scheduler.plan(self.now)
        if plan is None:
            self.take(self.scheduler.expire(self.now))
        else:
            self.check(plan)
            self.plans.append(plan)
            self.shares.append([(share.sequence, share.count, share.wanted) for share in plan.shares])
        return plan

    def settle(self, plan: StepPlan) -> list[SequenceEvent]:
        seconds = exact(plan.rows, plan.pairs)
        self.now += seconds
        for share in plan.shares:
            self.rows[share.sequence] = self.rows.get(share.sequence, 0) + share.count
        events = self.scheduler.settle(plan, [self.answers(share) for share in plan.shares], self.now, seconds)
        self.take(events)
        return events

    def step(self) -> StepPlan | None:
        plan = self.plan()
        if plan is not None:
            self.settle(plan)
        return plan

    def run(self, steps: int = 100_000) -> None:
        """Until all is done, or for so many steps."""
        while steps > 0 and self.step() is not None:
            steps -= 1
        if steps > 0:
            assert self.scheduler.idle
            assert self.blocks.available == self.blocks.count

    def take(self, events: list[SequenceEvent]) -> None:
        for event in events:
            assert event.sequence not in self.endings, "an event after the end"
            self.times[event.sequence] += [self.now] * len(event.tokens)
            if event.finish is not None:
                assert event.sequence.finish is event.finish
                self.endings[event.sequence] = [(event.finish, event.why, self.now)]

    def finish(self, sequence: SequenceState) -> FinishReason | None:
        return self.endings[sequence][0][0] if sequence in self.endings else None

    def ttft(self, sequence: SequenceState) -> float:
        return self.times[sequence][0] - sequence.request.arrival

    def gaps(self, sequence: SequenceState) -> list[float]:
        times = self.times[sequence]
        return [later - earlier for earlier, later in pairwise(times)]

    def check(self, plan: StepPlan) -> None:
        """What holds of every plan."""
        assert plan.shares
        assert plan.rows == sum(share.count for share in plan.shares) <= self.limits.max_rows
        assert plan.pairs == sum(pairs_of(share.sequence.computed, share.count) for share in plan.shares)
        assert len({id(share.sequence) for share in plan.shares}) == len(plan.shares) <= self.limits.max_sequences
        written: set[int] = set()
        for share in plan.shares:
            sequence = share.sequence
            assert sequence.finish is None
            assert 0 < share.count <= len(sequence.tokens) + len(sequence.drafted) - sequence.computed
            assert 0 <= share.wanted <= share.count
            end = sequence.computed + share.count
            assert len(sequence.blocks) * self.blocks.block_tokens >= end, (sequence, share)
            assert plan.hidden == (sequence.request.kind == "embed")
            size = self.blocks.block_tokens
            mine = {sequence.blocks[place] for place in range(sequence.computed // size, -(-end // size))}
            assert not mine & written, "two sequences write to one block"
            written |= mine
