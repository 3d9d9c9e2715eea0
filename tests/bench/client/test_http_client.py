"""The client against servers that misbehave: every end of an answer has a kind, and no wait is without a bound."""

from __future__ import annotations

import asyncio
import itertools
import socket

import pytest

from headrace.bench.client.http_client import Target, head_of
from headrace.errors import RequestError
from tests.support.programs.fake_openai_server import (
    DONE,
    END,
    STREAM_HEAD,
    Fake,
    Heard,
    OpenAI,
    asked,
    asynchronous,
    chunk,
    client_of,
    delta,
    error,
    event,
    says,
    whole,
)

GOOD = STREAM_HEAD + chunk(event(delta("a"))) + chunk(event(delta("b", finish="stop"))) + chunk(event(DONE)) + END


@asynchronous
async def test_a_stream_is_read_and_its_connection_kept() -> None:
    with Fake(OpenAI()) as fake:
        client = client_of(fake.url)
        answers = [await asked(client) for _ in range(3)]
        assert [answer.error for answer in answers] == ["", "", ""]
        assert [len(answer.output_times) for answer in answers] == [4, 4, 4]
        assert (fake.connections, client.opened) == (1, 1)
        assert answers[0].connect > 0.0
        assert answers[1].connect == 0.0
        for answer in answers:
            assert answer.start <= answer.output_times[0] <= answer.output_times[-1] <= answer.end
        client.close()


@asynchronous
async def test_bytes_in_the_smallest_pieces_are_the_same_answer() -> None:
    pieces = [bytes([byte]) for byte in GOOD]
    with Fake(says(*pieces)) as fake:
        answer = await asked(client_of(fake.url))
        assert (answer.error, answer.content_parts, answer.finish) == ("", ["a", "b"], "stop")


@pytest.mark.parametrize(
    ("parts", "close", "kind"),
    [
        ((), True, "reset"),
        ((STREAM_HEAD,), True, "reset"),
        ((STREAM_HEAD, chunk(event(delta("a")))), True, "reset"),
        ((STREAM_HEAD, b"zz\r\n"), False, "malformed"),
        ((b"SPDY/3 hello\r\n\r\n",), False, "malformed"),
        ((STREAM_HEAD, chunk(b"data: {nothing\n\n")), False, "malformed"),
        ((b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 60_000,), False, "malformed"),
        ((STREAM_HEAD, chunk(event(delta("a"))), END), False, "cut"),
        ((STREAM_HEAD, chunk(event(DONE)), END), False, "empty"),
        ((whole(error("too many"), status=429),), False, "http 429"),
        ((whole(error("broken"), status=500),), False, "http 500"),
        ((whole({}),), False, "malformed"),
        ((STREAM_HEAD, chunk(event(error("lost"))), END), False, "stream"),
    ],
)
def test_what_a_server_does_wrong_has_a_kind(parts: tuple[bytes, ...], close: bool, kind: str) -> None:
    @asynchronous
    async def ask() -> None:
        with Fake(says(*parts, close=close)) as fake:
            answer = await asked(client_of(fake.url))
            assert (answer.error, answer.end >= answer.start) == (kind, True)

    ask()


@asynchronous
async def test_a_server_that_hangs_is_given_up() -> None:
    async def hang(_: Heard, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(event(delta("a"))))
        await asyncio.sleep(60)

    with Fake(hang) as fake:
        client = client_of(fake.url, timeout=0.1)
        answer = await asked(client)
        assert (answer.error, len(answer.output_times)) == ("timeout", 1)
        assert not client._idle  # pyright: ignore[reportPrivateUsage] - what hangs is not used again


@asynchronous
async def test_nobody_there_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nobody else gets the port
        answer = await asked(client_of(f"http://127.0.0.1:{taken.getsockname()[1]}"))
    assert answer.error == "refused"


@asynchronous
async def test_no_https_there_is_an_error_of_tls() -> None:
    def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 this is another protocol\r\n")

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        answer = await asked(client_of(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
    assert answer.error == "tls"


@asynchronous
async def test_a_kept_connection_that_the_server_closed_is_no_failure() -> None:
    numbers = itertools.count()

    async def once(_: Heard, writer: asyncio.StreamWriter) -> None:
        writer.write(GOOD)
        await writer.drain()
        if next(numbers) == 0:
            writer.close()

    with Fake(once) as fake:
        client = client_of(fake.url)
        assert (await asked(client)).error == ""
        answers = [await asked(client) for _ in range(2)]
        assert [answer.error for answer in answers] == ["", ""]
        assert client.opened == 2


@asynchronous
async def test_a_body_may_end_with_the_connection() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    with Fake(says(head, event(delta("a", finish="stop")), close=True)) as fake:
        answer = await asked(client_of(fake.url))
        assert (answer.error, answer.content_parts) == ("", ["a"])


@asynchronous
async def test_an_interim_answer_is_passed_over() -> None:
    with Fake(says(b"HTTP/1.1 100 Continue\r\n\r\n", GOOD)) as fake:
        assert (await asked(client_of(fake.url))).content_parts == ["a", "b"]


@asynchronous
async def test_an_answer_that_nobody_asked_for_ends_the_connection() -> None:
    with Fake(says(GOOD + GOOD)) as fake:
        client = client_of(fake.url)
        assert [(await asked(client)).error for _ in range(2)] == ["", ""]
        assert client.opened == 2


@asynchronous
async def test_whole_answers_are_read() -> None:
    with Fake(OpenAI()) as fake:
        answer = await asked(client_of(fake.url), stream=False)
        assert (answer.error, answer.output_tokens, len(answer.output_times)) == ("", 4, 0)


@asynchronous
async def test_connections_are_opened_ahead() -> None:
    with Fake(OpenAI()) as fake:
        client = client_of(fake.url)
        await client.warm(3)
        await asyncio.gather(*(asked(client) for _ in range(3)))
        assert client.opened == 3
        client.close()


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:port", "http://x/?a=b", ""])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(RequestError, match="URL"):
        Target.of(url)


def test_a_url_is_taken_apart() -> None:
    target = Target.of("https://example.com/proxy/v1/")
    assert (target.host, target.port, target.base, target.secure) == ("example.com", 443, "/proxy", True)
    assert target.url == "https://example.com/proxy"
    assert Target.of("localhost:8000").url == "http://localhost:8000"
    assert Target.of("http://[::1]:8000/v1").name == "[::1]:8000"


def test_headers_cannot_be_smuggled() -> None:
    with pytest.raises(RequestError, match="header"):
        head_of(Target.of("http://x"), "GET", "/", {"a": "b\r\nc: d"})
