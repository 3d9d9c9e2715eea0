"""A wall clock that does not go back while the process runs."""

from __future__ import annotations

from collections.abc import Callable


class ForwardClock:
    """Call it for the time in seconds. While the machine's clock is behind what it was, time stands still.

    So what has expired stays expired.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._latest = 0.0

    def __call__(self) -> float:
        self._latest = max(self._latest, self._clock())
        return self._latest
