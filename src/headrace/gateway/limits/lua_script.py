"""What is said to the script limits.lua, and how its answers are read.

Owns Ask (an operation, whole) and Layout (the keys of some scopes, and the places of their limits in the answers).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Final
from urllib.parse import quote

import msgspec

from headrace.gateway.limits.limit_scopes import LimitRefusal, LimitScope, WindowStatus, windows_of
from headrace.gateway.limits.local_limits import UNLIMITED

_LONG_NAME: Final = 100  # characters of a scope's name in a key; of a longer one, a digest


def script() -> str:
    return files("headrace.gateway.limits").joinpath("limits.lua").read_text()


class ScriptScope(msgspec.Struct, frozen=True):
    concurrent: int  # -1: as many as there are
    windows: tuple[tuple[str, int, int, int], ...]  # meter, pace (1 or 2), limit, span


class ScriptArguments(msgspec.Struct, kw_only=True):
    """What the script is told. Times are microseconds, but for `keep`."""

    operation: str
    id: str = ""
    scopes: tuple[ScriptScope, ...] = ()
    ahead: int = 0
    # reserve
    amounts: tuple[int, ...] = ()  # of each window
    # reserve, more
    targets: tuple[int, int] = (0, 0)  # output tokens to grant in all; 0: there is no such limit
    # more
    need: int = 0  # output tokens in all
    again: int = 0  # 1: even if the lease has lapsed
    # more, close
    start: int = msgspec.field(default=0, name="from")  # tokens let out before the segments
    segments: tuple[tuple[int, int], ...] = ()  # age and tokens of what was let out, the oldest first
    # close
    extra: int = 0  # output tokens beyond those let out, or fewer
    input: int = 0  # input tokens beyond those reserved, or fewer
    void: int = 0  # 1: not even the request counts
    # The store's own, the same in all.
    lease: int = 0
    keep: int = 0  # milliseconds that the server keeps what nobody asks for
    entries: int = 0
    raw: int | msgspec.UnsetType = msgspec.UNSET  # in place of the server's time, for tests


class ScriptKeys:
    """What is the same in every call for these scopes."""

    __slots__ = ("asked", "keys", "limits", "paced", "scopes", "smallest", "windows")

    def __init__(self, prefix: str, scopes: tuple[LimitScope, ...]) -> None:
        # One hash tag for all keys, so that those of a request are in one place where keys are spread over several.
        base = f"{{{prefix}:limits}}"
        self.scopes = scopes
        self.keys = [f"{base}:clock"]
        self.limits = [windows_of(scope.limits) for scope in scopes]
        self.windows = [limit for limits in self.limits for limit in limits]
        asked: list[ScriptScope] = []
        for scope, limits in zip(scopes, self.limits, strict=True):
            own = f"{base}:{scope.kind}:{_in_keys(scope.name)}"
            self.keys += [f"{own}:book", f"{own}:leases", *(f"{own}:{limit.field}" for limit in limits)]
            concurrent = scope.limits.concurrent
            windows = tuple((limit.meter, limit.pace + 1, limit.limit, limit.span) for limit in limits)
            asked.append(ScriptScope(-1 if concurrent is None else concurrent, windows))
        self.asked = tuple(asked)
        outputs = [limit for limit in self.windows if limit.meter == "output_tokens"]
        self.paced = tuple(any(limit.pace == pace for limit in outputs) for pace in (0, 1))
        self.smallest = min((limit.limit for limit in outputs), default=UNLIMITED)

    def refusal(self, found: Sequence[int], standings: tuple[WindowStatus, ...] = ()) -> LimitRefusal:
        """From what the script says: the wait, whether it is exact, and the places of the scope and the window."""
        wait, exact, scope, window = found
        whose = self.scopes[scope - 1]
        if window == 0:
            return LimitRefusal(whose, "concurrent", whose.limits.concurrent or 0, wait, bool(exact), standings)
        limit = self.limits[scope - 1][window - 1]
        return LimitRefusal(whose, limit.field, limit.limit, wait, bool(exact), standings)

    def never(self, count: int) -> LimitRefusal | None:
        """Where a limit is smaller than so many output tokens."""
        for scope, limits in zip(self.scopes, self.limits, strict=True):
            for limit in limits:
                if limit.meter == "output_tokens" and limit.limit < count:
                    return LimitRefusal(scope, limit.field, limit.limit, None, True)
        return None

    def standings(self, numbers: Sequence[int]) -> tuple[WindowStatus, ...]:
        return tuple(
            WindowStatus(limit, numbers[2 * place], numbers[2 * place + 1]) for place, limit in enumerate(self.windows)
        )


@lru_cache(maxsize=4096)
def script_keys(prefix: str, scopes: tuple[LimitScope, ...]) -> ScriptKeys:
    return ScriptKeys(prefix, scopes)


def _in_keys(name: str) -> str:
    quoted = quote(name, safe="")
    return quoted if len(quoted) <= _LONG_NAME else hashlib.sha256(name.encode()).hexdigest()
