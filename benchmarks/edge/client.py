"""A low-overhead HTTP client over raw sockets that times responses and the chunks of streams.

It parses no JSON: it finds the end of a response and counts its events. Times are of this process's monotonic clock.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from array import array
from typing import Final, cast

import msgspec

KEY: Final = f"sk-{secrets.token_hex(32)}"  # of this run; LiteLLM requires one
PATH: Final = "/v1/chat/completions"
_MARK: Final = b"data: {"  # an event with a value; [DONE] has none
_END: Final = b"0\r\n\r\n"  # of a chunked body: no event of ours ends so


class FailedError(Exception):
    """The response is an error, or the connection ended."""


class Answer:
    """The times and sizes of one response."""

    __slots__ = ("bytes", "done", "events", "first", "sent", "times")

    def __init__(self, *, timed: bool = False) -> None:
        self.sent = 0.0
        self.first = 0.0
        self.done = 0.0
        self.bytes = 0
        self.events = 0
        self.times: array[float] | None = array("d") if timed else None  # times of events, one per read

    @property
    def seconds(self) -> float:
        return self.done - self.sent


class Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[Answer] | None = None
        self._answer = Answer()
        self._head = b""
        self._in_head = True
        self._left = -1  # bytes of the body; -1: chunked
        self._tail = b""

    @classmethod
    async def open(cls, port: int) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return connection

    def ask(self, request: bytes, *, timed: bool = False) -> asyncio.Future[Answer]:
        assert self._transport is not None
        self._answer = Answer(timed=timed)
        self._head, self._in_head, self._tail = b"", True, b""
        self._waiter = asyncio.get_running_loop().create_future()
        self._answer.sent = time.monotonic()
        self._transport.write(request)
        return self._waiter

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    @property
    def is_open(self) -> bool:
        """False once the server has closed it, as some do with idle connections after seconds."""
        return self._transport is not None and not self._transport.is_closing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the connection ended: {exc}")

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        answer = self._answer
        if self._in_head:
            self._head += data
            head, end, data = self._head.partition(b"\r\n\r\n")
            if not end:
                return
            self._in_head = False
            answer.first = now
            if not head.startswith(b"HTTP/1.1 200"):
                self._fail(self._head[:300].decode("latin-1"))
                return
            _, found, value = head.lower().partition(b"content-length:")
            self._left = int(value.partition(b"\r\n")[0]) if found else -1
        answer.bytes += len(data)
        if self._left >= 0:
            self._left -= len(data)
            if self._left <= 0:
                self._end(now)
            return
        data = self._tail + data
        self._tail = data[1 - len(_MARK) :]
        count = data.count(_MARK)
        if count:
            answer.events += count
            if answer.times is not None:
                answer.times.append(now)
        if data.endswith(_END):
            self._end(now)

    def _end(self, now: float) -> None:
        self._answer.done = now
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(self._answer)

    def _fail(self, why: str) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(FailedError(why))


class Pool:
    """Keep-alive connections; opens a new one if all are busy."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[Connection] = []
        self._all: list[Connection] = []

    async def warm(self, count: int) -> None:
        while len(self._idle) < count:
            connection = await Connection.open(self._port)
            self._all.append(connection)
            self._idle.append(connection)

    async def ask(self, request: bytes, *, timed: bool = False) -> Answer:
        self._idle = [each for each in self._idle if each.is_open]
        if not self._idle:
            await self.warm(1)
        connection = self._idle.pop()
        answer = await connection.ask(request, timed=timed)
        self._idle.append(connection)
        return answer

    def close(self) -> None:
        for connection in self._all:
            connection.close()


def chat(model: str, *, tokens: int, stream: bool, number: int = 0) -> bytes:
    """Return the bytes of a request for a short chat; each number has its own text."""
    body = msgspec.json.encode(
        {
            "model": model,
            "messages": [
                {"role": "system", "content": "You are a helpful assistant."},
                {"role": "user", "content": f"What turns the wheel of mill number {number}, and where does it stand?"},
            ],
            "max_tokens": tokens,
            "stream": stream,
        }
    )
    head = (
        f"POST {PATH} HTTP/1.1\r\nhost: 127.0.0.1\r\naccept: */*\r\nuser-agent: headrace-bench\r\n"
        f"authorization: Bearer {KEY}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
