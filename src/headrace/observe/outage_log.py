"""Logs the outage of a dependency in few lines: its beginning, a count at growing intervals, and its end.

Does not decide what a failure is, and retries nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

import structlog

_FIRST_S: Final = 10.0  # from the first line to the first summary; each further one comes after twice as long
_LONGEST_S: Final = 600.0


class OutageLog:
    """One dependency, as one part of the program uses it."""

    def __init__(
        self,
        log: logging.Logger | structlog.stdlib.BoundLogger,
        failing: str,
        *,
        level: int = logging.ERROR,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`failing` says what fails: "the ledger cannot be written; charges are kept and retried"."""
        self._log = log
        self._failing = failing
        self._level = level
        self._clock = clock
        self._began = 0.0
        self._summary_at = 0.0
        self._interval = _FIRST_S
        self._failures = 0  # in this outage

    def failed(self, error: object, *, exc_info: BaseException | None = None) -> None:
        """Count a failure. Log it if it is the first one, or if a summary is due."""
        now = self._clock()
        reason = str(error) or type(error).__name__
        self._failures += 1
        if self._failures == 1:
            self._began, self._interval = now, _FIRST_S
            self._log.log(self._level, "%s: %s", self._failing, reason, exc_info=exc_info)
        elif now >= self._summary_at:
            self._interval = min(2 * self._interval, _LONGEST_S)
            self._log.log(
                self._level,
                "%s, for %.0f s and %d times; the latest: %s",
                self._failing,
                now - self._began,
                self._failures,
                reason,
            )
        else:
            return
        self._summary_at = now + self._interval

    def succeeded(self) -> None:
        """End the outage, if there is one, with one line. Cheap enough for every call."""
        if self._failures:
            seconds = self._clock() - self._began
            self._log.log(self._level, "%s: over after %.0f s and %d failures", self._failing, seconds, self._failures)
            self._failures = 0
