"""A Unix socket for administrators that needs no key: whoever may open the file may administer the server.

Marks its calls for the admin routes; all other paths are served as on the server's port. From its creation, only the
server's own user may open the file.
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
from headrace.server.http.api_call import LOCAL
from headrace.server.http.connection import Application, Connection, ConnectionBounds
from headrace.server.http.edge import Edge

_WAITING: Final = 64  # backlog of pending connections
Message = MutableMapping[str, Any]


class SocketError(HeadraceError):
    """Cannot listen on the socket."""


class AdminSocket:
    """Use from one event loop only."""

    def __init__(self, path: Path, application: Application, bounds: ConnectionBounds) -> None:
        self.path = path.expanduser()
        self._edge = Edge(_marked(application), bounds)
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen. Raise SocketError if the file cannot be created or another server listens on it."""
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
    """Create the listening socket. Replaces the file of a server that died."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        before = os.umask(0o177)  # so that no other user can open it at any moment
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


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise SocketError(f"admin.socket: {path} exists and is not a socket. Choose another path.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trying:
        trying.settimeout(1.0)
        try:
            trying.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()  # no server listens any more
            return
        except OSError as error:
            raise SocketError(f"admin.socket: cannot check {path}: {error.strerror or error}") from None
    raise SocketError(f"admin.socket: another server listens on {path}. Choose another path.")
