"""The drill `redis-frozen`: its promises on made-up replies, and the drill itself."""

from __future__ import annotations

import asyncio
import shutil

import pytest

from headrace.bench.drills import redis_frozen
from headrace.bench.drills.drill_client import ChatReply
from headrace.bench.drills.drill_server import DrillError
from tests.support.drill_promises import broken

ANSWERED = ChatReply(200, finish="stop", ttft=0.01)


@pytest.mark.skipif(
    not (shutil.which("redis-server") or shutil.which("valkey-server")), reason="no redis-server (make services)"
)
def test_a_frozen_redis_stops_only_tenants_that_fail_closed() -> None:
    promises = asyncio.run(redis_frozen.run())
    assert len(promises) == 4
    assert broken(promises) == []


def test_without_a_redis_server_the_drill_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(_: str) -> None:
        return None

    monkeypatch.setattr(shutil, "which", nothing)
    with pytest.raises(DrillError, match="make services"):
        asyncio.run(redis_frozen.run())


def test_every_request_of_an_open_tenant_is_answered() -> None:
    assert redis_frozen.open_tenants_are_served([ANSWERED] * 2).kept
    assert not redis_frozen.open_tenants_are_served([ANSWERED, ChatReply(503, {"retry-after": "1"})]).kept


def test_a_frozen_redis_costs_the_timeout_at_most() -> None:
    within = ChatReply(200, finish="stop", ttft=0.01 + redis_frozen.WAIT_S)
    beyond = ChatReply(200, finish="stop", ttft=0.1 + redis_frozen.WAIT_S)
    assert redis_frozen.no_request_waits_longer([ANSWERED], [within]).kept
    assert not redis_frozen.no_request_waits_longer([ANSWERED], [beyond]).kept


def test_a_closed_tenant_is_rejected_with_its_code_and_retry_after() -> None:
    rejected = ChatReply(503, {"retry-after": "1"}, code="limits_unavailable")
    assert redis_frozen.closed_tenants_are_rejected([rejected]).kept
    for other in (ANSWERED, ChatReply(503, code="limits_unavailable"), ChatReply(503, {"retry-after": "1"}, code="x")):
        assert not redis_frozen.closed_tenants_are_rejected([rejected, other]).kept


def test_redis_must_count_again() -> None:
    assert redis_frozen.redis_counts_again(0.2).kept
    assert not redis_frozen.redis_counts_again(None).kept
