"""What clients may do to a connection: whatever it is, it is bounded, and others are served."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket

import pytest

from headrace.observe import metrics
from headrace.server.http import connection
from tests.support.running_server import CHAT, asynchronous, count, ended, request, say, serving, until, words

LIVE = request("GET", "/health/live")
NOT_HTTP = {
    "nonsense": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "unknown method": b"FOO / HTTP/1.1\r\n\r\n",
    "no version": b"GET /health/live\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/3": b"GET / HTTP/3.0\r\n\r\n",
    "bytes in the path": b"GET /\xc3\xa4 HTTP/1.1\r\n\r\n",
    "zero in a header": b"GET / HTTP/1.1\r\nA: b\x00c\r\n\r\n",
    "bare line feeds": b"GET / HTTP/1.1\nA: b\n\n",
    "folded header": b"GET / HTTP/1.1\r\nA: b\r\n c: d\r\n\tx\r\n : e\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    "length and chunks": b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
    "huge length": b"POST / HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n",
    "negative length": b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    "chunk of no size": b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n",
    "a tunnel": b"CONNECT example.org:443 HTTP/1.1\r\nHost: x\r\n\r\nabc",
}
NOT_JSON = {
    "empty": b"",
    "cut": b'{"messages": [',
    "not UTF-8": b'{"prompt": "\xff\xfe"}',
    "a surrogate": b'{"prompt": "\\ud800"}',
    "a surrogate in UTF-8": b'{"prompt": "\xed\xa0\x80"}',
    "NaN": b'{"temperature": NaN}',
    "Infinity": b'{"temperature": Infinity}',
    "a float too large": b'{"prompt": "x", "temperature": 1e999}',
    "an integer too large": b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}",
    "an integer of 64 bits": b'{"model": 1, "prompt": "x", "seed": 99999999999999999999}',
    "nested too deep": b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "objects too deep": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "a list": b"[1, 2]",
    "a number": b"1",
    "two values": b"{} {}",
    "zero bytes": b"\x00" * 100,
    "a byte order mark": b"\xef\xbb\xbf{}",
}


@asynchronous
async def test_one_connection_too_many_is_told_so() -> None:
    async with serving(connections=3) as running:
        clients = [await running.client() for _ in range(3)]
        for client in clients:
            assert (await client.ask("GET", "/health/live")).status == 200
        more = await running.client()
        refused = await more.answer()
        assert refused.status == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.error["message"] == "The server has too many connections. Retry later."
        assert await more.ended() == b""
        more.leave()
        clients[0].leave()
        await until(lambda: len(running.server.edge.connections) == 2)
        assert (await running.ask("GET", "/health/live")).status == 200
        assert (await clients[1].ask("GET", "/health/live")).status == 200


@asynchronous
async def test_a_flood_of_connections_is_closed_without_a_word() -> None:
    async with serving(connections=2) as running:
        clients = [await running.client() for _ in range(200)]
        await until(lambda: len(running.server.edge.connections) <= 2 + 64)
        assert (await clients[0].ask("GET", "/health/live")).status == 200
        for client in clients[2:]:
            client.leave()
        await until(lambda: len(running.server.edge.connections) == 2)


@asynchronous
async def test_one_address_does_not_take_all_connections() -> None:
    async with serving(connections=100, address_connections=3) as running:
        clients = [await running.client() for _ in range(3)]
        for client in clients:
            assert (await client.ask("GET", "/health/live")).status == 200
        assert running.server.edge.addresses == {"127.0.0.1": 3}
        refused = count(metrics.cut, "too many of one address")
        more = await running.client()
        answer = await more.answer()
        assert answer.status == 503
        assert answer.error["message"] == "Your address has 3 connections, as many as it may. Close some."
        assert count(metrics.cut, "too many of one address") == refused + 1
        for client in (more, *clients):
            client.leave()
        await until(lambda: not running.server.edge.addresses)
        assert (await running.ask("GET", "/health/live")).status == 200


@asynchronous
async def test_the_unwanted_rest_of_a_body_is_read_at_a_pace_and_the_response_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(body_bytes=1000) as running:
        client = await running.client()
        long = request("POST", "/tokenize", b"x" * 8_000_000)
        client.writer.write(long)
        answer = await client.answer()
        assert answer.status == 413
        dropped = running.server.edge.dropped_until
        await until(lambda: running.server.edge.dropped_until > dropped)
        # One that is far ahead of its pace is not read: the kernel's buffers fill up.
        monkeypatch.setattr(connection, "_DROPPED_PER_S", 1)
        other = await running.client()
        other.writer.write(long)
        assert (await other.answer()).status == 413
        await until(lambda: any(each._paused for each in running.server.edge.connections))
        assert other.writer.transport.get_write_buffer_size() > 0
        assert (await running.ask("GET", "/health/live")).status == 200


@asynchronous
async def test_headers_that_are_too_long_get_431() -> None:
    async with serving(header_bytes=4096) as running:
        for head in (
            b"GET / HTTP/1.1\r\nA: " + b"b" * 8000,
            b"GET / HTTP/1.1\r\nA: " + b"b" * 200_000 + b"\r\n\r\n",
            b"GET /" + b"a" * 8000 + b" HTTP/1.1\r\n\r\n",
            b"GET / HTTP/1.1\r\n" + b"a:b\r\n" * 800 + b"\r\n",
            b"GET / HTTP/1.1\r\n" + b"a" * 8000,
        ):
            for pieces in ((head,), [head[at : at + 1000] for at in range(0, min(len(head), 9000), 1000)]):
                client = await running.client()
                with contextlib.suppress(ConnectionError):
                    await client.send(*pieces)
                answer = await client.answer()
                assert answer.status == 431
                assert answer.error["message"] == "the headers are too long"
                assert await client.ended() == b""


@asynchronous
async def test_a_body_does_not_count_as_headers() -> None:
    async with serving(header_bytes=512) as running:
        running.engine.answer = words("ok")
        client = await running.client()
        body = json.dumps(CHAT | {"metadata": {"x": "y" * 500}}).encode()
        for _ in range(3):
            whole = request("POST", "/v1/chat/completions", body)
            for pieces in ((whole,), (whole[:100], whole[100:]), (whole[:-600], whole[-600:-10], whole[-10:])):
                await client.send(*pieces)
                assert (await client.answer()).status == 200
        # Nor does the one of a request that was answered before its body came, nor do pipelined requests.
        await client.send(request("POST", "/nowhere", b"x" * 4000)[:-4000])
        assert (await client.answer()).status == 404
        await client.send(b"x" * 4000, LIVE * 16)
        for _ in range(16):
            assert (await client.answer()).status == 200


@asynchronous
async def test_what_comes_around_the_chunks_of_a_body_is_bounded() -> None:
    begins = b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with serving(header_bytes=2048) as running:
        for endless in (
            b"1;" + b"x" * 10_000,  # an extension of a chunk
            b"0\r\n" + b"trailer: value\r\n" * 1000,
            b"0\r\nt: " + b"x" * 10_000,
        ):
            client = await running.client()
            with contextlib.suppress(ConnectionError):
                await client.send(begins, *[endless[at : at + 700] for at in range(0, len(endless), 700)])
            assert (await client.answer()).status == 431
            assert await client.ended() == b""
        # Many small chunks are as good as a long one.
        running.engine.answer = words("ok")
        client = await running.client()
        body = json.dumps({"prompt": "x" * 2000}).encode()
        await client.send(begins + b"".join(b"1\r\n%c\r\n" % each for each in body) + b"0\r\nx: y\r\n\r\n")
        assert (await client.answer()).status == 200


@asynchronous
async def test_slow_headers_are_cut() -> None:
    async with serving(header_s=0.3, idle_s=30.0) as running:
        client = await running.client()
        dripping = asyncio.create_task(_drip(client.writer, LIVE[:-1] + b"x" * 1000))
        answer = await client.answer()
        assert answer.status == 408
        await client.ended()
        dripping.cancel()
        # The same after a request, and with empty lines before.
        client = await running.client()
        assert (await client.ask("GET", "/health/live")).status == 200
        await client.send(b"\r\n\r\nGET /heal")
        assert (await client.answer()).status == 408
        # Headers that come in pieces, but in time.
        client = await running.client()
        await client.send(*(LIVE[at : at + 5] for at in range(0, len(LIVE), 5)))
        assert (await client.answer()).status == 200


async def _drip(writer: asyncio.StreamWriter, data: bytes) -> None:
    for each in data:
        writer.write(bytes([each]))
        await asyncio.sleep(0.02)


@asynchronous
async def test_a_connection_that_says_nothing_is_closed() -> None:
    async with serving(idle_s=0.2, header_s=30.0) as running:
        silent = await running.client()
        used = await running.client()
        assert (await used.ask("GET", "/health/live")).status == 200
        after_lines = await running.client()
        await after_lines.send(b"\r\n")
        for client in (silent, used, after_lines):
            assert await client.ended() == b""
        assert not running.server.edge.connections


@asynchronous
async def test_an_answer_that_takes_long_is_no_silence() -> None:
    async with serving(idle_s=0.1, header_s=0.1, reader_s=0.1) as running:
        client = await running.client()
        await client.send(request("POST", "/v1/chat/completions", CHAT))
        await until(lambda: bool(running.engine.open))
        await asyncio.sleep(0.4)
        say(running.engine.open[0], "late", end=True)
        assert (await client.answer()).json["choices"][0]["message"]["content"] == "late"


@asynchronous
async def test_a_body_that_does_not_come_gets_408() -> None:
    async with serving(body_s=0.3) as running:
        for pieces in ((b"",), (b"{", b'"messages"')):
            client = await running.client()
            await client.send(request("POST", "/v1/chat/completions", b"x" * 100)[:-100], *pieces)
            answer = await client.answer()
            assert (answer.status, answer.error["code"]) == (408, "request_timeout")
        client = await running.client()
        await client.send(request("POST", "/v1/chat/completions", b"x" * 100)[:-100])
        dripping = asyncio.create_task(_drip(client.writer, b"x" * 90))
        assert (await client.answer()).status == 408
        dripping.cancel()


@asynchronous
async def test_a_body_that_is_too_long_gets_413() -> None:
    async with serving(body_bytes=100_000) as running:
        # Declared: not a byte of it is waited for.
        client = await running.client()
        await client.send(request("POST", "/v1/chat/completions", b"x" * 100_001)[:-100_001])
        answer = await client.answer()
        assert (answer.status, answer.error["code"]) == (413, "request_too_large")
        assert answer.headers["connection"] == "close"
        await client.ended()
        # In chunks, without end: the client still hears the answer.
        client = await running.client()
        await client.send(b"POST /v1/chat/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(30):
                await client.send(b"4000\r\n" + b"x" * 0x4000 + b"\r\n")
        assert (await client.answer()).status == 413
        await client.ended()
        # Just as long as it may be.
        body = json.dumps({"prompt": "a"}).encode()
        assert (await running.ask("POST", "/tokenize", body + b" " * (100_000 - len(body)))).status == 200


@asynchronous
async def test_a_body_longer_than_declared_is_no_next_request() -> None:
    async with serving() as running:
        running.engine.answer = words("ok")
        client = await running.client()
        await client.send(request("POST", "/v1/chat/completions", CHAT) + b"}}}}garbage")
        assert (await client.answer()).status == 200
        assert await client.ended() == b""


@pytest.mark.parametrize("what", NOT_HTTP)
@asynchronous
async def test_what_is_not_http_gets_400_in_the_shape_of_the_api(what: str) -> None:
    async with serving() as running:
        client = await running.client()
        await client.send(NOT_HTTP[what])
        answer = await client.answer()
        assert answer.status in (400, 505)
        assert answer.error["type"] == "invalid_request_error"
        assert answer.headers["connection"] == "close"
        assert await client.ended() == b""


@asynchronous
async def test_what_is_not_json_gets_400_and_the_connection_is_kept() -> None:
    async with serving() as running:
        running.engine.answer = words("ok")
        client = await running.client()
        for what, body in NOT_JSON.items():
            for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize"):
                answer = await client.ask("POST", path, body)
                assert answer.status == 400, (what, path, answer)
                assert answer.error["type"] == "invalid_request_error", (what, path)
                assert "connection" not in answer.headers
            assert (await client.chat()).status == 200
        # The last of two values counts, as in every JSON parser that our clients have.
        twice = await client.ask("POST", "/tokenize", b'{"prompt": 1, "prompt": "a"}')
        assert twice.status == 200


@asynchronous
async def test_a_request_after_an_error_is_answered_on_the_same_connection() -> None:
    async with serving() as running:
        running.engine.answer = words("ok")
        client = await running.client()
        smuggled = LIVE * 3
        for first, status in (
            (request("POST", "/nowhere", smuggled), 404),
            (request("GET", "/v1/chat/completions", smuggled), 405),
            (request("DELETE", "/health/live"), 405),
            (request("PROPFIND", "/v1/models"), 405),
            (request("POST", "/v1/chat/completions", smuggled), 400),
            (request("POST", "/v1/chat/completions", CHAT | {"model": "none"}), 404),
            (request("POST", "/v1/chat/completions", CHAT | {"max_token": 1}), 400),
        ):
            head, _, body = first.partition(b"\r\n\r\n")
            for pieces in ((first,), (head + b"\r\n\r\n", body)):
                await client.send(*pieces)
                answer = await client.answer()
                assert answer.status == status, first
                assert (answer.status == 405) == ("allow" in answer.headers)
                assert (await client.chat()).json["choices"][0]["message"]["content"] == "ok"


@asynchronous
async def test_the_rest_of_a_long_body_is_never_read_as_a_request() -> None:
    async with serving() as running:
        client = await running.client()
        long = LIVE * 20_000
        await client.send(request("POST", "/nowhere", long)[: -len(long)])
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (404, "close")
        with contextlib.suppress(ConnectionError):
            await client.send(long)
        assert await client.ended() == b""


@asynchronous
async def test_a_rest_that_does_not_come_is_not_waited_for() -> None:
    async with serving(header_s=0.2) as running:
        client = await running.client()
        await client.send(request("POST", "/nowhere", b"x" * 50)[:-50])
        assert (await client.answer()).status == 404
        assert await client.ended() == b""


@asynchronous
async def test_pipelined_requests_are_answered_in_their_order() -> None:
    async with serving() as running:
        client = await running.client()
        chat = request("POST", "/v1/chat/completions", CHAT)
        await client.send(chat + LIVE + chat + b"GET /nowhere HTTP/1.1\r\n\r\n")
        await until(lambda: bool(running.engine.open))
        assert len(running.engine.streams) == 1
        say(running.engine.streams[0], "first", end=True)
        assert b"first" in (await client.answer()).body
        assert (await client.answer()).json == {"status": "live"}
        await until(lambda: len(running.engine.streams) == 2)
        say(running.engine.streams[1], "second", end=True)
        assert b"second" in (await client.answer()).body
        assert (await client.answer()).status == 404


@asynchronous
async def test_only_so_many_requests_are_pipelined() -> None:
    async with serving() as running:
        client = await running.client()
        await client.send(LIVE * 5000)
        answers = [await client.answer() for _ in range(17)]
        assert {answer.status for answer in answers} == {200}
        assert answers[-1].headers["connection"] == "close"
        assert await client.ended() == b""
        # Nor does a long body wait behind another request.
        client = await running.client()
        await client.send(request("POST", "/v1/chat/completions", CHAT))
        await until(lambda: bool(running.engine.open))
        with contextlib.suppress(ConnectionError):
            await client.send(request("POST", "/tokenize", b"x" * 1_000_000))
        say(running.engine.open[0], "ok", end=True)
        assert (await client.answer()).status == 200
        assert await client.ended() == b""


@asynchronous
async def test_a_client_that_leaves_with_pipelined_requests_frees_the_first() -> None:
    async with serving() as running:
        client, stream = await running.streaming()
        await client.send(request("POST", "/v1/chat/completions", CHAT) + LIVE)
        client.leave()
        await until(lambda: stream.closed)
        await running.settled()
        assert len(running.engine.streams) == 1


@asynchronous
async def test_garbage_behind_a_stream_does_not_get_into_it() -> None:
    async with serving() as running:
        client, stream = await running.streaming()
        await client.send(b"\x00\x01\x02 garbage\r\n\r\n" * 10)
        say(stream, "two", end=True)
        said = b""
        while chunk := await client.chunk():
            said += chunk
        assert b"two" in said
        assert b"[DONE]" in said
        assert await client.ended() == b""


@asynchronous
async def test_a_page_of_another_origin_may_read_a_download() -> None:
    parts = (
        b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--x\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n{}\r\n--x--\r\n'
    )
    async with serving(cors_origins=("https://example.org",)) as running:
        client = await running.client()
        made = await client.ask("POST", "/v1/files", parts, content_type="multipart/form-data; boundary=x")
        assert made.status == 200, made.body
        path = f"/v1/files/{json.loads(made.body)['id']}/content"
        answer = await client.ask("GET", path, origin="https://example.org")
        assert (answer.body, answer.headers["access-control-allow-origin"]) == (b"{}", "https://example.org")
        assert "access-control-allow-origin" not in (await client.ask("GET", path)).headers


@asynchronous
async def test_methods() -> None:
    async with serving(cors_origins=("https://example.org",)) as running:
        client = await running.client()
        await client.send(request("HEAD", "/v1/models"))
        assert int((await client.answer(to_head=True)).headers["content-length"]) > 10
        await client.send(request("HEAD", "/v1/chat/completions"))
        assert (await client.answer(to_head=True)).status == 405
        allowed = await client.ask("OPTIONS", "/v1/chat/completions", origin="https://example.org")
        assert (allowed.status, allowed.headers["access-control-allow-origin"]) == (204, "https://example.org")
        other = await client.ask("OPTIONS", "/v1/chat/completions", origin="https://example.com")
        assert "access-control-allow-origin" not in other.headers
        assert (await client.ask("OPTIONS", "*")).status == 404
        assert (await client.ask("TRACE", "/v1/models")).status == 405
        assert (await client.ask("GET", "http://headrace/health/live")).status == 200
        assert (await client.ask("GET", "//health/live")).status == 404
        assert (await client.ask("GET", "/health/%6cive")).status == 200
        assert (await client.ask("GET", "/v1/models/%00%ff%0a")).status == 404


@asynchronous
async def test_a_client_that_asks_whether_it_may_send_is_told() -> None:
    async with serving(body_bytes=1000) as running:
        running.engine.answer = words("ok")
        body = json.dumps(CHAT).encode()
        whole = request("POST", "/v1/chat/completions", body, expect="100-continue")
        client = await running.client()
        await client.send(whole[: -len(body)])
        assert (await client.answer()).status == 100
        await client.send(body)
        assert (await client.answer()).status == 200
        # Refused before: whether the body comes nobody knows, so the connection ends.
        for head in (
            request("POST", "/v1/chat/completions", b"x" * 2000, expect="100-continue")[:-2000],
            request("POST", "/nowhere", body, expect="100-continue")[: -len(body)],
        ):
            client = await running.client()
            await client.send(head)
            answer = await client.answer()
            assert answer.status in (413, 404)
            assert answer.headers["connection"] == "close"
            assert await client.ended() == b""


@asynchronous
async def test_http_1_0_gets_no_chunks() -> None:
    async with serving() as running:
        running.engine.answer = words("a ", "b ", "c")
        client = await running.client()
        body = json.dumps(CHAT | {"stream": True}).encode()
        await client.send(b"POST /v1/chat/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        answer = await client.answer()
        assert "transfer-encoding" not in answer.headers
        assert answer.text == "a b c"
        client = await running.client()
        await client.send(b"GET /health/live HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
        assert (await client.answer()).headers["connection"] == "close"
        assert await client.ended() == b""


@asynchronous
async def test_a_client_that_would_rather_speak_http_2_is_answered() -> None:
    # Java's client asks so with every first request.
    upgrade = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2_settings": "AAEAAEAAAAIAAAABAAMAAABk"}
    async with serving() as running:
        running.engine.answer = words("ok")
        client = await running.client()
        for _ in range(2):
            whole = request("POST", "/v1/chat/completions", CHAT, **upgrade)
            for pieces in ((whole,), (whole[:-20], whole[-20:]), (whole + LIVE,)):
                await client.send(*pieces)
                assert (await client.answer()).json["choices"][0]["message"]["content"] == "ok"
            assert (await client.answer()).json == {"status": "live"}
            await client.send(request("GET", "/health/live", connection="upgrade", upgrade="websocket") + LIVE)
            assert (await client.answer()).status == 200
            assert (await client.answer()).status == 200
            chunked = b"transfer-encoding: chunked\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
            await client.send(b"POST /tokenize HTTP/1.1\r\n" + chunked, b'11\r\n{"prompt": "abc"}\r\n0\r\n\r\n')
            assert (await client.answer()).status == 200


@asynchronous
async def test_a_reader_that_does_not_read_is_cut_and_others_are_served() -> None:
    async with serving(reader_s=0.3) as running:
        before = count(metrics.cut, "slow reader")
        client, stream = await running.streaming(max_tokens=2000)
        client.reader._transport.pause_reading()  # pyright: ignore
        small = client.writer.get_extra_info("socket")
        small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        (connection,) = running.server.edge.connections
        most = 0
        for _ in range(3000):
            if stream.closed:
                break
            say(stream, "x" * 10_000)
            await asyncio.sleep(0.002)
            most = max(most, connection._transport.get_write_buffer_size())  # pyright: ignore
        assert stream.closed
        assert most < 256 * 1024
        assert count(metrics.cut, "slow reader") == before + 1
        running.engine.answer = words("ok")
        assert (await running.ask("POST", "/v1/chat/completions", CHAT)).status == 200


@asynchronous
async def test_a_reader_that_is_slow_but_reads_is_not_cut() -> None:
    async with serving(reader_s=0.4) as running:
        client = await running.client()
        await client.send(request("POST", "/v1/completions", {"prompt": "x"}))
        await until(lambda: bool(running.engine.open))
        text = "y" * 40_000_000
        say(running.engine.open[0], text, end=True)
        _, headers = await client.head()
        left = int(headers["content-length"])
        began = asyncio.get_running_loop().time()
        while left:
            left -= len(await client.reader.read(1024 * 1024))
            await asyncio.sleep(0.03)
        assert asyncio.get_running_loop().time() - began > 0.8


@asynchronous
async def test_a_client_that_closes_its_half_gets_a_short_answer_but_no_long_one() -> None:
    async with serving() as running:
        gone = ended("gone")
        client = await running.client()
        await client.send(LIVE)
        client.writer.write_eof()
        assert (await client.answer()).status == 200
        assert await client.ended() == b""
        client, stream = await running.streaming()
        client.writer.write_eof()
        await until(lambda: stream.closed)
        await client.ended()
        await running.settled()
        assert ended("gone") == gone + 1


@asynchronous
async def test_thousands_of_idle_connections_disturb_nobody() -> None:
    wanted = 2000
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * wanted + 1000)), hard))
    async with serving() as running:
        running.engine.answer = words("ok")
        for _ in range(wanted // 100):
            await asyncio.gather(*(running.client() for _ in range(100)))
        await until(lambda: len(running.server.edge.connections) == wanted)
        for _ in range(10):
            assert (await running.ask("POST", "/v1/chat/completions", CHAT)).status == 200
        assert (await running.clients[wanted // 2].ask("GET", "/health/live")).status == 200
