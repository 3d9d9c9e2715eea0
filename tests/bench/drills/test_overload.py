"""The drill `overload`: its promises on made-up replies, and the drill itself."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.bench.drills import overload
from headrace.bench.drills.drill_client import ChatReply
from tests.support.drill_promises import broken

ANSWERED = ChatReply(200, finish="stop", ttft=0.1)
REFUSED = ChatReply(503, {"retry-after": "2"})


def test_the_server_answers_or_rejects_every_request() -> None:
    promises = asyncio.run(overload.run(seconds=3.0, max_requests=200))
    assert len(promises) == 6
    assert broken(promises) == []


def test_a_rejection_without_retry_after_breaks_the_promise() -> None:
    assert overload.every_request_ends([ANSWERED, REFUSED], 10.0).kept
    assert not overload.every_request_ends([ANSWERED, REFUSED, ChatReply(503)], 10.0).kept
    assert not overload.every_request_ends([ANSWERED, ChatReply(200, text="half an ans")], 10.0).kept


def test_the_first_token_must_come_within_the_patience() -> None:
    slow = ChatReply(200, finish="stop", ttft=overload.PATIENCE_S + 0.6)
    assert overload.first_tokens_within_patience([ANSWERED, REFUSED]).kept
    assert not overload.first_tokens_within_patience([ANSWERED, slow]).kept


@pytest.mark.parametrize("signs", [{"extracted": True}, {"finish": "length", "tokens": overload.MAX_TOKENS - 1}])
def test_a_degraded_answer_without_the_header_breaks_the_promise(signs: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"finish": "stop"} | signs
    full = ChatReply(200, finish="length", tokens=overload.MAX_TOKENS)
    marked = ChatReply(200, {"x-headrace-degraded": "extract"}, **fields)
    unmarked = ChatReply(200, **fields)
    assert overload.degraded_replies_are_marked([full, marked]).kept
    assert not overload.degraded_replies_are_marked([full, marked, unmarked]).kept


def test_a_server_that_keeps_up_breaks_no_promise() -> None:
    promise = overload.degraded_replies_are_marked([ANSWERED] * 3)
    assert promise.kept
    assert "kept up" in promise.found


def test_nine_of_ten_requests_with_sources_are_answered() -> None:
    assert overload.sources_are_used([ANSWERED] * 9 + [REFUSED]).kept
    assert not overload.sources_are_used([ANSWERED] * 8 + [REFUSED] * 2).kept


def test_full_service_is_an_answer_without_the_header() -> None:
    assert overload.is_full_service(ANSWERED)
    assert not overload.is_full_service(REFUSED)
    assert not overload.is_full_service(ChatReply(200, {"x-headrace-degraded": "trim"}, finish="stop"))
    assert overload.full_service_returns(1.0).kept
    assert not overload.full_service_returns(None).kept


def test_fast_mode_cuts_the_answer_and_says_so() -> None:
    cut = ChatReply(200, {"x-headrace-fast": "on"}, finish="length")
    assert overload.fast_mode_holds(200, {}, cut).kept
    assert not overload.fast_mode_holds(200, {}, ChatReply(200, finish="length")).kept
    refused = overload.fast_mode_holds(403, {"error": "no"}, cut)
    assert not refused.kept
    assert "403" in refused.found
