"""Work that no request waits for: short tasks, of which a bounded number run at once, and loops until shutdown."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Final

from headrace.observe import metrics
from headrace.tasks import end_tasks

log: Final = logging.getLogger(__name__)

_MAX_TASKS: Final = 1024
_DRAIN_S: Final = 5.0


class BackgroundTasks:
    """All of it belongs to one event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loops: list[asyncio.Task[None]] = []

    def run(self, work: Coroutine[Any, Any, Any]) -> None:
        """Start a task. Drops it, and counts that, where too many run already."""
        if len(self._tasks) >= _MAX_TASKS:
            work.close()
            metrics.of(metrics.dropped, "background").inc()
            return
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def run_until_close(self, loop: Coroutine[Any, Any, None]) -> None:
        self._loops.append(asyncio.get_running_loop().create_task(loop))

    async def close(self) -> None:
        """Cancel the loops at once, and the tasks that have not finished after 5 s."""
        await end_tasks(self._loops)
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=_DRAIN_S)
            await end_tasks(late)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("work in the background failed", exc_info=error)
