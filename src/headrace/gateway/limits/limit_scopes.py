"""What limits there are, whom they are for, and what a request asks of them.

Owns the words that the stores of limits share: LimitSet (as the configuration has it), Scope (a LimitSet of somebody),
WindowLimit (one of its windows), Wish (what a request wants at once) and Refusal (which limit had no room, and until
when). Counts nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final, Literal

import msgspec

from headrace.config.limit_section import LimitSet

LimitKind = Literal["tenant", "key", "model", "surface"]
Meter = Literal["requests", "input_tokens", "output_tokens"]

SECOND: Final = 1_000_000  # microseconds, as all times in here
MINUTE: Final = 60 * SECOND
PACES: Final = (SECOND, MINUTE)  # a window's `pace` is the place of its span in here


class LimitScope(msgspec.Struct, frozen=True):
    """The limits of one tenant, key, model or surface."""

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
    found: list[WindowLimit] = []
    for field, meter, pace in _WINDOWS:
        limit: int | None = getattr(limits, field)
        if limit is not None:
            found.append(WindowLimit(field, meter, pace, limit))
    return tuple(found)


def scopes_to_count(scopes: Iterable[LimitScope]) -> tuple[LimitScope, ...]:
    """Those that have something to count; a limit on the context alone needs no counting."""
    return tuple(scope for scope in scopes if scope.limits.concurrent is not None or windows_of(scope.limits))


def shortest_context(scopes: Iterable[LimitScope]) -> tuple[int, LimitScope] | None:
    """The shortest context that a request may have, and whose limit that is."""
    limited = [(scope.limits.context, scope) for scope in scopes if scope.limits.context is not None]
    return min(limited, key=lambda each: each[0], default=None)


def smallest_limit(scopes: Iterable[LimitScope], meter: Meter, pace: int) -> int | None:
    """The smallest of the limits of a kind."""
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
    """What a request asks for. Pairs are for windows of a second and of a minute."""

    input_tokens: int
    most_output: int  # tokens that the answer can have
    first: tuple[int, int]  # output tokens to hold from the start; no more than any limit
    step: tuple[int, int]  # output tokens to hold further at a time
    ahead: int  # microseconds that such an answer takes, for guesses of when others end

    def amount(self, window: WindowLimit) -> int:
        """That the request needs of a window to be let in."""
        if window.meter == "requests":
            return 1
        return self.input_tokens if window.meter == "input_tokens" else self.first[window.pace]


class WindowStatus(msgspec.Struct, frozen=True):
    """How a window stands, for headers."""

    window: WindowLimit
    left: int
    reset: int  # microseconds until all of it is there again, if nothing else comes


class LimitRefusal(msgspec.Struct, frozen=True):
    """The limit that has no room for longest."""

    scope: LimitScope
    field: str  # of LimitSet
    limit: int
    wait: int | None  # microseconds until there is room; None: there never is
    exact: bool  # the wait hangs on nobody else; else it is a guess of when others end
    standings: tuple[WindowStatus, ...] = ()
