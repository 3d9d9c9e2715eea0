"""Arguments, keys and replies of the script limits.lua."""

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

_LONG_NAME: Final = 100  # characters of a scope's name in a key; longer names are hashed


def script() -> str:
    return files("headrace.gateway.limits").joinpath("limits.lua").read_text()


class ScriptScope(msgspec.Struct, frozen=True):
    concurrent: int  # -1: unlimited
    windows: tuple[tuple[str, int, int, int], ...]  # meter, pace (1 or 2), limit, span


class ScriptArguments(msgspec.Struct, kw_only=True):
    """Arguments of one call. Times are in microseconds, except `keep`."""

    operation: str
    id: str = ""
    scopes: tuple[ScriptScope, ...] = ()
    ahead: int = 0
    # reserve
    amounts: tuple[int, ...] = ()  # per window
    # reserve, more
    targets: tuple[int, int] = (0, 0)  # output tokens to grant in total; 0: no such limit
    # more
    need: int = 0  # output tokens in total
    again: int = 0  # 1: even if the lease has expired
    # more, close
    start: int = msgspec.field(default=0, name="from")  # tokens delivered before the segments
    segments: tuple[tuple[int, int], ...] = ()  # age and tokens of each delivery, oldest first
    # close
    extra: int = 0  # output tokens beyond those delivered; negative: fewer
    input: int = 0  # input tokens beyond those reserved; negative: fewer
    void: int = 0  # 1: do not count the request either
    # The same in every call
    lease: int = 0
    keep: int = 0  # milliseconds after which Redis drops unused keys
    entries: int = 0
    raw: int | msgspec.UnsetType = msgspec.UNSET  # replaces the time of Redis in tests


class ScriptKeys:
    """Redis keys and windows of some scopes, the same in every call."""

    __slots__ = ("asked", "keys", "limits", "paced", "scopes", "smallest", "windows")

    def __init__(self, prefix: str, scopes: tuple[LimitScope, ...]) -> None:
        # One hash tag for all keys, so that a cluster keeps them on one node.
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

    def refusal(self, reply: Sequence[int], statuses: tuple[WindowStatus, ...] = ()) -> LimitRefusal:
        """Build a refusal from the reply: wait, whether it is exact, and the indexes of scope and window."""
        wait, exact, scope, window = reply
        refused_by = self.scopes[scope - 1]
        if window == 0:
            return LimitRefusal(
                refused_by, "concurrent", refused_by.limits.concurrent or 0, wait, bool(exact), statuses
            )
        limit = self.limits[scope - 1][window - 1]
        return LimitRefusal(refused_by, limit.field, limit.limit, wait, bool(exact), statuses)

    def never(self, count: int) -> LimitRefusal | None:
        """Return a refusal if a limit is smaller than `count` output tokens."""
        for scope, limits in zip(self.scopes, self.limits, strict=True):
            for limit in limits:
                if limit.meter == "output_tokens" and limit.limit < count:
                    return LimitRefusal(scope, limit.field, limit.limit, None, True)
        return None

    def statuses(self, numbers: Sequence[int]) -> tuple[WindowStatus, ...]:
        return tuple(
            WindowStatus(limit, numbers[2 * place], numbers[2 * place + 1]) for place, limit in enumerate(self.windows)
        )


@lru_cache(maxsize=4096)
def script_keys(prefix: str, scopes: tuple[LimitScope, ...]) -> ScriptKeys:
    return ScriptKeys(prefix, scopes)


def _in_keys(name: str) -> str:
    quoted = quote(name, safe="")
    return quoted if len(quoted) <= _LONG_NAME else hashlib.sha256(name.encode()).hexdigest()
