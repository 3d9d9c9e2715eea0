"""Tools of `/v1/chat/completions` as the openai package uses them: forced by grammar, so that the model has no say."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel, Field

MESSAGES: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Oslo"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK: Any = {
    "type": "function",
    "function": {
        "name": "get_time",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"enum": ["UTC"]}},
            "required": ["zone"],
            "additionalProperties": False,
        },
    },
}
# What the bundled model writes where it calls. A grammar of the request's own takes the place of that of the calls.
CALL = '<tool_call>{"name": "get_time", "arguments": {"zone": "UTC"}}</tool_call>'
SHORT: dict[str, Any] = {"model": "mini", "messages": MESSAGES, "tools": [WEATHER, CLOCK], "max_tokens": 80}


def ask(client: openai.OpenAI, **wishes: Any) -> ChatCompletion:
    found = client.chat.completions.create(**{**SHORT, **wishes})
    assert isinstance(found, ChatCompletion)
    return found


def stream(client: openai.OpenAI, **wishes: Any) -> list[ChatCompletionChunk]:
    return list(client.chat.completions.create(**{**SHORT, **wishes}, stream=True))


def says(text: str) -> dict[str, Any]:
    return {"tools": [CLOCK], "extra_body": {"guided_choice": [text]}}


def check(name: str, arguments: str) -> None:
    found = json.loads(arguments)
    if name == "get_weather":
        assert found["city"] in ("Paris", "Oslo")
        assert 1 <= found["days"] <= 9
        assert len(found) == 2
    else:
        assert (name, found) == ("get_time", {"zone": "UTC"})


def streamed(chunks: list[ChatCompletionChunk]) -> list[tuple[str, str]]:
    """Names and arguments of the calls, with the rules of their deltas checked."""
    calls: list[tuple[str, str]] = []
    for chunk in chunks:
        for choice in chunk.choices:
            for delta in choice.delta.tool_calls or ():
                assert delta.function is not None
                if delta.index == len(calls):
                    assert delta.id is not None
                    assert delta.id.startswith("call_")
                    assert delta.type == "function"
                    assert delta.function.name
                    calls.append((delta.function.name, ""))
                else:
                    assert delta.index == len(calls) - 1  # one call after the other
                    assert (delta.id, delta.type, delta.function.name) == (None, None, None)
                name, arguments = calls[delta.index]
                calls[delta.index] = (name, arguments + (delta.function.arguments or ""))
    return calls


def test_required_calls_a_tool_with_arguments_of_its_schema(client: openai.OpenAI) -> None:
    answer = ask(client, tool_choice="required", parallel_tool_calls=False, seed=1)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.id.startswith("call_")
    check(call.function.name, call.function.arguments)


@pytest.mark.parametrize("name", ["get_weather", "get_time"])
def test_a_named_tool_is_the_one_that_is_called(client: openai.OpenAI, name: str) -> None:
    named: Any = {"type": "function", "function": {"name": name}}
    answer = ask(client, tool_choice=named, parallel_tool_calls=False, temperature=0)
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"  # as the service ends a call that it was told to make
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == name
    check(name, call.function.arguments)


@pytest.mark.parametrize("mode", ["required", "auto"])
@pytest.mark.parametrize("name", ["get_weather", "get_time"])
def test_only_allowed_tools_are_called(client: openai.OpenAI, name: str, mode: str) -> None:
    allowed: Any = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": mode, "tools": [{"type": "function", "function": {"name": name}}]},
    }
    called = 0
    for question in ("What is the weather in Paris?", "What time is it in Oslo?"):
        messages: Any = [{"role": "user", "content": question}]
        answer = ask(client, messages=messages, tool_choice=allowed, temperature=0, max_tokens=100)
        plain = ask(client, messages=messages, temperature=0, max_tokens=1)
        assert answer.usage is not None
        assert plain.usage is not None
        assert answer.usage.prompt_tokens == plain.usage.prompt_tokens  # the model is shown all: its prefix is cached
        for call in answer.choices[0].message.tool_calls or []:
            assert call.type == "function"
            assert call.function.name == name
            check(name, call.function.arguments)
            called += 1
    assert called > 0


def test_streamed_calls_are_those_of_the_whole_answer(client: openai.OpenAI) -> None:
    wishes: dict[str, Any] = {"tool_choice": "required", "seed": 3, "parallel_tool_calls": False}
    whole = ask(client, **wishes).choices[0].message.tool_calls
    chunks = stream(client, **wishes)
    assert whole is not None
    assert streamed(chunks) == [
        (call.function.name, call.function.arguments) for call in whole if call.type == "function"
    ]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ""
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_arguments_come_while_they_are_made(client: openai.OpenAI) -> None:
    chunks = stream(client, tool_choice={"type": "function", "function": {"name": "get_weather"}}, temperature=0)
    deltas = [chunk for chunk in chunks if chunk.choices[0].delta.tool_calls]
    assert len(deltas) > 2


def test_auto_passes_on_what_the_model_decides(client: openai.OpenAI) -> None:
    said = ask(client, **says("No need.")).choices[0]
    assert (said.message.content, said.message.tool_calls, said.finish_reason) == ("No need.", None, "stop")
    called = ask(client, **says(f"Wait.{CALL}")).choices[0]
    assert called.message.content == "Wait."
    assert called.finish_reason == "tool_calls"
    assert called.message.tool_calls is not None
    assert [call.function.name for call in called.message.tool_calls if call.type == "function"] == ["get_time"]


QUESTIONS = (
    "What is the weather in Seville?", "What time is it in Oslo?", "Hi there.", "Tell me about the KV cache.",
)  # fmt: skip
LOOSE: Any = {"type": "function", "function": {**WEATHER["function"], "strict": False}}


def test_calls_of_auto_are_json_that_fits_the_schema_whatever_the_seed(base_url: str) -> None:
    """Without `strict`. The bundled model calls in a third of the answers, and breaks some of them if it is let."""

    async def all_seeds() -> list[ChatCompletion]:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120) as many:
            return await asyncio.gather(
                *(
                    many.chat.completions.create(
                        model="mini",
                        messages=[{"role": "user", "content": QUESTIONS[seed % 4]}],
                        tools=[LOOSE, CLOCK],
                        temperature=1.2,
                        seed=seed,
                        max_tokens=100 if seed % 5 else 8,
                    )
                    for seed in range(60)
                )
            )

    called, cut = 0, 0
    for answer in asyncio.run(all_seeds()):
        (choice,) = answer.choices
        calls = choice.message.tool_calls or []
        for call in calls:
            assert call.type == "function"
            check(call.function.name, call.function.arguments)
        if choice.finish_reason != "length":
            assert choice.finish_reason == ("tool_calls" if calls else "stop")
        called += bool(calls)
        cut += choice.finish_reason == "length" and not calls
    assert called > 12
    assert cut > 3  # half a call is none


def test_a_stream_that_is_cut_in_a_call_ends_with_its_length(client: openai.OpenAI) -> None:
    cut: dict[str, Any] = {"tool_choice": "required", "seed": 3, "parallel_tool_calls": False, "max_tokens": 14}
    chunks = stream(client, **cut)
    assert chunks[-1].choices[0].finish_reason == "length"
    ((name, arguments),) = streamed(chunks)
    assert name in ("get_weather", "get_time")
    with pytest.raises(json.JSONDecodeError):
        json.loads(arguments)
    whole = ask(client, **cut).choices[0]
    assert (whole.finish_reason, whole.message.tool_calls, whole.message.content) == ("length", None, "")


def test_several_calls_of_one_answer(client: openai.OpenAI) -> None:
    whole = ask(client, **says(CALL + CALL)).choices[0].message.tool_calls
    assert whole is not None
    assert len(whole) == 2
    assert whole[0].id != whole[1].id
    found = streamed(stream(client, **says(CALL + CALL)))
    assert [(name, json.loads(arguments)) for name, arguments in found] == [("get_time", {"zone": "UTC"})] * 2
    one = ask(client, parallel_tool_calls=False, **says(CALL + CALL)).choices[0].message.tool_calls
    assert one is not None
    assert len(one) == 1


def test_none_writes_text_whatever_it_looks_like(client: openai.OpenAI) -> None:
    choice = ask(client, tool_choice="none", **says(CALL)).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (CALL, None, "stop")


def test_none_does_not_show_the_tools_to_the_model(client: openai.OpenAI) -> None:
    hidden = ask(client, tool_choice="none", max_tokens=1)
    plain = client.chat.completions.create(model="mini", messages=MESSAGES, max_tokens=1)
    assert hidden.usage is not None
    assert plain.usage is not None
    assert hidden.usage.prompt_tokens == plain.usage.prompt_tokens


def test_a_conversation_with_calls_goes_on(client: openai.OpenAI) -> None:
    first = ask(client, tool_choice="required", parallel_tool_calls=False, seed=1).choices[0].message
    assert first.tool_calls is not None
    result: Any = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": '{"degrees": 21}'}
    history: Any = [*MESSAGES, first.model_dump(exclude_none=True), result]
    answer = ask(client, messages=history, max_tokens=4, tool_choice="none")
    assert answer.choices[0].finish_reason in ("stop", "length")
    # An answer that comes from another client has its nulls.
    again: Any = [*MESSAGES, first.model_dump(), result]
    twice = ask(client, messages=again, max_tokens=4, tool_choice="none")
    assert twice.usage is not None
    assert answer.usage is not None
    assert twice.usage.prompt_tokens == answer.usage.prompt_tokens


def test_parse_reads_the_arguments(client: openai.OpenAI) -> None:
    class Weather(BaseModel):
        """The weather of a city."""

        days: int = Field(ge=1, le=9)

    answer = client.chat.completions.parse(
        model="mini",
        messages=MESSAGES,
        tools=[openai.pydantic_function_tool(Weather)],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=60,
    )
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    assert isinstance(calls[0].function.parsed_arguments, Weather)


@pytest.mark.parametrize(
    ("wishes", "parameter"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
            "tool_choice.tools",
        ),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "other"}}]},
                }
            },
            "tool_choice",
        ),
        ({"tools": [CLOCK, CLOCK]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameter": 1}}]}, "tools[0].function.parameter"),
        ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools[0].type"),
        ({"tools": [CLOCK] * 200}, "tools"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ],
)
def test_what_is_wrong_is_named(client: openai.OpenAI, wishes: dict[str, Any], parameter: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        ask(client, **wishes)
    assert raised.value.param == parameter
