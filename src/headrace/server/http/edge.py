"""Edge: accepts connections for an ASGI application, and ends them: after their responses, or at once.

Connection has one connection and the bounds on what its client may do. Does not interpret requests.
"""

from __future__ import annotations

import asyncio
import socket

from headrace.server.http.connection import LINGER_S, Application, Connection, ConnectionBounds, ConnectionGroup


class Edge(ConnectionGroup):
    def __init__(self, application: Application, bounds: ConnectionBounds) -> None:
        super().__init__(application, bounds)
        self._server: asyncio.Server | None = None

    async def listen(self, listening: socket.socket, backlog: int) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Connection(self), sock=listening, backlog=backlog)

    async def listen_also(self, listening: socket.socket) -> asyncio.Server:
        """Accept the connections of another socket, until its server is closed."""
        return await asyncio.get_running_loop().create_server(lambda: Connection(self), sock=listening)

    async def listen_on_path(self, listening: socket.socket) -> asyncio.Server:
        """The same for a Unix socket."""
        return await asyncio.get_running_loop().create_unix_server(lambda: Connection(self), sock=listening)

    async def drain(self, seconds: float, hurry: asyncio.Event) -> None:
        """Let requests in progress finish, for at most `seconds` or until `hurry` is set. Answers new requests."""
        self.draining = True
        for connection in list(self.connections):
            connection.retire()
        finished = asyncio.create_task(self._finished())
        hurried = asyncio.create_task(hurry.wait())
        await asyncio.wait({finished, hurried}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in (finished, hurried):
            task.cancel()
        await asyncio.gather(finished, hurried, return_exceptions=True)

    async def _finished(self) -> None:
        if self.tasks:
            await asyncio.wait(set(self.tasks))  # requests that come later get a 503
        if self._server is not None:
            self._server.close()
        await self.deserted.wait()  # wait until the last bytes have been read

    async def close(self) -> None:
        """Abort the remaining connections."""
        if self._server is not None:
            self._server.close()
        for task in list(self.tasks):
            task.cancel()
        if self.tasks:
            await asyncio.wait(set(self.tasks), timeout=LINGER_S)
        for connection in list(self.connections):
            connection.abort()
        await asyncio.sleep(0)
