"""A pool of Postgres connections with a timeout on every use.

A connection that does not answer in time is cut at once, without asking the server, which may be frozen. Knows no
tables. asyncpg is imported with the first connection.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias, TypeVar

from headrace.errors import HeadraceError

T = TypeVar("T")
PostgresConnection: TypeAlias = Any  # asyncpg's

_STATEMENT_MS: Final = 10_000  # statement timeout on the server


class StoreBusyError(TimeoutError):
    """The database works, but has more requests than it can handle."""


class MissingDriverError(HeadraceError):
    """asyncpg is not installed."""


class PostgresPool:
    def __init__(self, dsn: str, *, schema: str, most: int = 8) -> None:
        self._dsn = dsn
        self._schema = schema
        self._idle: list[PostgresConnection] = []
        self._all: set[PostgresConnection] = set()
        self._slots = asyncio.Semaphore(most)
        self._closed = False

    async def run(self, work: Callable[[PostgresConnection], Awaitable[T]], seconds: float) -> T:
        """Run `work` within a total of `seconds`.

        Raise TimeoutError if it took longer and may have taken effect, StoreBusyError if it was not started.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        try:
            async with asyncio.timeout_at(end):
                await self._slots.acquire()
        except TimeoutError:
            raise StoreBusyError("all database connections are in use") from None
        try:
            connection = await self._connected(end)
            timer = loop.call_at(end, connection.terminate)
            healthy = False
            try:
                result = await work(connection)
                healthy = True
            except Exception as error:
                # The connection survives an error that the server reported, and nothing else.
                healthy = type(error).__module__ == "asyncpg.exceptions" and not connection.is_closed()
                if loop.time() >= end:
                    raise TimeoutError("the database did not answer in time") from None
                raise
            finally:
                timer.cancel()
                self._put_back(connection, healthy=healthy)
            return result
        finally:
            self._slots.release()

    async def warm(self, count: int, seconds: float) -> None:
        """Open connections in advance."""
        missing = count - len(self._all)
        if missing > 0 and not self._closed:
            end = asyncio.get_running_loop().time() + seconds
            opened = await asyncio.gather(*(self._connected(end, fresh=True) for _ in range(missing)))
            for connection in opened:
                self._put_back(connection, healthy=True)

    async def connect(self, seconds: float) -> PostgresConnection:
        """Open a connection that the caller must close."""
        try:
            asyncpg = importlib.import_module("asyncpg")
        except ImportError:
            raise MissingDriverError(
                "Postgres needs the package asyncpg. Run: pip install 'headrace[postgres]'"
            ) from None
        settings = {
            "search_path": self._schema,
            "statement_timeout": str(_STATEMENT_MS),
            "idle_in_transaction_session_timeout": str(_STATEMENT_MS),
            "application_name": "headrace",
        }
        return await asyncpg.connect(self._dsn, timeout=seconds, server_settings=settings)

    async def _connected(self, end: float, *, fresh: bool = False) -> PostgresConnection:
        if self._closed:
            raise ConnectionError("the pool is closed")
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
