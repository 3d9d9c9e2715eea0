"""Batch work for the most tokens/s: long steps and alike prompts together, until somebody waits."""

from __future__ import annotations

from itertools import pairwise

import pytest

from headrace.engine.memory.block_manager import BlockManager
from headrace.engine.scheduling.policy import Policy
from headrace.engine.scheduling.step_plan import SchedulerLimits
from headrace.surfaces import SURFACES
from tests.support.scheduler_machine import Machine, prompt

THROUGHPUT = Policy().for_throughput()
LIMITS = SchedulerLimits(max_sequences=16, max_rows=2048)


@pytest.fixture
def machine() -> Machine:
    return Machine(BlockManager(4096), limits=LIMITS, policy=THROUGHPUT)


def test_a_step_of_batches_alone_may_be_long(machine: Machine) -> None:
    plain = Machine(BlockManager(4096), limits=LIMITS)
    for each in (machine, plain):
        for number in range(16):
            each.must(f"batch {number}", 600, surface="batch", max_tokens=50)
    first, other = machine.step(), plain.step()
    assert first is not None
    assert other is not None
    assert other.predicted <= LIMITS.longest_step < 0.9 < first.predicted <= THROUGHPUT.batch_step
    machine.run()
    plain.run()
    assert machine.now < plain.now  # fewer steps, each with its fixed cost


def test_every_batch_stream_is_in_every_step(machine: Machine) -> None:
    streams = [machine.must(f"batch {number}", 50, surface="batch", max_tokens=200) for number in range(8)]
    machine.run(steps=5)
    for number in range(8):
        machine.must(f"more {number}", 3000, surface="batch")
    for _ in range(20):
        plan = machine.step()
        assert plan is not None
        assert {share.sequence for share in plan.shares} >= set(streams)


def test_prompts_that_begin_alike_follow_each_other(machine: Machine) -> None:
    kinds = [prompt(200, seed=seed) for seed in (1, 2, 3)]
    sent = [
        machine.must(f"{number} {kind}", (*kinds[kind], *prompt(40, seed=50 + number)), surface="batch", max_tokens=1)
        for number in range(30)
        for kind in range(3)
    ]
    machine.run()
    order = sorted(sent, key=lambda each: machine.times[each][0])
    seen = [each.request.id.split()[1] for each in order]
    changes = sum(one != other for one, other in pairwise(seen))
    assert changes < 30  # in order of arrival every one differs from the one before
    assert sum(machine.rows.values()) < 3 * 200 + 90 * 60


@pytest.mark.parametrize("gap", [0.0, 0.4])
def test_batches_step_aside_in_one_step(machine: Machine, gap: float) -> None:
    batch = [machine.must(f"batch {number}", 600, surface="batch", max_tokens=300) for number in range(40)]
    machine.run(steps=30)
    plan = machine.plan()
    assert plan is not None
    machine.now += gap
    chat = machine.must("chat", 100, max_tokens=20)
    machine.now -= gap
    machine.settle(plan)
    step = machine.step()
    assert step is not None
    assert [share.sequence for share in step.shares] == [chat]
    machine.run(steps=25)
    assert max(machine.gaps(chat)) <= SURFACES["chat"].itl + 1e-9
    machine.run()
    assert all(machine.finish(each) is not None for each in batch)


def test_prompts_of_batches_do_not_lengthen_the_first_step_of_a_chat() -> None:
    limits = SchedulerLimits(max_sequences=64, max_rows=2048)
    machine = Machine(BlockManager(16_384), limits=limits, policy=THROUGHPUT)
    for number in range(30):
        machine.must(f"batch {number}", 3000, surface="batch", max_tokens=20)
    machine.run(steps=6)
    plan = machine.plan()
    assert plan is not None
    chat = machine.must("chat", 100, max_tokens=1)
    machine.settle(plan)
    step = machine.step()
    assert step is not None
    assert [share.sequence for share in step.shares] == [chat]
    machine.run()


def test_a_beginning_waits_no_longer_than_its_group(machine: Machine) -> None:
    seconds = THROUGHPUT.batch_group
    early = machine.must("early", 100, surface="batch", arrival=0.0)
    for number in range(40):
        machine.must(f"late {number}", 100, surface="batch", arrival=2.0 * seconds)
    machine.step()
    assert machine.rows.get(early, 0) > 0
