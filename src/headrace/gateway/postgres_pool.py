"""Connections to Postgres whose every use has an end.

Owns a few connections, each used by one statement or transaction at a time, and the timer that cuts one which does not
answer: at once, without asking the server, which may be the one that is frozen. Knows no table. Needs asyncpg, which is
loaded when the first connection is made.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias, TypeVar

from headrace.errors import HeadraceError
from headrace.gateway.ledger.ledger_store import StoreBusyError

T = TypeVar("T")
PostgresConnection: TypeAlias = Any  # asyncpg's

_STATEMENT_MS: Final = 10_000  # that the server itself lets one run


class MissingDriverError(HeadraceError):
    """asyncpg is not installed."""


class PostgresPool:
    def __init__(self, dsn: str, *, schema: str, most: int = 8) -> None:
        self._dsn = dsn
        self._schema = schema
        self._idle: list[PostgresConnection] = []
        self._all: set[PostgresConnection] = set()
        self._places = asyncio.Semaphore(most)
        self._closed = False

    async def run(self, work: Callable[[PostgresConnection], Awaitable[T]], seconds: float) -> T:
        """`work`'s result, all in all within so many seconds.

        Else TimeoutError, and it may have happened all the same; or BusyError, and it has not.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        try:
            async with asyncio.timeout_at(end):
                await self._places.acquire()
        except TimeoutError:
            raise StoreBusyError("every connection to the ledger's database is in use") from None
        try:
            connection = await self._connected(end)
            timer = loop.call_at(end, connection.terminate)
            healthy = False
            try:
                result = await work(connection)
                healthy = True
            except Exception as error:
                # What the server refused leaves the connection as it was; everything else does not.
                healthy = type(error).__module__ == "asyncpg.exceptions" and not connection.is_closed()
                if loop.time() >= end:
                    raise TimeoutError("the database did not answer in time") from None
                raise
            finally:
                timer.cancel()
                self._put_back(connection, healthy=healthy)
            return result
        finally:
            self._places.release()

    async def warm(self, count: int, seconds: float) -> None:
        """Open so many, so that those who have little time find one."""
        missing = count - len(self._all)
        if missing > 0 and not self._closed:
            end = asyncio.get_running_loop().time() + seconds
            opened = await asyncio.gather(*(self._connected(end, fresh=True) for _ in range(missing)))
            for connection in opened:
                self._put_back(connection, healthy=True)

    async def connect(self, seconds: float) -> PostgresConnection:
        """One more, which its user closes."""
        try:
            asyncpg = importlib.import_module("asyncpg")
        except ImportError:
            raise MissingDriverError("a ledger in Postgres needs asyncpg: pip install 'headrace[postgres]'") from None
        settings = {
            "search_path": self._schema,
            "statement_timeout": str(_STATEMENT_MS),
            "idle_in_transaction_session_timeout": str(_STATEMENT_MS),
            "application_name": "headrace",
        }
        return await asyncpg.connect(self._dsn, timeout=seconds, server_settings=settings)

    async def _connected(self, end: float, *, fresh: bool = False) -> PostgresConnection:
        if self._closed:
            raise ConnectionError("the ledger is closed")
        while self._idle and not fresh:
            connection = self._idle.pop()
            if not connection.is_closed():
                return connection
            self._all.discard(connection)
        async with asyncio.timeout_at(end):
            connection = await self.connect(max(0.01, end - asyncio.get_running_loop().time()))
        self._all.add(connection)
        return connection

    def _put_back(self, connection: PostgresConnection, *, healthy: bool) -> None:
        if healthy and not self._closed and not connection.is_closed() and not connection.is_in_transaction():
            self._idle.append(connection)
        else:
            connection.terminate()
            self._all.discard(connection)

    def close(self) -> None:
        self._closed = True
        for connection in self._all:
            connection.terminate()
        self._all.clear()
        self._idle.clear()
