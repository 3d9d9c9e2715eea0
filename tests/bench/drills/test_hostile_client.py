"""The drill `hostile-client`: its promises on made-up replies, and a short run of one attack."""

from __future__ import annotations

import asyncio

import pytest

from headrace.bench.drills import hostile_client
from headrace.bench.drills.drill_client import ChatReply
from headrace.bench.drills.hostile_requests import ATTACKS
from tests.support.drill_promises import broken

MIB = 1024 * 1024


def replies(*milliseconds: int) -> list[ChatReply]:
    return [ChatReply(200, finish="stop", seconds=each / 1000) for each in milliseconds]


def test_a_p99_beyond_twice_the_quiet_one_breaks_the_promise() -> None:
    quiet = replies(*[10] * 99, 20)
    assert hostile_client.stays_fast("it", quiet, replies(*[20] * 100)).kept
    assert not hostile_client.stays_fast("it", quiet, replies(*[20] * 98, 21, 21)).kept


def test_a_chat_that_fails_breaks_the_promise() -> None:
    promise = hostile_client.stays_fast("it", replies(10), [*replies(10), ChatReply(503, {"retry-after": "1"})])
    assert not promise.kept
    assert "1 of 2 failed" in promise.found


@pytest.mark.parametrize(
    ("statuses", "held", "may_wait", "kept"),
    [
        ({400: 5, 0: 1}, 0, False, True),
        ({}, 0, False, False),
        ({}, 0, True, True),
        ({200: 1}, 0, False, False),
        ({500: 1, 400: 3}, 0, False, False),
        ({429: 9}, 64 * MIB, True, True),
        ({429: 9}, 65 * MIB, True, False),
    ],
)
def test_an_attack_must_be_refused_within_the_memory(
    statuses: dict[int, int], held: float, may_wait: bool, kept: bool
) -> None:
    assert hostile_client.is_refused("it", statuses, held, may_wait=may_wait).kept is kept


@pytest.mark.parametrize("name", ATTACKS)
def test_every_attack_fits_the_default_length_of_a_body(name: str) -> None:
    assert len(ATTACKS[name].body()) <= 8 * MIB


def test_the_drill_runs() -> None:
    promises = asyncio.run(hostile_client.run(chats=10, attacks=("stop-ids",)))
    assert [promise.timed for promise in promises] == [True, False]
    assert broken(promises) == []
