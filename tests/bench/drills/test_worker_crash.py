"""The drill `worker-crash`: its promises on made-up replies, and the drill itself."""

from __future__ import annotations

import asyncio

from headrace.bench.drills import worker_crash
from headrace.bench.drills.drill_client import ChatReply
from tests.support.drill_promises import broken

ANSWER = ChatReply(200, text="An answer.", finish="length")


def test_a_crash_changes_no_stream() -> None:
    promises = asyncio.run(worker_crash.run())
    assert len(promises) == 3
    assert broken(promises) == []


def test_every_stream_must_be_the_same_to_the_byte() -> None:
    assert worker_crash.streams_continue([ANSWER], [ANSWER]).kept
    assert not worker_crash.streams_continue([ANSWER], [ChatReply(200, text="Another.", finish="length")]).kept
    assert not worker_crash.streams_continue([ANSWER], [ChatReply(200, text="An answer.")]).kept


def test_the_pause_must_be_short_and_without_errors() -> None:
    assert worker_crash.pause_is_short([ANSWER]).kept
    long = ChatReply(200, finish="length", longest_gap=worker_crash.PAUSE_S + 1.0)
    assert not worker_crash.pause_is_short([ANSWER, long]).kept
    assert not worker_crash.pause_is_short([ANSWER, ChatReply(500)]).kept


def test_the_worker_must_restart_and_the_server_stay_ready() -> None:
    assert worker_crash.worker_restarts(True, "ready").kept
    assert not worker_crash.worker_restarts(False, "ready").kept
    assert not worker_crash.worker_restarts(True, "starting").kept
