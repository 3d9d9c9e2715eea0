"""The drills' client: what it reads from a stream, its timetable, and its waits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.bench.drills.drill_client import ChatClient, ChatReply, retry_until, send_at_rate, wait_until


def delta(text: str = "", finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}], **fields}


def test_events_add_up_to_a_reply() -> None:
    reply = ChatReply(200)
    assert [reply.take_event(delta(text)) for text in ("", "Hel", "lo")] == [False, True, True]
    reply.take_event(delta(finish="stop"))
    reply.take_event({"choices": [], "usage": {"completion_tokens": 7}, "headrace": {"extracted": True}})
    assert (reply.text, reply.finish, reply.tokens, reply.extracted) == ("Hello", "stop", 7, True)
    assert reply.answered


def test_a_marked_restart_discards_the_text() -> None:
    reply = ChatReply(200)
    reply.take_event(delta("first"))
    assert not reply.take_event({"headrace": {"restart": True}, "choices": []})
    reply.take_event(delta("second", "stop"))
    assert (reply.text, reply.restarts) == ("second", 1)


def test_an_error_in_the_stream_is_no_answer() -> None:
    reply = ChatReply(200, finish="stop")
    reply.take_event({"error": {"code": "worker_lost"}})
    assert reply.code == "worker_lost"
    assert not reply.answered


@pytest.mark.parametrize(
    ("reply", "answered", "refused"),
    [
        (ChatReply(200, finish="length"), True, False),
        (ChatReply(200), False, False),  # the stream broke off
        (ChatReply(429, {"retry-after": "1"}), False, True),
        (ChatReply(503, {"retry-after": "1"}), False, True),
        (ChatReply(503), False, False),
        (ChatReply(500, {"retry-after": "1"}), False, False),
        (ChatReply(), False, False),
    ],
)
def test_a_reply_is_answered_refused_or_neither(reply: ChatReply, answered: bool, refused: bool) -> None:
    assert (reply.answered, reply.refused) == (answered, refused)


def test_a_server_that_is_not_there_is_a_reply_without_status() -> None:
    async def ask() -> ChatReply:
        async with ChatClient("http://127.0.0.1:9", "key") as client:
            return await client.chat("Hello")

    reply = asyncio.run(ask())
    assert (reply.status, reply.code, reply.answered) == (0, "ClientConnectorError", False)


def test_requests_are_sent_whether_or_not_earlier_ones_have_finished() -> None:
    async def run() -> list[ChatReply]:
        started = 0
        all_started = asyncio.Event()

        async def request() -> ChatReply:
            nonlocal started
            started += 1
            if started == 4:
                all_started.set()
            await all_started.wait()  # a closed loop would wait here forever
            return ChatReply(200)

        return await asyncio.wait_for(send_at_rate([request] * 4, 1000.0), 60.0)

    assert len(asyncio.run(run())) == 4


def test_waits_end_with_their_condition_or_their_timeout() -> None:
    assert asyncio.run(wait_until(lambda: True, 0.0)) is not None
    assert asyncio.run(wait_until(lambda: False, 0.0)) is None


def test_a_request_is_repeated_until_its_reply_is_accepted() -> None:
    statuses = iter([503, 503, 200, 200])

    async def request() -> ChatReply:
        return ChatReply(next(statuses))

    assert asyncio.run(retry_until(request, lambda reply: reply.status == 200, 60.0, 0.0)) is not None
    assert next(statuses) == 200
    assert asyncio.run(retry_until(request, lambda reply: True, 0.0, 0.0)) is None
