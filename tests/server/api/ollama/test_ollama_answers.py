"""Answers of Ollama's API, whole and as lines."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.gateway.api_errors import ApiError
from headrace.gateway.requests.text_request import (
    ChoiceDelta,
    FinishReason,
    RestartDelta,
    TextRequest,
    TokenLogprob,
    TokenUsage,
)
from headrace.server.api.ollama.conversation_context import decode_context
from headrace.server.api.ollama.ollama_answers import AnswerLines, answer_body, chat_fields, generate_fields
from headrace.server.api.ollama.ollama_requests import OllamaRequest
from tests.support.dialect_exchanges import called, exchange_for, streamed, whole

USAGE = TokenUsage(prompt_tokens=20, output_tokens=7, queue_s=0.001, prefill_s=0.25, decode_s=1.5)
REQUEST = OllamaRequest(TextRequest(model="mini"))
TIMES = {"load_duration": 1_000_000, "prompt_eval_duration": 250_000_000, "eval_duration": 1_500_000_000}


def end(finish: FinishReason = "stop", usage: TokenUsage = USAGE) -> ChoiceDelta:
    return ChoiceDelta(0, finish=finish, usage=usage)


def lines_of(pieces: list[ChoiceDelta], fields: Any = chat_fields, request: OllamaRequest = REQUEST) -> list[Any]:
    data = streamed(AnswerLines(fields, request, exchange_for(request.text_request)), pieces)
    assert data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


def body_of(pieces: list[ChoiceDelta], fields: Any = chat_fields, request: OllamaRequest = REQUEST) -> dict[str, Any]:
    return answer_body(fields, request, exchange_for(request.text_request), whole(pieces))


def test_each_piece_is_a_line_and_the_last_one_has_the_statistics() -> None:
    first, second, last = lines_of([ChoiceDelta(0, content='"a'), ChoiceDelta(0, content="b\n"), end()])
    assert first["message"] == {"role": "assistant", "content": '"a'}
    assert second["message"] == {"role": "assistant", "content": "b\n"}
    assert (first["model"], first["done"], second["done"], last["done"]) == ("mini", False, False, True)
    assert first["created_at"] == last["created_at"]
    assert (last["done_reason"], last["message"]["content"]) == ("stop", "")
    assert (last["prompt_eval_count"], last["eval_count"]) == (20, 7)
    assert {name: last[name] for name in TIMES} == TIMES
    assert last["total_duration"] > 0


def test_a_whole_answer_joins_the_lines() -> None:
    pieces = [
        ChoiceDelta(0, reasoning="Hm."),
        ChoiceDelta(0, content="a"),
        *called(0, "weather", '{"city":', ' "Oslo"}'),
        end("tool_calls"),
    ]
    body, lines = body_of(pieces), lines_of(pieces)
    assert body["message"] == {
        "role": "assistant",
        "content": "a",
        "thinking": "Hm.",
        "tool_calls": [{"id": "call_0", "function": {"index": 0, "name": "weather", "arguments": {"city": "Oslo"}}}],
    }
    joined: dict[str, Any] = {"role": "assistant", "content": "", "thinking": "", "tool_calls": []}
    for line in lines:
        for name, value in line["message"].items():
            joined[name] = value if name == "role" else joined[name] + value
    assert joined == body["message"]
    assert body["done_reason"] == lines[-1]["done_reason"] == "stop"
    assert {name: body[name] for name in TIMES} == TIMES


def test_calls_one_after_another_are_each_written_when_they_end() -> None:
    pieces = [*called(0, "a", "{}"), *called(1, "b", '{"x"', ": 1}"), ChoiceDelta(0, content="after"), end()]
    calls = [call for line in lines_of(pieces) for call in line["message"].get("tool_calls", [])]
    assert [(call["id"], call["function"]["index"], call["function"]["arguments"]) for call in calls] == [
        ("call_0", 0, {}),
        ("call_1", 1, {"x": 1}),
    ]


@pytest.mark.parametrize("finish", ["length", "deadline"])
def test_a_call_that_is_cut_is_left_out(finish: FinishReason) -> None:
    pieces = [*called(0, "a", "{}"), *called(1, "b", '{"x": '), end(finish)]
    lines, body = lines_of(pieces), body_of(pieces)
    names = [call["function"]["name"] for line in lines for call in line["message"].get("tool_calls", [])]
    assert names == ["a"] == [call["function"]["name"] for call in body["message"]["tool_calls"]]
    assert lines[-1]["done_reason"] == body["done_reason"] == finish


def test_arguments_that_are_no_object_stand_under_a_key() -> None:
    (call,) = body_of([*called(0, "a", "nonsense"), end()])["message"]["tool_calls"]
    assert call["function"]["arguments"] == {"_raw": "nonsense"}


def test_generated_text_is_the_response_and_ends_with_its_conversation() -> None:
    asked = [{"role": "user", "content": "Hello"}]
    request = OllamaRequest(TextRequest(model="mini", messages=asked), asked)
    pieces = [ChoiceDelta(0, reasoning="Hm."), ChoiceDelta(0, content="Hi "), ChoiceDelta(0, content="you"), end()]
    body, lines = body_of(pieces, generate_fields, request), lines_of(pieces, generate_fields, request)
    assert (body["response"], body["thinking"]) == ("Hi you", "Hm.")
    assert "".join(line["response"] for line in lines) == "Hi you"
    assert "context" not in lines[0]
    assert body["context"] == lines[-1]["context"]
    assert decode_context(body["context"]) == [*asked, {"role": "assistant", "content": "Hi you"}]
    assert "context" not in body_of(pieces, generate_fields)


def test_log_probabilities_stand_beside_their_text() -> None:
    logprob = TokenLogprob("a", b"a", -0.5, [("a", b"a", -0.5), ("b", b"b", -1.0)], "a")
    pieces = [ChoiceDelta(0, content="a", logprobs=[logprob]), end()]
    found = lines_of(pieces)[0]["logprobs"]
    assert found == body_of(pieces)["logprobs"]
    assert [(each["token"], each["logprob"]) for each in found[0]["top_logprobs"]] == [("a", -0.5), ("b", -1.0)]


def test_an_answer_that_took_no_time_can_be_divided_by() -> None:
    assert body_of([end(usage=TokenUsage(output_tokens=3))])["eval_duration"] == 1


def test_an_error_is_a_line_and_an_answer_cannot_begin_anew() -> None:
    writer = AnswerLines(chat_fields, REQUEST, exchange_for(REQUEST.text_request))
    assert json.loads(writer.error(ApiError("It broke.", kind="server_error"))) == {"error": "It broke."}
    with pytest.raises(ApiError, match="broke off"):
        writer.restart(RestartDelta(0))
