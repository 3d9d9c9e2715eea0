"""Decides whether the next step waits a few milliseconds for requests that are expected to share it.

Learns the gaps between arrivals, and expects what happened after gaps like the present one. Waits only while another
request is more likely than not to arrive before the window ends, and only if that costs those that wait less time than
it saves the next one, which would otherwise wait for the whole step. Knows times, and no requests.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import msgspec

_GAPS: Final = 64  # remembered
_LEAST: Final = 8  # gaps before anything is expected
_LIKELY: Final = 0.5
SLICE: Final = 1e-3  # seconds after which the decision is taken again


class GatherStats(msgspec.Struct):
    steps: int = 0  # that waited
    rows: int = 0  # of those steps
    sequences: int = 0  # of those steps
    seconds: float = 0.0  # waited


class GatherWindow:
    def __init__(self) -> None:
        self.stats = GatherStats()
        self._gaps: deque[float] = deque(maxlen=_GAPS)
        self._arrived: float | None = None  # when the newest request arrived
        self._began: float | None = None  # when the present wait began

    def arrive(self, now: float) -> None:
        """Record an arrival."""
        if self._arrived is not None:
            self._gaps.append(max(now - self._arrived, 0.0))
        self._arrived = now

    def wait(self, now: float, until: float, *, waiting: int, step: float) -> float:
        """Return the seconds to wait before the decision is taken again; 0 to begin the step. `until` is the latest
        time at which the step may begin, `waiting` the requests that wait for it, `step` the seconds that it takes."""
        left = until - now
        gap = self._next(now, left) if left > 0.0 else None
        if gap is None or (waiting + 1) * gap > step:
            return 0.0
        if self._began is None:
            self._began = now
        return min(left, SLICE)

    def begin(self, now: float, rows: int, sequences: int) -> None:
        """Record that a step begins."""
        if self._began is None:
            return
        stats = self.stats
        stats.steps += 1
        stats.rows += rows
        stats.sequences += sequences
        stats.seconds += now - self._began
        self._began = None

    def abandon(self) -> None:
        """Forget the present wait: what waited has gone."""
        self._began = None

    def _next(self, now: float, left: float) -> float | None:
        """Return in how many seconds another request is expected, if it will probably arrive within `left` seconds."""
        if self._arrived is None or len(self._gaps) < _LEAST:
            return None
        since = now - self._arrived
        longer = [gap for gap in self._gaps if gap > since]
        soon = [gap for gap in longer if gap <= since + left]
        return sum(soon) / len(soon) - since if len(soon) > _LIKELY * len(longer) else None
