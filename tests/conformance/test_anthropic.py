"""Anthropic's own package against /v1/messages."""

from __future__ import annotations

import json
from collections.abc import Iterator

import anthropic
import pytest

from tests.conformance.conftest import Server

QUESTION = [{"role": "user", "content": "What is paging?"}]
TOOL = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as found:
        yield found


def test_a_stream_says_what_a_whole_answer_says(client: anthropic.Anthropic) -> None:
    asked = {"model": "mini", "max_tokens": 24, "messages": QUESTION, "extra_body": {"temperature": 0.0}}
    whole = client.messages.create(**asked)
    assert whole.content[0].type == "text"
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert whole.stop_reason == final.stop_reason
    assert whole.usage.output_tokens == final.usage.output_tokens <= 24


def test_tokens_are_counted_as_they_are_used(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model="mini", messages=QUESTION, system="Be brief.")
    used = client.messages.create(model="mini", max_tokens=1, messages=QUESTION, system="Be brief.").usage
    assert counted.input_tokens == used.input_tokens + (used.cache_read_input_tokens or 0)


def test_a_tool_that_must_be_called_is_called_and_its_result_taken(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(
        model="mini",
        max_tokens=200,
        messages=[{"role": "user", "content": "How warm is it in Oslo, in degrees Celsius?"}],
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True},
    )
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    assert call.name == "get_weather"
    assert set(call.input) == {"city", "unit"}
    assert call.input["unit"] in ("C", "F")
    after = client.messages.create(
        model="mini",
        max_tokens=16,
        tools=[TOOL],
        messages=[
            {"role": "user", "content": "How warm is it in Oslo, in degrees Celsius?"},
            {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": '{"degrees": 7}'}]},
        ],
    )
    assert after.usage.output_tokens > 0


def test_errors_are_the_clients_own(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="Unknown model 'nobody'"):
        client.messages.create(model="nobody", max_tokens=1, messages=QUESTION)
    with pytest.raises(anthropic.BadRequestError) as raised:
        client.messages.create(model="mini", max_tokens=1, messages=QUESTION, extra_body={"colour": "red"})
    error = json.loads(raised.value.response.text)
    assert error["type"] == "error"
    assert "colour" in error["error"]["message"]
