"""A server whose answers come from an upstream: the surface that the delivery of answers needs is there, all of it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

import pytest

from millrace.gateway import text
from millrace.gateway.upstreams.answering import UpstreamAnswering
from millrace.gateway.upstreams.shapes import Retries, Timeouts
from tests.gateway.edging import CHAT, Running, asynchronous, ended, request, serving, until
from tests.gateway.upstreams.faking import (
    ANSWER,
    Fake,
    Handler,
    Line,
    chunk,
    faking,
    hangs,
    refuses,
    soon,
    sse,
    streams,
    upstream_of,
    used,
)

STREAM = CHAT | {"stream": True}


@contextlib.asynccontextmanager
async def through(*answers: Handler, **changes: Any) -> AsyncGenerator[tuple[Running, Fake]]:
    async with faking(*answers) as fake, upstream_of(fake, **changes) as upstream, serving() as running:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(text, "Answering", partial(UpstreamAnswering, upstream=upstream))
            yield running, fake


@asynchronous
async def test_chats_are_answered_whole_and_as_streams() -> None:
    async with through(streams()) as (running, _):
        finished = ended("finished")
        whole = await soon(running.ask("POST", "/v1/chat/completions", CHAT))
        assert whole.json["choices"][0]["message"]["content"] == "Hello!"
        assert whole.json["usage"]["completion_tokens"] == 3
        assert whole.json["model"] == "mini"
        assert "prefill" in whole.headers["server-timing"]
        streamed = await soon(running.ask("POST", "/v1/chat/completions", STREAM))
        assert streamed.text == "Hello!"
        assert ended("finished") == finished + 2


@asynchronous
async def test_other_dialects_are_answered_too() -> None:
    calls = [
        chunk(delta={"reasoning": "hm"}),
        chunk("Hi"),
        chunk(delta={"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "look", "arguments": '{"a":1}'}}]}),
        chunk(finish="stop"),
        used(completion_tokens=30),
    ]
    tool = {"name": "look", "input_schema": {"type": "object"}}
    body = {"messages": CHAT["messages"], "max_tokens": 50, "tools": [tool], "thinking": {"type": "adaptive"}}
    async with through(streams(*calls)) as (running, _):
        answer = (await soon(running.ask("POST", "/v1/messages", body))).json
        assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use"]
        assert answer["content"][2]["input"] == {"a": 1}
        assert answer["stop_reason"] == "tool_use"
        assert answer["usage"]["output_tokens"] == 30
        events = await soon(running.ask("POST", "/v1/messages", body | {"stream": True}))
        assert b'"partial_json":"{\\"a\\":1}"' in events.body
        assert b"message_stop" in events.body


@asynchronous
async def test_an_error_before_the_first_word_has_its_status() -> None:
    for status, ours in ((400, 400), (429, 429), (500, 502), (503, 503)):
        async with through(refuses(status), retries=Retries(most=0)) as (running, _):
            answer = await soon(running.ask("POST", "/v1/chat/completions", STREAM))
            assert answer.status == ours
            if status in (429, 503):
                assert answer.headers["retry-after"] == "1"


@asynchronous
async def test_an_error_after_it_is_an_event() -> None:
    async with through(streams(chunk("Hel"), done=False)) as (running, _):
        answer = await soon(running.ask("POST", "/v1/chat/completions", STREAM))
        assert answer.status == 200
        assert answer.text == "Hel"
        assert answer.events[-1]["error"]["code"] == "upstream_broke_off"


@asynchronous
async def test_a_client_that_leaves_ends_the_upstreams_work() -> None:
    async def begins(line: Line) -> None:
        await line.head()
        await line.say(sse(ANSWER[1], done=False))
        await line.gone()

    for handler in (hangs, begins):
        async with through(handler) as (running, fake):
            gone = ended("gone")
            client = await running.client()
            await client.send(request("POST", "/v1/chat/completions", STREAM))
            await until(lambda fake=fake: bool(fake.heard))
            client.leave()
            await until(lambda fake=fake: not fake.tasks)
            await until(lambda gone=gone: ended("gone") == gone + 1)


@asynchronous
async def test_a_deadline_ends_the_answer_in_the_dialects_way() -> None:
    async with through(hangs, timeouts=Timeouts()) as (running, _):
        answer = await soon(running.ask("POST", "/v1/chat/completions", STREAM | {"deadline_ms": 100}))
        assert answer.status == 200
        assert answer.events[-1]["choices"][0]["finish_reason"] == "deadline"
