"""Alerts of objectives reach the webhook, and fast mode is on while one pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.config import SloConfig
from headrace.gateway.api_errors import ApiError
from headrace.gateway.observation.objective_watch import ObjectiveWatch
from headrace.observe.latency.latency_book import RequestSample, Slice
from headrace.observe.slo.objectives import Objectives, objectives_of
from tests.support.clock import Clock
from tests.support.running_server import asynchronous

SLICE = Slice("mini", "chat", "-", "/v1/x", "<=128", "direct")


class World:
    def __init__(self, *, declared: bool = True) -> None:
        self.clock = Clock()
        self.posted: list[dict[str, Any]] = []
        self.statuses = [500, 200]
        self.fast: list[tuple[float, str]] = []
        self._declared = declared
        self.objectives = Objectives(objectives_of({"chat": SloConfig(availability=0.9)}), self.clock)
        self.watch = ObjectiveWatch(
            self.objectives,
            url="http://hook",
            headers={"authorization": "Bearer x"},
            fast=("chat",),
            set_fast=self.set_fast,
            post=self.post,
            pause_s=0.0,
            clock=self.clock,
        )

    async def post(self, url: str, body: bytes, headers: Mapping[str, str], seconds: float) -> int:
        assert (url, headers["authorization"]) == ("http://hook", "Bearer x")
        self.posted.append(msgspec.json.decode(body))
        return self.statuses.pop(0) if self.statuses else 200

    async def set_fast(self, seconds: float, reason: str) -> None:
        if not self._declared:
            raise ApiError("Fast mode has no effect.", code="fast_not_declared")
        self.fast.append((seconds, reason))

    def answers(self, count: int, *, failed: bool) -> None:
        for _ in range(count):
            self.objectives.judge(RequestSample(SLICE, {}, failed=failed))


@asynchronous
async def test_an_alert_is_posted_until_it_is_taken_and_again_when_it_is_over() -> None:
    world = World()
    world.answers(100, failed=True)
    await world.watch.look()
    assert [(each["state"], each["severity"]) for each in world.posted] == [("firing", "page")] * 2
    assert world.posted[0]["objective"] == "availability"
    await world.watch.look()
    assert len(world.posted) == 2
    world.clock.now += 4 * 86_400.0
    await world.watch.look()
    assert world.posted[-1]["state"] == "resolved"


@asynchronous
async def test_fast_mode_is_held_while_an_objective_pages() -> None:
    world = World()
    world.answers(100, failed=True)
    for _ in range(3):
        await world.watch.look()
    assert world.fast == [(300.0, "objectives of chat")]
    world.clock.now += 200.0
    world.answers(50, failed=True)
    await world.watch.look()
    assert len(world.fast) == 2
    world.clock.now += 4 * 86_400.0
    await world.watch.look()
    assert len(world.fast) == 2


@asynchronous
async def test_fast_mode_that_changes_nothing_is_no_failure() -> None:
    world = World(declared=False)
    world.answers(100, failed=True)
    await world.watch.look()
    assert world.fast == []
