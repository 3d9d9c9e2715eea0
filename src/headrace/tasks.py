"""Ends asyncio tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final

_AGAIN_S: Final = 10.0  # a task may clean up for so long


async def end_tasks(tasks: Iterable[asyncio.Task[Any] | None]) -> None:
    """Cancel tasks and wait until all have ended, whatever they end with.

    Cancels again what goes on, because a task may lose a cancellation: before Python 3.12, `asyncio.wait_for` drops one
    that comes in the moment in which what it waits for ends, and drivers such as redis-py use it for every command.
    """
    pending = {task for task in tasks if task is not None}
    while pending:
        for task in pending:
            task.cancel()
        done, pending = await asyncio.wait(pending, timeout=_AGAIN_S)
        for task in done:
            if not task.cancelled():
                task.exception()  # marks it as read, so that asyncio logs nothing
