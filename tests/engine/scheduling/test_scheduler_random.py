"""Random traffic through the scheduler: everything that is admitted ends exactly once, and nothing leaks."""

from __future__ import annotations

import random

import pytest

from headrace.engine.interface.request import FinishReason
from headrace.engine.memory.block_manager import BlockManager
from headrace.engine.scheduling.policy import Policy
from headrace.engine.scheduling.step_plan import SchedulerLimits, Share, ShareOutcome
from tests.support.scheduler_machine import Machine, prompt


class Traffic:
    """One random client of everything that there is."""

    def __init__(self, seed: int, machine: Machine) -> None:
        self.rng = random.Random(seed)
        self.machine = machine
        self.count = 0
        self.open: dict[str, int] = {}
        machine.answers = self.answer

    def send(self) -> None:
        rng, machine = self.rng, self.machine
        self.count += 1
        name = f"{self.count}"
        kind = rng.choices(("generate", "score", "embed"), (8, 1, 1))[0]
        shared = prompt(rng.choice((0, 40, 160, 330)), seed=rng.randrange(3))
        tokens = (*shared, *prompt(rng.randint(1, 120), seed=rng.randrange(1000)))
        most = rng.randint(1, 60)
        admission = machine.send(
            name,
            tokens,
            kind=kind,
            tenant=f"t{rng.randrange(6)}",
            salt=f"t{rng.randrange(2)}",
            surface=rng.choice(("chat", "chat", "voice", "agent", "batch")),
            priority=rng.choice((0, 0, 0, 2, -3)),
            n=rng.choice((1, 1, 1, 3)) if kind == "generate" else 1,
            weight=rng.choice((1.0, 2.0)),
            max_tokens=most,
            deadline=machine.now + rng.uniform(0.01, 5.0) if rng.random() < 0.2 else None,
            prompt_logprobs=0 if kind == "generate" and rng.random() < 0.1 else None,
            score_from=rng.randint(0, len(tokens)) if kind == "score" else 0,
            stop_ids=frozenset({3}) if rng.random() < 0.3 else frozenset(),
        )
        assert admission.accepted == bool(admission.sequences)
        assert admission.accepted or admission.why

    def answer(self, share: Share) -> ShareOutcome:
        rng, sequence = self.rng, share.sequence
        if rng.random() < 0.002:
            return ShareOutcome([], FinishReason.FAILED, "broken")
        if not share.wanted or sequence.request.kind != "generate":
            return ShareOutcome()
        if sequence.computed + share.count < len(sequence.tokens):
            return ShareOutcome()  # results of the prompt alone
        kept = rng.randint(0, len(sequence.drafted))
        accepted = [*sequence.drafted[:kept], rng.randint(0, 60)]
        if rng.random() < 0.02:
            accepted += [5] * rng.randint(1, 40)  # forced
        return ShareOutcome(accepted)

    def go(self, steps: int, *, most_waiting: int) -> None:
        rng, machine = self.rng, self.machine
        scheduler = machine.scheduler
        for step in range(steps):
            while scheduler.stats().waiting < most_waiting and rng.random() < 0.6:
                self.send()
            if rng.random() < 0.1:
                machine.take(scheduler.cancel(str(rng.randint(max(1, self.count - 30), self.count)), machine.now))
            for job in scheduler.running.decoding:
                if rng.random() < 0.3:
                    job.sequence.drafted = [rng.randint(4, 60) for _ in range(rng.randint(0, 5))]
            plan = machine.plan()
            if plan is None:
                machine.now += 0.01
                continue
            if rng.random() < 0.1:
                machine.take(scheduler.cancel(str(rng.randint(max(1, self.count - 30), self.count)), machine.now))
            if rng.random() < 0.1:
                machine.take(scheduler.expire(machine.now + 0.01))
            if rng.random() < 0.1:
                self.send()
            machine.settle(plan)
            if step % 25 == 0:
                machine.blocks.check()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("blocks", [48, 100, 2000])
def test_everything_ends_once_and_nothing_leaks(seed: int, blocks: int) -> None:
    limits = SchedulerLimits(
        max_sequences=12, max_rows=128, queued_sequences=60, context=700, short_rows=64, idle_tenants=2
    )
    machine = Machine(BlockManager(blocks), limits=limits, policy=Policy(refuse_unmet=seed % 2 == 0))
    traffic = Traffic(seed, machine)
    traffic.go(500, most_waiting=40)
    machine.run()
    machine.blocks.check()
    assert set(machine.endings) == set(machine.times)
    scheduler = machine.scheduler
    for sequence, [(finish, why, _)] in machine.endings.items():
        request = sequence.request
        assert len(machine.times[sequence]) == sequence.output_count <= request.max_tokens
        assert sequence.blocks == []
        assert sequence.finish is finish
        match finish:
            case FinishReason.LENGTH:
                assert sequence.output_count == request.max_tokens
            case FinishReason.STOP if request.kind == "generate":
                assert sequence.output[-1] in request.stop_ids
            case FinishReason.DEADLINE:
                assert request.deadline is not None
            case FinishReason.FAILED:
                assert why == "broken", (why, request.kind, sequence.output_count, sequence.computed)
            case _:
                pass
    stats = scheduler.stats()
    assert (stats.waiting, stats.running, stats.following) == (0, 0, 0)
    assert stats.finished + stats.cut + stats.cancelled + stats.failed == len(machine.endings)
    assert stats.tenants <= limits.idle_tenants
    assert all(account.queued == account.queued_tokens == account.running == 0 for account in scheduler.queue.accounts)
    assert stats.finished > 50


def test_nobody_waits_for_ever_however_much_there_is() -> None:
    """Every kind of request under a flood that never lets the machine rest."""
    machine = Machine(BlockManager(400), limits=SchedulerLimits(max_sequences=8), policy=Policy(refuse_unmet=False))
    rng = random.Random(1)
    wanted = [
        machine.must("cold", 900, tenant="a", max_tokens=3),
        machine.must("low", 200, tenant="a", max_tokens=3, priority=-10),
        machine.must("batch", 200, tenant="b", max_tokens=3, surface="batch"),
        machine.must("flooder's own", 200, tenant="t0", max_tokens=3),
    ]
    hot = prompt(320)
    for step in range(6000):
        while machine.scheduler.stats().waiting < 60:
            machine.must(
                f"{step} {rng.random()}",
                (*hot, *prompt(rng.randint(1, 60), seed=rng.randrange(500))),
                tenant=f"t{rng.randrange(4)}",
                surface=rng.choice(("chat", "voice")),
                max_tokens=rng.randint(1, 10),
                priority=rng.choice((0, 0, 1)),
            )
        machine.step()
        if all(machine.finish(sequence) for sequence in wanted):
            break
    assert [machine.finish(sequence) for sequence in wanted] == [FinishReason.LENGTH] * 4
