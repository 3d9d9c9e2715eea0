"""The connections of the server: HTTP/1.1 for an ASGI application, and what a client may do to a connection.

Owns Edge (all connections, and what they share) and Connection (one socket: its bounds, and the order of what is asked
on it). One request with its response is cycle's, parsing httptools'. Knows nothing of what requests mean.

    socket ──▶ Connection ──▶ RequestCycle ──receive──▶ application ──send──▶ RequestCycle ──▶ socket

Every wait for a client has an end: for its headers, for the rest of a body that nobody wants, for its next request, for
room in its buffers. The wait for a body is the application's, which knows how long one may be. A connection on which
it is not sure where the next request begins is never read again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from email.utils import formatdate
from typing import Any, Final, cast
from urllib.parse import unquote

import httptools
import msgspec

from headrace.config import ServerConfig
from headrace.observe import metrics
from headrace.server.http.request_cycle import STATUS, Message, RequestCycle

log: Final = logging.getLogger(__name__)

Application = Callable[
    [MutableMapping[str, Any], Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]

_SLICE: Final = 16 * 1024  # most bytes that are parsed at once, between two looks at the bounds
_FIELD: Final = 32  # bytes that a header counts beside its own, as in HTTP/2: it takes memory of its own
_UNREAD: Final = 64 * 1024  # bytes of a body that wait for the application: then the socket is not read
_PIPELINED: Final = 16  # requests that wait for the one before
_PROGRESS: Final = 16 * 1024  # bytes that a slow reader takes in the time it has
_LINGER: Final = 2.0  # seconds that a client has to read why it is cut, while what it still says is dropped
_TOLD: Final = 64  # connections beyond the bound that are told so; further ones are closed without a word


class ConnectionBounds(msgspec.Struct, frozen=True):
    connections: int
    header_bytes: int
    header_s: float
    idle_s: float
    reader_s: float

    @classmethod
    def of(cls, server: ServerConfig) -> ConnectionBounds:
        return cls(server.connections, server.header_bytes, server.header_s, server.idle_s, server.reader_s)


class Edge:
    """All of it belongs to one event loop."""

    def __init__(self, application: Application, bounds: ConnectionBounds) -> None:
        self.application = application
        self.bounds = bounds
        self.draining = False  # each connection is closed after the response that is under way
        self.connections: set[Connection] = set()
        self.tasks: set[asyncio.Task[None]] = set()  # one for each cycle under way
        self.deserted = asyncio.Event()  # there is no connection
        self.deserted.set()
        self._server: asyncio.Server | None = None
        self._second = 0
        self._date = b""

    async def listen(self, listening: socket.socket, backlog: int) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Connection(self), sock=listening, backlog=backlog)

    async def drain(self, seconds: float, hurry: asyncio.Event) -> None:
        """Lets what runs finish, for so long at most, or until somebody hurries. New requests are still answered."""
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
            await asyncio.wait(set(self.tasks))  # what came later is told that the server is about to end
        if self._server is not None:
            self._server.close()
        await self.deserted.wait()  # the last bytes are with their readers

    async def close(self) -> None:
        """Cuts what is left."""
        if self._server is not None:
            self._server.close()
        for task in list(self.tasks):
            task.cancel()
        if self.tasks:
            await asyncio.wait(set(self.tasks), timeout=_LINGER)
        for connection in list(self.connections):
            connection.abort()
        await asyncio.sleep(0)

    def date(self) -> bytes:
        """The header of that name."""
        second = int(time.time())
        if second != self._second:
            self._second, self._date = second, b"date: " + formatdate(second, usegmt=True).encode() + b"\r\n"
        return self._date


class _RefusalError(Exception):
    def __init__(self, status: int, message: str, why: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.why = why  # for the metric


class Connection(asyncio.Protocol):
    def __init__(self, edge: Edge) -> None:
        self.edge = edge
        self.room = asyncio.Event()  # in the buffer of what is to be written
        self.room.set()
        self.full = False  # the same, for who does not wait
        self._bounds = edge.bounds
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)
        self._parser: Any = httptools.HttpRequestParser(self)
        self._deaf = False  # what comes is dropped
        self._half = False  # the client has closed its side
        self._finished = False  # nothing more is written
        self._paused = False  # the socket is not read
        self._timer: asyncio.TimerHandle | None = None  # for what the client is to do next
        self._reader_timer: asyncio.TimerHandle | None = None  # for it to read
        self._running: RequestCycle | None = None
        self._waiting: deque[RequestCycle] = deque()
        self._reading: RequestCycle | None = None  # whose body is not whole
        # Of the message that is being read:
        self._in_head = False
        self._again = False  # a head that was read before is read once more
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0  # of URL and headers, those after a body included
        self._loose = 0  # bytes that made no sense yet
        self._moved = False  # something made sense
        self._declared: int | None = 0
        self._expects = False

    # The transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are none of asyncio's classes
        connections = self.edge.connections
        connections.add(self)
        self.edge.deserted.clear()
        metrics.connections.inc()
        over = len(connections) - self._bounds.connections
        if over <= 0:
            self._wait(self._bounds.idle_s, "idle")
        elif over <= _TOLD:
            self._refuse(503, "too many connections", "too many")
        else:
            self._cut("too many")

    def connection_lost(self, exc: Exception | None) -> None:
        self.edge.connections.discard(self)
        if not self.edge.connections:
            self.edge.deserted.set()
        metrics.connections.dec()
        if isinstance(exc, TimeoutError):
            metrics.cut.labels("unreachable").inc()  # the kernel heard nothing of its machine
        self._wait(0.0, None)
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None
        self._deaf = True
        for cycle in (self._running, self._reading, *self._waiting):
            if cycle is not None:
                cycle.lose()
        self._waiting.clear()
        self._parser = None
        self.full = False
        self.room.set()

    def eof_received(self) -> bool:
        """Most that say nothing more have left; one that only closed its half still gets a short answer."""
        self._deaf = self._half = True
        self._waiting.clear()
        if self._running is None:
            return False
        self._running.keep = False
        self._running.left = True
        self._running.wake()
        return True

    def pause_writing(self) -> None:
        self.full = True
        self.room.clear()
        if self._reader_timer is None:
            self._watch_reader(self._transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self.full = False
        self.room.set()
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    def _watch_reader(self, size: int) -> None:
        def look() -> None:
            left = self._transport.get_write_buffer_size()
            if left > size - _PROGRESS:
                self._cut("slow reader")
            else:
                self._watch_reader(left)

        self._reader_timer = self._loop.call_later(self._bounds.reader_s, look)

    def data_received(self, data: bytes) -> None:
        view = memoryview(data)
        length = max(512, min(_SLICE, self._bounds.header_bytes // 4))
        for start in range(0, len(data), length):
            if self._deaf:
                return
            piece = view[start : start + length]
            self._moved = False
            try:
                self._feed(piece)
            except _RefusalError as refusal:
                self._spoilt(refusal)
                return
            self._loose = 0 if self._moved else self._loose + len(piece)
            if self._head_bytes + self._loose > self._bounds.header_bytes:
                self._spoilt(_too_long())

    def _feed(self, piece: memoryview) -> None:
        try:
            self._parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            self._stay(piece[upgrade.args[0] :])
        except httptools.HttpParserCallbackError as error:
            if isinstance(error.__context__, _RefusalError):
                raise error.__context__ from None
            log.error("a request could not be taken", exc_info=error.__context__)
            raise _RefusalError(400, "the request cannot be read", "malformed") from None
        except httptools.HttpParserError:
            raise _RefusalError(400, "this is not HTTP", "malformed") from None

    def _stay(self, rest: memoryview) -> None:
        """A client that would rather speak another protocol is answered in this one.

        The parser takes what follows for the other protocol's, so another parser is told where we are: Java's clients
        ask so with every first request, and its body follows.
        """
        cycle = self._reading
        self._parser = httptools.HttpRequestParser(self)
        if cycle is None:
            self._feed(rest)
            return
        framing = b"transfer-encoding: chunked" if cycle.declared is None else b"content-length: %d" % cycle.declared
        self._again = True
        self._parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n\r\n")
        self._feed(rest)

    # The parser's side

    def on_message_begin(self) -> None:
        if self._again:
            return
        self._moved = self._in_head = True
        self._url, self._headers, self._head_bytes = b"", [], 0
        self._declared, self._expects = 0, False
        if self._running is None and not self._deaf:
            self._wait(self._bounds.header_s, "slow headers")

    def on_url(self, url: bytes) -> None:
        if not self._again:
            self._url += url
            self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._again:
            return
        self._count(len(name) + len(value) + _FIELD)
        if not self._in_head:
            return  # it came after the body, and nobody waits for such
        name = name.lower()
        if name == b"content-length":
            self._declared = int(value)
        elif name == b"transfer-encoding":
            self._declared = None
        elif name == b"expect":
            self._expects = value.lower() == b"100-continue"
        self._headers.append((name, value))

    def _count(self, length: int) -> None:
        self._moved = True
        self._head_bytes += length
        if self._head_bytes > self._bounds.header_bytes:
            raise _too_long()

    def on_headers_complete(self) -> None:
        if self._again:
            self._again = False
            return
        self._moved, self._in_head = True, False
        if self._deaf:
            return
        version = self._parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise _RefusalError(505, "only HTTP/1.1 is spoken here", "malformed")
        cycle = self._reading = RequestCycle(
            self,
            self._scope(version),
            keep=version == "1.1" and self._parser.should_keep_alive(),
            modern=version == "1.1",
            declared=self._declared,
            expects=self._expects and version == "1.1" and self._declared != 0,
        )
        if self._running is None:
            self._begin(cycle)
        elif len(self._waiting) < _PIPELINED:
            self._waiting.append(cycle)
        else:
            self._stop_listening()

    def _scope(self, version: str) -> dict[str, Any]:
        try:
            url = httptools.parse_url(self._url)
        except httptools.HttpParserInvalidURLError:
            raise _RefusalError(400, "the URL cannot be read", "malformed") from None
        raw = url.path or b"/"
        path = raw.decode("ascii", "replace")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "scheme": "http",
            "method": self._parser.get_method().decode("ascii"),
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw,
            "query_string": url.query or b"",
            "root_path": "",
            "headers": self._headers,
            "client": self._transport.get_extra_info("peername"),
            "server": self._transport.get_extra_info("sockname"),
        }

    def on_body(self, body: bytes) -> None:
        self._moved = True
        cycle = self._reading
        if cycle is None or self._deaf:
            return
        cycle.received += len(body)
        if cycle.complete:
            return
        cycle.body += body
        if len(cycle.body) > _UNREAD and cycle is not self._running:
            self._stop_listening()
        elif len(cycle.body) > _UNREAD:
            self.pace()
        cycle.wake()

    def on_message_complete(self) -> None:
        self._moved = True
        cycle = self._reading
        if cycle is None or (self._parser.should_upgrade() and cycle.declared != 0):
            return  # in the second case its body is still to come, see _stay
        cycle.whole = True
        self._reading = None
        if cycle.complete:
            self._await()
        else:
            cycle.wake()

    # Cycles

    def _begin(self, cycle: RequestCycle) -> None:
        self._wait(0.0, None)
        self._running = cycle
        task = self._loop.create_task(self._run(cycle))
        self.edge.tasks.add(task)
        task.add_done_callback(self.edge.tasks.discard)

    async def _run(self, cycle: RequestCycle) -> None:
        try:
            await self.edge.application(cycle.scope, cycle.receive, cycle.send)
        except Exception:
            log.exception("the application failed")
        finally:
            cycle.scope.pop("extensions", None)  # it leads back to the cycle, and they are not to keep each other
            if cycle.complete or cycle.lost:
                pass
            elif cycle.started:
                self.abort()  # so that the client knows that something is missing
            elif cycle.left:
                self._finish()
            elif self.edge.draining:
                self._refuse(503, "the server is about to end", "draining", kind="overloaded_error")
            else:
                self._refuse(500, "something went wrong inside of Headrace", None, kind="server_error")

    def ended(self, cycle: RequestCycle) -> None:
        """Its response is complete."""
        self._running = None
        if cycle.keep and self._waiting:
            self._begin(self._waiting.popleft())
            self.pace()
        elif cycle.keep and not self._deaf:
            self._await()
        else:
            self._finish()

    def _await(self) -> None:
        """What the client is to do, when nothing runs."""
        self.pace()
        if self._reading is not None:
            self._wait(self._bounds.header_s, "slow body")
        elif self._in_head:
            self._wait(self._bounds.header_s, "slow headers")
        else:
            self._wait(self._bounds.idle_s, "idle")

    def retire(self) -> None:
        """The connection is closed after the response that is under way."""
        if self._running is not None:
            self._running.keep = False
        elif not self._deaf:
            self._finish()

    def _stop_listening(self) -> None:
        """Nothing after the requests that are whole is read; the client may ask again on another connection."""
        self._deaf = True
        if self._waiting and self._waiting[-1] is self._reading:
            self._waiting.pop()
        last = self._waiting[-1] if self._waiting else self._running
        if last is not None:
            last.keep = False

    def _spoilt(self, refusal: _RefusalError) -> None:
        """What came is no HTTP, or too much of it."""
        cycle = self._running
        metrics.cut.labels(refusal.why).inc()
        if cycle is None:
            self._refuse(refusal.status, str(refusal), None)
        elif cycle is not self._reading:
            self._stop_listening()  # what was asked before is answered
        elif cycle.started:
            self._cut("")
        else:
            cycle.lose()
            self._refuse(refusal.status, str(refusal), None)

    # The end

    def _refuse(self, status: int, message: str, why: str | None, *, kind: str = "invalid_request_error") -> None:
        if why is not None:
            metrics.cut.labels(why).inc()
        body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": None}}).encode()
        retry = b"retry-after: 1\r\n" if status == 503 else b""
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.write(STATUS[status] + self.edge.date() + retry + head + body)
        self._deaf = True
        self._finish()

    def _finish(self) -> None:
        """No more cycles: what was written goes out, and the socket is closed."""
        if self._finished or self._transport.is_closing():
            return
        more_may_come = not self._half and (self._deaf or self._reading is not None)
        self._deaf = self._finished = True
        self._waiting.clear()
        self.pace()
        if more_may_come:
            # Closed with bytes that were not read, the socket would be reset, and the client not hear the answer.
            self._transport.write_eof()
            self._wait(_LINGER if self.room.is_set() else self._bounds.reader_s, "")
        else:
            self._transport.close()
            self._wait(self._bounds.reader_s, "slow reader")

    def abort(self) -> None:
        self._deaf = self._finished = True
        self._transport.abort()

    def _cut(self, why: str) -> None:
        if why:
            metrics.cut.labels(why).inc()
        self.abort()

    def _wait(self, seconds: float, why: str | None) -> None:
        """Cuts the client after so long; None: no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if why is not None:
            self._timer = self._loop.call_later(seconds, self._over, why)

    def _over(self, why: str) -> None:
        self._timer = None
        if why == "idle":
            self._finish()
        elif why == "slow headers":
            self._refuse(408, "the headers did not come in time", why)
        else:
            self._cut(why)

    def write(self, data: bytes) -> None:
        if not self._finished and not self._transport.is_closing():
            self._transport.write(data)

    def pace(self) -> None:
        """Reads no more of a body than the application has asked for."""
        cycle = self._reading
        full = cycle is not None and not self._deaf and not cycle.complete and len(cycle.body) > _UNREAD
        if full != self._paused and not self._transport.is_closing():
            self._paused = full
            if full:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()


def _too_long() -> _RefusalError:
    return _RefusalError(431, "the headers are too long", "long headers")
