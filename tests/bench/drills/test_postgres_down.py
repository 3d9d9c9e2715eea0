"""The drill `postgres-down`: its promises on made-up phases. tests/gateway/ledger has a smaller form of the drill."""

from __future__ import annotations

import asyncio
import shutil

import pytest

from headrace.bench.drills import postgres_down
from headrace.bench.drills.drill_client import ChatReply
from headrace.bench.drills.drill_server import DrillError
from headrace.bench.drills.postgres_down import LIMIT, Phase

ANSWERED = ChatReply(200, finish="stop", ttft=0.01, seconds=0.5)
REFUSED = ChatReply(429, {"retry-after": "1"}, code="budget_held")


def phase(spent: int, *replies: ChatReply, written_after_s: float | None = 0.1) -> Phase:
    found = Phase("well")
    found.spent, found.replies, found.written_after_s = spent, list(replies), written_after_s
    return found


def test_without_postgres_the_drill_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str, *, path: str) -> None:
        return None

    monkeypatch.setattr(shutil, "which", nothing)
    with pytest.raises(DrillError, match="make services"):
        asyncio.run(postgres_down.run())


def test_the_budget_is_the_most_that_may_be_spent() -> None:
    assert postgres_down.nothing_is_overspent(phase(LIMIT)).kept
    assert not postgres_down.nothing_is_overspent(phase(LIMIT + 1)).kept
    assert not postgres_down.nothing_is_overspent(phase(0)).kept  # then nothing was tried


def test_a_database_that_answers_lets_the_budget_be_spent() -> None:
    assert postgres_down.the_budget_can_be_spent(phase(LIMIT)).kept
    assert not postgres_down.the_budget_can_be_spent(phase(LIMIT // 2)).kept


def test_what_is_rejected_says_when_to_retry() -> None:
    assert postgres_down.what_is_rejected_can_be_retried([phase(1, ANSWERED, REFUSED)]).kept
    assert not postgres_down.what_is_rejected_can_be_retried([phase(1, ChatReply(500, code="x"))]).kept


def test_waits_have_an_end() -> None:
    assert postgres_down.no_request_waits_longer([phase(1, ANSWERED)]).kept
    assert not postgres_down.no_request_waits_longer([phase(1, ChatReply(200, finish="stop", seconds=60.0))]).kept


def test_every_charge_is_written() -> None:
    assert postgres_down.charges_are_written([phase(1)]).kept
    assert not postgres_down.charges_are_written([phase(1), phase(1, written_after_s=None)]).kept
