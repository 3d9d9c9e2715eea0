"""A step waits for requests that are expected within its window, and for nothing else."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from headrace.engine.memory.block_manager import BlockManager
from headrace.engine.scheduling.gather_window import GatherWindow
from headrace.engine.scheduling.policy import Policy
from headrace.surfaces import SURFACES
from tests.support.scheduler_machine import Machine

WINDOW = 4e-3


@pytest.fixture
def machine() -> Machine:
    """All surfaces but voice gather."""
    surfaces = {
        name: surface if name == "voice" else replace(surface, gather=WINDOW) for name, surface in SURFACES.items()
    }
    return Machine(BlockManager(1024), policy=Policy(surfaces=surfaces))


def embed(machine: Machine, name: str, surface: str = "chat", tokens: int = 12, **more: object) -> None:
    machine.must(name, tokens, surface=surface, kind="embed", **more)


def burst(machine: Machine, name: str, count: int = 4, gap: float = 1e-3) -> int:
    """Send requests a millisecond apart to an engine that gathers. Return the steps that they took."""
    before = len(machine.plans)
    due = [machine.now + gap * number for number in range(count)]

    def send(until: float) -> None:
        while due and due[0] <= until:
            machine.now = due.pop(0)
            embed(machine, f"{name} {len(due)}")

    while due or not machine.scheduler.idle:
        now = machine.now
        send(now)
        machine.now = now
        pause = machine.scheduler.gather(now)
        if pause:
            machine.now += pause
            continue
        plan = machine.plan()
        if plan is None:
            machine.now = due[0]
            continue
        send(now + plan.predicted)  # while the step runs
        machine.now = now
        machine.settle(plan)
    machine.now += 0.5
    return len(machine.plans) - before


def test_a_burst_shares_a_step_once_bursts_are_known(machine: Machine) -> None:
    steps = [burst(machine, f"burst {number}") for number in range(8)]
    assert steps[0] == 2  # nothing was expected: the first went alone
    assert steps[-1] == 1
    stats = machine.scheduler.stats().gather
    assert stats.sequences >= 4 * 4
    assert 0 < stats.seconds <= (WINDOW + 1e-3) * stats.steps


def test_nothing_is_waited_for_where_nothing_comes(machine: Machine) -> None:
    for number in range(40):
        embed(machine, f"lonely {number}")
        assert machine.scheduler.gather(machine.now) == 0.0
        machine.step()
        machine.now += 0.2
    assert machine.scheduler.stats().gather.steps == 0


@pytest.fixture
def expecting(machine: Machine) -> Machine:
    for number in range(8):
        burst(machine, f"burst {number}")
    return machine


def test_a_wait_ends_with_its_window(expecting: Machine) -> None:
    embed(expecting, "one")
    began = expecting.now
    while pause := expecting.scheduler.gather(expecting.now):
        expecting.now += pause
    assert 0 < expecting.now - began <= WINDOW + 1e-9


def test_a_surface_without_a_window_is_not_kept_waiting(expecting: Machine) -> None:
    embed(expecting, "one")
    assert expecting.scheduler.gather(expecting.now) > 0.0
    embed(expecting, "other", surface="voice")
    assert expecting.scheduler.gather(expecting.now) == 0.0


def test_a_deadline_is_not_missed_for_others(expecting: Machine) -> None:
    embed(expecting, "one", deadline=expecting.now + 0.0245)  # its own step takes 22 ms
    waited = 0.0
    while pause := expecting.scheduler.gather(expecting.now):
        expecting.now += pause
        waited += pause
    assert waited < WINDOW
    assert expecting.step() is not None
    assert [ending[0][0] for ending in list(expecting.endings.values())[-1:]] == ["stop"]


def test_large_work_does_not_wait(expecting: Machine) -> None:
    embed(expecting, "one", tokens=2000)
    assert expecting.scheduler.gather(expecting.now) == 0.0


def test_a_busy_engine_does_not_wait(expecting: Machine) -> None:
    expecting.must("chat", 20, max_tokens=30, surface="voice")
    expecting.step()
    embed(expecting, "one")
    assert expecting.scheduler.gather(expecting.now) == 0.0


def test_a_wait_for_a_request_that_left_is_not_counted(expecting: Machine) -> None:
    embed(expecting, "gone")
    assert expecting.scheduler.gather(expecting.now) > 0.0
    expecting.scheduler.cancel("gone", expecting.now)
    assert expecting.scheduler.gather(expecting.now) == 0.0
    before = expecting.scheduler.stats().gather.seconds
    expecting.now += 100.0
    expecting.must("voice", 10, surface="voice")
    expecting.run()
    assert expecting.scheduler.stats().gather.seconds == before


def test_expectation_follows_the_gaps() -> None:
    window = GatherWindow()
    times = [place // 4 * 1.0 + place % 4 * 1e-3 for place in range(40)]  # four at a time, a second apart
    for now in times:
        window.arrive(now)
    last = times[-1]

    def wait(since: float, until: float, waiting: int = 1, step: float = 10e-3) -> float:
        return window.wait(last + since, last + until, waiting=waiting, step=step)

    assert wait(0.0, 2e-3) > 0.0
    assert wait(1.5e-3, 4e-3) == 0.0  # after such a gap, the next one is a second away
    assert wait(0.0, 0.5e-3) == 0.0  # none ever came so soon
    assert wait(0.0, 2e-3, waiting=8) > 0.0
    assert wait(0.0, 2e-3, waiting=10) == 0.0  # ten would wait longer than the next one saves
    assert wait(0.0, 2e-3, step=1e-3) == 0.0
