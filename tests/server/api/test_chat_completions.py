"""`/v1/chat/completions` without a server: what is read of bodies, and what is written of pieces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from headrace.config import RequestLimits
from headrace.engine.interface import outputs
from headrace.engine.interface.grammar_spec import Grammar
from headrace.engine.interface.outputs import SequenceEnd, SequenceOutput
from headrace.engine.interface.request import FinishReason
from headrace.engine.interface.sampling import SampledToken
from headrace.gateway.api_errors import ApiError
from headrace.gateway.output.choice_reader import ChoiceReader
from headrace.gateway.output.tool_formats import TOOL_FORMATS
from headrace.gateway.requests.text_request import (
    Choice,
    ChoiceDelta,
    TextRequest,
    TokenLogprob,
    TokenUsage,
)
from headrace.server.api.chat_completions import ChatStream, chat_body, logprob_json, read_chat_request
from tests.support.dialect_exchanges import USAGE, called, exchange_for, streamed, tokenizer, whole

SAY: dict[str, Any] = {"role": "user", "content": "Hi"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "now"}}


def asked(**wishes: Any) -> TextRequest:
    return read_chat_request(msgspec.json.encode({"messages": [SAY], **wishes}), {}, RequestLimits())


def chunks(stream: bytes) -> list[dict[str, Any]]:
    parts = stream.decode().split("\n\n")
    assert parts.pop() == ""
    assert parts.pop() == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def test_wishes_become_the_engine_s() -> None:
    found = asked(
        temperature=0.5, top_p=0, top_k=-1, seed=-1, stop="end", max_tokens=5, n=2, logit_bias={"7": 100, "8": -2}
    )
    assert (found.sampling.temperature, found.sampling.top_k, found.sampling.seed) == (0.5, 0, 2**64 - 1)
    assert 0 < found.sampling.top_p < 1e-3  # the likeliest token alone
    assert found.sampling.logit_bias == {7: 10_000, 8: -2}
    assert (found.stop, found.max_tokens, found.n) == (("end",), 5, 2)


def test_defaults_are_the_service_s() -> None:
    found = asked()
    assert found.sampling.temperature == 1.0
    assert found.sampling.logprobs is None
    assert (found.max_tokens, found.n, found.stream, found.choosing) == (None, 1, False, "auto")
    assert asked().sampling.seed != asked().sampling.seed


def test_messages_become_what_templates_take() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}
    found = asked(
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."},
            {"role": "tool", "tool_call_id": "a", "content": "12:00"},
            {"role": "assistant", "content": None, "refusal": "No."},
        ]
    )
    system, assistant, result, refusal = found.messages or []
    assert system == {"role": "system", "content": "One.\nTwo."}
    function = {"name": "now", "arguments": {"zone": "UTC"}}
    assert assistant["tool_calls"] == [{"id": "a", "type": "function", "function": function}]
    assert (assistant["content"], assistant["reasoning_content"]) == ("", "Hm.")
    assert result == {"role": "tool", "content": "12:00", "tool_call_id": "a"}
    assert refusal["content"] == "No."


@pytest.mark.parametrize("arguments", ["", "nonsense", "[1]", "[" * 10_000])
def test_arguments_that_are_no_object_are_kept_as_they_are(arguments: str) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": arguments}}
    found = asked(messages=[{"role": "assistant", "tool_calls": [call]}]).messages or []
    assert found[0]["tool_calls"][0]["function"]["arguments"] == (arguments or {})


def test_tool_choices() -> None:
    assert asked(tools=[TOOL]).choosing == "auto"
    assert asked(tools=[TOOL], tool_choice="none").choosing == "none"
    assert asked(tools=[TOOL], tool_choice="required").choosing == "required"
    named = asked(tools=[TOOL], tool_choice=TOOL)
    assert (named.choosing, named.only_tool) == ("required", "now")


def test_an_error_about_a_grammar_knows_where_it_came_from() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    found = asked(response_format=schema)
    assert (found.grammar, found.grammar_of) == (Grammar("json_schema", '{"type":"object"}'), "response_format")
    assert asked(guided_regex="a+").grammar_of == "guided_regex"


@pytest.mark.parametrize(
    ("wishes", "parameter"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [{"id": "a"}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "content": "a", "audio": {}}]}, "messages[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages[0].tool_calls[0]"),
        ({"min_tokens": 5, "max_completion_tokens": 4}, "min_tokens"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ],
)
def test_what_is_wrong_is_named(wishes: dict[str, Any], parameter: str) -> None:
    with pytest.raises(ApiError) as raised:
        asked(**wishes)
    assert (raised.value.status, raised.value.parameter) == (400, parameter)


def test_an_empty_assistant_turn_is_taken_back_as_clients_send_it() -> None:
    history = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "refusal": None, "tool_calls": None},
        {"role": "user", "content": "Hello?"},
    ]
    assert asked(messages=history).messages == [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "", "reasoning_content": "Hm."},
        {"role": "user", "content": "Hello?"},
    ]
    for role in ("user", "system", "tool"):
        with pytest.raises(ApiError, match=r"'messages\[0\]' has no content"):
            asked(messages=[{"role": role, "content": None, "tool_call_id": "x", "tool_calls": []}])


def test_a_stream_is_the_whole_answer_in_chunks() -> None:
    pieces = [
        ChoiceDelta(0, content="It "),
        ChoiceDelta(0, content="is."),
        *called(0, "now", '{"zone":', ' "UTC"}'),
        *called(1, "now", "{}"),
        ChoiceDelta(0, finish="tool_calls", usage=USAGE),
    ]
    exchange = exchange_for(asked(stream=True, stream_options={"include_usage": True}, metadata={"a": "b"}))
    body = chat_body(exchange, whole(pieces))
    found = chunks(streamed(ChatStream(exchange), pieces))
    message = body["choices"][0]["message"]
    assert message["content"] == "It is."
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ['{"zone": "UTC"}', "{}"]
    deltas = [chunk["choices"][0]["delta"] for chunk in found[:-1]]
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None}
    assert "".join(delta.get("content", "") for delta in deltas) == "It is."
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    begin = {"index": 0, "id": "call_0", "type": "function", "function": {"name": "now", "arguments": ""}}
    assert calls[0] == begin
    assert calls[1] == {"index": 0, "function": {"arguments": '{"zone":'}}
    assert calls[3]["index"] == 1
    assert found[-2]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "tool_calls"}
    assert [chunk["usage"] is None for chunk in found] == [True] * (len(found) - 1) + [False]
    assert found[-1]["usage"] == body["usage"]
    assert found[-1]["metadata"] == body["metadata"] == {"a": "b"}
    assert {chunk["id"] for chunk in found} == {body["id"]} == {"chatcmpl-one"}


def test_without_being_asked_no_chunk_speaks_of_usage() -> None:
    found = chunks(streamed(ChatStream(exchange_for(asked(stream=True))), [ChoiceDelta(0, finish="stop", usage=USAGE)]))
    assert all("usage" not in chunk for chunk in found)


def test_every_chunk_has_the_usage_so_far_if_that_is_wanted() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    pieces = [
        ChoiceDelta(0, reasoning="hm", tokens=2),
        ChoiceDelta(0, "Hi", tokens=1),
        ChoiceDelta(0, " there", tokens=3),
        ChoiceDelta(0, finish="stop", usage=USAGE),
    ]
    exchange = exchange_for(asked(stream=True, stream_options=options))
    first, *found, last = chunks(streamed(ChatStream(exchange), pieces))
    assert first["usage"] is None
    assert [each["usage"]["completion_tokens"] for each in found] == [2, 3, 6, 6]
    assert {each["usage"]["prompt_tokens"] for each in found} == {20}
    assert "".join(each["choices"][0]["delta"].get("content") or "" for each in found) == "Hi there"
    assert last["usage"]["completion_tokens"] == USAGE.output_tokens
    without = asked(stream=True, stream_options={"continuous_usage_stats": True})
    assert all("usage" not in each for each in chunks(streamed(ChatStream(exchange_for(without)), pieces)))


def test_usage_counts_a_prompt_once_and_every_answer() -> None:
    exchange = exchange_for(asked(n=3))
    choices = [Choice(index, usage=TokenUsage(prompt_tokens=10, output_tokens=index)) for index in range(3)]
    usage = chat_body(exchange, choices)["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (10, 3, 13)
    # What the engine drafted by itself is no part of it.
    usage = chat_body(exchange_for(asked()), [Choice(0, usage=TokenUsage(output_tokens=5, drafted=9, accepted=4))])[
        "usage"
    ]
    assert usage["completion_tokens_details"]["rejected_prediction_tokens"] == 0


def test_an_error_in_a_stream_is_an_event_that_clients_know() -> None:
    event = ChatStream(exchange_for(asked(stream=True))).error(ApiError("broken", kind="server_error", code="x"))
    assert event.endswith(b"\n\n")
    assert json.loads(event.removeprefix(b"data: "))["error"]["message"] == "broken"


def test_logprobs_of_an_empty_answer_are_an_empty_list() -> None:
    exchange = exchange_for(asked(logprobs=True))
    assert chat_body(exchange, [Choice(0, logprobs=[])])["choices"][0]["logprobs"] == {"content": [], "refusal": None}
    one = TokenLogprob("a", b"a", -1.0, [("a", b"a", -1.0)], "a")
    found = chat_body(exchange, [Choice(0, content="a", logprobs=[one])])["choices"][0]["logprobs"]["content"]
    assert found == [
        {"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": [{"token": "a", "logprob": -1.0, "bytes": [97]}]}
    ]


def test_the_chosen_token_is_always_among_the_likeliest() -> None:
    chosen = TokenLogprob("b", b"b", -4.0, [("a", b"a", -0.1)], "b")
    listed = [each["token"] for each in logprob_json(chosen)["top_logprobs"]]
    assert listed == ["a", "b"]
    assert logprob_json(TokenLogprob("b", b"b", -4.0, [], "b"))["top_logprobs"] == []  # none are requested


# The reader, on outputs as the engine gives them


def chosen(*tokens: int) -> list[SampledToken]:
    return [SampledToken(token, -0.5, ((token, -0.5), (5, float("-inf")))) for token in tokens]


def output(
    tokens: Sequence[int], text: str, finish: FinishReason | None = None, stop: str | None = None
) -> SequenceOutput:
    usage = outputs.SequenceUsage(3, len(tokens), 0, 0, 0, 0.0, 0.0, 0.0)
    ending = None if finish is None else SequenceEnd(finish, usage, "", stop)
    return SequenceOutput("r", 0, list(tokens), text, chosen=chosen(*tokens), ending=ending)


def measured(*outputs: SequenceOutput, echo: Sequence[int] | None = None) -> list[TokenLogprob]:
    reader = ChoiceReader(0, tokenizer(), logprobs=True, echo=echo)
    return [each for one in outputs for each in reader.read(one).logprobs or ()]


def cut(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def test_logprobs_leave_out_the_end_of_the_answer() -> None:
    (end,) = tuple(tokenizer().eos_ids)[:1]
    text = "Grüße, 日本語 🦜"
    found = measured(output([*cut(text), end], text, FinishReason.STOP))
    assert b"".join(each.bytes for each in found).decode() == text
    assert "".join(each.shown for each in found) == text
    assert all(top >= -9999 for each in found for _, _, top in each.top)  # JSON has no infinity


def test_logprobs_come_with_their_text() -> None:
    tokens = cut("one two three")
    reader = ChoiceReader(0, tokenizer(), logprobs=True)
    held = reader.read(output(tokens, "one"))  # the rest may yet be a stop text
    assert "".join(each.shown for each in held.logprobs or ()) == "one"
    rest = reader.read(output([], " two three", FinishReason.LENGTH))
    assert "".join(each.shown for each in rest.logprobs or ()) == " two three"


@pytest.mark.parametrize("stop", range(1, 13))
def test_logprobs_end_where_a_stop_text_begins(stop: int) -> None:
    text = "one two three"
    found = measured(output(cut(text), text[:stop], FinishReason.STOP, text[stop:]))
    assert b"".join(each.bytes for each in found).decode() == text[:stop]


def test_tokens_one_by_one_are_the_same_as_at_once() -> None:
    text = "日本語 🦜 is é"
    tokens = cut(text)
    at_once = measured(output(tokens, text, FinishReason.LENGTH))
    steps: list[SequenceOutput] = []
    told = ""
    for count in range(1, len(tokens) + 1):
        new = tokenizer().decode(tokens[:count]).rstrip("\ufffd")[len(told) :]
        told += new
        steps.append(output(tokens[count - 1 : count], new, FinishReason.LENGTH if count == len(tokens) else None))
    assert told == text
    assert measured(*steps) == at_once


def test_special_tokens_count_where_they_are_shown() -> None:
    (end,) = tuple(tokenizer().eos_ids)[:1]
    name = tokenizer().decode([end], skip_special_tokens=False)
    tokens = [*cut("one"), end, *cut("two")]
    shown = measured(output(tokens, f"one{name}two", FinishReason.LENGTH))
    assert "".join(each.shown for each in shown) == f"one{name}two"
    hidden = measured(output(tokens, "onetwo", FinishReason.LENGTH))
    assert "".join(each.text for each in hidden) == "onetwo"


NOW = '<tool_call>{"name": "now", "arguments": {"zone": "UTC"}}</tool_call>'


def read_calls(text: str, finish: FinishReason, *, named: bool = False) -> ChoiceDelta:
    reader = ChoiceReader(0, tokenizer(), calls=TOOL_FORMATS["mini"].parser(), named=named)
    return reader.read(output(cut(text), text, finish))


def test_an_answer_to_a_named_tool_stops_as_the_service_s_does() -> None:
    for named, finish in ((False, "tool_calls"), (True, "stop")):
        assert read_calls(NOW, FinishReason.STOP, named=named).finish == finish
        assert read_calls(NOW, FinishReason.LENGTH, named=named).finish == "length"


@pytest.mark.parametrize("end", range(len('<tool_call>{"name": "now", '), len(NOW) - len("}</tool_call>")))
def test_half_a_call_is_no_call_of_a_whole_answer(end: int) -> None:
    for text, finish, expected, count in (
        (NOW[:end], FinishReason.LENGTH, "length", 0),
        (NOW[:end], FinishReason.DEADLINE, "deadline", 0),
        (NOW[:end], FinishReason.STOP, "stop", 0),  # a stop string came in the call
        (NOW + NOW[:end], FinishReason.LENGTH, "length", 1),
        (NOW + NOW[:end], FinishReason.STOP, "tool_calls", 1),
    ):
        choices = whole([read_calls("Wait. " + text, finish)])
        (shown,) = chat_body(exchange_for(asked(tools=[TOOL])), choices)["choices"]
        assert shown["finish_reason"] == expected
        assert shown["message"]["content"] == "Wait."
        calls = shown["message"].get("tool_calls", [])
        assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"zone": "UTC"}] * count


@pytest.mark.parametrize("end", range(len("<tool_call>"), len('<tool_call>{"name": "now"')))
def test_a_call_that_is_cut_before_its_name_is_shown_nowhere(end: int) -> None:
    for text, finish, count in (
        (NOW[:end], FinishReason.LENGTH, 0),
        (NOW[:end], FinishReason.DEADLINE, 0),
        (NOW + NOW[:end], FinishReason.LENGTH, 1),
    ):
        (choice,) = whole([read_calls("Wait. " + text, finish)])
        assert (choice.content, len(choice.calls), choice.finish) == ("Wait.", count, finish.value)


def test_a_call_that_was_cut_behind_its_arguments_is_whole() -> None:
    for end in range(len(NOW) - len("}</tool_call>"), len(NOW)):
        (choice,) = whole([read_calls(NOW[:end], FinishReason.LENGTH)])
        assert [call.arguments for call in choice.calls] == ['{"zone": "UTC"}']
        assert choice.finish == "length"


def test_a_sequence_that_failed_is_an_error() -> None:
    with pytest.raises(ApiError) as raised:
        ChoiceReader(0, tokenizer()).read(output([], "", FinishReason.FAILED))
    assert (raised.value.status, raised.value.code) == (500, "generation_failed")
