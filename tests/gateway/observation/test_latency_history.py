"""What is counted survives a restart, hour by hour, merges exactly, and is bounded."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from headrace.config import SloConfig
from headrace.gateway.database import Database
from headrace.gateway.observation.latency_history import LatencyHistory
from headrace.observe.latency.latency_book import LatencyBook, RequestSample, Slice
from headrace.observe.slo.objectives import Objectives, objectives_of
from tests.support.clock import Clock
from tests.support.running_server import asynchronous

NOON = 1_800_000_000 // 3600 * 3600.0
CHAT = {"chat": SloConfig(availability=0.9)}


class Process:
    """One life of a gateway."""

    def __init__(self, folder: Path, wall: Clock, monotonic: Clock, **bounds: Any) -> None:
        self.database = Database(folder)
        self.book = LatencyBook(monotonic)
        self.objectives = Objectives(objectives_of(CHAT), monotonic, wall)
        self.history = LatencyHistory(self.database, self.book, self.objectives, clock=wall, **bounds)

    def answer(self, ttft: float = 0.1, *, failed: bool = False, model: str = "mini") -> None:
        slice = Slice(model, "chat", "-", "/v1/x", "<=128", "direct")
        sample = RequestSample(slice, {"ttft": ttft}, failed=failed, micros=5, stages={"decode": ttft})
        sample.good = self.objectives.judge(sample)
        self.book.record(sample)


@asynchronous
async def test_hours_are_the_same_after_a_restart_and_merge_with_what_comes_then(tmp_path: Path) -> None:
    wall, monotonic = Clock(NOON), Clock(100.0)
    first = Process(tmp_path, wall, monotonic)
    for number in range(100):
        first.answer(0.001 * (number + 1))
    await first.history.flush()
    wall.now += 120.0
    monotonic.now += 120.0
    await first.database.close()

    second = Process(tmp_path, wall, Clock(5.0))
    for number in range(100):
        second.answer(0.001 * (number + 101))
    await second.history.flush()
    wall.now += 7200.0
    second.answer(9.0)
    await second.history.flush()
    found = await second.history.hours(int(NOON), int(NOON) + 86_400)
    await second.database.close()
    assert [(each.hour, each.row.requests, each.row.micros) for each in found] == [
        (NOON, 200, 1000),
        (NOON + 3600, 1, 5),  # of the hour in the middle of the pause
    ]
    (median,) = found[0].row.sketches["ttft"].quantiles((0.5,))
    assert median == pytest.approx(0.1, rel=0.02)
    assert found[0].row.stages["decode"] == pytest.approx(sum(0.001 * each for each in range(1, 201)))


@asynchronous
async def test_objectives_go_on_after_a_restart(tmp_path: Path) -> None:
    wall, monotonic = Clock(NOON), Clock(1000.0)
    first = Process(tmp_path, wall, monotonic)
    for _ in range(50):
        first.answer(failed=True)
        wall.now += 10.0
        monotonic.now += 10.0
    await first.history.flush()
    before = first.objectives.as_json()
    await first.database.close()

    second = Process(tmp_path, wall, Clock(3.0))  # another monotonic clock, as after a reboot
    await second.history.restore()
    (restored,) = second.objectives.as_json()
    assert restored["events"] == 50
    assert restored["attainment"] == 0.0
    assert restored["burn_rate"]["1h"] == before[0]["burn_rate"]["1h"] == pytest.approx(10.0)
    second.answer()
    await second.history.flush()
    await second.history.flush()
    events = await second.history.objective_events(0, 2**40)  # the first minute began before noon
    await second.database.close()
    assert [sum(each) for each in zip(*((each.good, each.total) for each in events), strict=True)] == [1, 51]


@asynchronous
async def test_what_cannot_be_stored_is_stored_later(tmp_path: Path) -> None:
    wall = Clock(NOON)
    process = Process(tmp_path / "gone" / "storage", wall, Clock(0.0))
    (tmp_path / "gone").write_text("not a folder")
    process.answer()
    await process.history.flush()
    (tmp_path / "gone").unlink()
    process.answer()
    await process.history.flush()
    (hour,) = await process.history.hours(int(NOON), int(NOON) + 3600)
    (events,) = await process.history.objective_events(int(NOON), int(NOON) + 3600)
    await process.database.close()
    assert (hour.row.requests, events.total) == (2, 2)


@asynchronous
async def test_days_and_bytes_are_bounded(tmp_path: Path) -> None:
    wall, monotonic = Clock(NOON), Clock(0.0)
    process = Process(tmp_path, wall, monotonic, days=10, total_bytes=4000)
    for _ in range(24 * 12):
        process.answer()
        wall.now += 3600.0
        monotonic.now += 3600.0
        await process.history.flush()
    found = await process.history.hours(0, 2**40)
    assert found
    assert len(found) < 24 * 10
    assert found[-1].hour == wall.now - 3600.0
    await process.database.close()
    with sqlite3.connect(tmp_path / "headrace.sqlite") as connection:
        (used,) = connection.execute("SELECT SUM(bytes) FROM latency_hours").fetchone()
        (oldest,) = connection.execute("SELECT MIN(began) FROM objective_slots").fetchone()
    connection.close()
    assert used <= 4000
    assert oldest >= wall.now - 11 * 86_400


@asynchronous
async def test_old_minutes_of_objectives_are_put_together_without_a_loss(tmp_path: Path) -> None:
    wall, monotonic = Clock(NOON), Clock(0.0)
    process = Process(tmp_path, wall, monotonic)
    for _ in range(120):
        process.answer(failed=True)
        wall.now += 60.0
        monotonic.now += 60.0
    await process.history.flush()
    wall.now += 6 * 86_400.0
    monotonic.now += 6 * 86_400.0
    process.answer()
    await process.history.flush()
    wall.now += 3600.0
    process.answer()
    await process.history.flush()
    events = await process.history.objective_events(0, 2**40)
    await process.database.close()
    assert sum(each.total for each in events) == 122
    with sqlite3.connect(tmp_path / "headrace.sqlite") as connection:
        (rows,) = connection.execute("SELECT COUNT(*) FROM objective_slots").fetchone()
    connection.close()
    assert rows <= 5


@asynchronous
async def test_an_idle_server_writes_nothing(tmp_path: Path) -> None:
    process = Process(tmp_path / "storage", Clock(NOON), Clock(0.0))
    await process.history.flush()
    assert not (tmp_path / "storage").exists()
    process.answer()
    await process.history.flush()
    await process.history.flush()
    changes = await process.database.run(lambda connection: connection.total_changes)
    await process.history.flush()
    assert await process.database.run(lambda connection: connection.total_changes) == changes
    await process.database.close()


@asynchronous
async def test_hours_that_were_stored_without_a_profile_are_still_read(tmp_path: Path) -> None:
    process = Process(tmp_path, Clock(NOON), Clock(100.0))
    process.answer()
    await process.history.flush()

    def forget_profile(connection: sqlite3.Connection) -> None:
        connection.execute("""UPDATE latency_hours SET slice = replace(slice, ',"standard"', '')""")

    await process.database.run(forget_profile)
    (hour,) = await process.history.hours(int(NOON), int(NOON) + 3600)
    await process.database.close()
    assert hour.slice == Slice("mini", "chat", "-", "/v1/x", "<=128", "direct", "standard")
