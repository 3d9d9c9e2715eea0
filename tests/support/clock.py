"""The one fake clock of the suite: time passes when a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Clock:
    """Call it for the time in seconds. Set `now` or `millis` to move it and wake sleepers."""

    __slots__ = ("_now", "_sleepers", "is_frozen")

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self._now = now
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []  # when each wakes
        self.is_frozen = False  # sleepers wake after a moment of real time, and the clock stands still

    def __call__(self) -> float:
        return self._now

    @property
    def now(self) -> float:
        return self._now

    @now.setter
    def now(self, now: float) -> None:
        self._now = now
        due = [woken for until, woken in self._sleepers if until <= now]
        self._sleepers = [each for each in self._sleepers if each[0] > now]
        for woken in due:
            if not woken.done():
                woken.set_result(None)

    @property
    def millis(self) -> int:
        """The time in whole milliseconds."""
        return round(self._now * 1000)

    @millis.setter
    def millis(self, millis: int) -> None:
        self.now = millis / 1000

    @property
    def sleeping(self) -> int:
        """Sleepers that nothing has woken yet."""
        return sum(not woken.done() for _, woken in self._sleepers)

    async def sleep(self, seconds: float) -> None:
        """Wait until the clock is moved that far."""
        if self.is_frozen:
            await asyncio.sleep(0.005)
            return
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append(((self.millis + max(1, round(seconds * 1000))) / 1000, woken))
        await woken

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work to its end. Whenever it waits for nothing but this clock, move the clock to the next sleeper."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                for _ in range(50):
                    await asyncio.sleep(0)
                waiting = [until for until, woken in self._sleepers if not woken.done()]
                if task.done() or not waiting:
                    continue
                self.now = max(self._now, min(waiting))
            return task.result()
        finally:
            task.cancel()

    async def skip(self, seconds: float) -> None:
        """Instead of waiting, move the clock that far."""
        self.millis += max(1, round(seconds * 1000))
