"""`/v1/messages`: what is read, refused and answered, checked with Anthropic's own client."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, cast

import anthropic
import pytest
from anthropic.types import Message
from pydantic import BaseModel

from headrace.config import RequestLimits
from headrace.gateway.api_errors import ApiError
from headrace.gateway.requests.text_request import ChoiceDelta, TextRequest, TokenUsage, ToolCallDelta
from headrace.gateway.serving.engine_answering import EngineAnswering
from headrace.server.api.block_events import BlockSplitter
from headrace.server.api.messages import (
    MessageStream,
    message_body,
    read_count_request,
    read_message_request,
    tool_use_id,
)
from headrace.server.api.messages_parameters import COUNT_TOKENS_PARAMETERS, MESSAGE_PARAMETERS
from headrace.server.http import body_parameters as parameters
from headrace.server.http.unknown_fields import UnknownFields
from tests.support.dialect_exchanges import USAGE, Wire, called, events_of, exchange_for, streamed, tokenizer, whole

LIMITS = RequestLimits()
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "How it is outside.", "input_schema": SCHEMA}
LEAST: dict[str, Any] = {"model": "mini", "max_tokens": 50, "messages": [{"role": "user", "content": "Hello"}]}


def asked_of(headers: dict[str, str] | None = None, **given: Any) -> TextRequest:
    return read_message_request(json.dumps({**LEAST, **given}).encode(), headers or {}, LIMITS)


def refused(**given: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        asked_of(**given)
    assert caught.value.status == 400
    return caught.value


def messages_of(*turns: tuple[str, Any], **given: Any) -> list[dict[str, Any]]:
    asked = asked_of(messages=[{"role": role, "content": content} for role, content in turns], **given)
    assert asked.messages is not None
    return asked.messages


# Reading


def test_reads_the_least_there_can_be() -> None:
    asked = asked_of()
    assert asked.model == "mini"
    assert asked.messages == [{"role": "user", "content": "Hello"}]
    assert (asked.max_tokens, asked.stream, asked.n, asked.choosing) == (50, False, 1, "auto")
    assert asked.sampling.temperature == 1.0


def test_reads_every_parameter_into_the_engines_words() -> None:
    asked = asked_of(
        {"anthropic-version": "2099-01-01", "x-headrace-priority": "3"},
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        metadata={"user_id": "u1"},
        stop_sequences=["END", "\n\n"],
        stream=True,
        temperature=0.5,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        seed=7,
        service_tier="auto",
        cache_control={"type": "ephemeral"},
        speed="fast",
        deadline_ms=1500,
        surface="agent",
        tools=[{**WEATHER, "strict": True, "cache_control": {"type": "ephemeral"}, "type": "custom"}],
        tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
        output_config={"effort": "low"},
    )
    assert asked.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert (asked.user, asked.metadata, asked.stop, asked.stream) == ("u1", {}, ("END", "\n\n"), True)
    sampling = asked.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 5, 0.9, 0.1)
    assert sampling.seed == 7
    assert (asked.profile, asked.surface, asked.deadline_s, asked.priority) == ("fast", "agent", 1.5, 3)
    assert [(tool.name, tool.description, tool.parameters, tool.strict) for tool in asked.tools] == [
        ("weather", "How it is outside.", SCHEMA, True)
    ]
    assert (asked.choosing, asked.only_tool, asked.parallel_calls) == ("required", "weather", False)
    assert asked.template_hints == {"reasoning_effort": "low"}


@pytest.mark.parametrize(
    ("thinking", "think"),
    [
        (None, False),
        ({"type": "disabled"}, False),
        ({"type": "enabled", "budget_tokens": 1024}, True),
        ({"type": "adaptive"}, None),
    ],
)
def test_thinking_is_asked_for(thinking: Any, think: bool | None) -> None:
    assert asked_of(thinking=thinking).think is think


@pytest.mark.parametrize(
    ("choice", "choosing", "parallel"),
    [
        ({"type": "auto"}, "auto", True),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
        ({"type": "any"}, "required", True),
        ({"type": "none"}, "none", True),
    ],
)
def test_reads_tool_choices(choice: Any, choosing: str, parallel: bool) -> None:
    asked = asked_of(tools=[WEATHER], tool_choice=choice)
    assert (asked.choosing, asked.only_tool, asked.parallel_calls) == (choosing, None, parallel)


@pytest.mark.parametrize("name", ["output_config", "output_format"])
def test_an_output_format_holds_the_answer(name: str) -> None:
    wanted = {"type": "json_schema", "schema": SCHEMA}
    given: dict[str, Any] = {name: {"format": wanted} if name == "output_config" else wanted}
    asked = asked_of(**given)
    assert asked.grammar is not None
    assert asked.grammar.kind == "json_schema"
    assert json.loads(asked.grammar.text) == SCHEMA


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"temperature": 3}, "temperature"),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
    ({"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type"),
    ({"thinking": {"type": "adaptive", "display": "half"}}, "thinking.display"),
    ({"metadata": {"name": "x"}}, "metadata.name"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ({"output_format": {"type": "json_schema", "schema": {}}, "guided_regex": "a"}, "output_config.format"),
]


@pytest.mark.parametrize(("given", "parameter"), WRONG)
def test_what_is_wrong_is_named(given: dict[str, Any], parameter: str) -> None:
    assert refused(**given).parameter == parameter


@pytest.mark.parametrize(
    ("given", "parameter"),
    [
        ({"container": "c1"}, "container"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]}, "tools[0].type"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [{**WEATHER, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [{**WEATHER, "input_examples": [{"city": "Bern"}]}]}, "tools[0].input_examples"),
    ],
)
def test_what_is_not_served_is_refused_by_name(given: dict[str, Any], parameter: str) -> None:
    error = refused(**given)
    assert (error.parameter, error.code) == (parameter, "unsupported_parameter")


def test_a_hosted_tool_is_refused_with_its_name() -> None:
    assert "web_search_20250305" in refused(tools=[{"type": "web_search_20250305", "name": "web_search"}]).message


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("n", "unsupported_parameter"),
        ("user", "unsupported_parameter"),
        ("logprobs", "unsupported_parameter"),
        ("metadata_", "unknown_parameter"),
    ],
)
def test_a_parameter_of_another_endpoint_is_refused(name: str, code: str) -> None:
    error = refused(**{name: 2})
    assert (error.parameter, error.code) == (name, code)


def test_asking_for_nothing_is_no_offence() -> None:
    asked_of(mcp_servers=[], context_management={"edits": []}, service_tier="standard_only", container=None)


# Messages


def test_tool_results_come_before_the_rest_of_the_users_turn() -> None:
    found = messages_of(
        ("user", "How is it in Bern?"),
        (
            "assistant",
            [
                {"type": "thinking", "thinking": "Look.", "signature": "s"},
                {"type": "redacted_thinking", "data": "abc"},
                {"type": "text", "text": "I look.", "citations": None},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Bern"}},
                {"type": "tool_use", "id": "t2", "name": "weather", "input": {"_raw": "{oh"}},
            ],
        ),
        (
            "user",
            [
                {"type": "text", "text": "And?"},
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "Rain"}]},
                {"type": "tool_result", "tool_use_id": "t2", "content": "no such city", "is_error": True},
                {"type": "text", "text": "Be brief."},
            ],
        ),
    )
    assert found == [
        {"role": "user", "content": "How is it in Bern?"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Look.",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}},
                {"id": "t2", "type": "function", "function": {"name": "weather", "arguments": "{oh"}},
            ],
        },
        {"role": "tool", "content": "Rain", "tool_call_id": "t1", "name": "weather"},
        {"role": "tool", "content": "Error: no such city", "tool_call_id": "t2", "name": "weather"},
        {"role": "user", "content": "And?\nBe brief."},
    ]
    assert "Rain" in tokenizer().apply_template(found)


def test_turns_of_one_role_in_a_row_are_one() -> None:
    found = messages_of(
        ("system", "Be kind."), ("user", "a"), ("user", "b"), ("assistant", "c"), ("assistant", []), ("user", "d"),
        system="Be brief.",
    )  # fmt: skip
    assert [(each["role"], each["content"]) for each in found] == [
        ("system", "Be brief.\nBe kind."),
        ("user", "a\nb"),
        ("assistant", "c"),
        ("user", "d"),
    ]


CALL: tuple[str, Any] = ("assistant", [{"type": "tool_use", "id": "t1", "name": "weather", "input": {}}])
RESULT = {"type": "tool_result", "tool_use_id": "t1"}


UNREADABLE: list[tuple[list[tuple[str, Any]], str]] = [
    ([("user", [RESULT])], "messages[0].content[0].tool_use_id"),
    ([CALL, ("user", [RESULT, RESULT])], "messages[1].content[1].tool_use_id"),
    ([CALL, ("user", [{**RESULT, "content": [{"type": "image"}]}])], "messages[1].content[0].content"),
    ([("user", [{"type": "image", "source": {"type": "url", "url": "x"}}])], "messages[0].content[0].source.url"),
    ([("user", [{"type": "document", "source": {}}])], "messages[0].content"),
    ([("user", [{"type": "server_tool_use"}])], "messages[0].content[0].type"),
    ([("user", [{"type": "thinking", "thinking": "x"}])], "messages[0].content"),
    ([("user", "a"), ("assistant", [RESULT]), ("user", "b")], "messages[1].content"),
    ([("user", "a"), ("assistant", "The best answer is (")], "messages[1]"),
]


@pytest.mark.parametrize(("turns", "parameter"), UNREADABLE)
def test_content_that_cannot_be_read_is_named(turns: list[tuple[str, Any]], parameter: str) -> None:
    error = refused(messages=[{"role": role, "content": content} for role, content in turns])
    assert error.parameter == parameter


def test_an_image_without_a_source_is_refused_in_plain_words() -> None:
    error = refused(messages=[{"role": "user", "content": [{"type": "image", "source": {}}]}])
    assert "Expected base64 or url" in error.message


# Counting


def test_counting_asks_for_a_prompt_alone() -> None:
    given = {"model": "mini", "messages": LEAST["messages"], "system": "Be brief.", "tools": [WEATHER]}
    asked = read_count_request(json.dumps(given).encode(), {}, LIMITS)
    assert asked.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert (asked.max_tokens, len(asked.tools)) == (None, 1)


def test_counting_needs_no_parameters_of_the_answer() -> None:
    with pytest.raises(ApiError, match="'max_tokens' is not supported: it is no part of a prompt"):
        read_count_request(json.dumps(LEAST).encode(), {}, LIMITS)
    unknown = UnknownFields(strict=False)
    asked = read_count_request(json.dumps({**LEAST, "stream": True}).encode(), {}, LIMITS, unknown)
    assert (asked.max_tokens, asked.stream) == (None, False)
    assert unknown.header == "max_tokens, stream"


def test_the_tables_have_schemas() -> None:
    components: dict[str, Any] = {}
    for table in (MESSAGE_PARAMETERS, COUNT_TOKENS_PARAMETERS):
        parameters.body_schema(table, "body", components)
    assert components["body"]["required"] == ["messages"]


# Answers

DONE = ChoiceDelta(0, finish="stop", usage=USAGE)
ALTERNATING = [
    ChoiceDelta(0, reasoning="Let me "),
    ChoiceDelta(0, reasoning="see."),
    ChoiceDelta(0, content="I "),
    ChoiceDelta(0, content="look."),
    *called(0, "weather", '{"city": ', '"Bern"}'),
    *called(1, "weather", '{"city": "Rome"}'),
    ChoiceDelta(0, content="Wait."),
    *called(2, "clock"),
    ChoiceDelta(0, finish="tool_calls", usage=USAGE),
]


@pytest.mark.parametrize(
    "id", ["call_abc", "toolu_abc", "chatcmpl-tool-1f", "functions.weather:0", "\ud800", "x" * 500, ""]
)
def test_ids_of_tool_uses_have_anthropics_form_and_stay_the_same(id: str) -> None:
    found = tool_use_id(id)
    assert re.fullmatch(r"toolu_[a-zA-Z0-9_-]+", found)
    assert found == tool_use_id(id) == tool_use_id(found)
    assert tool_use_id("call_abc") == "toolu_abc"
    assert tool_use_id("functions.weather:0") != tool_use_id("functions.weather:1")


def test_a_whole_answer_has_its_blocks() -> None:
    body = message_body(exchange_for(asked_of()), whole(ALTERNATING))
    message = Message.model_validate(body)
    assert (message.id, message.model, message.stop_reason, message.stop_sequence) == (
        "msg_one", "mini", "tool_use", None,
    )  # fmt: skip
    assert body["content"] == [
        {"type": "thinking", "thinking": "Let me see.", "signature": "headrace"},
        {"type": "text", "text": "I look.Wait."},
        {"type": "tool_use", "id": "toolu_0", "name": "weather", "input": {"city": "Bern"}},
        {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}},
        {"type": "tool_use", "id": "toolu_2", "name": "clock", "input": {}},
    ]
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (4, 16, 7)
    assert body["headrace"]["cached_tokens"] == 16


def test_arguments_that_are_no_object_are_kept_as_they_are() -> None:
    pieces = [*called(0, "weather", '["Bern"'), DONE]
    assert message_body(exchange_for(asked_of()), whole(pieces))["content"][0]["input"] == {"_raw": '["Bern"'}


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        (ChoiceDelta(0, finish="stop"), "end_turn"),
        (ChoiceDelta(0, finish="stop", stop="END"), "stop_sequence"),
        (ChoiceDelta(0, finish="length", usage=TokenUsage(output_tokens=50)), "max_tokens"),
        (ChoiceDelta(0, finish="length", usage=TokenUsage(output_tokens=20)), "model_context_window_exceeded"),
        (ChoiceDelta(0, finish="deadline"), "deadline"),
        (
            ChoiceDelta(0, calls=[ToolCallDelta(0, "c", "weather")], finish="stop"),
            "tool_use",
        ),  # the one that was asked for
    ],
)
def test_why_it_stopped_is_told_alike_whole_and_streamed(last: ChoiceDelta, reason: str) -> None:
    exchange = exchange_for(asked_of())
    body = message_body(exchange, whole([ChoiceDelta(0, content="x"), last]))
    told = events_of(streamed(MessageStream(exchange), [ChoiceDelta(0, content="x"), last]))[-2]
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, last.stop)
    assert told["delta"] == {"stop_reason": reason, "stop_sequence": last.stop}


def test_a_streams_blocks_follow_each_other() -> None:
    events = events_of(streamed(MessageStream(exchange_for(asked_of())), ALTERNATING))
    shape = [
        (event["type"].removeprefix("content_block_"), event.get("index"), event.get("delta", {}).get("type"))
        for event in events
    ]
    assert shape == [
        ("message_start", None, None),
        ("start", 0, None),
        ("delta", 0, "thinking_delta"),
        ("delta", 0, "thinking_delta"),
        ("delta", 0, "signature_delta"),
        ("stop", 0, None),
        ("start", 1, None),
        ("delta", 1, "text_delta"),
        ("delta", 1, "text_delta"),
        ("stop", 1, None),
        ("start", 2, None),
        ("delta", 2, "input_json_delta"),
        ("delta", 2, "input_json_delta"),
        ("stop", 2, None),
        ("start", 3, None),
        ("delta", 3, "input_json_delta"),
        ("stop", 3, None),
        ("start", 4, None),
        ("delta", 4, "text_delta"),
        ("stop", 4, None),
        ("start", 5, None),
        ("stop", 5, None),
        ("message_delta", None, None),
        ("message_stop", None, None),
    ]
    assert events[0]["message"]["usage"]["input_tokens"] == 20
    assert events[-2]["usage"]["input_tokens"] == 4


def test_the_end_of_a_call_goes_before_what_came_after_it_in_the_same_piece() -> None:
    pieces = [
        *called(0, "weather", '{"city": '),
        ChoiceDelta(
            0, content="Done.", calls=[ToolCallDelta(0, arguments='"Bern"}'), ToolCallDelta(1, "c", "clock", "{}")]
        ),
    ]
    splitter = BlockSplitter()
    steps = [step for piece in pieces for step in splitter.split(piece)]
    assert [(step.action, step.kind, step.text) for step in steps] == [
        ("begin", "call", ""),
        ("more", "call", '{"city": '),
        ("more", "call", '"Bern"}'),
        ("end", "call", ""),
        ("begin", "text", ""),
        ("more", "text", "Done."),
        ("end", "text", ""),
        ("begin", "call", ""),
        ("more", "call", "{}"),
    ]


class Idle:
    """An engine that takes requests and does nothing."""

    def stream(self, request: Any) -> Any:
        return self

    async def stats(self) -> list[dict[str, Any]]:
        return []


def test_a_stream_begins_with_the_prompts_length() -> None:
    exchange = exchange_for(asked_of())
    exchange.served.engine = Idle()
    answering = EngineAnswering(exchange)
    asyncio.run(answering.begin())
    (prompt,) = answering.prompts
    (start,) = events_of(MessageStream(exchange).begin())
    assert start["message"]["usage"]["input_tokens"] == len(prompt) > 0


def test_the_client_puts_a_stream_together() -> None:
    wire = Wire(streamed(MessageStream(exchange_for(asked_of())), ALTERNATING))
    with wire.anthropic().messages.stream(**LEAST) as stream:
        texts = list(stream.text_stream)
        message = stream.get_final_message()
    assert texts == ["I ", "look.", "Wait."]
    assert [block.type for block in message.content] == [
        "thinking", "text", "tool_use", "tool_use", "text", "tool_use",
    ]  # fmt: skip
    assert [block.input for block in message.content if block.type == "tool_use"] == [
        {"city": "Bern"},
        {"city": "Rome"},
        {},
    ]
    assert message.stop_reason == "tool_use"
    assert message.usage.input_tokens == 4
    assert message.usage.cache_read_input_tokens == 16
    assert message.usage.output_tokens == 7
    assert read_message_request(wire.sent[0], {}, LIMITS).stream


@pytest.mark.parametrize("stream", [False, True])
def test_the_client_feeds_an_answer_back(stream: bool) -> None:
    exchange = exchange_for(asked_of())
    answer = streamed(MessageStream(exchange), ALTERNATING) if stream else message_body(exchange, whole(ALTERNATING))
    wire = Wire(answer)
    client = wire.anthropic()
    if stream:
        with client.messages.stream(**LEAST) as events:
            content = cast(Any, events).get_final_message().content
    else:
        content = cast(Any, client).messages.create(**LEAST).content
    results: Any = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "ok"}
        for block in content
        if block.type == "tool_use"
    ]
    again: Any = [*LEAST["messages"], {"role": "assistant", "content": content}]
    again.append({"role": "user", "content": results})
    list(client.messages.create(model="mini", max_tokens=5, messages=again, stream=True)) if stream else (
        client.messages.create(model="mini", max_tokens=5, messages=again)
    )
    found = read_message_request(wire.sent[-1], {}, LIMITS).messages
    assert found is not None
    assert [each["role"] for each in found] == ["user", "assistant", "tool", "tool", "tool"]
    assert found[1]["reasoning_content"] == "Let me see."
    assert [call["function"]["arguments"] for call in found[1]["tool_calls"]] == [
        {"city": "Bern"},
        {"city": "Rome"},
        {},
    ]


class City(BaseModel):
    city: str


def test_the_clients_structured_output_is_read() -> None:
    pieces = [ChoiceDelta(0, content='{"city": "Bern"}'), DONE]
    wire = Wire(message_body(exchange_for(asked_of()), whole(pieces)))
    message = wire.anthropic().messages.parse(**LEAST, output_format=City)
    assert message.parsed_output == City(city="Bern")
    grammar = read_message_request(wire.sent[0], {}, LIMITS).grammar
    assert grammar is not None
    assert json.loads(grammar.text)["required"] == ["city"]


def test_the_clients_count_is_read() -> None:
    wire = Wire({"input_tokens": 12})
    counted = wire.anthropic().messages.count_tokens(model="mini", messages=LEAST["messages"], system="Be brief.")
    assert counted.input_tokens == 12
    assert read_count_request(wire.sent[0], {}, LIMITS).model == "mini"


def test_an_error_in_a_stream_reaches_the_client() -> None:
    events = MessageStream(exchange_for(asked_of()))
    error = ApiError("the answer broke off", kind="server_error")
    sent = events.begin() + events.piece(ChoiceDelta(0, content="Hel")) + events.error(error)
    assert events_of(sent)[-1] == {
        "type": "error",
        "error": {"type": "api_error", "message": "the answer broke off"},
    }
    with (
        pytest.raises(anthropic.APIStatusError, match="broke off"),
        Wire(sent).anthropic().messages.stream(**LEAST) as stream,
    ):
        stream.get_final_message()
