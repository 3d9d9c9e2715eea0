"""A TCP proxy on 127.0.0.1 that delays what a server answers, holds it back, or cuts connections.

For drills and tests that need a slow, frozen or flapping database. Knows no protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Final

_CHUNK: Final = 65_536  # bytes


class TcpProxy:
    """An async context manager. Clients connect to `port`."""

    def __init__(self, target_port: int) -> None:
        self.port = 0
        self.delay_s = 0.0  # of each answer
        self._target_port = target_port
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> TcpProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def freeze(self) -> None:
        """Take connections and requests, and answer nothing."""
        self._flowing.clear()

    def resume(self) -> None:
        self._flowing.set()

    def cut(self) -> None:
        """Close every connection."""
        for task in self._tasks:
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with contextlib.suppress(OSError):
                answers, requests = await asyncio.open_connection("127.0.0.1", self._target_port)
                try:
                    async with asyncio.TaskGroup() as group:
                        group.create_task(self._pass_on(reader, requests))
                        group.create_task(self._pass_on_late(answers, writer))
                except* (OSError, EOFError):
                    pass
                finally:
                    requests.close()
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
        raise EOFError

    async def _pass_on_late(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Delay each answer, as a long line does. Answers do not wait for one another."""
        loop = asyncio.get_running_loop()
        on_their_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(1024)

        async def arrive() -> None:
            while True:
                due, data = await on_their_way.get()
                await asyncio.sleep(max(0.0, due - loop.time()))
                await self._flowing.wait()
                writer.write(data)
                await writer.drain()

        async with asyncio.TaskGroup() as group:
            arriving = group.create_task(arrive())
            while data := await reader.read(_CHUNK):
                await on_their_way.put((loop.time() + self.delay_s, data))
            arriving.cancel()
        raise EOFError
