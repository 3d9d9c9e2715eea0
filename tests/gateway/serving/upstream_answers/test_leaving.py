"""Clients that leave, wait and read slowly before an upstream, and upstreams that are not well."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.config.upstream_section import UpstreamHealthConfig, UpstreamTimeouts
from headrace.gateway.api_errors import ApiError
from headrace.gateway.requests.text_request import ChoiceDelta
from headrace.gateway.routing.composite_answerer import collect_choices
from headrace.gateway.serving.upstream_answers.upstream_generation import UpstreamGeneration
from headrace.gateway.upstreams.upstream_errors import UpstreamError
from tests.support.fake_upstream import (
    Line,
    chunk,
    exchange,
    faking,
    hangs,
    hangs_after_the_head,
    hangs_in_the_stream,
    pieces_of,
    refuses,
    soon,
    sse,
    streams,
    text_of,
    upstream_of,
    used,
)
from tests.support.running_server import asynchronous, until


@pytest.mark.parametrize(
    "handler", [hangs, hangs_after_the_head, hangs_in_the_stream, refuses(503, None, retry_after="0.9")]
)
@asynchronous
async def test_a_client_that_leaves_ends_the_upstreams_work(handler: Any) -> None:
    async with faking(handler) as fake, upstream_of(fake) as upstream:
        answering = UpstreamGeneration(exchange(stream=True), upstream)
        await answering.begin()
        pieces: list[ChoiceDelta] = []
        running = asyncio.create_task(answering.run(lambda piece: pieces.append(piece) is None))
        await until(lambda: bool(fake.heard) and (bool(pieces) or handler is not hangs_in_the_stream))
        answering.cancel()
        assert await soon(running, 5.0) is True
        answering.settle()
        answering.settle()
        assert upstream.slots.taken == 0
        assert upstream.breaker.counts()[0] <= 1
        await until(lambda: not fake.tasks)  # it was told
        assert answering.gone
        assert bool(answering.exchange.usage.output_tokens) == (handler is hangs_in_the_stream)


@asynchronous
async def test_one_that_left_before_it_began_asks_for_nothing() -> None:
    async with faking(streams()) as fake, upstream_of(fake) as upstream:
        answering = UpstreamGeneration(exchange(), upstream)
        await answering.begin()
        answering.cancel()
        assert [choice.content for choice in await collect_choices(answering)] == [""]
        answering.settle()
        assert fake.heard == []


@asynchronous
async def test_who_leaves_the_queue_leaves_no_trace() -> None:
    async with faking(hangs) as fake, upstream_of(fake, connections=1) as upstream:
        first, second = (UpstreamGeneration(exchange(), upstream) for _ in range(2))
        running: list[asyncio.Task[bool]] = []
        for answering in (first, second):
            await answering.begin()
            running.append(asyncio.create_task(answering.run(lambda piece: True)))
        await until(lambda: upstream.slots.waiting == 1 and len(fake.heard) == 1)
        second.cancel()
        assert await soon(running[1])
        second.settle()
        assert upstream.slots.waiting == 0
        first.cancel()
        assert await soon(running[0])
        first.settle()
        assert len(fake.heard) == 1


@asynchronous
async def test_who_leaves_just_when_a_place_is_given_gives_it_back() -> None:
    async with faking(hangs) as fake, upstream_of(fake, connections=1) as upstream:
        for turns in range(6):
            await upstream.slots.acquire(0, 1.0)
            answering = UpstreamGeneration(exchange(), upstream)
            await answering.begin()
            running = asyncio.create_task(answering.run(lambda piece: True))
            await until(lambda: upstream.slots.waiting == 1)
            upstream.slots.release()
            for _ in range(turns):
                await asyncio.sleep(0)
            answering.cancel()
            assert await soon(running)
            answering.settle()
            assert upstream.slots.taken == upstream.slots.waiting == 0


@asynchronous
async def test_a_task_that_is_cancelled_leaves_nothing_behind() -> None:
    for handler in (hangs, hangs_in_the_stream):
        async with faking(handler) as fake, upstream_of(fake) as upstream:
            running = asyncio.create_task(pieces_of(upstream))
            await until(lambda fake=fake: bool(fake.heard))
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert upstream.slots.taken == 0


@asynchronous
async def test_a_full_queue_refuses_and_counts_it() -> None:
    async with faking(hangs) as fake, upstream_of(fake, connections=1, queue=0) as upstream:
        running = asyncio.create_task(pieces_of(upstream))
        await until(lambda: bool(fake.heard))
        assert not upstream.available
        with pytest.raises(UpstreamError) as error:
            await soon(pieces_of(upstream))
        assert (error.value.reason, error.value.status) == ("busy", 503)
        assert upstream.state()["refused"] == 1
        assert upstream.breaker.counts() == (0, 0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@asynchronous
async def test_a_client_that_reads_slowly_stops_the_reading() -> None:
    sent = [0]

    async def floods(line: Line) -> None:
        await line.head()
        block = sse(chunk("x" * 1000), done=False) * 16
        for _ in range(4000):  # 64 MiB and more
            await line.say(block)
            sent[0] += len(block)

    async with faking(floods) as fake, upstream_of(fake, buffer_bytes=64 * 1024) as upstream:
        answering = UpstreamGeneration(exchange(stream=True), upstream)
        await answering.begin()
        assert await soon(answering.run(lambda piece: False)) is False
        before = -1
        while sent[0] != before:  # until the sockets between are full
            before = sent[0]
            await asyncio.sleep(0.1)
        assert sent[0] < 16 * 1024 * 1024
        taken: list[ChoiceDelta] = []

        def some(piece: ChoiceDelta) -> bool:
            taken.append(piece)
            return len(taken) % 1000 != 0

        for _ in range(20):
            assert await soon(answering.run(some)) is False
        assert len(taken) == 20_000
        answering.cancel()
        answering.settle()


@asynchronous
async def test_time_that_the_client_takes_is_not_the_upstreams() -> None:
    async def later(line: Line) -> None:
        await line.head()
        await line.say(sse(chunk("a"), done=False))
        await asyncio.sleep(2.2)
        await line.say(sse(chunk("b"), chunk(finish="stop"), used()))

    timeouts = UpstreamTimeouts(first_s=20.0, chunk_s=2.0, total_s=60.0)
    async with faking(later) as fake, upstream_of(fake, timeouts=timeouts) as upstream:
        answering = UpstreamGeneration(exchange(stream=True), upstream)
        await answering.begin()
        found: list[ChoiceDelta] = []

        def take(piece: ChoiceDelta) -> bool:
            found.append(piece)
            return len(found) > 1

        assert await soon(answering.run(take)) is False
        await asyncio.sleep(2.1)  # with what follows it is more than the upstream may take
        assert await soon(answering.run(take))
        answering.settle()
        assert text_of(found) == "ab"


# Health


@asynchronous
async def test_the_health_check_shuts_and_opens_the_upstream() -> None:
    async def health(line: Line) -> None:
        line.kept = True
        status = statuses.pop(0)
        await line.say(b"HTTP/1.1 %d Whatever\r\ncontent-length: 2\r\n\r\nok" % status)

    statuses = [200, 503, 503, 200]
    config = UpstreamHealthConfig(path="/health", interval_s=3600.0, failures=2)
    async with faking(health) as fake, upstream_of(fake, health=config) as upstream:
        await until(lambda: upstream.healthy is not None)
        assert fake.heard[0].path == "/health"
        assert upstream.healthy is True
        await upstream.check()
        assert upstream.available  # one may be a mishap
        await upstream.check()
        assert upstream.healthy is False
        assert not upstream.available
        with pytest.raises(UpstreamError) as error:
            await soon(pieces_of(upstream))
        assert (error.value.reason, error.value.status) == ("unhealthy", 503)
        await upstream.check()
        assert upstream.available
        assert fake.connections == 1


@asynchronous
async def test_one_that_cannot_be_reached_is_not_well() -> None:
    async with faking(hangs) as fake:
        url = fake.url
    config = UpstreamHealthConfig(path="/health", interval_s=0.01, timeout_s=0.5, failures=2)
    async with upstream_of(url, health=config) as upstream:
        await until(lambda: upstream.healthy is False)


@asynchronous
async def test_what_is_asked_of_it_is_refused_before_it_is_sent() -> None:
    async with faking(streams()) as fake, upstream_of(fake) as upstream:
        answering = UpstreamGeneration(exchange(template={"tone": "dry"}), upstream)
        with pytest.raises(ApiError) as error:
            await answering.begin()
        assert error.value.parameter == "chat_template_kwargs"
        answering.settle(error.value)
        assert fake.heard == []
