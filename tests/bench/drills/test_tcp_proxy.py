"""The proxy that makes a server slow, frozen or flapping."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from headrace.bench.drills.tcp_proxy import TcpProxy
from tests.support.file_storage import asynchronous


@asynccontextmanager
async def echoing() -> AsyncGenerator[TcpProxy]:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with server, TcpProxy(server.sockets[0].getsockname()[1]) as proxy:
        yield proxy


def test_answers_pass_later_in_order() -> None:
    async def test() -> None:
        async with echoing() as proxy:
            proxy.delay_s = 0.05
            reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            began = asyncio.get_running_loop().time()
            writer.write(b"one")
            assert await reader.readexactly(3) == b"one"
            assert asyncio.get_running_loop().time() - began >= 0.05
            writer.write(b"two")
            writer.write(b"three")
            assert await reader.readexactly(8) == b"twothree"
            writer.close()

    asynchronous(test)


def test_a_frozen_server_takes_connections_and_answers_when_it_is_back() -> None:
    async def test() -> None:
        async with echoing() as proxy:
            proxy.freeze()
            reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            writer.write(b"one")
            reading = asyncio.create_task(reader.readexactly(3))
            await asyncio.sleep(0.05)
            assert not reading.done()
            proxy.resume()
            assert await reading == b"one"
            writer.close()

    asynchronous(test)


def test_cut_connections_end_and_new_ones_work() -> None:
    async def test() -> None:
        async with echoing() as proxy:
            reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            writer.write(b"one")
            assert await reader.readexactly(3) == b"one"
            proxy.cut()
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
            reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            writer.write(b"two")
            assert await reader.readexactly(3) == b"two"
            writer.close()

    asynchronous(test)
