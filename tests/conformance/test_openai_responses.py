"""The openai package against /v1/responses."""

from __future__ import annotations

import time
from typing import Any

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


def test_a_response_in_the_background_is_polled_to_its_end(client: openai.OpenAI) -> None:
    asked: Any = {"model": "mini", "input": "What is paging?", "temperature": 0, "max_output_tokens": 24}
    created = client.responses.create(**asked, background=True)
    assert (created.status, created.background) == ("queued", True)
    deadline = time.monotonic() + 120
    while (found := client.responses.retrieve(created.id)).status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert found.output_text == client.responses.create(**asked).output_text
    assert client.responses.cancel(created.id) == found  # it has ended, so it stays as it is


def test_a_response_in_the_background_is_cancelled(client: openai.OpenAI) -> None:
    created = client.responses.create(
        model="mini", input="Count.", background=True, max_output_tokens=1500, extra_body={"ignore_eos": True}
    )
    assert client.responses.cancel(created.id).status == "cancelled"
    assert client.responses.retrieve(created.id).status == "cancelled"


def test_a_stream_of_the_background_is_followed_from_an_event_on(client: openai.OpenAI) -> None:
    stream = client.responses.create(
        model="mini", input="What is AWQ?", temperature=0, max_output_tokens=24, background=True, stream=True
    )
    first = next(iter(stream))
    assert first.type == "response.created"
    stream.close()
    events = list(client.responses.retrieve(first.response.id, stream=True, starting_after=first.sequence_number))
    assert [event.sequence_number for event in events] == list(range(1, len(events) + 1))
    assert events[-1].type in ("response.completed", "response.incomplete")
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert said == client.responses.retrieve(first.response.id).output_text


def test_a_conversation_is_kept_and_continued(client: openai.OpenAI) -> None:
    conversation = client.conversations.create(
        items=[{"type": "message", "role": "system", "content": "Be brief."}], metadata={"topic": "paging"}
    )
    assert client.conversations.retrieve(conversation.id) == conversation
    asked: Any = {"model": "mini", "temperature": 0, "max_output_tokens": 8, "conversation": conversation.id}
    first = client.responses.create(**asked, input="What is paging?")
    second = client.responses.create(**asked, input="Why?")
    assert first.usage is not None
    assert second.usage is not None
    assert second.conversation is not None
    assert second.conversation.id == conversation.id
    assert second.usage.input_tokens >= first.usage.total_tokens
    items = list(client.conversations.items.list(conversation.id, order="asc", limit=2))  # page by page
    roles = [item.role for item in items if item.type == "message"]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    added = client.conversations.items.create(
        conversation.id, items=[{"type": "message", "role": "user", "content": "And?"}]
    )
    (item,) = added.data
    assert client.conversations.items.retrieve(item.id or "", conversation_id=conversation.id) == item
    assert client.conversations.items.delete(item.id or "", conversation_id=conversation.id).id == conversation.id
    assert client.conversations.update(conversation.id, metadata={"topic": "other"}).metadata == {"topic": "other"}
    assert client.conversations.delete(conversation.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.responses.create(**asked, input="Still there?")
