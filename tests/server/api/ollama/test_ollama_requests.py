"""Requests of Ollama's API: what is read, what is ignored and what is rejected."""

from __future__ import annotations

import json
from typing import Any

import ollama
import pytest

from headrace.config import RequestLimits
from headrace.gateway.api_errors import ApiError
from headrace.gateway.requests.text_request import Tool
from headrace.server.api.ollama.conversation_context import encode_context
from headrace.server.api.ollama.ollama_parameters import OPTION_PARAMETERS
from headrace.server.api.ollama.ollama_requests import OllamaRequest, read_chat_request, read_generate_request

LIMITS = RequestLimits()
HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Outside.", "parameters": SCHEMA}}


def chat(headers: dict[str, str] | None = None, **given: Any) -> OllamaRequest:
    body = {"model": "mini", "messages": HELLO, **given}
    return read_chat_request(json.dumps(body).encode(), headers or {}, LIMITS)


def generate(**given: Any) -> OllamaRequest:
    return read_generate_request(json.dumps({"model": "mini", **given}).encode(), {}, LIMITS)


def refused(reading: Any, **given: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        reading(**given)
    assert caught.value.status == 400
    return caught.value


def test_the_least_chat_is_a_stream_with_ollamas_defaults() -> None:
    asked = chat().text_request
    assert (asked.model, asked.messages, asked.stream) == ("mini", HELLO, True)
    assert (asked.sampling.temperature, asked.sampling.top_p, asked.sampling.repetition_penalty) == (0.8, 0.9, 1.0)
    assert (asked.max_tokens, asked.think, asked.grammar, asked.overflow, asked.seeded) == (
        None,
        None,
        None,
        None,
        False,
    )


def test_every_honoured_option_is_read() -> None:
    asked = chat(
        {"x-headrace-surface": "voice", "x-headrace-deadline-ms": "1500"},
        stream=False,
        think="high",
        keep_alive="5m",
        truncate=True,
        format={"type": "object"},
        logprobs=True,
        top_logprobs=2,
        priority=3,
        options={
            "num_predict": 7,
            "temperature": 0,
            "top_p": 0.5,
            "top_k": 20,
            "min_p": 0.1,
            "seed": 42,
            "stop": ["\n", "user:"],
            "repeat_penalty": 1.2,
            "repeat_last_n": -1,
            "presence_penalty": 1.5,
            "frequency_penalty": 1.0,
        },
    ).text_request
    sampling = asked.sampling
    assert (asked.stream, asked.max_tokens, asked.stop, asked.overflow) == (False, 7, ("\n", "user:"), "drop")
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 0.5, 20, 0.1)
    assert (sampling.seed, asked.seeded, sampling.logprobs) == (42, True, 2)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.2, 1.5, 1.0)
    assert (asked.think, asked.template) == (True, {"reasoning_effort": "high"})
    assert (asked.surface, asked.deadline_s, asked.priority) == ("voice", 1.5, 3)
    assert asked.grammar is not None
    assert (asked.grammar.kind, json.loads(asked.grammar.text), asked.grammar_of) == (
        "json_schema",
        {"type": "object"},
        "format",
    )


@pytest.mark.parametrize("least", [-2, -1, 0])
def test_a_number_of_tokens_that_is_no_limit_is_none(least: int) -> None:
    assert chat(options={"num_predict": least, "seed": -1}).text_request.max_tokens is None


def test_whole_floats_are_integers() -> None:
    asked = chat(options={"num_predict": 12.0, "top_k": 4.0, "num_ctx": 4096.0, "temperature": 1}).text_request
    assert (asked.max_tokens, asked.sampling.top_k, asked.sampling.temperature) == (12, 4, 1)
    assert refused(chat, options={"num_predict": 1.5}).parameter == "options.num_predict"


def test_a_repeat_penalty_over_no_tokens_is_none() -> None:
    assert chat(options={"repeat_penalty": 1.3, "repeat_last_n": 0}).text_request.sampling.repetition_penalty == 1.0
    assert refused(chat, options={"repeat_penalty": 1.3, "repeat_last_n": 64}).parameter == "options.repeat_last_n"


def test_options_that_only_load_a_model_change_nothing() -> None:
    ignored = {"num_ctx": 512, "num_gpu": 1, "num_thread": 8, "use_mmap": True, "num_batch": 2, "numa": False}
    plain, loaded = chat(options={"seed": 1}).text_request, chat(options={"seed": 1, **ignored}).text_request
    assert plain == loaded


@pytest.mark.parametrize(
    ("option", "value", "accepted"),
    [("mirostat", 1, 0), ("tfs_z", 0.9, 1.0), ("typical_p", 0.7, 1.0), ("penalize_newline", False, True)],
)
def test_options_that_would_change_the_answer_are_rejected_by_name(option: str, value: Any, accepted: Any) -> None:
    error = refused(chat, options={option: value})
    assert (error.parameter, error.code) == (f"options.{option}", "unsupported_parameter")
    assert error.message.startswith(f"'options.{option}' is not supported")
    assert chat(options={option: accepted, "seed": 1}).text_request == chat(options={"seed": 1}).text_request


def test_every_option_of_ollamas_package_is_known() -> None:
    assert set(ollama.Options.model_fields) <= set(OPTION_PARAMETERS)


@pytest.mark.parametrize(
    ("format", "kind"), [("", None), (None, None), ("json", "json_object"), ({"type": "object"}, "json_schema")]
)
def test_formats_become_grammars(format: Any, kind: str | None) -> None:
    grammar = chat(format=format).text_request.grammar
    assert (None if grammar is None else grammar.kind) == kind


def test_a_format_of_another_kind_is_rejected() -> None:
    assert refused(chat, format="yaml").parameter == "format"


@pytest.mark.parametrize(("think", "read"), [(True, True), (False, False), ("low", True), (None, None)])
def test_thinking_is_read(think: Any, read: bool | None) -> None:
    assert chat(think=think).text_request.think is read


# Messages


def test_calls_and_results_without_ids_are_matched_by_name_and_order() -> None:
    calls = [{"function": {"name": name, "arguments": {"n": n}}} for n, name in enumerate(("a", "b", "a"))]
    messages = chat(
        messages=[
            *HELLO,
            {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": calls},
            {"role": "tool", "content": "B", "tool_name": "b"},
            {"role": "tool", "content": "A0", "tool_name": "a"},
            {"role": "tool", "content": "A2"},
            {"role": "assistant", "tool_calls": [{"id": "own", "function": {"name": "c", "arguments": '{"x": 1}'}}]},
            {"role": "tool", "content": "C", "tool_call_id": "own"},
            {"role": "tool", "content": "?", "tool_name": "d"},
        ]
    ).text_request.messages
    assert messages is not None
    first, second = messages[1], messages[5]
    assert (first["reasoning_content"], [call["id"] for call in first["tool_calls"]]) == (
        "hm",
        ["call_0", "call_1", "call_2"],
    )
    assert first["tool_calls"][2]["function"] == {"name": "a", "arguments": {"n": 2}}
    assert [(each["tool_call_id"], each["name"], each["content"]) for each in messages[2:5]] == [
        ("call_1", "b", "B"),
        ("call_0", "a", "A0"),
        ("call_2", "a", "A2"),
    ]
    assert second["tool_calls"][0] == {
        "id": "own",
        "type": "function",
        "function": {"name": "c", "arguments": {"x": 1}},
    }
    assert (messages[6]["tool_call_id"], messages[6]["name"]) == ("own", "c")
    assert (messages[7]["tool_call_id"], messages[7]["name"]) == ("call_4", "d")


def test_images_come_before_the_text_of_a_users_message() -> None:
    assert chat(messages=[{"role": "user", "content": "Hello", "images": []}]).text_request.messages == HELLO
    messages = chat(messages=[{"role": "user", "content": "?", "images": ["aGk="]}]).text_request.messages
    assert messages == [{"role": "user", "content": "\ufffc?", "images": [{"url": "data:image/png;base64,aGk="}]}]
    error = refused(chat, messages=[{"role": "system", "content": "?", "images": ["aGk="]}])
    assert error.parameter == "messages[0]"
    assert refused(chat, messages=[{"role": "user", "images": [1]}]).parameter == "messages[0].images[0]"
    assert refused(generate, prompt="?", images=["aGk="]).parameter == "images"


def test_calls_that_an_answer_had_can_be_sent_back() -> None:
    function = {"index": 0, "name": "weather", "arguments": {"city": "Rome"}}
    call = {"id": "c", "type": "function", "function": function}
    history = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}]
    messages = chat(messages=history).text_request.messages
    assert messages is not None
    expected = {"name": "weather", "arguments": {"city": "Rome"}}
    assert messages[1]["tool_calls"] == [{"id": "c", "type": "function", "function": expected}]


def test_tools_are_read() -> None:
    assert chat(tools=[WEATHER]).text_request.tools == (Tool("weather", "Outside.", SCHEMA),)
    assert refused(chat, tools=[WEATHER, WEATHER]).parameter == "tools[1].function.name"


def test_too_many_messages_are_rejected() -> None:
    with pytest.raises(ApiError, match="messages"):
        read_chat_request(json.dumps({"messages": HELLO * 5}).encode(), {}, RequestLimits(messages=4))


def test_a_request_without_a_prompt_asks_for_nothing() -> None:
    assert chat(messages=[]).is_empty
    assert generate().is_empty
    assert generate(prompt="", raw=True).is_empty
    assert not chat().is_empty
    assert not generate(prompt="Hello").is_empty


# Generate


def test_a_prompt_is_a_chat_of_its_system_message_and_itself() -> None:
    request = generate(prompt="Hello", system="Be brief.")
    assert request.text_request.messages == [{"role": "system", "content": "Be brief."}, *HELLO]
    assert request.conversation == request.text_request.messages


def test_a_raw_prompt_is_not_put_into_a_chat() -> None:
    request = generate(prompt="<|user|>Hello", raw=True, template="", suffix="")
    assert (request.text_request.prompts, request.text_request.messages) == (["<|user|>Hello"], None)
    assert request.conversation is None
    assert refused(generate, prompt="Hello", raw=True, system="x").parameter == "system"
    assert refused(generate, prompt="Hello", raw=True, context=[1]).parameter == "context"


@pytest.mark.parametrize("name", ["template", "suffix"])
def test_what_no_model_honours_is_rejected_by_name(name: str) -> None:
    error = refused(generate, prompt="Hello", **{name: "x"})
    assert (error.parameter, error.code) == (name, "unsupported_parameter")


def test_a_context_continues_its_conversation() -> None:
    earlier = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Grüße 🙂"},
        {"role": "assistant", "content": "Hi"},
    ]
    context = encode_context(earlier)
    assert generate(prompt="Hello", context=context).text_request.messages == [*earlier, *HELLO]
    changed = generate(prompt="Hello", context=context, system="Be long.")
    assert changed.text_request.messages == [{"role": "system", "content": "Be long."}, *earlier[1:], *HELLO]


def test_an_unknown_parameter_is_named() -> None:
    assert refused(chat, message=HELLO).parameter == "message"
    error = refused(chat, options={"temprature": 1})
    assert (error.parameter, error.code) == ("options.temprature", "unknown_parameter")
    assert "Did you mean 'options.temperature'?" in error.message
