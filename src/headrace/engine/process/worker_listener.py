"""The door of a worker to other hosts: accepts TLS connections and relays their bytes to the worker's Unix socket.

The engine's process keeps its one private socket and spends no time on encryption. Does not read what it relays.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from os import PathLike, fspath
from typing import Final

from headrace.engine.process.worker_address import WorkerAddress, WorkerTls
from headrace.tasks import end_tasks

log = logging.getLogger(__name__)

_AT_ONCE: Final = 256 * 1024  # bytes, of a read and of what waits to be written
_HANDSHAKE_S: Final = 10.0


class WorkerListener:
    """Belongs to one event loop."""

    def __init__(
        self,
        address: WorkerAddress,
        path: str | PathLike[str],
        *,
        tls: WorkerTls | None = None,
        connections: int = 32,  # at once; further ones are closed
        silence: float = 30.0,  # seconds without a byte of a client, which pings, before it counts as gone
    ) -> None:
        self._address = address
        self._path = fspath(path)
        self._tls = tls
        self._most = connections
        self._silence = silence
        self._server: asyncio.Server | None = None
        self._relays: set[asyncio.Task[None]] = set()

    async def start(self) -> WorkerAddress:
        """Listen. Return the address with the port that was found for port 0. OSError if it cannot be used."""
        context = None if self._tls is None else self._tls.server_context()
        self._server = await asyncio.start_server(
            self._accept,
            self._address.host,
            self._address.port,
            limit=_AT_ONCE,
            ssl=context,
            ssl_handshake_timeout=None if context is None else _HANDSHAKE_S,
        )
        port: int = self._server.sockets[0].getsockname()[1]
        return WorkerAddress(host=self._address.host, port=port, tls=context is not None)

    async def close(self) -> None:
        """Close the door and all connections."""
        if self._server is not None:
            self._server.close()
        await end_tasks(self._relays)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._relays) >= self._most:
            log.warning("a connection is refused: %d are open already", self._most)
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._relays.add(task)
        try:
            await self._relay(reader, writer)
        except asyncio.CancelledError:
            pass  # the listener closes; asyncio would log the task's cancellation as an error
        finally:
            self._relays.discard(task)
            writer.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inner_reader, inner_writer = await asyncio.open_unix_connection(self._path, limit=_AT_ONCE)
        except OSError:
            return  # the engine's process starts again; the client retries
        try:
            await _until_first(
                self._pump(reader, inner_writer, self._silence), self._pump(inner_reader, writer, silence=None)
            )
        finally:
            inner_writer.transport.abort()

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, silence: float | None) -> None:
        """Copy until the source ends, and deliver what was read."""
        with contextlib.suppress(OSError, TimeoutError):
            while True:
                async with asyncio.timeout(silence):
                    data = await source.read(_AT_ONCE)
                if not data:
                    break
                target.write(data)
                await target.drain()
            target.close()
            async with asyncio.timeout(_HANDSHAKE_S):
                await target.wait_closed()


async def _until_first(*pumps: Coroutine[None, None, None]) -> None:
    tasks = [asyncio.create_task(pump) for pump in pumps]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
