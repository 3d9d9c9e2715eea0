"""Days and months as labels, `2025-11-22` and `2025-11`, from a wall clock.

Only the label of a period is stored, so a budget's period is spent once even if the clock jumps back to it.
"""

from __future__ import annotations

import math
from datetime import UTC, date, datetime, timedelta
from typing import Final

_DAY: Final = 86_400  # seconds
_LAST: Final = 2_932_896  # 9999-12-31, counted from 1970-01-01
_EPOCH: Final = date(1970, 1, 1)


class Calendar:
    def __init__(self, *, offset_minutes: int = 0) -> None:
        """`offset_minutes`: how far local time is ahead of UTC."""
        self._offset = offset_minutes * 60
        self._number = -1
        self._label = ""

    def day(self, now: float) -> str:
        """Return the label of the day; times out of range give the first or last day."""
        number = max(0, min(math.floor((now + self._offset) / _DAY), _LAST))
        if number != self._number:
            self._number, self._label = number, _label(number)
        return self._label

    def days_before(self, now: float, days: int) -> str:
        return self.day(now - days * _DAY) if days else self.day(now)

    def end(self, period: str) -> float:
        """Return the end of a day or month in seconds since 1970."""
        year, month, *days = map(int, period.split("-"))
        try:
            after = date(year, month, days[0]) + timedelta(days=1) if days else _month_after(year, month)
        except (OverflowError, ValueError):  # the last year
            after = date.max
        return (after - _EPOCH).days * _DAY - self._offset

    def format_time(self, moment: float) -> str:
        """Format seconds since 1970 as 2025-11-22T00:00:00Z."""
        return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def month_of(day: str) -> str:
    return day[:7]


def is_month(period: str) -> bool:
    return len(period) == 7


def _label(number: int) -> str:
    return (_EPOCH + timedelta(days=number)).isoformat()


def _month_after(year: int, month: int) -> date:
    return date(year + month // 12, month % 12 + 1, 1)
