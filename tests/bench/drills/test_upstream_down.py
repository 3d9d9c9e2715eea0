"""The drill `upstream-down`: its promises on made-up replies, and the drill itself."""

from __future__ import annotations

import asyncio

import pytest

from headrace.bench.drills import upstream_down
from headrace.bench.drills.drill_client import ChatReply
from tests.support.drill_promises import broken

RESTARTED = ChatReply(200, text="An answer.", finish="stop", restarts=1, ttft=0.1)


def test_streams_of_a_lost_upstream_finish_on_the_next_variant() -> None:
    promises = asyncio.run(upstream_down.run())
    assert len(promises) == 4
    assert broken(promises) == []


def test_the_upstream_is_known_by_its_word() -> None:
    assert upstream_down.upstream_answers(ChatReply(200, text="upstream upstream ", finish="stop")).kept
    assert not upstream_down.upstream_answers(RESTARTED).kept


@pytest.mark.parametrize(
    "reply",
    [
        ChatReply(200, text="upstream An answer.", finish="stop", restarts=1),  # two answers in one
        ChatReply(200, text="An answer.", finish="stop"),  # not marked
        ChatReply(200, text="An ans", restarts=1),  # cut
    ],
)
def test_a_broken_stream_must_restart_once_and_finish(reply: ChatReply) -> None:
    assert upstream_down.broken_streams_restart([RESTARTED]).kept
    assert not upstream_down.broken_streams_restart([RESTARTED, reply]).kept


def test_a_known_downtime_must_cost_nothing() -> None:
    slow = ChatReply(200, finish="stop", ttft=upstream_down.QUICK_S + 0.1)
    assert upstream_down.downtime_costs_nothing([RESTARTED], 0).kept
    assert not upstream_down.downtime_costs_nothing([RESTARTED, slow], 0).kept
    assert not upstream_down.downtime_costs_nothing([RESTARTED, ChatReply(503)], 0).kept


def test_the_upstream_must_be_used_again() -> None:
    assert upstream_down.upstream_is_used_again(2.0).kept
    assert not upstream_down.upstream_is_used_again(None).kept
