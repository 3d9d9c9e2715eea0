"""RpcCycle: one RPC as an ASGI application sees it. Frames that the application writes wait here until they are sent.

Knows no gRPC library. GrpcServer sends the frames and tells when the client has left.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final
from urllib.parse import unquote

from headrace.server.grpc.frames import split_frames
from headrace.server.http.request_cycle import BODY, GONE, PUSH, Message

_FULL: Final = 64 * 1024  # bytes that wait to be sent, from which on the application pauses
_PEER: Final = re.compile(r"ipv[46]:\[?(?P<host>[0-9a-fA-F.:]+)(?:%[^\]]*)?\]?:(?P<port>\d+)")


class RpcCycle:
    def __init__(self, method: str, body: bytes, metadata: Iterable[tuple[str, Any]], peer: str) -> None:
        headers = [
            (name.lower().encode("latin-1", "replace"), value.encode("latin-1", "replace"))
            for name, value in metadata
            if isinstance(value, str)
        ]
        self.scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": method,
            "query_string": b"",
            "headers": headers,
            "client": _address(peer),
            "extensions": {PUSH: self.push, BODY: self.take, GONE: self.when_gone},
        }
        self.status = 0
        self.headers: dict[str, str] = {}
        self._body: bytes | None = body
        self._plain = b""  # the body of a response with another status than 200
        self._frames: deque[tuple[int, bytes]] = deque()
        self._waiting = 0  # bytes in `_frames`
        self._is_ended = False
        self._is_gone = False
        self._changed = asyncio.Event()  # for the sender
        self._room = asyncio.Event()
        self._room.set()
        self._left = asyncio.Event()
        self._leaving: Callable[[], None] | None = None

    # The application's side

    async def receive(self) -> Message:
        body = self.take()
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    def take(self) -> bytes | None:
        body, self._body = self._body, None
        return body

    def when_gone(self, callback: Callable[[], None] | None) -> None:
        self._leaving = callback
        if self._is_gone:
            self._tell()

    async def send(self, message: Message) -> None:
        await self._room.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]}
            return
        self.push(message.get("body", b""))

    def push(self, data: bytes) -> bool:
        """Write whole frames. Return whether there is room for more."""
        if self._is_gone:
            return True
        if self.status != 200:
            self._plain += data
            return True
        self._frames.extend(split_frames(data))
        self._waiting += len(data)
        if self._waiting > _FULL:
            self._room.clear()
        self._changed.set()
        return self._room.is_set()

    def end(self, *_: Any) -> None:
        """The application has returned."""
        self._is_ended = True
        self._changed.set()

    # The sender's side

    async def next(self) -> tuple[int, bytes] | None:
        """Return the next frame's kind and data; None at the end."""
        while not self._frames:
            if self._is_ended:
                return None
            self._changed.clear()
            await self._changed.wait()
        kind, data = self._frames.popleft()
        self._waiting = self._waiting - len(data) if self._frames else 0
        if self._waiting <= _FULL:
            self._room.set()
        return kind, data

    @property
    def refusal(self) -> bytes:
        """The body of a response with another status than 200."""
        return self._plain

    def close(self) -> None:
        """End it: all is sent, the client has left, or nothing more can be sent to it."""
        self._is_gone = True
        self._frames.clear()
        self._room.set()
        self._left.set()
        self._tell()

    def _tell(self) -> None:
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            asyncio.get_running_loop().call_soon(leaving)


def _address(peer: str) -> tuple[str, int] | None:
    """Return the address of gRPC's name of a peer, such as ipv4:127.0.0.1:5000. None for a Unix socket."""
    found = _PEER.fullmatch(unquote(peer))
    if found is None:
        return None
    try:
        return str(ipaddress.ip_address(found["host"])), int(found["port"])
    except ValueError:
        return None
