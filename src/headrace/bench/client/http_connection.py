"""One HTTP/1.1 connection of the client: sends a request and timestamps its response as bytes arrive.

The timestamp is taken first in data_received, so that this process's own work is not part of any measurement.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, cast

import httptools

from headrace.bench.client.timed_response import TimedResponse

MOST_HEAD: Final = 256 * 1024  # bytes of a response head: 256 KiB


class ClientConnection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer: TimedResponse | None = None
        self._settled: asyncio.Future[bool] | None = None
        self._now = 0.0
        self._received = 0  # bytes of this response
        self._requests = 0  # requests sent so far
        self._headed = False  # the head is complete
        self._whole = False  # the body is complete
        self._framed = False  # the head states where the body ends
        self._interim = False  # a 1xx response, which another one follows
        self._keep = False
        self._type = ""
        self.closed = False

    def send(self, request: bytes, answer: TimedResponse) -> asyncio.Future[bool]:
        """Send a request. Resolves to True when `answer` has ended; False if the kept connection was already closed."""
        assert self._transport is not None
        assert self._answer is None
        self._parser = httptools.HttpResponseParser(self)
        self._answer = answer
        self._received = 0
        self._headed = self._whole = self._framed = self._interim = self._keep = False
        self._type = ""
        self._requests += 1
        self._settled = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._settled

    @property
    def reusable(self) -> bool:
        return not self.closed and self._answer is None and self._transport is not None

    def abort(self) -> None:
        """Close the connection and leave its response as it is."""
        self.closed = True
        self._answer = None
        if self._transport is not None:
            self._transport.abort()

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._now = self._clock()
        answer = self._answer
        if answer is None:
            self.abort()  # unexpected bytes
            return
        self._received += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            raise  # a bug in the client, not a fault of the server
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self._whole:
                answer.fail("malformed", f"HTTP: {error}")
        if not self._headed and self._received > MOST_HEAD:
            answer.fail("malformed", f"the head is longer than {MOST_HEAD} bytes")
        if self._whole:
            answer.complete(self._now)
            self._settle()
        elif answer.error:
            answer.end = self._now
            self._keep = False
            self._settle()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        answer = self._answer
        if answer is None:
            return
        now = self._clock()
        if self._headed and not self._framed and exc is None:
            answer.complete(now)  # the body ends with the connection
        elif not self._received and self._requests > 1:
            # The server closed its kept connection just as we used it: not a fault of this request.
            self._answer = None
            if self._settled is not None and not self._settled.done():
                self._settled.set_result(False)
            return
        else:
            answer.end = now
            answer.fail("reset", str(exc) if exc else "the server closed the connection before the answer's end")
        self._keep = False
        self._settle()

    def _settle(self) -> None:
        self._answer = None
        if self._settled is not None and not self._settled.done():
            self._settled.set_result(True)
        if not self._keep:
            self.abort()

    # httptools' callbacks

    def on_message_begin(self) -> None:
        if self._whole:
            self._keep = False  # an unexpected response begins

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type":
            self._type = value.decode("latin-1").lower()
        elif name in (b"content-length", b"transfer-encoding"):
            self._framed = True

    def on_headers_complete(self) -> None:
        if self._answer is None or self._whole:
            return
        status = self._parser.get_status_code()
        self._interim = status < 200
        if not self._interim:
            self._headed = True
            self._answer.head(status, self._type)

    def on_body(self, body: bytes) -> None:
        if self._answer is not None and not self._answer.error and not self._whole:
            self._answer.data(body, self._now)

    def on_message_complete(self) -> None:
        if not self._interim and not self._whole:
            self._whole = True
            self._keep = self._parser.should_keep_alive()
