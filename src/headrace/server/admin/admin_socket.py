"""A Unix socket for administrators, on which no key is needed: who may open the file may administer.

Owns the file and the connections on it, and marks what comes by it for the admin API's routes; everything else on it is
served as on the server's port. The file is for the server's own user alone, from the moment that it is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any, Final

from headrace.errors import HeadraceError
from headrace.server.admin.admin_routes import LOCAL
from headrace.server.http.edge import Application, Connection, ConnectionBounds, Edge

_WAITING: Final = 64  # connections that the kernel keeps for us
Message = MutableMapping[str, Any]


class SocketError(HeadraceError):
    """The socket cannot be listened on."""


class AdminSocket:
    """All of it belongs to one event loop."""

    def __init__(self, path: Path, application: Application, bounds: ConnectionBounds) -> None:
        self.path = path.expanduser()
        self._edge = Edge(_marked(application), bounds)
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """SocketError where the file cannot be made, or another server listens on it."""
        listening = listen_on(self.path)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: Connection(self._edge), sock=listening, backlog=_WAITING)

    async def close(self) -> None:
        self._edge.draining = True
        if self._server is not None:
            self._server.close()
            with contextlib.suppress(OSError):
                self.path.unlink()
        await self._edge.close()


def _marked(application: Application) -> Application:
    async def marked(
        scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        scope[LOCAL] = True
        await application(scope, receive, send)

    return marked


def listen_on(path: Path) -> socket.socket:
    """The socket. What a server that died has left is replaced."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _make_room(path)
        before = os.umask(0o177)  # so that at no moment anybody else could open it
        try:
            listening.bind(str(path))
        finally:
            os.umask(before)
        listening.listen(_WAITING)
        listening.setblocking(False)
    except BaseException as error:
        listening.close()
        if isinstance(error, OSError):
            raise SocketError(f"admin.socket: cannot listen on {path}: {error.strerror or error}") from None
        raise
    return listening


def _make_room(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise SocketError(f"admin.socket: {path} is there already, and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trying:
        trying.settimeout(1.0)
        try:
            trying.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()  # nobody listens any more
            return
        except OSError as error:
            raise SocketError(f"admin.socket: {path} cannot be looked at: {error.strerror or error}") from None
    raise SocketError(f"admin.socket: another server listens on {path}")
