"""Answers of upstreams as pieces: text, reasoning, calls, log-probabilities, ends and usage, in every style."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.config.upstream_section import UpstreamFeatures
from headrace.engine.interface.sampling import SamplingParams
from headrace.gateway.api_errors import ApiError
from headrace.gateway.requests.text_request import Choice, ChoiceDelta, TokenUsage, Tool, ToolCall
from headrace.gateway.serving.upstream_answers.upstream_generation import UpstreamGeneration
from headrace.gateway.upstreams.upstream_errors import BrokenStreamError, UpstreamError
from headrace.server.api.chat_completions import ChatStream
from tests.support.fake_upstream import (
    ANSWER,
    Handler,
    answered,
    chunk,
    exchange,
    faking,
    kept,
    pieces_of,
    says,
    sse,
    streams,
    text_of,
    tokenizer,
    upstream_of,
    used,
)
from tests.support.running_server import asynchronous

LOOK = Tool("look")


def counts(usage: TokenUsage) -> tuple[int, int]:
    return usage.prompt_tokens, usage.output_tokens


async def one(handler: Handler, *, takes: UpstreamFeatures | None = None, **asked: Any) -> Choice:
    async with faking(handler) as fake, upstream_of(fake, takes=takes or UpstreamFeatures()) as upstream:
        (choice,) = await answered(upstream, **asked)
        return choice


async def pieces(handler: Handler, **asked: Any) -> list[ChoiceDelta]:
    async with faking(handler) as fake, upstream_of(fake) as upstream:
        return await pieces_of(upstream, **asked)


@asynchronous
async def test_a_stream_becomes_pieces_and_its_end_has_the_usage() -> None:
    found = await pieces(streams())
    assert [piece.content for piece in found] == ["Hel", "lo", "!", ""]
    assert [piece.finish for piece in found] == [None, None, None, "stop"]
    assert found[-1].usage is not None
    assert counts(found[-1].usage) == (12, 3)


@asynchronous
async def test_what_is_sent_is_a_streamed_request_with_the_key() -> None:
    async with faking(streams()) as fake, upstream_of(fake, key="sk-1", headers={"X-Team": "a"}) as upstream:
        await answered(upstream)
        (heard,) = fake.heard
        assert (heard.method, heard.path) == ("POST", "/v1/chat/completions")
        assert heard.headers["authorization"] == "Bearer sk-1"
        assert heard.headers["x-team"] == "a"
        assert heard.headers["accept-encoding"] == "identity"
        assert heard.json["model"] == "theirs"
        assert heard.json["stream_options"] == {"include_usage": True}


@asynchronous
async def test_a_key_may_have_a_header_of_its_own() -> None:
    async with faking(streams()) as fake, upstream_of(fake, key="sk-1", key_header="api-key") as upstream:
        await answered(upstream)
        assert fake.heard[0].headers["api-key"] == "sk-1"
        assert "authorization" not in fake.heard[0].headers


@asynchronous
async def test_connections_are_kept_between_requests() -> None:
    async with faking(kept(sse(*ANSWER, used()))) as fake, upstream_of(fake) as upstream:
        for _ in range(5):
            (choice,) = await answered(upstream)
            assert choice.content == "Hello!"
        assert len(fake.heard) == 5
        assert fake.connections == 1


@asynchronous
async def test_an_answer_that_is_not_streamed_is_read_as_well() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a":1}'}}
    message = {"role": "assistant", "content": "Hi", "reasoning_content": "hm", "tool_calls": [call]}
    body = {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}], "usage": used()["usage"]}
    whole = says(json.dumps(body).encode(), kind="application/json")
    for takes in (UpstreamFeatures(stream=False), UpstreamFeatures()):  # whether it was asked for or not
        choice = await one(whole, takes=takes, tools=(LOOK,))
        assert (choice.content, choice.reasoning, choice.finish) == ("Hi", "hm", "tool_calls")
        assert choice.calls == [ToolCall("c1", "look", '{"a":1}')]
        assert counts(choice.usage) == (12, 3)


@asynchronous
async def test_completions_are_texts() -> None:
    said = [{"choices": [{"index": 0, "text": text, "finish_reason": None}]} for text in ("a", "b")]
    end = {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}
    choice = await one(streams(*said, end, used()), takes=UpstreamFeatures(completions=True), prompts=["Say"])
    assert (choice.content, choice.finish) == ("ab", "length")


@asynchronous
async def test_a_prompt_is_put_before_its_answers_where_the_upstream_does_not() -> None:
    said = [{"choices": [{"index": index, "text": f"<{index}>", "finish_reason": None}]} for index in (1, 0, 2, 3)]
    ends = [{"choices": [{"index": index, "text": "", "finish_reason": "stop"}]} for index in range(4)]
    async with (
        faking(streams(*said, *ends)) as fake,
        upstream_of(fake, takes=UpstreamFeatures(completions=True)) as upstream,
    ):
        found = await answered(upstream, prompts=["one", "two"], n=2, echo=True)
        assert [choice.content for choice in found] == ["one<0>", "one<1>", "two<2>", "two<3>"]


@asynchronous
async def test_several_choices_come_in_any_order_and_share_the_usage() -> None:
    said = [chunk("a", index=1), chunk("b", index=0), chunk("c", index=1), chunk(index=1, finish="stop")]
    found = await pieces(streams(*said, chunk(index=0, finish="length"), used(completion_tokens=3)), n=2)
    assert [text_of(found, index) for index in (0, 1)] == ["b", "ac"]
    ends = {piece.index: piece for piece in found if piece.finish is not None}
    assert [ends[index].finish for index in (0, 1)] == ["length", "stop"]
    usages = [ends[index].usage or TokenUsage() for index in (0, 1)]
    assert sum(usage.output_tokens for usage in usages) == 3
    assert [usage.prompt_tokens for usage in usages] == [12, 12]


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
@asynchronous
async def test_reasoning_has_two_names(field: str) -> None:
    choice = await one(streams(chunk(delta={field: "hm"}), chunk("Hi"), chunk(finish="stop"), used()))
    assert (choice.reasoning, choice.content) == ("hm", "Hi")


@asynchronous
async def test_reasoning_that_nobody_wants_is_left_out() -> None:
    found = await pieces(
        streams(chunk(delta={"reasoning": "hm"}), chunk("Hi"), chunk(finish="stop"), used()), think=False
    )
    assert "".join(piece.reasoning for piece in found) == ""
    assert text_of(found) == "Hi"


@asynchronous
async def test_contents_may_be_parts_and_refusals_are_text() -> None:
    parts = chunk(delta={"content": [{"type": "text", "text": "a"}, {"type": "image"}, 3]})
    choice = await one(streams(parts, chunk(delta={"refusal": "no"}), chunk(finish="stop"), used()))
    assert choice.content == "ano"


# Tool calls


def calling(*calls: dict[str, Any]) -> dict[str, Any]:
    return chunk(delta={"tool_calls": list(calls)})


CALLS: dict[str, list[dict[str, Any]]] = {
    "as OpenAI": [
        calling({"index": 0, "id": "c1", "type": "function", "function": {"name": "look", "arguments": ""}}),
        calling({"index": 0, "function": {"arguments": '{"a"'}}),
        calling({"index": 0, "function": {"arguments": ":1}"}}),
        calling({"index": 1, "id": "c2", "function": {"name": "wait", "arguments": "{}"}}),
    ],
    "ids and names again and again": [
        calling({"index": 0, "id": "c1", "function": {"name": "look", "arguments": '{"a"'}}),
        calling({"index": 0, "id": "c1", "function": {"name": "look", "arguments": ":1}"}}),
        calling({"index": 1, "id": "c2", "function": {"name": "wait", "arguments": "{}"}}),
    ],
    "no indices": [
        calling({"id": "c1", "function": {"name": "look", "arguments": '{"a"'}}),
        calling({"function": {"arguments": ":1}"}}),
        calling({"id": "c2", "function": {"name": "wait", "arguments": "{}"}}),
    ],
    "one index for all": [
        calling({"index": 0, "id": "c1", "function": {"name": "look", "arguments": '{"a":1}'}}),
        calling({"index": 0, "id": "c2", "function": {"name": "wait", "arguments": "{}"}}),
    ],
    "indices from one": [
        calling({"index": 1, "id": "c1", "function": {"name": "look", "arguments": '{"a":1}'}}),
        calling({"index": 2, "id": "c2", "function": {"name": "wait", "arguments": "{}"}}),
    ],
    "late names": [
        calling({"index": 0, "id": "c1", "function": {"arguments": '{"a"'}}),
        calling({"index": 0, "function": {"name": "look", "arguments": ":1}"}}),
        calling({"index": 1, "id": "c2", "function": {"name": "wait", "arguments": "{}"}}),
    ],
    "objects, all at once": [
        calling(
            {"index": 0, "id": "c1", "function": {"name": "look", "arguments": {"a": 1}}},
            {"index": 1, "id": "c2", "function": {"name": "wait", "arguments": {}}},
        ),
    ],
}


@pytest.mark.parametrize("how", CALLS)
@asynchronous
async def test_tool_calls_in_every_style_are_the_same(how: str) -> None:
    found = await pieces(streams(*CALLS[how], chunk(finish="stop"), used(completion_tokens=20)), tools=(LOOK,))
    choice = Choice(0)
    for piece in found:
        choice.add(piece)
    assert choice.calls == [ToolCall("c1", "look", '{"a":1}'), ToolCall("c2", "wait", "{}")]
    assert choice.finish == "tool_calls"


@asynchronous
async def test_calls_without_ids_get_some() -> None:
    said = [calling({"index": place, "function": {"name": "look", "arguments": "{}"}}) for place in (0, 1)]
    choice = await one(streams(*said, chunk(finish="tool_calls"), used()), tools=(LOOK,))
    assert len({call.id for call in choice.calls}) == 2
    assert all(call.id.startswith("call_") for call in choice.calls)


@asynchronous
async def test_a_second_call_is_left_out_where_one_is_wanted() -> None:
    choice = await one(
        streams(*CALLS["as OpenAI"], chunk(finish="tool_calls"), used()), tools=(LOOK,), parallel_calls=False
    )
    assert [call.name for call in choice.calls] == ["look"]
    assert choice.finish == "tool_calls"


@asynchronous
async def test_a_tool_that_had_to_be_called_just_ends_the_answer() -> None:
    said = streams(*CALLS["one index for all"], chunk(finish="tool_calls"), used())
    choice = await one(said, tools=(LOOK,), choosing="required", only_tool="look")
    assert choice.finish == "stop"


# Log-probabilities


@asynchronous
async def test_log_probabilities_of_chats() -> None:
    content = [
        {
            "token": "Hi",
            "logprob": -0.5,
            "bytes": [72, 105],
            "top_logprobs": [
                {"token": "Hi", "logprob": -0.5, "bytes": [72, 105]},
                {"token": "Ho", "logprob": None},
                {"token": "Ha", "logprob": -3},
            ],
        }
    ]
    said = streams(chunk("Hi", logprobs={"content": content}), chunk(finish="stop", logprobs=None), used())
    choice = await one(said, sampling=SamplingParams(logprobs=2))
    assert choice.logprobs is not None
    (found,) = choice.logprobs
    assert (found.text, found.bytes, found.logprob, found.shown) == ("Hi", b"Hi", -0.5, "Hi")
    assert found.top == [("Hi", b"Hi", -0.5), ("Ho", b"Ho", -9999.0)]


@asynchronous
async def test_log_probabilities_of_completions() -> None:
    logprobs = {
        "tokens": ["a", "b"],
        "token_logprobs": [None, -1.0],
        "top_logprobs": [None, {"b": -1.0, "c": -0.2}],
        "text_offset": [0, 1],
    }
    said = {"choices": [{"index": 0, "text": "ab", "finish_reason": "stop", "logprobs": logprobs}]}
    takes = UpstreamFeatures(completions=True, echo=True)
    choice = await one(streams(said), takes=takes, prompts=["a"], echo=True, sampling=SamplingParams(logprobs=2))
    assert choice.logprobs is not None
    first, second = choice.logprobs
    assert first.logprob is None
    assert second.top == [("c", b"c", -0.2), ("b", b"b", -1.0)]


@asynchronous
async def test_log_probabilities_that_nobody_asked_for_are_left_out_and_wrong_ones_are_an_error() -> None:
    wrong = {"content": [{"logprob": "much"}]}
    assert (await one(streams(chunk("Hi", logprobs=wrong), chunk(finish="stop"), used()))).logprobs is None
    with pytest.raises(UpstreamError, match="log-probabilities"):
        await one(streams(chunk("Hi", logprobs=wrong), chunk(finish="stop")), sampling=SamplingParams(logprobs=0))


# Ends


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("stop", "stop"),
        ("eos_token", "stop"),
        ("STOP", "stop"),
        ("length", "length"),
        ("max_tokens", "length"),
        ("deadline", "deadline"),
        ("tool_calls", "stop"),  # though it called nothing
        ("something new", "stop"),
    ],
)
@asynchronous
async def test_ends_have_our_names(theirs: str, ours: str) -> None:
    assert (await one(streams(chunk("Hi"), chunk(finish=theirs), used()))).finish == ours


@pytest.mark.parametrize("field", ["stop_reason", "matched_stop"])
@asynchronous
async def test_the_stop_text_is_told_where_the_upstream_says_it(field: str) -> None:
    fields: dict[str, Any] = {field: "END"}
    assert (await one(streams(chunk("Hi", finish="stop", **fields), used()), stop=("END",))).stop == "END"
    fields[field] = 128009  # a token
    assert (await one(streams(chunk("Hi", finish="stop", **fields), used()), stop=("END",))).stop is None


@asynchronous
async def test_a_filtered_answer_is_an_error_that_says_so() -> None:
    with pytest.raises(BrokenStreamError) as error:
        await pieces(streams(chunk("Hi"), chunk(finish="content_filter")))
    assert (error.value.status, error.value.code) == (400, "content_filter")


@asynchronous
async def test_an_end_without_a_reason_is_one_where_the_upstream_says_done() -> None:
    assert (await one(streams(chunk("Hi")))).finish == "stop"


@asynchronous
async def test_text_after_the_end_is_left_out() -> None:
    found = await pieces(streams(chunk("Hi"), chunk(finish="stop"), chunk("more"), used()))
    assert text_of(found) == "Hi"


@asynchronous
async def test_done_may_be_missing_or_come_again() -> None:
    for said in (
        streams(*ANSWER, used(), done=False),
        says(sse(*ANSWER, used()) + sse() + sse()),
        says(sse(*ANSWER, used()) + b"data: what?\n\n"),
        says(sse(*ANSWER, used()).removesuffix(b"\n\n")),
    ):
        assert (await one(said)).content == "Hello!"


@asynchronous
async def test_an_answer_without_a_word_is_one() -> None:
    choice = await one(streams(chunk(finish="stop"), used(completion_tokens=0)))
    assert (choice.content, choice.finish, counts(choice.usage)) == ("", "stop", (12, 0))


# Usage


async def usage_of(handler: Handler, *, exact: bool = False, **asked: Any) -> tuple[TokenUsage, dict[str, Any]]:
    async with faking(handler) as fake, upstream_of(fake, tokenizer=tokenizer() if exact else None) as upstream:
        (choice,) = await answered(upstream, **asked)
        return choice.usage, upstream.state()


@asynchronous
async def test_a_usage_that_is_missing_is_estimated_or_counted_and_marked() -> None:
    usage, state = await usage_of(streams(*ANSWER))
    assert usage.output_tokens == 3  # chunks
    assert usage.prompt_tokens > 0
    assert (state["usage_estimated"], state["usage_counted"]) == (1, 0)
    usage, state = await usage_of(streams(*ANSWER), exact=True)
    assert usage.output_tokens == len(tokenizer().encode("Hello!", False))
    assert usage.prompt_tokens == len(
        tokenizer().encode(tokenizer().apply_template([{"role": "user", "content": "Hello there"}]), False)
    )
    assert (state["usage_estimated"], state["usage_counted"]) == (0, 1)


@asynchronous
async def test_long_chunks_are_estimated_by_their_length() -> None:
    usage, _ = await usage_of(streams(chunk("word " * 80), chunk(finish="stop")))
    assert usage.output_tokens == 100


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("told", [{"completion_tokens": 100_000}, {"completion_tokens": -5}, {"prompt_tokens": 10**9}])
@asynchronous
async def test_a_usage_that_cannot_be_is_not_used_and_flagged(told: dict[str, int], exact: bool) -> None:
    usage, state = await usage_of(streams(*ANSWER, used(**told)), exact=exact)
    assert 0 < usage.output_tokens < 10
    assert 0 < usage.prompt_tokens < 100
    assert state["usage_wrong"] == 1


@asynchronous
async def test_too_small_a_usage_is_flagged() -> None:
    said = [chunk("a") for _ in range(100)]
    usage, state = await usage_of(streams(*said, chunk(finish="stop"), used(completion_tokens=1)))
    assert usage.output_tokens == 100
    assert state["usage_wrong"] == 1


@pytest.mark.parametrize("garbage", ["3", {"completion_tokens": "many"}, [], {}])
@asynchronous
async def test_a_usage_that_cannot_be_read_is_a_missing_one(garbage: Any) -> None:
    usage, state = await usage_of(streams(*ANSWER, {"choices": [], "usage": garbage}))
    assert usage.output_tokens == 3
    assert state["usage_estimated"] == 1


@asynchronous
async def test_hidden_reasoning_is_no_wrong_usage() -> None:
    told = used(completion_tokens=5000, completion_tokens_details={"reasoning_tokens": 4990})
    usage, state = await usage_of(streams(*ANSWER, told))
    assert (usage.output_tokens, usage.reasoning_tokens) == (5000, 4990)
    assert state["usage_wrong"] == 0


@pytest.mark.parametrize(
    "cached",
    [{"prompt_tokens_details": {"cached_tokens": 8}}, {"prompt_cache_hit_tokens": 8, "prompt_cache_miss_tokens": 4}],
)
@asynchronous
async def test_cached_tokens_are_told(cached: dict[str, Any]) -> None:
    usage, _ = await usage_of(streams(*ANSWER, used(**cached)))
    assert usage.cached_tokens == 8


@asynchronous
async def test_a_usage_in_every_chunk_is_read_from_the_last() -> None:
    said = [{**chunk(text), "usage": used(completion_tokens=place)["usage"]} for place, text in enumerate("abc", 1)]
    usage, _ = await usage_of(streams(*said, {**chunk(finish="stop"), "usage": used(completion_tokens=4)["usage"]}))
    assert usage.output_tokens == 4


# Tokens of pieces


def brought(found: list[ChoiceDelta], index: int = 0) -> list[int]:
    return [piece.tokens for piece in found if piece.index == index]


@asynchronous
async def test_pieces_say_what_they_bring_and_the_last_puts_the_sum_right() -> None:
    for told, last in ((3, 0), (9, 6), (2, -1)):
        assert brought(await pieces(streams(*ANSWER, used(completion_tokens=told)))) == [1, 1, 1, last]
    assert brought(await pieces(streams(*ANSWER))) == [1, 1, 1, 0]  # nothing is told
    calls = await pieces(streams(*CALLS["as OpenAI"], chunk(finish="stop"), used(completion_tokens=20)), tools=(LOOK,))
    assert sum(brought(calls)) == 20
    assert all(piece.tokens > 0 for piece in calls)


@asynchronous
async def test_long_pieces_are_counted_by_the_tokenizer_or_their_length() -> None:
    said = streams(chunk("ab"), chunk("word " * 8), chunk(finish="stop"), used(completion_tokens=12))
    assert brought(await pieces(said)) == [1, 10, 1]
    count = len(tokenizer().encode("word " * 8, False))
    async with faking(said) as fake, upstream_of(fake, tokenizer=tokenizer()) as upstream:
        assert brought(await pieces_of(upstream)) == [1, count, 11 - count]


@asynchronous
async def test_tokens_that_no_piece_shows_come_with_the_next_one() -> None:
    said = (chunk(delta={"reasoning": "hm, let me see"}), chunk("Hi"), chunk(finish="stop"), used(completion_tokens=9))
    found = await pieces(streams(*said), think=False)
    assert [piece.content for piece in found] == ["Hi", ""]
    assert brought(found) == [4, 5]


@asynchronous
async def test_each_choice_s_pieces_make_up_its_own_usage() -> None:
    said = [chunk("a", index=1), chunk("b", index=0), chunk("c", index=1), chunk(index=1, finish="stop")]
    found = await pieces(streams(*said, chunk(index=0, finish="length"), used(completion_tokens=30)), n=2)
    ends = {piece.index: piece.usage for piece in found if piece.usage is not None}
    for index, usage in ends.items():
        assert sum(brought(found, index)) == usage.output_tokens
    assert sum(usage.output_tokens for usage in ends.values()) == 30


@asynchronous
async def test_a_prompt_that_the_upstream_repeats_brings_no_tokens() -> None:
    said = [{"choices": [{"index": 0, "text": text, "finish_reason": None}]} for text in ("Say ", "something", " a")]
    end = {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}
    takes = UpstreamFeatures(completions=True, echo=True)
    async with (
        faking(streams(*said, end, used(completion_tokens=1))) as fake,
        upstream_of(fake, takes=takes) as upstream,
    ):
        found = await pieces_of(upstream, prompts=["Say something"], echo=True)
        assert text_of(found) == "Say something a"
        assert brought(found) == [0, 0, 0, 1]
        assert sum(brought(found)) == 1


@asynchronous
async def test_how_far_an_answer_is_can_be_asked_while_its_bytes_are_relayed() -> None:
    async with faking(streams()) as fake, upstream_of(fake) as upstream:
        answering = UpstreamGeneration(exchange(stream=True), upstream)
        await answering.begin()
        assert answering.output_tokens == 0
        while not await answering.relay(lambda data: False, ChatStream):
            pass
        assert answering.output_tokens == 3 == answering.exchange.usage.output_tokens
        answering.settle()


@asynchronous
async def test_a_prompt_beyond_the_context_is_refused_before_anything_is_sent() -> None:
    async with faking(streams()) as fake, upstream_of(fake, tokenizer=tokenizer(), context=16) as upstream:
        with pytest.raises(ApiError) as error:
            await answered(upstream, messages=[{"role": "user", "content": "word " * 100}])
        assert (error.value.code, error.value.parameter) == ("context_length_exceeded", "messages")
        assert fake.heard == []
