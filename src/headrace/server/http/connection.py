"""Connection: one HTTP/1.1 connection for an ASGI application, with a bound on everything that a client may do.

RequestCycle has one request with its response; httptools parses. Does not listen, and does not interpret requests.

    socket ──▶ Connection ──▶ RequestCycle ──receive──▶ application ──send──▶ RequestCycle ──▶ socket

Every wait for a client has a timeout: for its headers, for the unwanted rest of a body, for its next request, for room
in its buffers. The application bounds the wait for a body, because it knows how long one may be. A connection on which
the start of the next request is uncertain is never read again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, MutableMapping
from email.utils import formatdate
from typing import Any, Final, cast
from urllib.parse import unquote

import httptools
import msgspec

from headrace.config import ServerConfig
from headrace.observe import metrics
from headrace.server.http.client_address import client_address
from headrace.server.http.request_cycle import BEGAN, STATUS, Message, RequestCycle

log: Final = logging.getLogger(__name__)

Application = Callable[
    [MutableMapping[str, Any], Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]

_SLICE: Final = 16 * 1024  # bytes parsed at once; the bounds are checked in between
_FIELD: Final = 32  # bytes added to the size of each header, as in HTTP/2, for the memory it takes
_UNREAD: Final = 64 * 1024  # bytes of a body that the application has not read; beyond that the socket is not read
_PIPELINED: Final = 16  # pipelined requests that wait for the one before
_PROGRESS: Final = 16 * 1024  # bytes that a slow reader must take within `reader_s`
_RESOLUTION: Final = 0.002  # seconds by which a timer may be early
LINGER_S: Final = 2.0  # seconds for a client to read why its connection ends, while its input is dropped
_DROPPED_PER_S: Final = 32 * 1024 * 1024  # bytes of unwanted input, of all connections together
_DROPPED_AHEAD_S: Final = 0.05
_TOLD: Final = 64  # connections beyond the limit that get a 503; further ones are closed without a response


class ConnectionBounds(msgspec.Struct, frozen=True):
    connections: int
    address_connections: int
    header_bytes: int
    header_s: float
    idle_s: float
    reader_s: float

    @classmethod
    def of(cls, server: ServerConfig) -> ConnectionBounds:
        return cls(
            connections=server.connections,
            address_connections=server.address_connections,
            header_bytes=server.header_bytes,
            header_s=server.header_s,
            idle_s=server.idle_s,
            reader_s=server.reader_s,
        )


class ConnectionGroup:
    """What the connections of an edge share. Not thread-safe: belongs to one event loop."""

    def __init__(self, application: Application, bounds: ConnectionBounds) -> None:
        self.application = application
        self.bounds = bounds
        self.draining = False  # each connection is closed after the response in progress
        self.connections: set[Connection] = set()
        self.addresses: Counter[str] = Counter()  # connections of each address
        self.tasks: set[asyncio.Task[None]] = set()  # one for each cycle in progress
        self.dropped_until = 0.0  # when the input that was dropped has used up its pace
        self.deserted = asyncio.Event()  # set while there is no connection
        self.deserted.set()
        self._second = 0
        self._date = b""

    def date(self) -> bytes:
        """Return the `date` header line, formatted once a second."""
        second = int(time.time())
        if second != self._second:
            self._second, self._date = second, b"date: " + formatdate(second, usegmt=True).encode() + b"\r\n"
        return self._date


class _RefusalError(Exception):
    def __init__(self, status: int, message: str, why: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.why = why  # the metric's label


class Connection(asyncio.Protocol):
    def __init__(self, edge: ConnectionGroup) -> None:
        self.edge = edge
        self.room = asyncio.Event()  # set while the write buffer has room
        self.room.set()
        self.full = False  # the opposite of `room`, for callers that do not wait
        self._bounds = edge.bounds
        self._loop = asyncio.get_running_loop()
        self.time = self._loop.time
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)
        self._address = ""  # of the client; empty for a Unix socket
        self._parser: Any = httptools.HttpRequestParser(self)
        self._drops_input = False
        self._half = False  # the client has closed its half of the connection
        self._finished = False  # nothing more is written
        self._paused = False  # the socket is not read
        self._timeout = 0.0  # when the client's next action is due, on the loop's clock
        self._timeout_why: str | None = None  # None: nothing is due
        self._timer: asyncio.TimerHandle | None = None  # looks at the timeout, at `_timer_at`
        self._timer_at = 0.0
        self._reader_timer: asyncio.TimerHandle | None = None  # for the client to read
        self._running: RequestCycle | None = None
        self._waiting: deque[RequestCycle] = deque()
        self._reading: RequestCycle | None = None  # its body is incomplete
        # Of the message that is being read:
        self._in_head = False
        self._again = False  # the parser re-reads a head; see _stay
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0  # of URL and headers, those after a body included
        self._unparsed_bytes = 0  # bytes since the parser last made progress
        self._moved = False  # the parser made progress
        self._declared: int | None = 0
        self._expects = False

    # The transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports are not subclasses of asyncio's
        connections = self.edge.connections
        connections.add(self)
        self.edge.deserted.clear()
        metrics.connections.inc()
        over = len(connections) - self._bounds.connections
        over_address = 0
        if address := client_address(transport.get_extra_info("peername")):
            self._address = address
            self.edge.addresses[address] += 1
            over_address = self.edge.addresses[address] - self._bounds.address_connections
        if over <= 0 and over_address <= 0:
            self._wait(self._bounds.idle_s, "idle")
        elif max(over, over_address) > _TOLD:
            self._cut("too many" if over > 0 else "too many of one address")
        elif over > 0:
            self._refuse(503, "The server has too many connections. Retry later.", "too many", kind="overloaded_error")
        else:
            message = f"Your address has {self._bounds.address_connections} connections, as many as it may. Close some."
            self._refuse(503, message, "too many of one address", kind="overloaded_error")

    def connection_lost(self, exc: Exception | None) -> None:
        self.edge.connections.discard(self)
        if self._address:
            self.edge.addresses[self._address] -= 1
            if not self.edge.addresses[self._address]:
                del self.edge.addresses[self._address]
        if not self.edge.connections:
            self.edge.deserted.set()
        metrics.connections.dec()
        if isinstance(exc, TimeoutError):
            metrics.cut.labels("unreachable").inc()  # the kernel got no acknowledgement
        for timer in (self._timer, self._reader_timer):
            if timer is not None:
                timer.cancel()
        self._timer = self._reader_timer = self._timeout_why = None
        self._drops_input = True
        for cycle in (self._running, self._reading, *self._waiting):
            if cycle is not None:
                cycle.lose()
        self._waiting.clear()
        self._parser = None
        self.full = False
        self.room.set()

    def eof_received(self) -> bool:
        """Treat the client as gone, although one that closed only its half still gets a short response."""
        self._drops_input = self._half = True
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
        if self._drops_input:
            self._drop(len(data))
            return
        view = memoryview(data)
        length = max(512, min(_SLICE, self._bounds.header_bytes // 4))
        for start in range(0, len(data), length):
            if self._drops_input:
                return
            piece = view[start : start + length]
            self._moved = False
            try:
                self._feed(piece)
            except _RefusalError as refusal:
                self._spoilt(refusal)
                return
            self._unparsed_bytes = 0 if self._moved else self._unparsed_bytes + len(piece)
            if self._head_bytes + self._unparsed_bytes > self._bounds.header_bytes:
                self._spoilt(_too_long())

    def _drop(self, count: int) -> None:
        """Drop input at the pace that all connections share: reading it takes time too."""
        edge, now = self.edge, self._loop.time()
        edge.dropped_until = max(edge.dropped_until, now) + count / _DROPPED_PER_S
        ahead = edge.dropped_until - now - _DROPPED_AHEAD_S
        if ahead > 0 and not self._paused and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()
            self._loop.call_later(ahead, self.pace)  # reads on

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
        """Ignore a request to upgrade to another protocol, and answer in HTTP/1.1.

        The parser would read the rest as the other protocol, so a new parser gets an equivalent head first. Java's
        clients ask for an upgrade with every first request, and its body follows.
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
        if self._running is None and not self._drops_input:
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
            return  # a trailer, which is ignored
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
        if self._drops_input:
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
            BEGAN: time.monotonic(),
        }

    def on_body(self, body: bytes) -> None:
        self._moved = True
        cycle = self._reading
        if cycle is None or self._drops_input:
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
        self.edge.tasks.add(self._loop.create_task(self._run(cycle)))

    async def _run(self, cycle: RequestCycle) -> None:
        try:
            await self.edge.application(cycle.scope, cycle.receive, cycle.send)
        except Exception:
            log.exception("the application failed")
        finally:
            # Not by a callback of the task, which would take a turn of the event loop of its own.
            self.edge.tasks.discard(cast("asyncio.Task[None]", asyncio.current_task()))
            cycle.scope.pop("extensions", None)  # break the reference cycle between the scope and the request cycle
            if cycle.complete or cycle.lost:
                pass
            elif cycle.started:
                self.abort()  # so that the client notices the truncation
            elif cycle.left:
                self._finish()
            elif self.edge.draining:
                self._refuse(503, "the server is about to end", "draining", kind="overloaded_error")
            else:
                self._refuse(500, "something went wrong inside of Headrace", None, kind="api_error")

    def ended(self, cycle: RequestCycle) -> None:
        """Start the next pipelined cycle, wait for a request, or close: the response is complete."""
        self._running = None
        if cycle.keep and self._waiting:
            self._begin(self._waiting.popleft())
            self.pace()
        elif cycle.keep and not self._drops_input:
            self._await()
        else:
            self._finish()

    def _await(self) -> None:
        """Start the timeout for the client's next action; no cycle runs."""
        self.pace()
        if self._reading is not None:
            self._wait(self._bounds.header_s, "slow body")
        elif self._in_head:
            self._wait(self._bounds.header_s, "slow headers")
        else:
            self._wait(self._bounds.idle_s, "idle")

    def retire(self) -> None:
        """Close the connection after the response in progress."""
        if self._running is not None:
            self._running.keep = False
        elif not self._drops_input:
            self._finish()

    def _stop_listening(self) -> None:
        """Read nothing after the complete requests. The client may retry the rest on another connection."""
        self._drops_input = True
        if self._waiting and self._waiting[-1] is self._reading:
            self._waiting.pop()
        last = self._waiting[-1] if self._waiting else self._running
        if last is not None:
            last.keep = False

    def _spoilt(self, refusal: _RefusalError) -> None:
        """End a connection whose input is not HTTP, or exceeds a bound."""
        cycle = self._running
        metrics.cut.labels(refusal.why).inc()
        if cycle is None:
            self._refuse(refusal.status, str(refusal), None)
        elif cycle is not self._reading:
            self._stop_listening()  # earlier requests still get their responses
        elif cycle.started:
            self._cut("")
        else:
            cycle.lose()
            self._refuse(refusal.status, str(refusal), None)

    # The end

    def _refuse(self, status: int, message: str, why: str | None, *, kind: str = "invalid_request_error") -> None:
        if why is not None:
            metrics.cut.labels(why).inc()
        # The client's dialect may be unknown, so the body has both OpenAI's shape and Anthropic's.
        error = {"message": message, "type": kind, "param": None, "code": None}
        body = json.dumps({"type": "error", "error": error}).encode()
        retry = b"retry-after: 1\r\n" if status == 503 else b""
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.write(STATUS[status] + self.edge.date() + retry + head + body)
        self._drops_input = True
        self._finish()

    def _finish(self) -> None:
        """Flush the output and close the socket."""
        if self._finished or self._transport.is_closing():
            return
        more_may_come = not self._half and (self._drops_input or self._reading is not None)
        self._drops_input = self._finished = True
        self._waiting.clear()
        self.pace()
        if more_may_come:
            # Closing a socket with unread bytes resets it, and the client would lose the response.
            self._transport.write_eof()
            self._wait(LINGER_S if self.room.is_set() else self._bounds.reader_s, "")
        else:
            self._transport.close()
            self._wait(self._bounds.reader_s, "slow reader")

    def abort(self) -> None:
        self._drops_input = self._finished = True
        self._transport.abort()

    def _cut(self, why: str) -> None:
        if why:
            metrics.cut.labels(why).inc()
        self.abort()

    def _wait(self, seconds: float, why: str | None) -> None:
        """Replace the timeout for the client's next action. `why` None: no timeout.

        A timer that goes off early enough stays: every request has several timeouts, and next to none is ever due."""
        self._timeout_why = why
        if why is None:
            return
        self._timeout = self._loop.time() + seconds
        if self._timer is None or self._timer_at > self._timeout:
            self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = self._timeout
        self._timer = self._loop.call_at(self._timeout, self._look_at_timeout)

    def _look_at_timeout(self) -> None:
        self._timer = None
        if self._timeout_why is None:
            return
        if self._timeout - self._loop.time() > _RESOLUTION:
            self._set_timer()
            return
        why, self._timeout_why = self._timeout_why, None
        if why == "idle":
            self._finish()
        elif why == "slow headers":
            self._refuse(408, "the headers did not come in time", why, kind="timeout_error")
        else:
            self._cut(why)

    def write(self, data: bytes) -> None:
        if not self._finished and not self._transport.is_closing():
            self._transport.write(data)

    def pace(self) -> None:
        """Pause reading while much of the received body is unread by the application."""
        cycle = self._reading
        full = cycle is not None and not self._drops_input and not cycle.complete and len(cycle.body) > _UNREAD
        if full != self._paused and not self._transport.is_closing():
            self._paused = full
            if full:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()


def _too_long() -> _RefusalError:
    return _RefusalError(431, "the headers are too long", "long headers")
