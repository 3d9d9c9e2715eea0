"""A breaker: after some failures in a row, something is left alone for a while, so that nobody waits for it in vain.

Owns the count of failures and the time of the next try. Makes no call itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Breaker:
    def __init__(self, *, failures: int = 3, skip_s: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = failures
        self._skip_s = skip_s
        self._clock = clock
        self._failures = 0
        self._broke = 0.0

    @property
    def open(self) -> bool:
        """Nothing is to be sent, but for the one try that `due` tells of."""
        return self._failures >= self._most

    @property
    def due(self) -> bool:
        return self.open and self.left() <= 0.0

    def left(self) -> float:
        """Seconds until the next try."""
        return max(0.0, self._skip_s - max(0.0, self._clock() - self._broke)) if self.open else 0.0

    def failed(self) -> None:
        self._failures += 1
        self._broke = self._clock()

    def worked(self) -> None:
        self._failures = 0
