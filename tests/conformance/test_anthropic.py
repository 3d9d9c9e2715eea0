"""Anthropic's own package against /v1/messages."""

from __future__ import annotations

import json
import time
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
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=120) as found:
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
    assert answer.id.startswith("msg_")
    assert call.id.startswith("toolu_")
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
        client.messages.create(model="mini", max_tokens=1, messages=QUESTION, extra_body={"stop": ["a"]})
    error = json.loads(raised.value.response.text)
    assert error["type"] == "error"
    assert "'stop' is not supported: use this endpoint's own name" in error["error"]["message"]


def test_models_are_listed_in_the_clients_own_shape(client: anthropic.Anthropic) -> None:
    (model,) = client.models.list()
    assert (model.id, model.type, model.lifecycle) == ("mini", "model", "active")
    assert model.max_input_tokens is not None
    assert model.created_at.year >= 2025
    assert client.models.retrieve("mini") == model
    assert [each.id for each in client.beta.models.list()] == ["mini"]
    with pytest.raises(anthropic.NotFoundError, match="Unknown model 'nobody'") as raised:
        client.models.retrieve("nobody")
    assert raised.value.request_id is not None
    assert raised.value.body["error"]["type"] == "not_found_error"


def test_a_message_batch_is_run_and_its_results_are_read(client: anthropic.Anthropic) -> None:
    params = {"model": "mini", "max_tokens": 8, "messages": QUESTION}
    batch = client.messages.batches.create(
        requests=[
            {"custom_id": "good", "params": params},  # type: ignore[typeddict-item]
            {"custom_id": "bad", "params": {**params, "model": "nobody"}},  # type: ignore[typeddict-item]
        ]
    )
    assert batch.request_counts.processing == 2
    deadline = time.monotonic() + 120
    while (batch := client.messages.batches.retrieve(batch.id)).processing_status != "ended":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert (batch.request_counts.succeeded, batch.request_counts.errored) == (1, 1)
    results = {each.custom_id: each.result for each in client.messages.batches.results(batch.id)}
    good, bad = results["good"], results["bad"]
    assert good.type == "succeeded"
    assert 0 < good.message.usage.output_tokens <= 8
    assert bad.type == "errored"
    assert bad.error.error.type == "not_found_error"
    assert batch.id in [each.id for each in client.messages.batches.list(limit=1)]
    assert batch.id in [each.id for each in client.beta.messages.batches.list(limit=1)]
    assert len(list(client.beta.messages.batches.results(batch.id))) == 2
    with pytest.raises(anthropic.ConflictError):
        client.messages.batches.cancel(batch.id)
    assert client.messages.batches.delete(batch.id).type == "message_batch_deleted"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.retrieve(batch.id)
