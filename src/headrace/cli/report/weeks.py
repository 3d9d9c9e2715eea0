"""Reads the history of a running server: the sums of the hours of two spans of equal length, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from headrace.errors import HeadraceError
from headrace.observe.latency.latency_book import Row

HOUR: Final = 3600
DAY: Final = 86_400
# What rows are grouped by; each is asked for by itself, so that a busy server's answers stay small.
GROUPINGS: Final = (("surface", "model"), ("tenant",), ("endpoint", "length", "route"))

Key = tuple[str, ...]
Fetch = Callable[[str, Mapping[str, Any]], dict[str, Any]]  # path and query → JSON


class Span(msgspec.Struct):
    """The hours from `first` on and before `last`, in seconds since 1970."""

    first: int
    last: int
    hours: dict[tuple[str, ...], dict[Key, dict[int, Row]]] = {}  # by grouping, key and hour
    objectives: dict[tuple[str, str], tuple[int, int]] = {}  # good and all events by SLO and objective

    def rows(self, by: Sequence[str]) -> dict[Key, Row]:
        """Return the sums of the span by some dimensions of one grouping."""
        grouping = next(each for each in GROUPINGS if set(by) <= set(each))
        places = [grouping.index(name) for name in by]
        found: dict[Key, Row] = {}
        for key, hours in self.hours.get(grouping, {}).items():
            found.setdefault(tuple(key[place] for place in places), Row()).merge(_sum(hours.values()))
        return found

    def by_hour(self, key: Key | None = None) -> dict[int, Row]:
        """Return the sums of each hour: of a surface and model, or of all traffic."""
        found: dict[int, Row] = {}
        for each, hours in self.hours.get(GROUPINGS[0], {}).items():
            if key is None or each == key:
                for hour, row in hours.items():
                    found.setdefault(hour, Row()).merge(row)
        return found

    @property
    def total(self) -> Row:
        return _sum(self.by_hour().values())


def _sum(rows: Iterable[Row]) -> Row:
    total = Row()
    for row in rows:
        total.merge(row)
    return total


def read_span(fetch: Fetch, first: int, last: int) -> Span:
    """Ask for the history day by day. HeadraceError if the answer is not one."""
    span = Span(first, last)
    for begin in range(first, last, DAY):
        end = min(begin + DAY, last)
        for grouping in GROUPINGS:
            answer = fetch("history", {"first": begin, "last": end, "by": ",".join(grouping)})
            try:
                _add(span, grouping, answer)
            except (KeyError, TypeError, ValueError):
                raise HeadraceError("The server's history cannot be read. Is it of another version?") from None
    return span


def _add(span: Span, grouping: tuple[str, ...], answer: Mapping[str, Any]) -> None:
    keys = span.hours.setdefault(grouping, {})
    for each in answer["data"]:
        key = tuple(str(each[name]) for name in grouping)
        keys.setdefault(key, {}).setdefault(int(each["hour"]), Row()).merge(Row.unpack(each["sums"]))
    if grouping == GROUPINGS[0]:
        for each in answer["objectives"]:
            name = (str(each["slo"]), str(each["objective"]))
            good, total = span.objectives.get(name, (0, 0))
            span.objectives[name] = (good + int(each["good"]), total + int(each["total"]))
