"""RemovedPassages: the passages whose documents have changed or are gone, which no cached result may show any more.

Holds ids alone, the newest 100,000 of this process: results are kept for a shorter time than those take to come.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

_MOST: Final = 100_000


class RemovedPassages:
    """All of it belongs to one event loop."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._ids: dict[str, None] = {}  # the oldest first

    def add(self, ids: Iterable[str]) -> None:
        self._ids |= dict.fromkeys(ids)
        while len(self._ids) > self._most:
            del self._ids[next(iter(self._ids))]

    def any_of(self, ids: Iterable[str]) -> bool:
        return bool(self._ids) and any(each in self._ids for each in ids)
