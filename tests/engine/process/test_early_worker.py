"""A worker process that is started before it is known what it will run: taken once, or ended."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import pytest

from headrace.engine.process import early_worker
from headrace.engine.process.start_clock import StartClock, process_seconds
from headrace.engine.process.worker_process import WorkerProcess

_ECHO = "import sys; sys.stdout.write(sys.stdin.readline())"


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The processes that were started: each echoes a line instead of serving a model."""
    started: list[subprocess.Popen[bytes]] = []

    def launch() -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        started.append(subprocess.Popen([sys.executable, "-S", "-c", _ECHO], stdin=pipe, stdout=pipe, stderr=pipe))
        return started[-1]

    monkeypatch.setattr(early_worker, "launch", launch)
    yield started
    early_worker.discard()


def test_the_first_worker_takes_the_early_process(launched: list[subprocess.Popen[bytes]]) -> None:
    early_worker.launch_early()
    first, second = WorkerProcess(b"one\n"), WorkerProcess(b"two\n")
    assert [first.pid, second.pid] == [each.pid for each in launched]

    async def said(worker: WorkerProcess) -> bytes:
        line = await (await worker.output()).readline()
        await worker.wait()
        return line

    assert asyncio.run(said(first)) == b"one\n"
    assert asyncio.run(said(second)) == b"two\n"


def test_a_process_that_nothing_took_is_ended(launched: list[subprocess.Popen[bytes]]) -> None:
    early_worker.launch_early()
    early_worker.discard()
    assert launched[0].returncode is not None
    assert early_worker.take() is None


def test_a_process_that_has_ended_is_not_handed_out(launched: list[subprocess.Popen[bytes]]) -> None:
    early_worker.launch_early()
    launched[0].communicate(b"\n")
    assert early_worker.take() is None


def test_a_machine_that_starts_no_process_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> subprocess.Popen[bytes]:
        raise OSError("no more processes")

    monkeypatch.setattr(early_worker, "launch", fail)
    early_worker.launch_early()
    assert early_worker.take() is None


def test_a_worker_without_a_configuration_ends_without_a_word() -> None:
    command = [sys.executable, "-m", "headrace.engine.process"]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")


def test_a_start_is_told_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((10.0, 10.25, 10.5, 11.0))
    monkeypatch.setattr("headrace.engine.process.start_clock.time.monotonic", lambda: next(times))
    clock = StartClock(0.1)
    for part in ("folder", "weights", "folder"):
        clock.end(part)
    assert clock.describe() == "imports 100 ms, folder 750 ms, weights 250 ms"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_this_process_was_started_before_now() -> None:
    assert process_seconds() > 0.0
