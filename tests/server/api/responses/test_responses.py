"""`/v1/responses`: what is read, refused and answered, checked with OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from headrace.config import RequestLimits
from headrace.gateway.api_errors import ApiError
from headrace.gateway.requests.text_request import ChoiceDelta, TokenLogprob, TokenUsage
from headrace.server.api.responses.responses import (
    ResponseRequest,
    ResponseStream,
    output_items,
    read_response_request,
    response_body,
    with_history,
)
from headrace.server.api.responses.responses_parameters import RESPONSE_PARAMETERS
from headrace.server.http import body_parameters as parameters
from tests.support.dialect_exchanges import USAGE, Wire, called, events_of, exchange_for, streamed, tokenizer, whole

LIMITS = RequestLimits()
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "name": "weather", "description": "How it is outside.", "parameters": SCHEMA}
CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Bern"}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "Rain"}


def found_of(headers: dict[str, str] | None = None, **given: Any) -> ResponseRequest:
    body = {"model": "mini", "input": "Hello", **given}
    return read_response_request(json.dumps(body).encode(), headers or {}, LIMITS)


def refused(**given: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        found_of(**given)
    assert caught.value.status == 400
    return caught.value


def messages_of(*items: dict[str, Any], **given: Any) -> list[dict[str, Any]]:
    messages = found_of(input=list(items), **given).text_request.messages
    assert messages is not None
    return messages


# Reading


def test_reads_the_least_there_can_be() -> None:
    found = found_of()
    asked = found.text_request
    assert (asked.model, asked.messages) == ("mini", [{"role": "user", "content": "Hello"}])
    assert (asked.max_tokens, asked.stream, asked.n, asked.think) == (None, False, 1, None)
    assert (found.store, found.previous) == (True, None)
    (item,) = found.items
    assert item.pop("id").startswith("msg_")
    assert item == {
        "type": "message",
        "status": "completed",
        "role": "user",
        "content": [{"type": "input_text", "text": "Hello"}],
    }


def test_reads_every_parameter_into_the_engines_words() -> None:
    found = found_of(
        {"x-headrace-priority": "3"},
        instructions="Be brief.",
        max_output_tokens=50,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        seed=7,
        stop="END",
        tools=[{**WEATHER, "strict": True}, {"type": "function", "name": "clock", "parameters": None, "strict": None}],
        tool_choice={"type": "function", "name": "weather"},
        parallel_tool_calls=False,
        reasoning={"effort": "low", "summary": "auto"},
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
        top_logprobs=2,
        stream=True,
        stream_options={"include_obfuscation": False},
        store=False,
        metadata={"a": "b"},
        user="u1",
        truncation="disabled",
        service_tier="auto",
        background=False,
        prompt_cache_key="k",
        deadline_ms=1500,
        surface="agent",
        text={"verbosity": "medium", "format": {"type": "text"}},
    )
    asked, sampling = found.text_request, found.text_request.sampling
    assert asked.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert (asked.max_tokens, asked.stop, asked.stream) == (50, ("END",), True)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 5, 7)
    assert sampling.logprobs == 2
    assert [(tool.name, tool.parameters, tool.strict) for tool in asked.tools] == [
        ("weather", SCHEMA, True),
        ("clock", None, False),
    ]
    assert (asked.choosing, asked.only_tool, asked.parallel_calls) == ("required", "weather", False)
    assert (asked.think, asked.template_hints) == (True, {"reasoning_effort": "low", "verbosity": "medium"})
    assert (asked.user, asked.metadata) == ("u1", {"a": "b"})
    assert (asked.deadline_s, asked.surface, asked.priority) == (1.5, "agent", 3)
    assert (asked.grammar, found.store) == (None, False)


def test_reasoning_can_be_asked_not_to_be() -> None:
    asked = found_of(reasoning={"effort": "none"}).text_request
    assert (asked.think, asked.template_hints) == (False, {})


def test_log_probabilities_come_by_either_parameter() -> None:
    assert found_of(include=["message.output_text.logprobs"]).text_request.sampling.logprobs == 0
    assert found_of(top_logprobs=3).text_request.sampling.logprobs == 3
    assert found_of().text_request.sampling.logprobs is None


def test_allowed_tools_are_those_that_may_be_called() -> None:
    clock = {"type": "function", "name": "clock"}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [clock]}
    found = found_of(tools=[WEATHER, clock], tool_choice=choice)
    assert [tool.name for tool in found.text_request.tools] == ["weather", "clock"]
    assert [tool.name for tool in found.text_request.callable_tools] == ["clock"]
    assert found.text_request.choosing == "required"
    assert [tool["name"] for tool in found.echoed["tools"]] == ["weather", "clock"]


@pytest.mark.parametrize(
    ("form", "kind", "text"),
    [
        ({"type": "json_object"}, "json_object", ""),
        (
            {"type": "json_schema", "name": "city", "schema": SCHEMA, "strict": True},
            "json_schema",
            json.dumps(SCHEMA, separators=(",", ":")),
        ),
    ],
)
def test_a_format_holds_the_answer(form: dict[str, Any], kind: str, text: str) -> None:
    found = found_of(text={"format": form})
    assert found.text_request.grammar is not None
    assert (found.text_request.grammar.kind, found.text_request.grammar.text) == (kind, text)
    assert found.echoed["text"]["format"] == form


@pytest.mark.parametrize(
    ("given", "parameter"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": "x", "name": "y"}]}, "input[0].name"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [RESULT]}, "input"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input[0].call_id"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"stream_options": {}}, "stream_options"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tools": ["weather"]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "x"}}]}, "tools[0].function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"text": {"verbosity": "lots"}}, "text.verbosity"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "text.format"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"background": True, "store": False}, "background"),
        ({"conversation": "conv_1", "previous_response_id": "resp_1"}, "conversation"),
        ({"conversation": {"name": "x"}}, "conversation.name"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], parameter: str) -> None:
    assert refused(**given).parameter == parameter


@pytest.mark.parametrize(
    ("given", "parameter"),
    [
        ({"max_tool_calls": 3}, "max_tool_calls"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"tools": [{"type": "web_search", "search_context_size": "low"}]}, "tools[0].type"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": [{"type": "web_search_call", "id": "ws_1", "status": "completed"}]}, "input[0].type"),
    ],
)
def test_what_is_not_served_is_refused_by_name(given: dict[str, Any], parameter: str) -> None:
    error = refused(**given)
    assert (error.parameter, error.code) == (parameter, "unsupported_parameter")


def test_a_hosted_tool_is_refused_with_its_name() -> None:
    assert "web_search" in refused(tools=[{"type": "web_search"}]).message


@pytest.mark.parametrize("name", ["n", "messages", "max_tokens"])
def test_a_parameter_of_another_endpoint_is_refused(name: str) -> None:
    error = refused(**{name: 2})
    assert (error.parameter, error.code) == (name, "unsupported_parameter")


def test_the_table_has_a_schema() -> None:
    components: dict[str, Any] = {}
    parameters.body_schema(RESPONSE_PARAMETERS, "body", components)
    assert components["body"]["required"] == ["input"]


# Items


def test_what_the_assistant_thinks_says_and_calls_in_a_row_is_one_turn() -> None:
    found = messages_of(
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "How is it"}, {"type": "input_text", "text": "?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Look."}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
        },
        CALL,
        {**CALL, "call_id": "c2", "arguments": "{oh"},
        RESULT,
        {**RESULT, "call_id": "c2", "output": [{"type": "input_text", "text": "no such city"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Rain, then."}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"},
        {"role": "assistant", "content": "It rains."},
        {"role": "user", "content": "Thanks."},
        instructions="Be brief.",
    )
    assert found == [
        {"role": "system", "content": "Be brief.\nBe kind."},
        {"role": "user", "content": "How is it\n?"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Look.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}},
                {"id": "c2", "type": "function", "function": {"name": "weather", "arguments": "{oh"}},
            ],
        },
        {"role": "tool", "content": "Rain", "tool_call_id": "c1", "name": "weather"},
        {"role": "tool", "content": "no such city", "tool_call_id": "c2", "name": "weather"},
        {"role": "assistant", "content": "It rains.", "reasoning_content": "Rain, then."},
        {"role": "user", "content": "Thanks."},
    ]
    assert "It rains." in tokenizer().apply_template(found)


def test_going_on_from_a_response_puts_its_items_first_and_not_its_instructions() -> None:
    first = found_of(input="How is it?", instructions="Shout.", tools=[WEATHER])
    output = output_items(whole([*called(0, "weather", '{"city": "Bern"}')])[0], first.tools)
    new = found_of(
        input=[{**RESULT, "call_id": "call_0"}], instructions="Be brief.", previous_response_id="resp_1", store=False
    )
    assert new.previous == "resp_1"
    found = with_history(new, [*first.items, *output])
    assert found.text_request.messages is not None
    assert [(each["role"], each["content"]) for each in found.text_request.messages] == [
        ("system", "Be brief."),
        ("user", "How is it?"),
        ("assistant", ""),
        ("tool", "Rain"),
    ]
    assert [item["type"] for item in found.items] == ["message", "function_call", "function_call_output"]
    assert found.items[-1]["id"].startswith("fco_")
    assert (found.store, found.echoed["previous_response_id"]) == (False, "resp_1")


def test_a_result_of_no_call_is_found_out_once_the_history_is_known() -> None:
    found = found_of(input=[RESULT], previous_response_id="resp_1")
    with pytest.raises(ApiError, match="call_id 'c1'"):
        with_history(found, [])


def test_a_history_is_bounded() -> None:
    found = found_of(previous_response_id="resp_1")
    with pytest.raises(ApiError) as caught:
        with_history(found, found.items * LIMITS.messages)
    assert caught.value.parameter == "input"


# Answers

LOOKING = [
    ChoiceDelta(0, reasoning="Let me "),
    ChoiceDelta(0, reasoning="see."),
    ChoiceDelta(0, content="I "),
    ChoiceDelta(0, content="look."),
    *called(0, "weather", '{"city": ', '"Bern"}'),
    *called(1, "weather", '{"city": "Rome"}'),
    ChoiceDelta(0, finish="tool_calls", usage=USAGE),
]


def measured(text: str) -> list[TokenLogprob]:
    return [TokenLogprob(text, text.encode(), -0.5, [(text, text.encode(), -0.5)])]


def told(text: str) -> dict[str, Any]:
    one = {"token": text, "logprob": -0.5, "bytes": list(text.encode())}
    return {**one, "top_logprobs": [one]}


def without_ids(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    prefixes = {"reasoning": "rs_", "message": "msg_", "function_call": "fc_"}
    assert all(item["id"].startswith(prefixes[item["type"]]) for item in items)
    return [{name: value for name, value in item.items() if name != "id"} for item in items]


def text_item(text: str, *, status: str = "completed", logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
    return {"type": "message", "status": status, "role": "assistant", "content": [part]}


def call_item(call_id: str, arguments: str) -> dict[str, Any]:
    found = {"call_id": call_id, "name": "weather", "arguments": arguments}
    return {"type": "function_call", "status": "completed", **found}


LOOKED = [
    {
        "type": "reasoning",
        "status": "completed",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Let me see."}],
    },
    text_item("I look."),
    call_item("call_0", '{"city": "Bern"}'),
    call_item("call_1", '{"city": "Rome"}'),
]


def test_a_whole_answer_has_its_items() -> None:
    found = found_of(tools=[WEATHER], instructions="Be brief.", metadata={"a": "b"})
    body = response_body(exchange_for(found.text_request), whole(LOOKING), found)
    response = Response.model_validate(body)
    assert (response.id, response.object, response.model, response.status) == (
        "resp_one", "response", "mini", "completed",
    )  # fmt: skip
    assert response.output_text == "I look."
    assert without_ids(body["output"]) == LOOKED
    assert body["usage"] == {
        "input_tokens": 20,
        "input_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 27,
    }
    assert (response.instructions, response.metadata, response.tool_choice) == ("Be brief.", {"a": "b"}, "auto")
    assert response.tools[0].model_dump(exclude_unset=True) == {**WEATHER, "strict": False}
    assert body["headrace"]["cached_tokens"] == 16


@pytest.mark.parametrize(("finish", "reason"), [("length", "max_output_tokens"), ("deadline", "deadline")])
def test_what_was_cut_says_so_whole_and_streamed(finish: Any, reason: str) -> None:
    found = found_of(max_output_tokens=3)
    exchange = exchange_for(found.text_request)
    pieces = [ChoiceDelta(0, content="I lo"), ChoiceDelta(0, finish=finish, usage=USAGE)]
    stream = ResponseStream(exchange, found)
    last = events_of(streamed(stream, pieces))[-1]
    assert last["type"] == "response.incomplete"
    assert stream.response is not None
    for body in (response_body(exchange, whole(pieces), found), stream.response):
        assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": reason})
        assert body["completed_at"] is None
        assert without_ids(body["output"]) == [text_item("I lo", status="incomplete")]


def test_log_probabilities_are_those_of_the_text() -> None:
    found = found_of(top_logprobs=1)
    exchange = exchange_for(found.text_request)
    pieces = [
        ChoiceDelta(0, reasoning="Hm", logprobs=measured("Hm")),
        ChoiceDelta(0, logprobs=measured("</think>")),
        ChoiceDelta(0, content="I", logprobs=measured("I")),
        ChoiceDelta(0, logprobs=measured(" lo")),
        ChoiceDelta(0, content=" look", logprobs=measured("ok")),
        ChoiceDelta(0, finish="stop", usage=TokenUsage(output_tokens=5, reasoning_tokens=2)),
    ]
    body = response_body(exchange, whole(pieces), found)
    assert body["output"][1]["content"][0]["logprobs"] == [told("I"), told(" lo"), told("ok")]
    events = events_of(streamed(ResponseStream(exchange, found), pieces))
    assert [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"] == [
        [told("I")],
        [told(" lo"), told("ok")],
    ]
    assert events[-1]["response"]["output"][1] == {**body["output"][1], "id": events[-1]["response"]["output"][1]["id"]}


def test_a_streams_events_follow_each_other() -> None:
    found = found_of(tools=[WEATHER])
    stream = ResponseStream(exchange_for(found.text_request), found)
    events = events_of(streamed(stream, LOOKING))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [(event["type"].removeprefix("response."), event.get("output_index")) for event in events] == [
        ("created", None),
        ("in_progress", None),
        ("output_item.added", 0),
        ("content_part.added", 0),
        ("reasoning_text.delta", 0),
        ("reasoning_text.delta", 0),
        ("reasoning_text.done", 0),
        ("content_part.done", 0),
        ("output_item.done", 0),
        ("output_item.added", 1),
        ("content_part.added", 1),
        ("output_text.delta", 1),
        ("output_text.delta", 1),
        ("output_text.done", 1),
        ("content_part.done", 1),
        ("output_item.done", 1),
        ("output_item.added", 2),
        ("function_call_arguments.delta", 2),
        ("function_call_arguments.delta", 2),
        ("function_call_arguments.done", 2),
        ("output_item.done", 2),
        ("output_item.added", 3),
        ("function_call_arguments.delta", 3),
        ("function_call_arguments.done", 3),
        ("output_item.done", 3),
        ("completed", None),
    ]
    assert stream.response == events[-1]["response"]
    assert stream.items == events[-1]["response"]["output"]
    assert without_ids(stream.items) == LOOKED
    for event in events:
        if "item_id" in event:
            assert event["item_id"] == stream.items[event["output_index"]]["id"]


def test_text_between_calls_is_an_item_of_its_own() -> None:
    found = found_of(tools=[WEATHER])
    stream = ResponseStream(exchange_for(found.text_request), found)
    pieces = [*called(0, "weather", "{}"), ChoiceDelta(0, content="Wait."), *called(1, "weather", "{}"), LOOKING[-1]]
    streamed(stream, pieces)
    assert without_ids(stream.items) == [call_item("call_0", "{}"), text_item("Wait."), call_item("call_1", "{}")]


def test_every_event_is_one_that_the_client_knows() -> None:
    from openai.types import responses  # the types of the events

    found = found_of(tools=[WEATHER])
    for event in events_of(streamed(ResponseStream(exchange_for(found.text_request), found), LOOKING)):
        name = "".join(part.title() for part in event["type"].replace(".", "_").split("_"))
        name = name.replace("OutputText", "Text") + "Event"
        getattr(responses, name).model_validate(event)


def test_the_client_puts_a_stream_together() -> None:
    found = found_of(tools=[WEATHER])
    wire = Wire(streamed(ResponseStream(exchange_for(found.text_request), found), LOOKING))
    tool: Any = {**WEATHER, "strict": True}
    with wire.openai().responses.stream(model="mini", input="Hello", tools=[tool]) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        response = stream.get_final_response()
    assert texts == ["I ", "look."]
    assert response.output_text == "I look."
    assert [item.arguments for item in response.output if item.type == "function_call"] == [
        '{"city": "Bern"}',
        '{"city": "Rome"}',
    ]
    assert response.usage is not None
    assert response.usage.total_tokens == 27
    asked = read_response_request(wire.sent[0], {}, LIMITS).text_request
    assert asked.stream
    assert asked.tools[0].strict


@pytest.mark.parametrize("dumped", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_the_client_feeds_an_answer_back(stream: bool, dumped: bool) -> None:
    found = found_of(tools=[WEATHER])
    exchange = exchange_for(found.text_request)
    if stream:
        wire = Wire(streamed(ResponseStream(exchange, found), LOOKING))
        with wire.openai().responses.stream(model="mini", input="Hello") as events:
            response: Any = events.get_final_response()
    else:
        wire = Wire(response_body(exchange, whole(LOOKING), found))
        response = wire.openai().responses.create(model="mini", input="Hello")
    again: Any = [{"role": "user", "content": "Hello"}]
    again += [item.model_dump() for item in response.output] if dumped else response.output
    again += [
        {"type": "function_call_output", "call_id": item.call_id, "output": "ok"}
        for item in response.output
        if item.type == "function_call"
    ]
    wire = Wire(response_body(exchange, whole(LOOKING), found))
    wire.openai().responses.create(model="mini", input=again)
    messages = read_response_request(wire.sent[0], {}, LIMITS).text_request.messages
    assert messages is not None
    assert [each["role"] for each in messages] == ["user", "assistant", "tool", "tool"]
    assert (messages[1]["content"], messages[1]["reasoning_content"]) == ("I look.", "Let me see.")
    assert [call["id"] for call in messages[1]["tool_calls"]] == ["call_0", "call_1"]


class City(BaseModel):
    city: str


def test_the_clients_structured_output_is_read() -> None:
    found = found_of()
    pieces = [ChoiceDelta(0, content='{"city": "Bern"}'), ChoiceDelta(0, finish="stop", usage=USAGE)]
    wire = Wire(response_body(exchange_for(found.text_request), whole(pieces), found))
    client = wire.openai()
    response = client.responses.parse(
        model="mini", input="Where?", text_format=City, tools=[openai.pydantic_function_tool(City)]
    )
    assert response.output_parsed == City(city="Bern")
    read_again = read_response_request(wire.sent[0], {}, LIMITS)
    assert read_again.text_request.grammar is not None
    assert json.loads(read_again.text_request.grammar.text)["required"] == ["city"]
    dumped: Any = [item.model_dump() for item in response.output]
    client.responses.create(model="mini", input=[*dumped, {"role": "user", "content": "More"}])
    messages = read_response_request(wire.sent[1], {}, LIMITS).text_request.messages
    assert messages == [{"role": "assistant", "content": '{"city": "Bern"}'}, {"role": "user", "content": "More"}]


def test_a_failure_in_a_stream_ends_it_as_failed() -> None:
    found = found_of()
    stream = ResponseStream(exchange_for(found.text_request), found)
    error = ApiError("the answer broke off", kind="server_error")
    sent = stream.begin() + stream.piece(ChoiceDelta(0, content="Hel")) + stream.error(error)
    last = events_of(sent)[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "the answer broke off"}
    Response.model_validate(last["response"])
    with Wire(sent).openai().responses.stream(model="mini", input="Hello") as events:
        assert [event.type for event in events][-1] == "response.failed"


def test_a_failure_before_the_beginning_is_an_error_event() -> None:
    found = found_of()
    sent = ResponseStream(exchange_for(found.text_request), found).error(ApiError("no", parameter="input", code="c"))
    assert events_of(sent) == [
        {"type": "error", "sequence_number": 0, "code": "c", "message": "no", "param": "input"},
    ]
