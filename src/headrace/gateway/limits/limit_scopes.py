"""Types that the limit stores share: scopes, windows, and what a request asks for and is told.

Counts nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final, Literal

import msgspec

from headrace.config.limit_section import LimitSet

LimitKind = Literal["tenant", "key", "model", "surface", "address"]
Meter = Literal["requests", "input_tokens", "output_tokens"]

SECOND: Final = 1_000_000  # microseconds, like all times in this package
MINUTE: Final = 60 * SECOND
PACES: Final = (SECOND, MINUTE)  # a window's `pace` is an index into this tuple


class LimitScope(msgspec.Struct, frozen=True):
    """The limits of one tenant, key, model, surface or address of clients."""

    kind: LimitKind
    name: str
    limits: LimitSet


class WindowLimit(msgspec.Struct, frozen=True):
    field: str  # of LimitSet
    meter: Meter
    pace: int
    limit: int

    @property
    def span(self) -> int:
        return PACES[self.pace]


_WINDOWS: Final[tuple[tuple[str, Meter, int], ...]] = (
    ("requests_per_s", "requests", 0),
    ("requests_per_min", "requests", 1),
    ("input_tokens_per_s", "input_tokens", 0),
    ("input_tokens_per_min", "input_tokens", 1),
    ("output_tokens_per_s", "output_tokens", 0),
    ("output_tokens_per_min", "output_tokens", 1),
)


@lru_cache(maxsize=4096)
def windows_of(limits: LimitSet) -> tuple[WindowLimit, ...]:
    windows: list[WindowLimit] = []
    for field, meter, pace in _WINDOWS:
        limit: int | None = getattr(limits, field)
        if limit is not None:
            windows.append(WindowLimit(field, meter, pace, limit))
    return tuple(windows)


def scopes_to_count(scopes: Iterable[LimitScope]) -> tuple[LimitScope, ...]:
    """Return the scopes with something to count. A limit on the context alone needs no counting."""
    return tuple(scope for scope in scopes if scope.limits.concurrent is not None or windows_of(scope.limits))


def shortest_context(scopes: Iterable[LimitScope]) -> tuple[int, LimitScope] | None:
    """Return the smallest context limit and its scope; None if there is none."""
    limited = [(scope.limits.context, scope) for scope in scopes if scope.limits.context is not None]
    return min(limited, key=lambda each: each[0], default=None)


def smallest_limit(scopes: Iterable[LimitScope], meter: Meter, pace: int) -> int | None:
    """Return the smallest limit on a meter at a pace; None if there is none."""
    return min(
        (
            window.limit
            for scope in scopes
            for window in windows_of(scope.limits)
            if window.meter == meter and window.pace == pace
        ),
        default=None,
    )


class LimitRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The amounts that a request reserves. Pairs are (per second, per minute)."""

    input_tokens: int
    most_output: int  # output tokens, at most
    first: tuple[int, int]  # output tokens to hold at the start; no more than any limit
    step: tuple[int, int]  # output tokens to hold with each extension
    ahead: int  # typical duration in microseconds, to guess when running requests end
    runs: bool = True  # counts as a running request

    def amount(self, window: WindowLimit) -> int:
        """Return the amount that the request must reserve from a window to be admitted."""
        if window.meter == "requests":
            return 1
        return self.input_tokens if window.meter == "input_tokens" else self.first[window.pace]


class WindowStatus(msgspec.Struct, frozen=True):
    """The rest of a window, for headers and errors."""

    window: WindowLimit
    left: int
    reset: int  # microseconds until all of it is free again, without further requests


class LimitRefusal(msgspec.Struct, frozen=True):
    """The limit that takes longest to have room."""

    scope: LimitScope
    field: str  # of LimitSet
    limit: int
    wait: int | None  # microseconds until there is room; None: never
    exact: bool  # False: the wait is a guess of when other requests end
    statuses: tuple[WindowStatus, ...] = ()
