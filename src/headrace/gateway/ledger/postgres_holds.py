"""Asks Postgres for what exchanges hold, many at once.

Owns the queue of those that ask. While one statement is under way, the others gather, and the next one asks for all of
them: so that each costs the database a fraction of a transaction, and the rows of a busy tenant are locked once for
all its requests of a moment. Each who asks waits for a bounded time, however many there are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from headrace.gateway.ledger.ledger_records import ReservedCharge
from headrace.gateway.ledger.postgres_schema import HOLD
from headrace.gateway.postgres_pool import PostgresConnection, PostgresPool, StoreBusyError

_MOST: Final = 256  # per statement

HoldResult: TypeAlias = tuple[bool, list[tuple[int, int]]]  # (held, [(spent, held by others) per scope])


class HoldRequest(msgspec.Struct, frozen=True):
    reserved: ReservedCharge
    micros: int
    limits: tuple[int | None, ...]

    @property
    def order(self) -> tuple[str, str, str]:
        """The order in which rows are locked."""
        entry = self.reserved.entry
        return entry.tenant, entry.endpoint, self.reserved.day

    def row(self) -> tuple[Any, ...]:
        entry, day = self.reserved.entry, self.reserved.day
        reserved = msgspec.json.encode(self.reserved).decode()
        return entry.id, entry.tenant, entry.endpoint, day, reserved, self.micros, *self.limits


class HoldBatcher:
    def __init__(self, connections: PostgresPool, *, wait_s: float) -> None:
        self.run = ""
        self._connections = connections
        self._wait = wait_s
        self._queue: dict[asyncio.Future[HoldResult], HoldRequest] = {}  # bounded by the ledger's open requests
        self._worker: asyncio.Task[None] | None = None

    async def hold(self, asked: HoldRequest) -> HoldResult:
        """Hold budget. Raise StoreBusyError if the request was not sent in time, TimeoutError if it may be held."""
        future: asyncio.Future[HoldResult] = asyncio.get_running_loop().create_future()
        self._queue[future] = asked
        if self._worker is None:
            self._worker = asyncio.create_task(self._work())
        try:
            async with asyncio.timeout(self._wait):
                return await future
        except TimeoutError:
            if future in self._queue:
                raise StoreBusyError("too many holds are waiting") from None
            raise TimeoutError("the database did not answer in time") from None
        finally:
            self._queue.pop(future, None)

    async def _work(self) -> None:
        try:
            while self._queue:
                await self._ask_some()
        finally:
            self._worker = None

    async def _ask_some(self) -> None:
        some = sorted(list(self._queue.items())[:_MOST], key=lambda each: each[1].order)
        for future, _ in some:
            del self._queue[future]
        rows = [asked.row() for _, asked in some]

        async def ask(connection: PostgresConnection) -> list[Any]:
            return await connection.fetch(HOLD, self.run, max(1, round(self._wait * 1000)), *columns(rows, 10))

        try:
            # Callers time out earlier, but a late result may still serve the last of them.
            found = await self._connections.run(ask, 2 * self._wait)
        except Exception as error:
            for future, _ in some:
                if not future.done():
                    future.set_exception(error)
            return
        for (future, _), row in zip(some, found, strict=True):
            if not future.done():
                future.set_result((row[0], list(zip(row[1], row[2], strict=True))))


def columns(rows: Iterable[Sequence[Any]], width: int) -> list[list[Any]]:
    """Transpose rows into the arrays that unnest takes."""
    found: list[list[Any]] = [[] for _ in range(width)]
    for row in rows:
        for column, value in zip(found, row, strict=True):
            column.append(value)
    return found
