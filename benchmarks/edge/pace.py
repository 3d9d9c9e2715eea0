"""One timer for all streams of a server: it calls each once per period.

Streams keep their phase, so that a thousand of them do not answer in one burst.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

TICK: Final = 0.005  # seconds; every period is a whole number of these


class Wheel:
    """Not thread-safe: belongs to one event loop."""

    def __init__(self, per_second: float) -> None:
        self._slots: list[list[Callable[[], bool]]] = [[] for _ in range(max(1, round(1 / per_second / TICK)))]
        self._began = 0.0  # on the loop's clock
        self._tick = 0  # that comes next
        self._count = 0

    def add(self, step: Callable[[], bool]) -> None:
        """Call `step` once per period, starting one period from now, until it returns False."""
        loop = asyncio.get_running_loop()
        if not self._count:
            self._began, self._tick = loop.time(), 1
            loop.call_at(self._began + TICK, self._turn)
        self._count += 1
        # The slot that is current now comes again when a period has passed.
        self._slots[(self._tick - 1) % len(self._slots)].append(step)

    def _turn(self) -> None:
        loop = asyncio.get_running_loop()
        while self._began + self._tick * TICK <= loop.time():
            place = self._tick % len(self._slots)
            due = self._slots[place]
            self._tick += 1
            if due:
                self._slots[place] = []
                left = [step for step in due if step()]
                self._slots[place] += left
                self._count -= len(due) - len(left)
        if self._count:
            loop.call_at(self._began + self._tick * TICK, self._turn)
