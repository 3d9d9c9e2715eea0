"""StageClock: waits for work until a point in time or until the client has left. Tests pass their own clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class StageLateError(Exception):
    """The work did not end in time. It was cancelled."""


class ClientGoneError(Exception):
    """The client has left, or has interrupted the answer. The work was cancelled."""


class StageClock:
    """`now`: seconds on the monotonic clock. `sleep`: waits that long on the same clock."""

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.now = now
        self._sleep = sleep

    async def within(self, work: Coroutine[Any, Any, T], end: float, gone: asyncio.Event | None = None) -> T:
        """Return the work's result. StageLateError at `end`, ClientGoneError once `gone` is set.

        Work that does not heed its cancellation is not waited for.
        """
        if gone is not None and gone.is_set():
            work.close()
            raise ClientGoneError
        left = end - self.now()
        if left <= 0:
            work.close()
            raise StageLateError
        task = asyncio.ensure_future(work)
        guards: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._wait(left))]
        if gone is not None:
            guards.append(asyncio.ensure_future(gone.wait()))
        try:
            await asyncio.wait({task, *guards}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise ClientGoneError if gone is not None and gone.is_set() else StageLateError
        finally:
            for each in (task, *guards):
                if not each.done():
                    each.cancel()
            task.add_done_callback(_look)
            await asyncio.sleep(0)  # what heeds its cancellation ends here

    async def _wait(self, seconds: float) -> None:
        await self._sleep(seconds)


def _look(task: asyncio.Future[Any]) -> None:
    """Look at the error of work that is not waited for, so that asyncio does not report it."""
    if not task.cancelled():
        task.exception()
