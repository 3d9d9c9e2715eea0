"""A server whose model is served by an upstream, in the place of an engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, cast

import pytest

from headrace.config import ModelConfig
from headrace.config.routing_section import RoutingConfig, RuleConfig
from headrace.config.upstream_section import UpstreamFeatures, UpstreamRetries, UpstreamTimeouts
from headrace.server.server import Server
from tests.support.fake_upstream import (
    ANSWER,
    Fake,
    Handler,
    Line,
    breaks,
    chunk,
    config,
    faking,
    hangs,
    refuses,
    says,
    soon,
    sse,
    streams,
    used,
)
from tests.support.running_server import (
    CHAT,
    FakeEngine,
    Running,
    asynchronous,
    config_of,
    ended,
    request,
    until,
)

STREAM = CHAT | {"stream": True}


@contextlib.asynccontextmanager
async def through(
    *answers: Handler, routing: RoutingConfig | None = None, **changes: Any
) -> AsyncGenerator[tuple[Running, Fake]]:
    """A server that serves the fake's model, and nothing else: no engine of ours runs."""
    async with faking(*answers) as fake:
        with tempfile.TemporaryDirectory() as folder:
            models = {"mini": ModelConfig(upstream=config(fake, **changes))}
            server = Server(config_of(Path(folder), models=models, routing=routing or RoutingConfig()))
            task = asyncio.create_task(server.run(signals=False))
            running = Running(server, FakeEngine(), cast(Any, server.fleet), task)
            try:
                await until(lambda: server.context.is_ready or task.done())
                yield running, fake
                await running.settled()
                upstream = server.fleet.served["mini"].upstream
                assert upstream is not None
                assert upstream.slots.taken == upstream.slots.waiting == 0
            finally:
                for client in running.clients:
                    client.leave()
                server.end()
                await task


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


@pytest.mark.parametrize("routed", [False, True])
@asynchronous
async def test_an_answer_that_breaks_is_asked_for_anew_unless_the_client_has_heard_of_it(routed: bool) -> None:
    routing = RoutingConfig(rules=(RuleConfig("all", variant="mini"),)) if routed else None
    async with through(breaks, streams(), breaks, streams(), routing=routing) as (running, fake):
        whole = await soon(running.ask("POST", "/v1/chat/completions", CHAT))
        assert whole.json["choices"][0]["message"]["content"] == "Hello!"
        assert whole.json["usage"]["completion_tokens"] == 3
        assert len(fake.heard) == 2
        streamed = await soon(running.ask("POST", "/v1/chat/completions", STREAM))
        assert streamed.text == "Hello"
        assert b"error" in streamed.body
        assert len(fake.heard) == 3


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
        async with through(refuses(status), retries=UpstreamRetries(most=0)) as (running, _):
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
    async with through(hangs, timeouts=UpstreamTimeouts()) as (running, _):
        answer = await soon(running.ask("POST", "/v1/chat/completions", STREAM | {"deadline_ms": 100}))
        assert answer.status == 200
        assert answer.events[-1]["choices"][0]["finish_reason"] == "deadline"


@asynchronous
async def test_the_model_is_listed_and_the_metrics_need_no_engine() -> None:
    async with through(streams(), context=4096) as (running, _):
        (model,) = (await soon(running.ask("GET", "/v1/models"))).json["data"]
        assert (model["id"], model["max_model_len"], model["served_by"]) == ("mini", 4096, "upstream")
        assert (await soon(running.ask("GET", "/metrics"))).status == 200
        assert (await soon(running.ask("GET", "/health/ready"))).json["models"] == ["mini"]


@asynchronous
async def test_completions_and_embeddings_are_answered_too() -> None:
    text = {"choices": [{"index": 0, "text": "on", "finish_reason": "stop"}]}
    vectors = json.dumps({"data": [{"index": 0, "embedding": [3.0, 4.0]}], "usage": {"prompt_tokens": 2}}).encode()
    takes = UpstreamFeatures(completions=True, embeddings=True)
    async with through(streams(text, used()), says(vectors, kind="application/json"), takes=takes) as (running, fake):
        answer = await soon(running.ask("POST", "/v1/completions", {"prompt": "Go"}))
        assert answer.json["choices"][0]["text"] == "on"
        answer = await soon(running.ask("POST", "/v1/embeddings", {"input": "Go"}))
        assert answer.json["usage"]["prompt_tokens"] == 2
        assert [heard.path for heard in fake.heard] == ["/v1/completions", "/v1/embeddings"]


@asynchronous
async def test_tokens_of_a_chat_are_counted_or_estimated() -> None:
    for changes in ({}, {"tokenizer": "mini"}):
        async with through(streams(), **changes) as (running, fake):
            body = {"messages": CHAT["messages"]}
            answer = await soon(running.ask("POST", "/v1/messages/count_tokens", body))
            assert answer.json["input_tokens"] > 0
            assert (await soon(running.ask("POST", "/tokenize", body))).status == (200 if changes else 400)
            assert fake.heard == []


@asynchronous
async def test_what_only_an_engine_of_ours_can_do_is_refused() -> None:
    async with through(streams()) as (running, fake):
        body = {"prompt": "a", "continuations": ["b"]}
        answer = await soon(running.ask("POST", "/v1/score", body))
        assert (answer.status, answer.error["param"]) == (400, "model")
        assert fake.heard == []
