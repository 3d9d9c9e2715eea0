"""An upstream's own bytes, handed on: what is replaced, what is not, and what a client finds in the end."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.config.upstream_section import UpstreamFeatures, UpstreamRetries, UpstreamTimeouts
from headrace.engine.interface.sampling import SamplingParams
from headrace.gateway.requests.text_request import Tool
from headrace.gateway.serving.upstream_answers.relay import ChunkRenamer
from headrace.gateway.serving.upstream_answers.upstream_generation import UpstreamGeneration
from headrace.gateway.upstreams.upstream_errors import BrokenStreamError, UpstreamError
from headrace.server.api.chat_completions import ChatStream
from tests.support.fake_upstream import (
    ANSWER,
    Line,
    chunk,
    exchange,
    faking,
    pieces_of,
    refuses,
    relayed,
    says,
    soon,
    sse,
    streams,
    text_of,
    upstream_of,
    used,
)
from tests.support.running_server import asynchronous


def events(data: bytes) -> list[Any]:
    blocks = data.split(b"\n\n")
    assert blocks.pop() == b""
    assert blocks.pop() == b"data: [DONE]"
    return [json.loads(block.removeprefix(b"data: ")) for block in blocks]


def text(found: list[Any]) -> str:
    return "".join(each["choices"][0]["delta"].get("content") or "" for each in found if each["choices"])


@asynchronous
async def test_chunks_go_out_as_they_came_but_for_the_name_and_the_id() -> None:
    strange = chunk("x", extra={"deep": [1, None]}) | {"service_tier": "default"}
    said = (*ANSWER[:-1], strange, ANSWER[-1], used())
    async with faking(streams(*said)) as fake, upstream_of(fake) as upstream:
        data = await soon(relayed(upstream))
        wanted = sse(*ANSWER[:-1], strange, ANSWER[-1])
        assert data == wanted.replace(b"chatcmpl-theirs", b"chatcmpl-ours").replace(b'"theirs"', b'"mini@far"')
        state = upstream.state()
        assert (state["usage_estimated"], state["usage_wrong"]) == (0, 0)


@asynchronous
async def test_nothing_is_replaced_where_nothing_is_to_be() -> None:
    async with faking(streams()) as fake, upstream_of(fake) as upstream:
        assert await soon(relayed(upstream, rename=False)) == sse(*ANSWER)


@asynchronous
async def test_the_usage_is_noted_and_told_to_a_client_that_asks() -> None:
    async with faking(streams()) as fake, upstream_of(fake) as upstream:
        for asks in (False, True):
            asked = exchange(stream=True, include_usage=asks)
            answering = UpstreamGeneration(asked, upstream)
            await answering.begin()
            found: list[bytes] = []
            assert await soon(answering.relay(lambda data, found=found: found.append(data) is None, ChatStream))
            answering.settle()
            assert (asked.usage.prompt_tokens, asked.usage.output_tokens) == (12, 3)
            assert asked.finish == "stop"
            assert answering.log_fields() == {"attempts": 1, "usage_from": "told"}
            last = events(b"".join(found))[-1]
            assert bool(last.get("usage")) == asks
            if asks:
                assert last["usage"]["completion_tokens"] == 3
                assert last["id"] == "chatcmpl-ours"
                assert last["choices"] == []


@asynchronous
async def test_a_usage_that_is_missing_or_wrong_is_ours() -> None:
    for said in (ANSWER, (*ANSWER, used(completion_tokens=10**6))):
        async with faking(streams(*said)) as fake, upstream_of(fake) as upstream:
            found = events(await soon(relayed(upstream, include_usage=True)))
            assert found[-1]["usage"]["completion_tokens"] == 3


@asynchronous
async def test_completions_are_handed_on_too() -> None:
    head = {"id": "cmpl-theirs", "object": "text_completion", "model": "theirs"}
    said = [
        head | {"choices": [{"index": 0, "text": word, "finish_reason": end}]}
        for word, end in (("a", None), ("", "stop"))
    ]
    async with (
        faking(streams(*said, used())) as fake,
        upstream_of(fake, takes=UpstreamFeatures(completions=True)) as upstream,
    ):
        found = events(await soon(relayed(upstream, prompts=["Say"])))
        assert [each["choices"][0]["text"] for each in found] == ["a", ""]
        assert {each["id"] for each in found} == {"cmpl-ours"}


@pytest.mark.parametrize(
    ("asked", "takes"),
    [
        ({"tools": (Tool("look"),), "parallel_calls": False}, UpstreamFeatures()),
        ({"think": False}, UpstreamFeatures()),
        ({"prompts": ["Say"], "echo": True}, UpstreamFeatures(completions=True)),
        ({}, UpstreamFeatures(stream=False)),
        ({"stream": False}, UpstreamFeatures()),
    ],
)
@asynchronous
async def test_what_is_changed_here_is_not_handed_on(asked: dict[str, Any], takes: UpstreamFeatures) -> None:
    async with faking(streams()) as fake, upstream_of(fake, takes=takes) as upstream:
        fields: dict[str, Any] = {"stream": True, **asked}
        answering = UpstreamGeneration(exchange(**fields), upstream)
        await answering.begin()
        assert not answering.can_relay()
        answering.settle()


@asynchronous
async def test_calls_log_probabilities_reasoning_and_several_choices_are_handed_on() -> None:
    call = {"index": 0, "id": "c1", "function": {"name": "look", "arguments": "{}"}}
    said = (
        chunk(delta={"reasoning": "hm"}),
        chunk("a", index=1, logprobs={"content": [{"token": "a", "logprob": -1.0, "bytes": [97]}]}),
        chunk(delta={"tool_calls": [call]}),
        chunk(finish="tool_calls"),
        chunk(index=1, finish="stop"),
    )
    async with faking(streams(*said, used())) as fake, upstream_of(fake) as upstream:
        asked: dict[str, Any] = {"n": 2, "tools": (Tool("look"),), "sampling": SamplingParams(logprobs=0)}
        found = events(await soon(relayed(upstream, **asked)))
        assert [each["choices"] for each in found[1:]] == [each["choices"] for each in said[1:]]
        assert found[0]["choices"][0]["delta"] == {"reasoning_content": "hm"}  # as our answers call it


@asynchronous
async def test_the_end_is_written_where_the_upstream_forgets_it_and_only_once() -> None:
    for said in (streams(*ANSWER, used(), done=False), says(sse(*ANSWER, used()) * 2), streams(*ANSWER, done=False)):
        async with faking(said) as fake, upstream_of(fake) as upstream:
            assert text(events(await soon(relayed(upstream)))) == "Hello!"


@asynchronous
async def test_pings_stay_here_and_carriage_returns_too() -> None:
    data = b": ping\r\n\r\n" + sse(*ANSWER, used(), end="\r\n")
    async with faking(says(data)) as fake, upstream_of(fake) as upstream:
        found = await soon(relayed(upstream))
        assert b"\r" not in found
        assert b"ping" not in found
        assert text(events(found)) == "Hello!"


@asynchronous
async def test_several_lines_of_data_stay_several() -> None:
    first = json.dumps(chunk("Hel"), separators=(",", ":")).encode()
    cut = first.index(b'"object"')
    data = b"data: " + first[:cut] + b"\ndata: " + first[cut:] + b"\n\n" + sse(*ANSWER[2:], used())
    async with faking(says(data)) as fake, upstream_of(fake) as upstream:
        found = await soon(relayed(upstream))
        lines = found.split(b"\n\n")[0].split(b"\n")
        assert (
            json.loads(b"\n".join(line.removeprefix(b"data: ") for line in lines))["choices"] == chunk("Hel")["choices"]
        )


@asynchronous
async def test_an_answer_that_did_not_stream_becomes_a_stream() -> None:
    body = {
        "choices": [{"index": 0, "message": {"content": "Hi"}, "finish_reason": "length"}],
        "usage": used()["usage"],
    }
    whole = says(json.dumps(body).encode(), kind="application/json")
    async with faking(whole) as fake, upstream_of(fake) as upstream:
        found = events(await soon(relayed(upstream, include_usage=True)))
        assert text(found) == "Hi"
        assert found[-2]["choices"][0]["finish_reason"] == "length"
        assert found[-1]["usage"]["completion_tokens"] == 3


@asynchronous
async def test_at_the_deadline_the_stream_ends_as_ours_do() -> None:
    async def stays(line: Line) -> None:
        await line.head()
        await line.say(sse(chunk("Hi"), done=False))
        await line.gone()

    async with faking(stays) as fake, upstream_of(fake) as upstream:
        found = events(await soon(relayed(upstream, deadline_s=0.2, include_usage=True)))
        assert text(found) == "Hi"
        assert found[-2]["choices"][0]["finish_reason"] == "deadline"
        assert found[-1]["usage"]["completion_tokens"] == 1


@asynchronous
async def test_before_the_first_byte_another_attempt_is_made_and_none_after_it() -> None:
    async with faking(refuses(503), streams()) as fake, upstream_of(fake) as upstream:
        assert text(events(await soon(relayed(upstream)))) == "Hello!"
        assert len(fake.heard) == 2
    async with faking(streams(chunk("Hel"), done=False)) as fake, upstream_of(fake) as upstream:
        found: list[bytes] = []
        with pytest.raises(BrokenStreamError) as error:
            await soon(relayed(upstream, found))
        assert len(fake.heard) == 1
        assert error.value.delivered[0].content == "Hel"


@asynchronous
async def test_an_error_within_the_stream_is_not_handed_on() -> None:
    failing = {"error": {"message": "CUDA at /srv/x/y.py", "type": "server_error"}}
    async with faking(streams(chunk("Hel"), failing)) as fake, upstream_of(fake) as upstream:
        found: list[bytes] = []
        with pytest.raises(UpstreamError) as error:
            await soon(relayed(upstream, found))
        assert b"CUDA" not in b"".join(found)
        assert error.value.reason == "failed"


@asynchronous
async def test_one_that_hangs_is_left() -> None:
    async def silent(line: Line) -> None:
        await line.head()
        await line.gone()

    timeouts = UpstreamTimeouts(first_s=0.1)
    async with (
        faking(silent) as fake,
        upstream_of(fake, timeouts=timeouts, retries=UpstreamRetries(most=0)) as upstream,
    ):
        with pytest.raises(UpstreamError) as error:
            await soon(relayed(upstream))
        assert error.value.reason == "timeout"


@asynchronous
async def test_nothing_is_read_while_the_client_does_not_read() -> None:
    async with faking(streams()) as fake, upstream_of(fake) as upstream:
        answering = UpstreamGeneration(exchange(stream=True), upstream)
        await answering.begin()
        found: list[bytes] = []
        stops = 0
        while not await soon(answering.relay(lambda data: found.append(data) is not None, ChatStream)):
            stops += 1
        answering.settle()
        assert text(events(b"".join(found))) == "Hello!"
        assert stops == len(found)


@asynchronous
async def test_pieces_and_bytes_say_the_same() -> None:
    said = [chunk(word) for word in 'a b  c \u00e9 \U0001f600 \n " \\'.split(" ")]
    async with (
        faking(streams(*said, chunk(finish="length"), used(completion_tokens=9))) as fake,
        upstream_of(fake) as upstream,
    ):
        assert text(events(await soon(relayed(upstream)))) == text_of(await soon(pieces_of(upstream)))


# Names


def renamed(*chunks: bytes) -> list[bytes]:
    names = ChunkRenamer("ours", "mini")
    return [names.take(each) for each in chunks]


def test_names_are_replaced_however_they_are_written() -> None:
    assert renamed(b'{"id": "a1", "model" :\t"big/\\u006dodel","x":1}') == [b'{"id": "ours", "model" :\t"mini","x":1}']


def test_names_that_change_are_replaced_too() -> None:
    found = renamed(b'{"id":"a","model":"m"}', b'{"id":"b","model":"m"}', b'{"model":"m","id":"a"}', b'{"model":"n"}')
    assert found == [
        b'{"id":"ours","model":"mini"}',
        b'{"id":"ours","model":"mini"}',
        b'{"model":"mini","id":"ours"}',
        b'{"model":"mini"}',
    ]


def test_texts_and_the_ids_of_calls_are_left_alone() -> None:
    inner = json.dumps({"content": '{"id":"a","model":"m"}'}).encode()
    call = b'{"choices":[{"delta":{"tool_calls":[{"id":"c1"}]}}],"id":"a","model":"m"}'
    found = renamed(b'{"id":"a","model":"m","choices":[%b]}' % inner, call)
    assert found[0] == b'{"id":"ours","model":"mini","choices":[%b]}' % inner
    assert found[1] == call.replace(b'"a"', b'"ours"').replace(b'"m"', b'"mini"')


def test_chunks_without_names_stay_as_they_are() -> None:
    said = [b'{"choices":[]}', b'{"id":7,"model":null}', b"nonsense"]
    assert renamed(*said) == said
