"""A timeout and a pause around a model that the semantic cache asks: a slow or broken one costs a bounded wait.

Does not know what the model computes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from headrace.errors import HeadraceError
from headrace.gateway.api_errors import ApiError

T = TypeVar("T")

_FAILURES: Final = 5  # in a row, before the model is skipped for a while


class BoundedWork:
    """Runs one piece of work within a timeout; after several failures it skips the model until a pause is over."""

    def __init__(
        self,
        *,
        wait_s: float = 0.05,
        pause_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wait_s = wait_s
        self._pause_s = pause_s
        self._clock = clock
        self._failures = 0
        self._closed_until = 0.0  # on the clock

    @property
    def paused(self) -> bool:
        return self._failures >= _FAILURES and self._clock() < self._closed_until

    async def result(self, work: Callable[[], Awaitable[T]]) -> T | None:
        """Return the result of `work`; None if it fails, takes too long or is skipped."""
        if self.paused:
            return None
        try:
            async with asyncio.timeout(self._wait_s):
                found = await work()
        except (TimeoutError, HeadraceError, ApiError, OSError, ValueError) as error:
            if isinstance(error, ApiError) and error.kind == "invalid_request_error":
                return None  # a text that the model cannot read, such as a too long one, is no failure of it
            # After a pause, a single failure starts the next one.
            self._failures = min(self._failures + 1, _FAILURES)
            self._closed_until = self._clock() + self._pause_s
            return None
        self._failures = 0
        return found
