"""Rate limits of several processes: the main process counts, and each front process asks it.

A front delivers what it was granted and reports it in the same turn of the event loop. A token is held before it is
delivered and used once that is reported, so it counts at least from its delivery on. What a front held when it died is
given back, and its requests and prompts stay counted.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

import msgspec

from headrace.gateway.limits.limit_scopes import LimitRefusal, LimitRequest, LimitScope, WindowStatus
from headrace.gateway.limits.local_limits import LocalGrant, LocalLimitStore
from headrace.server.processes.channel import CallHandler, Channel


class GrantedLimits(msgspec.Struct, array_like=True):
    granted: tuple[int, int]
    statuses: tuple[WindowStatus, ...] = ()


class LimitAnswer(msgspec.Struct, array_like=True):
    """Exactly one of both is set."""

    grant: GrantedLimits | None = None
    refusal: LimitRefusal | None = None


class SharedLimits:
    """The main process's side for one front process."""

    def __init__(self, store: LocalLimitStore) -> None:
        self._store = store
        self._grants: dict[int, tuple[LocalGrant, int]] = {}  # by the front's number, with the prompt's tokens

    def handlers(self) -> dict[str, CallHandler]:
        return {
            "reserve_limits": CallHandler(tuple[int, tuple[LimitScope, ...], LimitRequest], self._reserve),
            "extend_limits": CallHandler(tuple[int, int, int], self._extend),
            "use_limits": CallHandler(tuple[int, int], self._use),
            "close_limits": CallHandler(tuple[int, int, int, int, bool], self._close),
        }

    def _reserve(self, number: int, scopes: Sequence[LimitScope], request: LimitRequest) -> LimitAnswer:
        found = self._store.reserve(scopes, request)
        if isinstance(found, LimitRefusal):
            return LimitAnswer(refusal=found)
        self._grants[number] = found, request.input_tokens
        return LimitAnswer(GrantedLimits(found.granted, found.statuses()))

    async def _extend(self, number: int, taken: int, count: int) -> LimitAnswer:
        self._use(number, taken)
        grant, _ = self._grants[number]
        refusal = await grant.more(count)
        return LimitAnswer(refusal=refusal) if refusal is not None else LimitAnswer(GrantedLimits(grant.granted))

    def _use(self, number: int, taken: int) -> None:
        grant, _ = self._grants[number]
        if taken > grant.taken:
            grant.take(taken - grant.taken)

    def _close(self, number: int, taken: int, input_tokens: int, extra: int, void: bool) -> None:
        self._use(number, taken)
        grant, _ = self._grants.pop(number)
        grant.close(input_tokens, extra, void=void)

    def end(self) -> None:
        """Close what the front process left open when it ended."""
        for grant, input_tokens in self._grants.values():
            grant.close(input_tokens, 0)
        self._grants.clear()


class FrontLimitStore:
    """A front process's side."""

    def __init__(self, channel: Callable[[], Channel]) -> None:
        self.skipped_s = 1.0
        self._channel = channel
        self._numbers = itertools.count()

    async def reserve(self, scopes: Sequence[LimitScope], request: LimitRequest) -> FrontGrant | LimitRefusal:
        """Reserve all scopes or none. ApiError if the main process is gone, or tracks too many scopes."""
        channel, number = self._channel(), next(self._numbers)
        reserving = asyncio.ensure_future(
            channel.call("reserve_limits", number, tuple(scopes), request, type=LimitAnswer)
        )
        try:
            answer: LimitAnswer = await asyncio.shield(reserving)
        except asyncio.CancelledError:  # the client has left; what is granted then is given back
            reserving.add_done_callback(lambda done: _give_back(channel, number, done))
            raise
        if answer.refusal is not None:
            return answer.refusal
        assert answer.grant is not None
        return FrontGrant(channel, number, answer.grant)

    async def open(self) -> None:
        """The channel is open already."""

    async def close(self) -> None:
        """The channel is closed by its owner."""


def _give_back(channel: Channel, number: int, done: asyncio.Future[LimitAnswer]) -> None:
    if not done.cancelled() and done.exception() is None and done.result().grant is not None:
        channel.notify("close_limits", number, 0, 0, 0, True)


class FrontGrant:
    __slots__ = ("_channel", "_granted", "_is_open", "_is_reporting", "_number", "_statuses", "taken")

    def __init__(self, channel: Channel, number: int, granted: GrantedLimits) -> None:
        self.taken = 0
        self._channel = channel
        self._number = number
        self._granted = granted.granted
        self._statuses = granted.statuses
        self._is_open = True
        self._is_reporting = False

    @property
    def granted(self) -> tuple[int, int]:
        return self._granted

    def take(self, count: int) -> bool:
        if not self._is_open or self.taken + count > min(self._granted):
            return False
        self.taken += count
        if not self._is_reporting:
            self._is_reporting = True
            asyncio.get_running_loop().call_soon(self._report)
        return True

    def _report(self) -> None:
        self._is_reporting = False
        if self._is_open:
            self._channel.notify("use_limits", self._number, self.taken)

    async def more(self, count: int) -> LimitRefusal | None:
        if not self._is_open:
            return None
        answer: LimitAnswer = await self._channel.call(
            "extend_limits", self._number, self.taken, count, type=LimitAnswer
        )
        if answer.refusal is not None:
            return answer.refusal
        assert answer.grant is not None
        self._granted = answer.grant.granted
        return None

    def close(self, input_tokens: int, extra: int, *, void: bool = False) -> asyncio.Future[None] | None:
        if self._is_open:
            self._is_open = False
            self._channel.notify("close_limits", self._number, self.taken, input_tokens, extra, void)
        return None

    def statuses(self) -> tuple[WindowStatus, ...]:
        return self._statuses
