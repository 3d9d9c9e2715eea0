"""What is read of an answer: outputs and their times, usage, what the server tells of itself, and errors by kind."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.bench.client.timed_response import OutputTally, TimedResponse
from tests.support.programs.fake_openai_server import DONE, delta, event


def streamed(*events: tuple[float, Any], keep_text: bool = True) -> TimedResponse:
    """An answer whose events came one by one; its last byte at 9.0."""
    answer = TimedResponse(stream=True, keep_text=keep_text)
    answer.head(200, "text/event-stream; charset=utf-8")
    for now, value in events:
        answer.data(event(value), now)
    answer.complete(9.0)
    return answer


USAGE: dict[str, Any] = {
    "choices": [],
    "usage": {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}},
}


def test_an_output_is_content_reasoning_or_a_tool_call_and_nothing_else() -> None:
    answer = streamed(
        (1.0, delta(role="assistant")),
        (2.0, delta(reasoning_content="hm")),
        (3.0, delta("well")),
        (4.0, delta(tool_calls=[{"index": 0, "function": {"arguments": "{}"}}])),
        (5.0, delta(finish="stop")),
        (6.0, USAGE),
        (7.0, DONE),
    )
    assert list(answer.output_times) == [2.0, 3.0, 4.0]
    assert answer.first_content == 3.0
    assert (answer.error, answer.finish, answer.end) == ("", "stop", 9.0)
    assert (answer.prompt_tokens, answer.output_tokens, answer.cached_tokens) == (7, 3, 4)
    assert (answer.reasoning_parts, answer.content_parts, answer.tools) == (["hm"], ["well"], True)


def test_outputs_of_one_read_are_counted_as_together() -> None:
    tally = OutputTally()
    answer = TimedResponse(stream=True, tally=tally)
    answer.head(200, "text/event-stream")
    answer.data(event(delta("a")) + event(delta("b")) + event(delta("c")), 1.0)
    answer.data(event(delta("d", finish="length")), 2.0)
    answer.complete(2.0)
    assert (list(answer.output_times), answer.together, tally.outputs) == ([1.0, 1.0, 1.0, 2.0], 2, 4)
    assert answer.content_parts == []  # texts are kept on request only


def test_completions_have_their_text_in_another_place() -> None:
    answer = streamed((1.0, {"choices": [{"text": "on"}]}), (2.0, {"choices": [{"text": "", "finish_reason": "stop"}]}))
    assert (list(answer.output_times), answer.content_parts, answer.error) == ([1.0], ["on"], "")


def test_what_servers_tell_of_themselves_is_kept() -> None:
    told = {"queue_ms": 1.5, "prefill_ms": 20, "decode_ms": 30.25, "draft_acceptance": None}
    answer = streamed((1.0, delta("a", finish="stop")), (2.0, USAGE | {"headrace": told}), (3.0, DONE))
    assert (answer.queue_ms, answer.prefill_ms, answer.decode_ms) == (1.5, 20.0, 30.25)
    answer = streamed((1.0, delta("a", finish="stop") | {"timings": {"prompt_ms": 5.0, "predicted_ms": 6.0}}))
    assert (answer.queue_ms, answer.prefill_ms, answer.decode_ms) == (None, 5.0, 6.0)


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        ([delta("a")], "cut"),
        ([delta(finish="stop"), DONE], "empty"),
        ([DONE], "empty"),
        ([delta("a"), {"error": {"message": "out of memory"}}], "stream"),
        ([delta("a"), "{no json"], "malformed"),
        (["[1, 2]"], "malformed"),
    ],
)
def test_what_is_wrong_with_a_stream_has_a_kind(events: list[Any], kind: str) -> None:
    assert streamed(*((1.0, each) for each in events)).error == kind


def test_an_error_says_what_the_server_said() -> None:
    assert streamed((1.0, {"error": {"message": "out of memory"}})).why == "out of memory"
    answer = TimedResponse(stream=True)
    answer.head(429, "application/json")
    answer.data(json.dumps({"error": {"message": "too  many\nrequests"}}).encode(), 1.0)
    answer.complete(2.0)
    assert (answer.error, answer.why) == ("http 429", "too many requests")


def test_a_body_that_is_no_json_is_an_error_that_shows_its_beginning() -> None:
    answer = TimedResponse(stream=False)
    answer.head(502, "text/html")
    answer.data(b"<html>Bad gateway</html>", 1.0)
    answer.complete(2.0)
    assert (answer.error, answer.why) == ("http 502", "<html>Bad gateway</html>")


def test_fields_of_other_types_than_expected_do_not_spoil_an_answer() -> None:
    parts = {"choices": [{"delta": {"content": [{"type": "text", "text": "a"}, {"type": "x"}]}}]}
    odd = {"choices": [{"delta": {"content": "b"}, "finish_reason": "stop"}], "timings": "fast", "headrace": 3}
    answer = streamed((1.0, parts), (2.0, odd), (3.0, DONE))
    assert (answer.content_parts, answer.error, list(answer.output_times)) == (["a", "b"], "", [1.0, 2.0])


def test_a_stream_that_was_asked_for_and_did_not_come_is_malformed() -> None:
    answer = TimedResponse(stream=True)
    answer.head(200, "application/json")
    assert answer.error == "malformed"


def test_a_whole_answer_has_its_text_and_usage_and_no_times_of_outputs() -> None:
    answer = TimedResponse(stream=False, keep_text=True)
    answer.head(200, "application/json")
    choice = {"message": {"content": "yes", "reasoning": "so"}, "finish_reason": "stop"}
    answer.data(json.dumps(USAGE | {"choices": [choice]}).encode(), 1.0)
    answer.complete(2.0)
    answer.read_whole()
    assert (answer.error, answer.content_parts, answer.reasoning_parts, answer.output_tokens) == (
        "",
        ["yes"],
        ["so"],
        3,
    )
    assert not answer.output_times


def test_a_whole_answer_that_is_none_is_malformed() -> None:
    answer = TimedResponse(stream=False)
    answer.head(200, "application/json")
    answer.data(b'{"choices": []}', 1.0)
    answer.complete(2.0)
    answer.read_whole()
    assert answer.error == "malformed"
