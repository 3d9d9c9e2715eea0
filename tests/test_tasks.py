"""What ends tasks."""

from __future__ import annotations

import asyncio
import contextlib
import gc

import pytest

from headrace import tasks
from headrace.tasks import end_tasks
from tests.support.running_server import asynchronous


@asynchronous
async def test_tasks_that_end_with_anything_are_awaited(caplog: pytest.LogCaptureFixture) -> None:
    async def fails() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError

    async def ends() -> None:
        return

    running = [asyncio.create_task(work()) for work in (fails, ends, asyncio.Event().wait)]
    await asyncio.sleep(0)
    await end_tasks([*running, None])
    assert all(task.done() for task in running)
    del running
    gc.collect()
    assert not caplog.records
    await end_tasks([])


@asynchronous
async def test_a_task_that_lost_a_cancellation_is_cancelled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_AGAIN_S", 0.01)
    lost = 0

    async def loses_two() -> None:
        nonlocal lost
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            lost += 1
            if lost == 2:
                await asyncio.Event().wait()

    task = asyncio.create_task(loses_two())
    await asyncio.sleep(0)
    await end_tasks([task])
    assert task.cancelled()
    assert lost == 2
