"""What other servers' clients send: accepted where it changes nothing or can be honoured, else rejected by name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.config import RequestLimits
from headrace.gateway.api_errors import ApiError
from headrace.gateway.requests.text_request import TextRequest
from headrace.server.api.chat_completions import read_chat_request
from headrace.server.api.completions import read_completion_request
from headrace.server.api.messages import read_message_request
from headrace.server.api.responses.responses import read_response_request
from headrace.server.http.unknown_fields import UnknownFields
from tests.support.running_server import CHAT, asynchronous, serving, tokenizer, words

SAY = {"role": "user", "content": "Hello"}
READERS: dict[str, Any] = {
    "chat": (read_chat_request, {"messages": [SAY]}),
    "completions": (read_completion_request, {"prompt": "Hello"}),
    "messages": (read_message_request, {"messages": [SAY], "max_tokens": 5}),
    "responses": (read_response_request, {"input": "Hello"}),
}


def read(dialect: str, **fields: Any) -> tuple[Any, str]:
    """The request, and the names of what was ignored."""
    reader, least = READERS[dialect]
    unknown = UnknownFields(strict=False)
    found = reader(msgspec.json.encode({**least, **fields}), {}, RequestLimits(), unknown)
    return found, unknown.header


def chat(**fields: Any) -> TextRequest:
    found, ignored = read("chat", **fields)
    assert ignored == ""
    return found


@pytest.mark.parametrize(
    ("dialect", "field", "value"),
    [
        ("chat", "best_of", 1),
        ("chat", "skip_special_tokens", True),
        ("chat", "use_beam_search", False),
        ("chat", "add_generation_prompt", True),
        ("chat", "continue_final_message", False),
        ("chat", "verbosity", "low"),
        ("chat", "store", False),
        ("chat", "include_reasoning", True),
        ("chat", "cache_prompt", True),
        ("chat", "thinking", {"type": "disabled"}),
        ("chat", "think", False),
        ("completions", "best_of", 1),
        ("completions", "use_beam_search", False),
        ("completions", "cache_prompt", True),
        ("messages", "thinking", {"type": "disabled"}),
        ("messages", "thinking", {"type": "adaptive", "display": "omitted"}),
        ("messages", "context_management", {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
        ("responses", "truncation", "auto"),
        ("responses", "text", {"verbosity": "high"}),
        ("responses", "use_beam_search", False),
    ],
)
def test_what_is_honoured_or_changes_nothing_is_not_named(dialect: str, field: str, value: Any) -> None:
    assert read(dialect, **{field: value})[1] == ""


@pytest.mark.parametrize(
    ("dialect", "field", "value"),
    [
        ("chat", "store", True),
        ("chat", "prompt_cache_retention", "24h"),
        ("chat", "service_tier", "flex"),
        ("chat", "keep_alive", "10m"),
        ("chat", "client_metadata", {"a": "b"}),
        ("chat", "provider", {"order": ["a"]}),
        ("completions", "prompt_cache_retention", "24h"),
        ("messages", "context_management", {"edits": [{"type": "clear_tool_uses_20250919"}]}),
        ("responses", "client_metadata", {"a": "b"}),
        ("responses", "context_management", [{"type": "compaction"}]),
        ("responses", "prompt_cache_retention", "24h"),
    ],
)
def test_a_hint_is_ignored_and_named(dialect: str, field: str, value: Any) -> None:
    assert read(dialect, **{field: value})[1] == field


@pytest.mark.parametrize("dialect", READERS)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_beam_search", True),
        ("typical_p", 0.5),
        ("mirostat", 2),
        ("max_new_tokens", 5),
        ("skip_special_tokens", False),
        ("options", {"temperature": 0}),
        ("extra_body", {"top_k": 1}),
        ("structured_outputs", {"regex": "a"}),
    ],
)
def test_what_would_change_the_answer_is_rejected_by_name(dialect: str, field: str, value: Any) -> None:
    with pytest.raises(ApiError) as raised:
        read(dialect, **{field: value})
    assert (raised.value.status, raised.value.parameter) == (400, field)


def test_history_of_other_clients_is_read_without_their_extras() -> None:
    message = {
        "role": "assistant",
        "content": "Hi",
        "provider_specific_fields": {"refusal": None},
        "thinking_blocks": [],
    }
    found, ignored = read("chat", messages=[SAY, message, SAY])
    assert [each["content"] for each in found.messages] == ["Hello", "Hi", "Hello"]
    assert ignored == "messages.provider_specific_fields, messages.thinking_blocks"


def test_a_message_that_should_be_continued_is_rejected() -> None:
    with pytest.raises(ApiError) as raised:
        read("chat", messages=[SAY, {"role": "assistant", "content": "He", "prefix": True}])
    assert raised.value.parameter == "messages[1].prefix"


@pytest.mark.parametrize(
    ("fields", "think", "hints"),
    [
        ({"reasoning_effort": "none"}, False, {}),
        ({"reasoning_effort": "high"}, True, {"reasoning_effort": "high"}),
        ({"thinking": {"type": "disabled"}}, False, {}),
        ({"thinking": {"type": "enabled", "budget_tokens": 100}}, True, {}),
        ({"thinking": {"type": "auto"}}, None, {}),
        ({"think": False}, False, {}),
        ({"think": True}, True, {}),
        ({"think": "low"}, True, {"reasoning_effort": "low"}),
        ({"enable_thinking": False}, False, {}),
        ({"verbosity": "low"}, None, {"verbosity": "low"}),
        ({}, None, {}),
    ],
)
def test_all_names_of_reasoning_mean_the_same(
    fields: dict[str, Any], think: bool | None, hints: dict[str, Any]
) -> None:
    asked = chat(**fields)
    assert (asked.think, asked.template_hints) == (think, hints)


def test_reasoning_can_be_left_out() -> None:
    assert chat(include_reasoning=False).show_reasoning is False
    assert chat().show_reasoning is True
    assert read("messages", thinking={"type": "adaptive", "display": "omitted"})[0].show_reasoning is False


def test_a_prompt_cache_that_is_switched_off_is_not_used() -> None:
    assert chat(cache_prompt=False).cache == "off"
    assert chat(cache_prompt=True).cache == "on"


def test_automatic_truncation_drops_old_messages() -> None:
    found, _ = read("responses", truncation="auto")
    assert (found.text_request.overflow, found.echoed["truncation"]) == ("drop", "auto")
    found, _ = read("responses", truncation="disabled")
    assert found.text_request.overflow is None


def test_chats_take_the_truncation_of_responses() -> None:
    assert read("chat", truncation="auto")[0].overflow == "drop"
    assert read("chat", truncation="auto", overflow="summarise")[0].overflow == "summarise"
    assert read("chat", truncation="disabled")[0].overflow is None
    with pytest.raises(ApiError, match="truncation"):
        read("chat", truncation="always")


def test_a_prediction_is_read_as_text() -> None:
    assert chat(prediction={"type": "content", "content": "Hello"}).prediction == "Hello"
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]
    assert chat(prediction={"type": "content", "content": parts}).prediction == "Hello\nthere"


@asynchronous
async def test_the_engine_gets_the_tokens_of_a_prediction() -> None:
    async with serving() as running:
        running.engine.answer = words("ok")
        for text in ("Hello there", "Hello " * 50_000):  # the second is longer than the context
            prediction = {"type": "content", "content": text}
            answer = await running.ask("POST", "/v1/chat/completions", {**CHAT, "prediction": prediction})
            assert answer.status == 200
        assert (await running.ask("POST", "/v1/chat/completions", CHAT)).status == 200
        short, long, none = [stream.request.prediction for stream in running.engine.streams]
    tokens = tokenizer().encode("Hello " * 5000, False)
    assert short == tuple(tokenizer().encode("Hello there", False))
    assert long == tuple(tokens[:2048])
    assert none == ()


def test_a_json_object_with_a_schema_is_held_to_the_schema() -> None:
    grammar = chat(response_format={"type": "json_object", "schema": {"type": "object"}}).grammar
    assert grammar is not None
    assert (grammar.kind, grammar.text) == ("json_schema", '{"type":"object"}')
