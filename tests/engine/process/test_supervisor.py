"""What is heard of a worker while it starts. Its dying and its restarts are tests/faults's."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from headrace.engine.process import wire, worker_program
from headrace.engine.process.supervisor import Supervisor


def test_loading_is_told_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(worker_program.time, "monotonic", lambda: now)
    lines: list[bytes] = []
    progress = worker_program.throttled_progress(lines.append)
    for now, done in ((100.1, 10), (100.3, 20), (100.4, 30), (100.9, 40)):  # noqa: B007 - the clock reads it
        progress(done, 40)
    found = [msgspec.json.decode(line, type=wire.LoadProgress) for line in lines]
    assert found == [wire.LoadProgress(20, 40), wire.LoadProgress(40, 40)]


def test_the_supervisor_hears_of_the_loading_until_the_worker_has_started() -> None:
    heard: list[tuple[int, int]] = []

    async def listen() -> wire.StartReport:
        supervisor = Supervisor([], progress=lambda done, total: heard.append((done, total)))
        lines = asyncio.StreamReader()
        for said in (wire.LoadProgress(1, 3), wire.LoadProgress(2, 3), wire.StartReport(load_s=0.5)):
            lines.feed_data(msgspec.json.encode(said) + b"\n")
        try:
            return await supervisor.report_of(lines)
        finally:
            await supervisor.stop()

    assert asyncio.run(listen()).load_s == 0.5
    assert heard == [(1, 3), (2, 3)]
