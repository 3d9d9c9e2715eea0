"""Upstreams that hang, break off, lie, storm and trickle: every wait ends, and nothing is told that must not be."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from headrace.config.breaker_section import UpstreamBreakerConfig
from headrace.config.upstream_section import UpstreamRetries, UpstreamTimeouts
from headrace.gateway.requests.text_request import ChoiceDelta
from headrace.gateway.serving.upstream_answers.upstream_generation import UpstreamGeneration
from headrace.gateway.upstreams.upstream_errors import BrokenStreamError, UpstreamError
from tests.support.fake_upstream import (
    ANSWER,
    Fake,
    Line,
    answered,
    breaks,
    chunk,
    exchange,
    faking,
    hangs,
    hangs_after_the_head,
    hangs_in_the_stream,
    pieces_of,
    refuses,
    resets,
    says,
    soon,
    sse,
    streams,
    text_of,
    upstream_of,
    used,
)
from tests.support.running_server import asynchronous

QUICK = UpstreamTimeouts(connect_s=0.1, first_s=0.1, chunk_s=0.1, usage_s=0.1, total_s=30.0)
ONCE = UpstreamRetries(most=0)


async def hangs_in_the_head(line: Line) -> None:
    await line.say(b"HTTP/1.1 200 OK\r\ncontent-ty")
    await line.gone()


async def hangs_before_the_usage(line: Line) -> None:
    await line.head()
    await line.say(sse(*ANSWER, done=False))
    await line.gone()


async def pings(line: Line) -> None:
    await line.head()
    while True:
        await line.say(b": still here\n\n")
        await asyncio.sleep(0.02)


async def trickles(line: Line) -> None:
    """A byte at a time, of an event that never ends."""
    await line.head()
    await line.say(sse(chunk("Hel"), done=False), b"data: ")
    while True:
        await line.say(b"x")
        await asyncio.sleep(0.02)


def failing(**changes: Any) -> dict[str, Any]:
    return {"timeouts": QUICK, "retries": ONCE, **changes}


# Hangs


@pytest.mark.parametrize("handler", [hangs, hangs_in_the_head, hangs_after_the_head, pings])
@asynchronous
async def test_one_that_says_nothing_is_left_in_time(handler: Any) -> None:
    async with faking(handler) as fake, upstream_of(fake, **failing()) as upstream:
        with pytest.raises(UpstreamError) as error:
            await soon(pieces_of(upstream))
        assert (error.value.status, error.value.reason) == (504, "timeout")
        assert not isinstance(error.value, BrokenStreamError)


@asynchronous
async def test_one_that_takes_no_connection_is_left_in_time() -> None:
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)  # and nobody accepts: beyond what is kept for later, connections do not come about
        for _ in range(4):
            other = stack.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(full.getsockname())
        times = UpstreamTimeouts(connect_s=0.1, first_s=20.0)
        url = f"http://127.0.0.1:{full.getsockname()[1]}/v1"
        async with upstream_of(url, timeouts=times, retries=ONCE) as upstream:
            with pytest.raises(UpstreamError) as error:
                await soon(pieces_of(upstream))
            assert (error.value.status, error.value.reason) == (503, "connect")


@asynchronous
async def test_one_that_is_not_there_is_told_apart() -> None:
    async with faking(streams()) as fake:
        url = fake.url
    for address in (url, "http://nobody.invalid/v1"):
        async with upstream_of(address, **failing(timeouts=UpstreamTimeouts())) as upstream:
            with pytest.raises(UpstreamError) as error:
                await soon(pieces_of(upstream))
            assert (error.value.status, error.value.reason) == (503, "connect")
            assert error.value.retry_after == 1.0


@pytest.mark.parametrize("handler", [hangs_in_the_stream, trickles])
@asynchronous
async def test_one_that_stops_within_its_answer_is_left_in_time(handler: Any) -> None:
    async with faking(handler) as fake, upstream_of(fake, **failing()) as upstream:
        found: list[ChoiceDelta] = []
        with pytest.raises(BrokenStreamError) as error:
            await soon(pieces_of(upstream, found))
        assert text_of(found) == "Hel"
        assert error.value.reason == "timeout"
        assert error.value.delivered[0].content == "Hel"
        assert error.value.ended == frozenset()


@asynchronous
async def test_an_answer_without_its_usage_does_not_wait_for_it() -> None:
    async with faking(hangs_before_the_usage) as fake, upstream_of(fake, **failing()) as upstream:
        found = await soon(pieces_of(upstream))
        assert text_of(found) == "Hello!"
        assert found[-1].finish == "stop"
        assert upstream.state()["usage_estimated"] == 1


@asynchronous
async def test_the_whole_answer_has_its_bound_too() -> None:
    async def goes_on(line: Line) -> None:
        await line.head()
        while True:
            await line.say(sse(chunk("x"), done=False))
            await asyncio.sleep(0.02)

    timeouts = UpstreamTimeouts(first_s=20.0, chunk_s=20.0, total_s=0.3)
    async with faking(goes_on) as fake, upstream_of(fake, timeouts=timeouts) as upstream:
        with pytest.raises(BrokenStreamError, match="complete its answer") as error:
            await soon(pieces_of(upstream))
        assert len(fake.heard) == 1
        assert error.value.delivered[0].content.startswith("xx")


@pytest.mark.parametrize("handler", [hangs, hangs_after_the_head, pings])
@asynchronous
async def test_at_the_deadline_an_answer_without_a_word_is_cut(handler: Any) -> None:
    async with faking(handler) as fake, upstream_of(fake) as upstream:
        (piece,) = await soon(pieces_of(upstream, deadline_s=0.1))
        assert (piece.content, piece.finish) == ("", "deadline")


def slow_clock() -> Callable[[], float]:
    """By it the loop's timers ring early."""
    began = time.monotonic()
    return lambda: began + 0.9 * (time.monotonic() - began)


@pytest.mark.parametrize("handler", [hangs, hangs_after_the_head, pings])
@asynchronous
async def test_a_timer_that_rings_a_little_early_is_the_deadline_too(handler: Any) -> None:
    async with faking(handler) as fake, upstream_of(fake, clock=slow_clock(), retries=ONCE) as upstream:
        (piece,) = await soon(pieces_of(upstream, deadline_s=0.2))
        assert (piece.content, piece.finish) == ("", "deadline")


@asynchronous
async def test_a_place_that_does_not_come_until_the_deadline_is_the_deadline_too() -> None:
    async with faking(hangs) as fake, upstream_of(fake, clock=slow_clock(), connections=1) as upstream:
        await upstream.slots.acquire(0, 1.0)
        (piece,) = await soon(pieces_of(upstream, deadline_s=0.2))
        assert (piece.content, piece.finish) == ("", "deadline")
        upstream.slots.release()


@asynchronous
async def test_at_the_deadline_an_answer_is_cut_with_what_there_is() -> None:
    async with faking(hangs_in_the_stream) as fake, upstream_of(fake) as upstream:
        found = await soon(pieces_of(upstream, deadline_s=0.2))
        assert [(piece.content, piece.finish) for piece in found] == [("Hel", None), ("", "deadline")]
        assert found[-1].usage is not None
        assert found[-1].usage.output_tokens == 1


# Breaks


@asynchronous
async def test_a_stream_that_breaks_says_what_was_delivered() -> None:
    async with faking(breaks) as fake, upstream_of(fake) as upstream:
        found: list[ChoiceDelta] = []
        with pytest.raises(BrokenStreamError) as error:
            await soon(pieces_of(upstream, found))
        assert len(fake.heard) == 1  # something was with the client already
        assert (error.value.status, error.value.reason) == (502, "reset")
        assert error.value.delivered[0].content == text_of(found) == "Hello"
        assert upstream.state()["broken"] == 1


@asynchronous
async def test_what_had_ended_when_a_stream_broke_is_told() -> None:
    said = streams(chunk("a"), chunk("b", index=1), chunk(index=1, finish="length"), done=False)
    async with faking(said) as fake, upstream_of(fake) as upstream:
        with pytest.raises(BrokenStreamError) as error:
            await soon(pieces_of(upstream, n=2))
        assert [choice.content for choice in error.value.delivered] == ["a", "b"]
        assert error.value.ended == {1}
        assert error.value.delivered[1].finish == "length"


@asynchronous
async def test_a_whole_answer_that_breaks_is_asked_for_anew() -> None:
    async with faking(breaks, streams()) as fake, upstream_of(fake) as upstream:
        (choice,) = await soon(answered(upstream))
        assert choice.content == "Hello!"
        assert len(fake.heard) == 2


@pytest.mark.parametrize("handler", [resets, hangs_after_the_head, refuses(503), refuses(500), says(b"what?")])
@asynchronous
async def test_before_the_first_word_another_attempt_is_made(handler: Any) -> None:
    timeouts = UpstreamTimeouts(first_s=0.2, chunk_s=20.0)
    async with faking(handler, streams()) as fake, upstream_of(fake, timeouts=timeouts) as upstream:
        assert text_of(await soon(pieces_of(upstream))) == "Hello!"
        assert len(fake.heard) == 2
        assert upstream.state()["reasons"] != {}


@asynchronous
async def test_a_role_alone_is_no_word_yet() -> None:
    first = streams(chunk(delta={"role": "assistant", "content": ""}), done=False)
    async with faking(first, streams()) as fake, upstream_of(fake) as upstream:
        found = await soon(pieces_of(upstream))
        assert text_of(found) == "Hello!"
        assert len(fake.heard) == 2
        assert upstream.state()["retries"] == 1


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'data: {"choices": [\n\n', "garbled"),
        (b"data: what?\n\n", "garbled"),
        (b'data: {"choices": "many"}\n\n', "garbled"),
        (b'data: {"choices":[{"index":7,"delta":{"content":"x"}}]}\n\n', "garbled"),
        (b'data: {"choices":[{"index":-1,"delta":{"content":"x"}}]}\n\n', "garbled"),
        (b'data: {"error":{"message":"boom","type":"server_error"}}\n\n', "failed"),
        (b'event: error\ndata: {"error":"boom","error_type":"generation"}\n\n', "failed"),
        (b'error: {"code":500,"message":"boom"}\n\n', "failed"),
        (b'data: {"object":"error","message":"boom","type":"Internal","code":500}\n\n', "failed"),
        (b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"abort"}]}\n\n', "failed"),
        (b"", "reset"),
    ],
)
@asynchronous
async def test_nonsense_within_an_answer_breaks_it_off(data: bytes, reason: str) -> None:
    async with faking(says(sse(chunk("Hel"), done=False) + data)) as fake, upstream_of(fake) as upstream:
        found: list[ChoiceDelta] = []
        with pytest.raises(BrokenStreamError) as error:
            await soon(pieces_of(upstream, found))
        assert text_of(found) == "Hel"
        assert error.value.reason == reason
        assert "boom" not in str(error.value)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html><body>Log in</body></html>",
        b"{",
        b"[]",
        b'{"choices":[]}',
        b'{"choices":[{"message":{"content":7}}]}',
        b"\x00\xff",
    ],
)
@pytest.mark.parametrize("kind", ["application/json", "text/html", "text/event-stream"])
@asynchronous
async def test_something_else_than_an_answer_is_an_error(body: bytes, kind: str) -> None:
    async with faking(says(body, kind=kind)) as fake, upstream_of(fake, retries=ONCE) as upstream:
        with pytest.raises(UpstreamError) as error:
            await soon(pieces_of(upstream))
        assert error.value.status == 502
        assert not isinstance(error.value, BrokenStreamError)


@pytest.mark.parametrize("kind", ["application/json", "text/plain", "application/octet-stream"])
@asynchronous
async def test_a_stream_with_a_wrong_name_is_read_all_the_same(kind: str) -> None:
    async with faking(says(sse(*ANSWER, used()), kind=kind)) as fake, upstream_of(fake) as upstream:
        assert text_of(await soon(pieces_of(upstream))) == "Hello!"


@asynchronous
async def test_bytes_that_are_no_text_are_replaced() -> None:
    broken = b'data: {"choices":[{"index":0,"delta":{"content":"a\xff\xc3b"}}]}\n\n'
    half = b'data: {"choices":[{"index":0,"delta":{"content":"\\ud83d!"}}]}\n\n'
    said = says(broken + half + sse(chunk(finish="stop"), used()))
    async with faking(said) as fake, upstream_of(fake) as upstream:
        assert text_of(await soon(pieces_of(upstream))) == "a\ufffd\ufffdb\ufffd!"


@asynchronous
async def test_a_giant_line_is_refused_and_a_giant_answer_too() -> None:
    big = json.dumps({"choices": [{"message": {"content": "x" * 5000}}]}).encode()
    for data, kind in ((b"data: " + b"x" * 5000, "text/event-stream"), (big, "application/json")):
        changes = failing(event_bytes=2048, answer_bytes=2048)
        async with faking(says(data, kind=kind)) as fake, upstream_of(fake, **changes) as upstream:
            with pytest.raises(UpstreamError, match="too long") as error:
                await soon(pieces_of(upstream))
            assert error.value.reason == "garbled"


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 20000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\ndata: x",
    ],
)
@asynchronous
async def test_no_http_is_an_error(raw: bytes) -> None:
    async def handler(line: Line) -> None:
        await line.say(raw)

    async with faking(handler) as fake, upstream_of(fake, retries=ONCE) as upstream:
        with pytest.raises(UpstreamError) as error:
            await soon(pieces_of(upstream))
        assert error.value.status == 502


@asynchronous
async def test_old_http_ends_with_its_connection() -> None:
    async def handler(line: Line) -> None:
        await line.say(b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n", sse(*ANSWER, used(), done=False))

    async with faking(handler) as fake, upstream_of(fake) as upstream:
        assert text_of(await soon(pieces_of(upstream))) == "Hello!"


@asynchronous
async def test_carriage_returns_comments_and_several_lines_are_read() -> None:
    first = json.dumps(chunk("Hel")).encode()
    cut = first.index(b",") + 1
    data = b": hello\r\n\r\ndata: " + first[:cut] + b"\r\ndata: " + first[cut:] + b"\r\n\r\n: ping\r\n\r\n"
    data += sse(chunk("lo"), chunk(finish="stop"), used(), end="\r\n")
    async with faking(says(data)) as fake, upstream_of(fake) as upstream:
        assert text_of(await soon(pieces_of(upstream))) == "Hello"


@asynchronous
async def test_nobody_is_followed_elsewhere() -> None:
    async with faking(streams()) as other:
        moved = refuses(307, b"", location=f"{other.url}/chat/completions")
        async with faking(moved) as fake, upstream_of(fake, key="sk-1") as upstream:
            with pytest.raises(UpstreamError) as error:
                await soon(pieces_of(upstream))
            assert error.value.reason == "misconfigured"
            assert other.heard == []


@asynchronous
async def test_what_one_reply_sets_is_not_sent_with_the_next_request() -> None:
    cookie = says(sse(*ANSWER, used()), set_cookie="session=1; Path=/")
    async with faking(cookie) as fake, upstream_of(fake) as upstream:
        for _ in range(2):
            await soon(pieces_of(upstream))
        assert "cookie" not in fake.heard[1].headers


# Errors and further attempts


@asynchronous
async def test_a_refusal_of_the_request_is_told_and_not_tried_again() -> None:
    body = {"error": {"message": "top_p must be in (0, 1] at http://gpu7:8000/v1", "param": "top_p", "code": 400}}
    async with faking(refuses(400, body)) as fake, upstream_of(fake) as upstream:
        with pytest.raises(UpstreamError) as error:
            await soon(pieces_of(upstream))
        assert (error.value.status, error.value.parameter) == (400, "top_p")
        assert "top_p must be in (0, 1]" in str(error.value)
        assert "gpu7" not in str(error.value)
        assert len(fake.heard) == 1
        assert upstream.breaker.counts() == (0, 1)


@asynchronous
async def test_the_key_the_address_and_the_name_there_are_never_told() -> None:
    def telling(fake: Fake) -> Any:
        async def handler(line: Line) -> None:
            said = (
                f"model theirs at {fake.url} (127.0.0.1:{fake.port}) with {line.heard.headers['authorization']} is no"
            )
            await refuses(400, {"error": {"message": said}})(line)

        return handler

    async with faking(hangs) as fake, upstream_of(fake, key="sk-geheim-1") as upstream:
        fake.answers = [telling(fake)]
        with pytest.raises(UpstreamError) as error:
            await soon(pieces_of(upstream))
        told = json.dumps(error.value.openai())
        for secret in ("geheim", str(fake.port), "127.0.0.1", "theirs"):
            assert secret not in told
        assert "mini@far" in told


@asynchronous
async def test_further_attempts_are_bounded() -> None:
    async with (
        faking(refuses(503)) as fake,
        upstream_of(fake, retries=UpstreamRetries(most=3, base_s=0.001)) as upstream,
    ):
        with pytest.raises(UpstreamError) as error:
            await soon(pieces_of(upstream))
        assert error.value.status == 503
        assert error.value.retry_after == 1.0
        assert len(fake.heard) == 4
        assert upstream.state()["retries"] == 3


@asynchronous
async def test_a_storm_of_refusals_is_not_answered_with_a_storm_of_attempts() -> None:
    quiet = UpstreamBreakerConfig(least_calls=10_000)
    retries = UpstreamRetries(most=2, base_s=0.001, share=0.1, reserve=3)
    async with faking(refuses(429)) as fake, upstream_of(fake, breaker=quiet, retries=retries) as upstream:
        for _ in range(50):
            with pytest.raises(UpstreamError) as error:
                await soon(pieces_of(upstream))
            assert error.value.status == 429
        assert 50 < len(fake.heard) <= 50 + 3 + 5
        assert upstream.state()["retries_denied"] > 0


@asynchronous
async def test_a_storm_opens_the_breaker_and_one_attempt_closes_it() -> None:
    now = [1000.0]
    breaker = UpstreamBreakerConfig(least_calls=4, open_s=5.0)
    async with (
        faking(*[refuses(429)] * 4, streams()) as fake,
        upstream_of(fake, breaker=breaker, retries=ONCE, clock=lambda: now[0]) as upstream,
    ):

        async def ask() -> list[ChoiceDelta]:
            asked = exchange(stream=True)
            asked.arrival = now[0]
            answering = UpstreamGeneration(asked, upstream)
            found: list[ChoiceDelta] = []
            try:
                await answering.begin()
                await answering.run(lambda piece: found.append(piece) is None)
            finally:
                answering.settle()
            return found

        for _ in range(4):
            with pytest.raises(UpstreamError):
                await soon(ask())
        assert upstream.state()["breaker"] == "open"
        assert not upstream.available
        with pytest.raises(UpstreamError) as error:
            await soon(ask())
        assert (error.value.reason, error.value.status, error.value.retry_after) == ("open", 503, 5.0)
        assert len(fake.heard) == 4
        now[0] += 5.0
        assert upstream.state()["breaker"] == "half-open"
        assert text_of(await soon(ask())) == "Hello!"
        assert upstream.state()["breaker"] == "closed"
        assert upstream.state()["opened"] == 1


@asynchronous
async def test_retry_after_is_waited_for_within_the_deadline_and_told_otherwise() -> None:
    async with faking(refuses(429, None, retry_after="0.05"), streams()) as fake, upstream_of(fake) as upstream:
        assert text_of(await soon(pieces_of(upstream))) == "Hello!"
        assert len(fake.heard) == 2
    trials: tuple[tuple[dict[str, Any], str], ...] = (({}, "3600"), ({"deadline_s": 0.5}, "0.7"))
    for asked, header in trials:
        async with faking(refuses(429, None, retry_after=header)) as fake, upstream_of(fake) as upstream:
            with pytest.raises(UpstreamError) as error:
                await soon(pieces_of(upstream, **asked))
            assert error.value.retry_after == (60.0 if header == "3600" else 0.7)
            assert len(fake.heard) == 1


@asynchronous
async def test_a_kept_connection_that_the_server_closes_is_no_failure() -> None:
    async def first(line: Line) -> None:
        line.kept = True
        data = sse(*ANSWER, used())
        await line.say(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        await line.say(b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data))

    async with faking(first, resets, streams()) as fake, upstream_of(fake, retries=ONCE) as upstream:
        for _ in range(2):
            assert text_of(await soon(pieces_of(upstream))) == "Hello!"
        assert len(fake.heard) == 3
        assert upstream.state()["failed"] == 0
