"""When a worker counts as frozen: its answers and the system's view of its process, with both scripted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from headrace.engine.process.heartbeat import Heartbeat, ProcessActivity, read_activity


class Process:
    def __init__(self, state: str = "S", ticks_each: int = 0) -> None:
        self.state = state
        self.ticks_each = ticks_each
        self.ticks = 0

    def __call__(self, pid: int) -> ProcessActivity | None:
        self.ticks += self.ticks_each
        return ProcessActivity(self.state, self.ticks)


def heartbeat(process: Process) -> Heartbeat:
    return Heartbeat(1, ping=0.5, silence=3.0, longest_step=60.0, activity=process)


def until_replaced(found: Heartbeat) -> tuple[float, str]:
    """The silence in seconds at which the worker is given up, and the reason."""
    for _ in range(1000):
        if (reason := found.tick()) is not None:
            return found.silent, reason
    raise AssertionError("it is never given up")


@pytest.mark.parametrize(
    ("process", "silence", "reason"),
    [
        (Process("T"), 3.0, "is stopped"),
        (Process("t", ticks_each=5), 3.0, "is stopped"),  # its clock cannot have moved; the state decides
        (Process("S"), 3.0, "is frozen"),  # a deadlock: it sleeps and uses no processor
        (Process("R"), 60.0, "has not answered for 60 s"),  # starved by a busy machine
        (Process("D"), 60.0, "has not answered for 60 s"),  # waits for a disk
        (Process("S", ticks_each=1), 60.0, "has not answered for 60 s"),  # computes, and its loop does not run
    ],
    ids=["stopped", "traced", "asleep", "starved", "disk", "computing"],
)
def test_only_an_inactive_worker_is_replaced_early(process: Process, silence: float, reason: str) -> None:
    found = heartbeat(process)
    for _ in range(20):
        found.beat(0.0)
        assert found.tick() is None
    at, why = until_replaced(found)
    assert at == silence
    assert reason in why


def test_an_answer_begins_the_count_anew() -> None:
    found = heartbeat(Process("S"))
    found.beat(0.0)
    for _ in range(50):
        assert [found.tick() for _ in range(6)] == [None] * 6
        found.beat(0.0)


def test_activity_begins_the_count_of_an_inactive_worker_anew() -> None:
    process = Process("S")
    found = heartbeat(process)
    found.beat(0.0)
    for _ in range(5):
        assert found.tick() is None
    process.ticks_each = 1
    assert found.tick() is None
    process.ticks_each = 0
    at, _ = until_replaced(found)
    assert at == 2.5 + 3.0


def test_a_long_step_is_no_freeze_and_one_above_the_bound_is() -> None:
    found = heartbeat(Process("S"))
    found.beat(59.0)
    assert found.tick() is None
    found.beat(60.5)
    assert found.tick() == "has been in one step for 60 s"


def test_without_a_view_of_the_process_silence_decides() -> None:
    found = Heartbeat(1, ping=0.5, silence=3.0, longest_step=60.0, activity=lambda pid: None)
    assert until_replaced(found)[0] == 3.0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_the_activity_of_a_process_is_read() -> None:
    own = read_activity(os.getpid())
    assert own is not None
    assert own.state == "R"
    assert own.processor_ticks > 0
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        stopped = read_activity(child.pid)
        assert stopped is not None
        assert stopped.state == "T"
    finally:
        child.kill()
        child.wait()
    assert read_activity(child.pid) is None
