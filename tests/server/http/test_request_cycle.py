"""What a response's parts become on the wire, and in how many writes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from headrace.server.http.request_cycle import FOLLOWS, Message, RequestCycle
from tests.support.running_server import asynchronous


class FakeConnection:
    draining = False

    def __init__(self) -> None:
        self.edge = self
        self.room = asyncio.Event()
        self.room.set()
        self.full = False
        self.now = 0.0
        self.time: Callable[[], float] = lambda: self.now
        self.written: list[bytes] = []
        self.has_ended = False

    def date(self) -> bytes:
        return b"date: now\r\n"

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def pace(self) -> None: ...

    def ended(self, cycle: RequestCycle) -> None:
        self.has_ended = True


def opened() -> tuple[FakeConnection, RequestCycle]:
    connection = FakeConnection()
    scope = {"method": "GET"}
    cycle = RequestCycle(connection, scope, keep=True, modern=True, declared=0, expects=False)
    cycle.whole = True
    return connection, cycle


def start(*headers: tuple[bytes, bytes], **more: Any) -> Message:
    return {"type": "http.response.start", "status": 200, "headers": headers, **more}


def body(data: bytes, *, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


HEAD = b"HTTP/1.1 200 OK\r\ndate: now\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"


@asynchronous
async def test_the_head_is_written_with_the_body_that_follows_at_once() -> None:
    connection, cycle = opened()
    await cycle.send(start((b"content-length", b"2"), **{FOLLOWS: True}))
    assert not connection.written
    await cycle.send(body(b"hi"))
    assert connection.written == [HEAD + b"content-length: 2\r\n\r\nhi"]
    assert connection.has_ended


@asynchronous
async def test_the_head_alone_is_written_at_once() -> None:
    connection, cycle = opened()
    await cycle.send(start())
    assert connection.written == [CHUNKED]


@asynchronous
async def test_the_first_part_of_a_turn_is_written_at_once_and_the_others_together() -> None:
    connection, cycle = opened()
    await cycle.send(start())
    for part in (b"a", b"bb", b"ccc"):
        assert cycle.push(part)
    assert connection.written == [CHUNKED, b"1\r\na\r\n"]
    await asyncio.sleep(0)
    assert connection.written[2:] == [b"2\r\nbb\r\n3\r\nccc\r\n"]
    connection.now = 1.0
    assert cycle.push(b"")  # an empty chunk would end the body
    cycle.push(b"d")
    assert connection.written[3:] == [b"1\r\nd\r\n"]


@asynchronous
async def test_a_part_of_the_next_turn_does_not_overtake_those_that_wait() -> None:
    connection, cycle = opened()
    await cycle.send(start())
    cycle.push(b"a")
    cycle.push(b"b")
    connection.now = 1.0  # a callback of this turn that comes before the one that writes what waits
    cycle.push(b"c")
    await asyncio.sleep(0)
    assert b"".join(connection.written) == CHUNKED + b"1\r\na\r\n1\r\nb\r\n1\r\nc\r\n"


@asynchronous
async def test_a_full_connection_is_noticed_within_a_turn() -> None:
    connection, cycle = opened()
    await cycle.send(start())
    for part in (b"a", b"b", b"c" * 8192):
        cycle.push(part)
    assert connection.written[2:] == [b"1\r\nb\r\n2000\r\n" + b"c" * 8192 + b"\r\n"]
    for _ in range(100):
        cycle.push(b"d")
    assert len(connection.written) == 4
    await asyncio.sleep(0)
    assert b"".join(connection.written[3:]) == b"1\r\nd\r\n" * 100


@asynchronous
async def test_the_end_comes_after_the_parts_that_wait() -> None:
    connection, cycle = opened()
    await cycle.send(start())
    cycle.push(b"a")
    cycle.push(b"b")
    await cycle.send(body(b"c"))
    await asyncio.sleep(0)
    assert b"".join(connection.written) == CHUNKED + b"1\r\na\r\n1\r\nb\r\n1\r\nc\r\n0\r\n\r\n"
    assert connection.has_ended


@asynchronous
async def test_a_part_that_is_pushed_before_the_head_is_written_comes_after_it() -> None:
    connection, cycle = opened()
    await cycle.send(start(**{FOLLOWS: True}))
    cycle.push(b"a")
    assert connection.written == [CHUNKED + b"1\r\na\r\n"]
