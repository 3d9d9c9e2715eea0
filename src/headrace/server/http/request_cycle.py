"""RequestCycle: one request of a connection with its response, as ASGI describes them.

Owns RequestCycle: the request body and the framing of the response. Pipelining and timeouts are the connection's.
"""

from __future__ import annotations

import asyncio
import http
import re
from collections.abc import Callable, MutableMapping
from typing import Any, Final, Protocol

Message = MutableMapping[str, Any]

# Extensions of ASGI that avoid a coroutine each.
PUSH: Final = "headrace.push"  # writes a part of the body at once; returns whether there is room for more
BODY: Final = "headrace.body"  # returns the complete request body if none of it was received yet; else None
BEGAN: Final = "headrace.began"  # in the scope: when the headers were complete, on the monotonic clock
FOLLOWS: Final = "headrace.follows"  # in the start of a response: a body follows at once, to be written with the head
GONE: Final = "headrace.gone"  # calls back once, in an iteration of the event loop of its own, when the client has left

STATUS: Final = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in http.HTTPStatus}
_REST: Final = 64 * 1024  # unwanted bytes of a body that are read to keep the connection
_TOGETHER: Final = 64  # parts of a body that are written at once
_LARGE: Final = 4 * 1024  # bytes of a part that waits for no others
_CONTROL: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


class ConnectionOwner(Protocol):
    """The state that the connections of a server share."""

    draining: bool  # each connection is closed after the response in progress

    def date(self) -> bytes:
        """Return the `date` header line."""
        ...


class CycleConnection(Protocol):
    """The part of a connection that a RequestCycle uses."""

    room: asyncio.Event  # set while the write buffer has room
    full: bool  # the opposite of `room`, for callers that do not wait
    time: Callable[[], float]  # the loop's clock, which stands still during a turn of the event loop

    @property
    def edge(self) -> ConnectionOwner: ...

    def write(self, data: bytes) -> None: ...

    def pace(self) -> None:
        """Pause or resume reading from the socket, depending on how much of the body is unread."""
        ...

    def ended(self, cycle: RequestCycle) -> None:
        """The response is complete."""
        ...


class RequestCycle:
    """One request and its response."""

    __slots__ = (
        "_chunked",
        "_connection",
        "_end_delivered",
        "_gathered",
        "_head",
        "_leaving",
        "_pushed_at",
        "_unwritten",
        "_waiter",
        "body",
        "complete",
        "declared",
        "expects",
        "keep",
        "left",
        "lost",
        "modern",
        "received",
        "scope",
        "started",
        "whole",
    )

    def __init__(
        self,
        connection: CycleConnection,
        scope: dict[str, Any],
        *,
        keep: bool,
        modern: bool,
        declared: int | None,
        expects: bool,
    ) -> None:
        self.scope = scope
        scope["extensions"] = {PUSH: self.push, BODY: self.take, GONE: self.when_gone}
        self.keep = keep  # keep the connection after the response
        self.modern = modern  # HTTP/1.1, not 1.0
        self.declared = declared  # bytes of the body; None for a chunked body
        self.expects = expects  # the client waits for 100 Continue before it sends the body
        self.body = bytearray()  # received and not read by the application
        self.received = 0  # bytes of the body
        self.whole = False  # the body is complete
        self.left = False  # the client has closed its half, so the application sees a disconnect
        self.lost = False  # the connection is lost, so output is dropped
        self.started = False  # the response
        self.complete = False
        self._connection = connection
        self._end_delivered = False  # the application has received the whole body
        self._head = b""  # waits for the body that follows
        self._pushed_at = -1.0  # the last part of the body, on the loop's clock
        self._gathered: list[bytes] = []  # further parts that came in the same turn of the event loop
        self._chunked = False
        self._unwritten: int | None = None  # bytes missing of the declared content-length; None without one
        self._waiter: asyncio.Future[None] | None = None
        self._leaving: Callable[[], None] | None = None  # called when the client has left

    async def receive(self) -> Message:
        connection = self._connection
        while not (self.left or self.complete):
            if self.body or (self.whole and not self._end_delivered):
                body, self.body = bytes(self.body), bytearray()
                self._end_delivered = self.whole
                connection.pace()
                return {"type": "http.request", "body": body, "more_body": not self.whole}
            if self.expects:
                self.expects = False
                connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return {"type": "http.disconnect"}

    def take(self) -> bytes | None:
        """Return the whole body if it has arrived, else None. See BODY."""
        if self.left or self.complete or self._end_delivered or not self.whole or self.expects:
            return None
        body, self.body = bytes(self.body), bytearray()
        self._end_delivered = True
        self._connection.pace()
        return body

    def when_gone(self, callback: Callable[[], None] | None) -> None:
        """Set the callback for a client that disconnects; None removes it. See GONE."""
        self._leaving = callback
        if callback is not None and self.left:
            self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self.left and self._leaving is not None:
            leaving, self._leaving = self._leaving, None
            asyncio.get_running_loop().call_soon(leaving)

    def lose(self) -> None:
        self.left = self.lost = True
        self.wake()

    async def send(self, message: Message) -> None:
        connection = self._connection
        if connection.full:
            await connection.room.wait()
        if self.lost:
            return
        if message["type"] == "http.response.start":
            self._start(message["status"], message.get("headers", ()))
            if FOLLOWS not in message:
                connection.write(self._head)
                self._head = b""
        else:
            self._write(message.get("body", b""), more=message.get("more_body", False))

    def push(self, body: bytes) -> bool:
        """Write a part of the body without waiting. Return whether there is room for more. See PUSH."""
        connection = self._connection
        if not body:  # an empty chunk would end the response
            return not connection.full
        if self._chunked and not (self.lost or self.complete or self._head):  # the common case; otherwise see `_write`
            data, now = b"%x\r\n%b\r\n" % (len(body), body), connection.time()
            if now != self._pushed_at and not self._gathered:
                self._pushed_at = now
                connection.write(data)
            else:  # most of an answer at once: from a cache, or because the event loop was late
                if not self._gathered:
                    asyncio.get_running_loop().call_soon(self._flush)
                self._gathered.append(data)
                if len(self._gathered) >= _TOGETHER or len(data) > _LARGE:
                    self._flush()  # so that a full write buffer is noticed within the turn
        elif not self.lost:
            self._write(body, more=True)
        return not connection.full

    def _flush(self) -> None:
        if self._gathered:
            gathered, self._gathered = self._gathered, []
            self._connection.write(b"".join(gathered))

    def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        if self.started:
            raise RuntimeError("the response has begun already")
        connection = self._connection
        length: int | None = None
        lines = [STATUS[status], connection.edge.date()]
        for name, value in headers:
            if _CONTROL.search(value):
                raise RuntimeError(f"the response's header {name!r} has a control character")
            if name == b"connection":
                self.keep = self.keep and value.lower() != b"close"
                continue
            if name == b"content-length":
                length = int(value)
            lines += (name, b": ", value, b"\r\n")
        if connection.edge.draining or not (self.whole or self._rest_is_short()):
            self.keep = False
        if self.scope["method"] == "HEAD" or status in (204, 304):
            self._unwritten = 0
        elif length is not None:
            self._unwritten = length
        elif self.modern:
            self._chunked = True
            lines.append(b"transfer-encoding: chunked\r\n")
        else:
            self.keep = False  # the end of the body is the end of the connection
        if not self.keep:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        self.started, self.expects = True, False
        self._head = b"".join(lines)

    def _rest_is_short(self) -> bool:
        """True if the rest of the body is short enough to read and drop."""
        return self.declared is not None and not self.expects and self.declared - self.received <= _REST

    def _write(self, body: bytes, *, more: bool) -> None:
        if not self.started or self.complete:
            raise RuntimeError("a response must be started once and completed once")
        if self._chunked:
            data = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            if not more:
                data += b"0\r\n\r\n"
        elif self.scope["method"] == "HEAD":
            data = b""
        else:
            data = body
            if self._unwritten is not None:
                self._unwritten -= len(body)
                if self._unwritten < 0 or (self._unwritten and not more):
                    raise RuntimeError("the response does not have its declared content-length")
        if self._head or self._gathered:
            data = b"".join((self._head, *self._gathered, data))
            self._head, self._gathered = b"", []
        if data:
            self._connection.write(data)
        if not more:
            self.complete = True
            self.wake()
            self._connection.ended(self)
