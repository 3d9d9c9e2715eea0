"""What a server says that it could take on, and when it turns requests away."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from headrace.config.upstream_section import UpstreamConfig
from headrace.engine.interface.request import GenerationRequest
from headrace.gateway.serving.capacity import CapacityMonitor
from headrace.gateway.upstreams.remote_capacity import RemoteCapacity
from headrace.gateway.upstreams.upstream import Upstream
from tests.gateway.serving.test_pinned_prompts import PinningEngine, fleet_of
from tests.support.clock import Clock
from tests.support.running_server import CHAT, asynchronous, serving, words
from tests.support.tiny_engine import one, open_tiny


class Measured(PinningEngine):
    """An engine with statistics that a test sets."""

    def __init__(self, *waits: float) -> None:
        super().__init__()
        self.replicas = [replica(wait) for wait in waits]

    async def stats(self) -> list[dict[str, Any]]:
        return self.replicas


def replica(wait: float) -> dict[str, Any]:
    return {
        "scheduler": {"running": 2, "waiting": 1},
        "blocks": {"block_tokens": 32, "total": 100, "free": 10, "cached": 20},
        "capacity": {
            "ttft": {"chat": wait, "voice": wait / 2},
            "prompt_tokens_per_s": 1000.0,
            "free_output_tokens_per_s": 50.0,
        },
    }


@asynchronous
async def test_replicas_are_added_up_and_the_soonest_answers() -> None:
    clock = Clock()
    monitor = CapacityMonitor(fleet_of(mini=Measured(0.4, 0.2)), clock=clock)
    assert monitor.headers("mini", "chat") == {}
    await monitor.measure()
    (found,) = monitor.as_json(monitor._fleet.served.values())
    assert found == {
        "model": "mini",
        "served_by": "engine",
        "available": True,
        "ttft_ms": {"chat": 200.0, "voice": 100.0},
        "prompt_tokens_per_s": 2000.0,
        "free_output_tokens_per_s": 100.0,
        "free_kv_tokens": 1920,
        "running": 4,
        "waiting": 2,
    }
    adapter = replace(monitor._fleet.served["mini"], name="mini:shop", base="mini")
    assert monitor.as_json([adapter]) == [{**found, "model": "mini:shop"}]  # the variant computes it
    expected = {"x-headrace-capacity-ttft-ms": "100", "x-headrace-capacity-tokens-per-s": "100"}
    assert monitor.headers("mini", "voice") == expected
    clock.now += 6.0  # old values count as unknown
    assert monitor.headers("mini", "voice") == {}


@asynchronous
async def test_a_server_sheds_when_no_model_answers_in_time_until_one_does_again() -> None:
    slow, quick = Measured(9.0), Measured(1.0)
    monitor = CapacityMonitor(fleet_of(mini=slow, draft=quick), shed_ttft_s=2.0)
    states: list[bool] = []
    for wait in (1.0, 5.0, 3.9, 3.0, 2.7, 4.1):  # of voice: half of it
        quick.replicas = [replica(wait)]
        await monitor.measure()
        states.append(monitor.overloaded)
    assert states == [False, True, True, True, False, True]
    never = CapacityMonitor(fleet_of(mini=slow))
    await never.measure()
    assert not never.overloaded


@asynchronous
async def test_a_model_that_writes_no_text_does_not_hide_an_overload() -> None:
    fleet = fleet_of(mini=Measured(9.0), encoder=Measured(0.01))
    fleet.served["encoder"].kind = "encoder"
    monitor = CapacityMonitor(fleet, shed_ttft_s=2.0)
    await monitor.measure()
    assert monitor.overloaded


@asynchronous
async def test_a_gateway_of_upstreams_sheds_when_none_of_them_answers_in_time() -> None:
    fleet = fleet_of(near=Measured(), far=Measured())
    clock = Clock()
    upstreams = [
        Upstream(name, UpstreamConfig(url="http://127.0.0.1:9/v1", kind="headrace"), clock=clock)
        for name in fleet.served
    ]
    for served, upstream in zip(fleet.served.values(), upstreams, strict=True):
        served.upstream = upstream
    monitor = CapacityMonitor(fleet, shed_ttft_s=2.0, clock=clock)

    async def overloaded(*said: tuple[str, float] | None) -> bool:
        for upstream, each in zip(upstreams, said, strict=True):
            known = None if each is None else RemoteCapacity(each[0], clock(), {"chat": each[1]} if each[1] else {})
            upstream._capacity = known
        await monitor.measure()
        return monitor.overloaded

    assert not await overloaded(None, None)  # other kinds of servers predict nothing
    assert not await overloaded(("ready", 9.0), None)
    assert not await overloaded(("ready", 9.0), ("ready", 1.0))
    assert await overloaded(("ready", 9.0), ("overloaded", 0.0))
    assert await overloaded(("ready", 1.9), ("draining", 0.0))  # above 0.7 of the bound
    upstreams[1].set_healthy(False)
    assert not await overloaded(("ready", 0.1), None)
    assert await overloaded(("overloaded", 0.0), None)
    upstreams[0].set_healthy(False)
    assert not await overloaded(None, None)  # an outage is no overload
    for upstream in upstreams:
        await upstream.close()


def test_a_busy_engine_predicts_longer_waits_and_less_room(tiny_folder: Path) -> None:
    opened = open_tiny(tiny_folder)
    engine = opened.engine
    for number in range(8):  # so that it knows what a step costs
        one(engine, GenerationRequest(id=f"w{number}", prompt=tuple(range(number, number + 120)), max_tokens=8))
    idle = engine.stats()["capacity"]
    assert set(idle.ttft) == {"chat", "voice", "agent", "embedded"}
    assert min(idle.ttft.values()) > 0
    accepted = asked = 0
    for number in range(60):
        prompt = tuple(range(number + 90, number + 210))
        named: dict[str, Any] = {"id": str(number), "tenant": f"t{number}", "arrival": time.monotonic()}
        asked += 1
        if not engine.submit(GenerationRequest(prompt=prompt, max_tokens=60, **named)).accepted:
            break  # the machine is so slow that the surface's patience is used up
        accepted += 1
    assert accepted > 4
    busy = engine.stats()["capacity"]
    assert all(busy.ttft[name] > idle.ttft[name] for name in idle.ttft), (idle, busy)
    assert len(engine.scheduler.queue.accounts) == asked + 1  # nothing is left of the question
    for number in range(accepted):
        engine.cancel(str(number))
    while not engine.idle:
        engine.step()
    engine.close()


@asynchronous
async def test_clients_are_told_and_readiness_turns_them_away() -> None:
    async with serving(shed_ttft_s=2.0) as running:
        running.engine.answer = words("Hello")
        engine = Measured(0.5)
        engine.answer = words("Hello")
        running.fleet.served["mini"].engine = engine
        monitor = running.server.services.capacity
        await monitor.measure()
        answer = await running.ask("POST", "/v1/chat/completions", CHAT)
        assert answer.headers["x-headrace-capacity-ttft-ms"] == "500"
        assert answer.headers["x-headrace-capacity-tokens-per-s"] == "50"
        told = (await running.ask("GET", "/v1/capacity")).json
        assert (told["object"], told["status"], told["free_requests"]) == ("capacity", "ready", 4096)
        assert told["data"][0]["ttft_ms"]["chat"] == 500.0
        assert (await running.ask("GET", "/health/ready")).status == 200
        engine.replicas = [replica(8.0)]
        await monitor.measure()
        ready = await running.ask("GET", "/health/ready")
        assert (ready.status, ready.json["status"]) == (503, "overloaded")
        assert (await running.ask("GET", "/health/live")).status == 200
        assert (await running.ask("GET", "/v1/capacity")).json["status"] == "overloaded"
        answer = await running.ask("POST", "/v1/chat/completions", CHAT)  # who comes all the same is served
        assert answer.status == 200
