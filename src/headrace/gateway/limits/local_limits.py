"""Limits counted in this process: the default, and what is left where a shared store is gone.

Owns the rooms (what one scope has used and holds) and the tickets (what one request was granted). Nothing in here
waits: each operation is done, over all scopes, before anything else in the process runs, so it is all or nothing.

    scope ── room ──┬─ window (requests a second)
                    ├─ window (output tokens a minute)     held ◀── ticket of a request
                    └─ running: requests
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from headrace.gateway.limits.limit_errors import too_many_scopes_error
from headrace.gateway.limits.limit_scopes import (
    LimitRefusal,
    LimitRequest,
    LimitScope,
    WindowLimit,
    WindowStatus,
    windows_of,
)
from headrace.gateway.limits.rate_windows import SlidingWindow, SteadyClock

UNLIMITED: Final = 1 << 62  # tokens
_LOOK: Final = 64  # rooms that are looked at for one to give up


class _Room:
    """What one scope has used and holds."""

    __slots__ = ("concurrent", "limits", "running", "tickets", "windows")

    def __init__(self) -> None:
        self.limits: object = None
        self.concurrent: int | None = None
        self.running = 0
        self.tickets = 0  # that know this room
        self.windows: list[tuple[WindowLimit, SlidingWindow]] = []

    def follow(self, scope: LimitScope, entries: int) -> None:
        """The limits may have changed since: what is counted stays, and a limit that is new begins with nothing."""
        if self.limits == scope.limits:
            return
        self.limits, self.concurrent = scope.limits, scope.limits.concurrent
        before = {limit.field: window for limit, window in self.windows}
        self.windows = []
        for limit in windows_of(scope.limits):
            window = before.get(limit.field)
            if window is None:
                window = SlidingWindow(limit.limit, limit.span, entries=entries)
            window.limit = limit.limit
            self.windows.append((limit, window))

    def idle(self, now: int) -> bool:
        return self.tickets == 0 and all(window.idle(now) for _, window in self.windows)


class _Short:
    """The limit that has no room for longest, among those that were looked at."""

    __slots__ = ("exact", "found", "wait")

    def __init__(self) -> None:
        self.found: tuple[LimitScope, str, int] | None = None
        self.wait = 0
        self.exact = True

    def add(self, scope: LimitScope, field: str, limit: int, wait: int, exact: bool) -> None:
        self.exact = self.exact and exact
        if self.found is None or wait > self.wait:
            self.found, self.wait = (scope, field, limit), wait


class LocalLimitStore:
    def __init__(
        self,
        *,
        scopes: int = 10_000,  # that are kept; idle ones make room, the one used longest ago first
        entries: int = 1024,  # of one window
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.now: Final = SteadyClock(clock)
        self._most = max(scopes, _LOOK)
        self._entries = entries
        self._rooms: OrderedDict[tuple[str, str], _Room] = OrderedDict()

    def __len__(self) -> int:
        """Scopes that are kept."""
        return len(self._rooms)

    def reserve(
        self, scopes: Sequence[LimitScope], wish: LimitRequest, *, begins: bool = True
    ) -> LocalGrant | LimitRefusal:
        """`begins`: it is a request, and not more output for one that runs. LimitError where there is no memory."""
        now = self.now()
        rooms = [self._room(scope, now) for scope in scopes]
        short = _Short()
        for scope, room in zip(scopes, rooms, strict=True):
            if begins and room.concurrent is not None and room.running >= room.concurrent:
                # With so many that run, one of them ends about this often.
                short.add(scope, "concurrent", room.concurrent, max(1000, wish.ahead // room.concurrent), False)
            for limit, window in room.windows:
                window.forget(now)
                amount = wish.amount(limit) if begins or limit.meter == "output_tokens" else 0
                missing = amount - window.room_for_new()
                if amount and missing > 0:
                    short.add(scope, limit.field, limit.limit, *window.wait(now, missing, wish.ahead))
        if short.found is not None:
            return LimitRefusal(*short.found, short.wait, short.exact, _standings(rooms, now))
        return LocalGrant(self.now, scopes, rooms, wish, begins)

    def _room(self, scope: LimitScope, now: int) -> _Room:
        name = (scope.kind, scope.name)
        room = self._rooms.get(name)
        if room is None:
            if len(self._rooms) >= self._most:
                self._make_room(now)
            room = self._rooms[name] = _Room()
        else:
            self._rooms.move_to_end(name)
        room.follow(scope, self._entries)
        return room

    def _make_room(self, now: int) -> None:
        """An idle room holds nothing that would be missed. Those that are not go to the end, to be looked at last."""
        for _ in range(_LOOK):
            name, room = next(iter(self._rooms.items()))
            if room.idle(now):
                del self._rooms[name]
                return
            self._rooms.move_to_end(name)
        raise too_many_scopes_error()


class LocalGrant:
    """What one request was granted here. Tokens are counted from `taken`, those that it has let out."""

    __slots__ = (
        "_at",
        "_begins",
        "_granted",
        "_inputs",
        "_least",
        "_now",
        "_open",
        "_outputs",
        "_requests",
        "_rooms",
        "_wanted",
        "_wish",
        "taken",
    )

    def __init__(
        self,
        now: Callable[[], int],
        scopes: Sequence[LimitScope],
        rooms: Sequence[_Room],
        wish: LimitRequest,
        begins: bool,
    ) -> None:
        self._now, self._rooms, self._wish, self._begins = now, rooms, wish, begins
        self._at = at = now()
        self._open = True
        self.taken = 0
        self._granted = [UNLIMITED, UNLIMITED]
        self._wanted = [0, 0]
        # The windows as they are now: one that comes later knows nothing of this request.
        self._requests: list[SlidingWindow] = []
        self._inputs: list[SlidingWindow] = []
        self._outputs: list[tuple[LimitScope, WindowLimit, SlidingWindow]] = []
        for scope, room in zip(scopes, rooms, strict=True):
            room.tickets += 1
            room.running += begins
            for limit, window in room.windows:
                amount = wish.amount(limit)
                if limit.meter == "output_tokens":
                    self._outputs.append((scope, limit, window))
                    self._granted[limit.pace] = amount
                    window.held += amount
                elif begins:
                    window.use(at, amount)
                    (self._requests if limit.meter == "requests" else self._inputs).append(window)
        self._least = min(self._granted)

    @property
    def granted(self) -> tuple[int, int]:
        """Tokens that may be let out in all before more is asked for, by the windows' paces."""
        return self._granted[0], self._granted[1]

    def take(self, count: int) -> bool:
        """Lets so many more tokens out, and has more granted where it must. False: there is no room."""
        taken = self.taken + count
        if taken > self._least and (not self._open or self._grow(count) is not None):
            return False
        self.taken = taken
        if self._outputs:
            now = self._now()
            for _, _, window in self._outputs:
                window.held -= count
                window.use(now, count)
        return True

    async def more(self, count: int) -> LimitRefusal | None:
        """Has so many more granted. None: they are."""
        return self._grow(count)

    def _grow(self, count: int) -> LimitRefusal | None:
        now = self._now()
        needs = [self.taken + count - granted for granted in self._granted]
        adds = [
            max(need, min(step, self._wish.most_output - granted))
            for need, step, granted in zip(needs, self._wish.step, self._granted, strict=True)
        ]
        short = _Short()
        for scope, limit, window in self._outputs:
            if count > limit.limit:
                return LimitRefusal(scope, limit.field, limit.limit, None, True)
            need = needs[limit.pace]
            if need > 0:
                window.forget(now)
                room = window.room()
                adds[limit.pace] = min(adds[limit.pace], room)
                if room < need:
                    wait, exact = window.wait(now, need - room, self._wish.ahead)
                    own = self._granted[limit.pace] - self.taken
                    # What others hold and do not use may be there sooner.
                    short.add(scope, limit.field, limit.limit, wait, exact and window.held <= own)
        wanted = [max(0, need) if short.found is not None else 0 for need in needs]
        for _, limit, window in self._outputs:
            window.wanted += wanted[limit.pace] - self._wanted[limit.pace]
        self._wanted = wanted
        if short.found is not None:
            return LimitRefusal(*short.found, short.wait, short.exact, _standings(self._rooms, now))
        for _, limit, window in self._outputs:
            if needs[limit.pace] > 0:
                window.held += adds[limit.pace]
        for pace, need in enumerate(needs):
            if need > 0:
                self._granted[pace] += adds[pace]
        self._least = min(self._granted)
        return None

    def close(self, input_tokens: int, extra: int, *, void: bool = False) -> asyncio.Future[None] | None:
        """Counts what was used and gives back the rest, once.

        extra: output tokens beyond those that were let out, or below zero, fewer; void: not even the request counts.
        """
        if not self._open:
            return None
        self._open = False
        self._least = 0
        now = self._now()
        for room in self._rooms:
            room.tickets -= 1
            room.running -= self._begins
        for window in self._inputs:
            window.use(now, input_tokens - self._wish.input_tokens)
            window.give_back(now, self._at, self._wish.input_tokens - input_tokens)
        for window in self._requests:
            if void:
                window.give_back(now, self._at, 1)
        for _, limit, window in self._outputs:
            window.held -= self._granted[limit.pace] - self.taken
            window.wanted -= self._wanted[limit.pace]
            window.use(now, extra)
            window.give_back(now, self._at, -extra)
        return None

    def standings(self) -> tuple[WindowStatus, ...]:
        return _standings(self._rooms, self._now())


def _standings(rooms: Sequence[_Room], now: int) -> tuple[WindowStatus, ...]:
    found: list[WindowStatus] = []
    for room in rooms:
        for limit, window in room.windows:
            window.forget(now)
            found.append(WindowStatus(limit, window.room_for_new(), window.reset(now)))
    return tuple(found)
