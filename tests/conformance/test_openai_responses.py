"""The openai package against /v1/responses."""

from __future__ import annotations

import openai
import pytest
from pydantic import BaseModel


class Order(BaseModel):
    number: int
    paid: bool


TOOL = {
    "type": "function",
    "name": "add",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}


def test_a_conversation_goes_on_from_a_stored_response(client: openai.OpenAI) -> None:
    first = client.responses.create(model="mini", input="What is paging?", temperature=0, max_output_tokens=40)
    assert first.usage is not None
    second = client.responses.create(
        model="mini", input="Why?", previous_response_id=first.id, temperature=0, max_output_tokens=4
    )
    assert second.usage is not None
    # All of the first conversation is in the second's prompt, and most of it in the cache.
    assert second.usage.input_tokens >= first.usage.total_tokens
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens
    assert client.responses.retrieve(second.id).output_text == second.output_text
    items = client.responses.input_items.list(second.id, order="asc").data
    assert [getattr(item, "role", None) for item in items] == ["user", "assistant", "user"]
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)


def test_what_is_not_to_be_stored_is_not(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="mini", input="Hello", store=False, max_output_tokens=4)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


def test_a_stream_ends_with_what_it_said(client: openai.OpenAI) -> None:
    said = ""
    numbers: list[int] = []
    with client.responses.stream(model="mini", input="What is AWQ?", temperature=0, max_output_tokens=24) as stream:
        for event in stream:
            numbers.append(event.sequence_number)
            if event.type == "response.output_text.delta":
                said += event.delta
        final = stream.get_final_response()
    assert numbers == list(range(len(numbers)))
    assert final.output_text == said
    # It can be gone on from as soon as its end was heard.
    assert client.responses.retrieve(final.id).output_text == said


def test_a_function_that_must_be_called_is_called_and_its_output_taken(client: openai.OpenAI) -> None:
    first = client.responses.create(
        model="mini",
        input="What is 17 plus 25?",
        tools=[TOOL],  # type: ignore[list-item]
        tool_choice={"type": "function", "name": "add"},
        parallel_tool_calls=False,
        max_output_tokens=100,
    )
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert call.name == "add"
    second = client.responses.create(
        model="mini",
        previous_response_id=first.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "42"}],
        tools=[TOOL],  # type: ignore[list-item]
        max_output_tokens=8,
    )
    assert second.status in ("completed", "incomplete")


def test_an_answer_is_parsed_by_its_schema(client: openai.OpenAI) -> None:
    answer = client.responses.parse(
        model="mini", input="Order 12, paid.", text_format=Order, max_output_tokens=60, temperature=0
    )
    assert isinstance(answer.output_parsed, Order)
