"""The ledger of several processes: the main process keeps it, and each front process asks it.

A front may deliver as many tokens as the main process has made room for, and asks for more before it delivers more. It
reports what was sent, as to the journal: a front that dies is charged what its clients had.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec

from headrace.gateway.ledger.budgets import Admitted, BudgetDecision, BudgetRefusal, FallbackVariant
from headrace.gateway.ledger.ledger import Ledger
from headrace.gateway.ledger.ledger_records import CRASHED, LedgerEntry
from headrace.gateway.requests.text_request import TokenUsage
from headrace.server.processes.channel import CallHandler, Channel

_AHEAD: Final = 32  # tokens that a front may deliver before it asks again, where the budget has room for them
_UNBOUNDED: Final = 1 << 62  # tokens of a request without budgets


class Decision(msgspec.Struct, array_like=True):
    """Exactly one of the first three is set."""

    admitted: Admitted | None = None
    fallback: FallbackVariant | None = None
    refusal: BudgetRefusal | None = None
    tokens: int = 0  # that may be delivered, if admitted

    @property
    def decision(self) -> BudgetDecision:
        found = self.admitted or self.fallback or self.refusal
        assert found is not None
        return found


class _Open(msgspec.Struct):
    prompt_tokens: int
    sent: int = 0


class SharedLedger:
    """The main process's side for one front process."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._open: dict[str, _Open] = {}
        self._has_ended = False

    def handlers(self) -> dict[str, CallHandler]:
        return {
            "reserve_budget": CallHandler(tuple[LedgerEntry, int, int | None, bool], self._reserve),
            "extend_budget": CallHandler(tuple[str, int], self._extend),
            "sent": CallHandler(tuple[str, int], self._sent),
            "charge": CallHandler(tuple[str, TokenUsage, str, str, str, str, LedgerEntry | None], self._charge),
            "release": CallHandler(tuple[str], self._release),
        }

    async def _reserve(self, entry: LedgerEntry, output: int, most: int | None, falls: bool) -> Decision:
        found = await self._ledger.reserve(entry, output_tokens=output, most_tokens=most, falls=falls)
        if isinstance(found, FallbackVariant):
            return Decision(fallback=found)
        if isinstance(found, BudgetRefusal):
            return Decision(refusal=found)
        if self._has_ended:
            self._ledger.release(entry.id)
        self._open[entry.id] = _Open(entry.prompt_tokens)
        return Decision(admitted=found, tokens=self._room(entry.id, 0))

    def _room(self, id: str, tokens: int) -> int:
        """Return how many tokens a request may deliver, at least those that it may deliver already."""
        if not self._ledger.is_bounded(id):
            return _UNBOUNDED
        return tokens + _AHEAD if self._ledger.may_reach(id, tokens + _AHEAD) else tokens

    async def _extend(self, id: str, tokens: int) -> int:
        """Return how many tokens may be delivered: 0 if the answer must end."""
        if not self._ledger.progress(id, tokens) and not await self._ledger.extend(id, tokens):
            return 0
        return self._room(id, tokens)

    def _sent(self, id: str, tokens: int) -> None:
        if id in self._open:
            self._open[id].sent = tokens
        self._ledger.sent(id, tokens)

    def _charge(
        self,
        id: str,
        usage: TokenUsage,
        ended: str,
        variant: str,
        hit: str,
        instead_of: str,
        entry: LedgerEntry | None,
    ) -> None:
        self._open.pop(id, None)
        self._ledger.charge(id, usage, ended=ended, variant=variant, hit=hit, instead_of=instead_of, entry=entry)

    def _release(self, id: str) -> None:
        self._open.pop(id, None)
        self._ledger.release(id)

    def end(self) -> None:
        """Charge what the clients of a front process had when it ended."""
        self._has_ended = True
        for id, open in self._open.items():
            if open.sent:
                self._ledger.charge(id, TokenUsage(open.prompt_tokens, open.sent), ended=CRASHED)
            else:
                self._ledger.release(id)
        self._open.clear()


class FrontLedger:
    """A front process's side."""

    def __init__(self, channel: Callable[[], Channel]) -> None:
        self._channel = channel
        self._room: dict[str, int] = {}  # tokens that each request may deliver

    async def open(self) -> None:
        """The main process has opened it."""

    async def close(self) -> None:
        """The main process closes it."""

    async def reserve(
        self, entry: LedgerEntry, *, output_tokens: int, most_tokens: int | None = None, falls: bool = True
    ) -> BudgetDecision:
        channel = self._channel()
        asking = asyncio.ensure_future(
            channel.call("reserve_budget", entry, output_tokens, most_tokens, falls, type=Decision)
        )
        try:
            found: Decision = await asyncio.shield(asking)
        except asyncio.CancelledError:
            asking.add_done_callback(lambda _: channel.notify("release", entry.id))
            raise
        if found.admitted is not None:
            self._room[entry.id] = found.tokens
        return found.decision

    def progress(self, id: str, output_tokens: int) -> bool:
        return output_tokens <= self._room.get(id, _UNBOUNDED)

    def sent(self, id: str, output_tokens: int) -> None:
        if id in self._room:
            self._channel().notify("sent", id, output_tokens)

    async def extend(self, id: str, output_tokens: int) -> bool:
        if id not in self._room:
            return True
        room: int = await self._channel().call("extend_budget", id, output_tokens, type=int)
        if not room:
            return False
        if id in self._room:
            self._room[id] = room
        return True

    def charge(
        self,
        id: str,
        usage: TokenUsage,
        *,
        ended: str,
        variant: str = "",
        hit: str = "",
        instead_of: str = "",
        entry: LedgerEntry | None = None,
    ) -> None:
        self._room.pop(id, None)
        self._channel().notify("charge", id, usage, ended, variant, hit, instead_of, entry)

    def release(self, id: str) -> None:
        self._room.pop(id, None)
        self._channel().notify("release", id)

    def budget_left(self, tenant: str, endpoint: str) -> float | None:
        """Unknown here. Ladders, which ask for it, need a single process."""
        return None
