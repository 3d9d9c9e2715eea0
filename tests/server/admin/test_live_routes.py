"""The live state of a server: what dashboards read, at once and as events."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.cli import main
from headrace.config import SurfaceConfig
from headrace.config.ledger_section import PriceConfig
from headrace.config.managed_section import ManagedConfig
from headrace.config.tenant_section import BudgetConfig, TenantConfig
from headrace.config.upstream_section import UpstreamConfig
from headrace.engine.interface.request import FinishReason
from headrace.observe.gpus.gpu import Gpu
from headrace.server.admin.live_snapshot import LiveSnapshot, gpus_json
from tests.support.accounts import bearer
from tests.support.admin_server import ROOT, administered
from tests.support.running_server import asynchronous, request, until, words

PRICES = {"mini": PriceConfig(input=1000.0, output=2000.0)}


@asynchronous
async def test_the_snapshot_shows_traffic_latency_costs_and_the_slowest_requests(tmp_path: Path) -> None:
    red = TenantConfig(budgets=(BudgetConfig(period="day", limit_micros=10**10),))
    async with administered(tmp_path, tenants={"red": red}, prices=PRICES) as server:
        server.engine.answer = words("a ", "b ", "c")
        answers = [await server.chat("caller-secret") for _ in range(3)]
        await server.chat("caller-secret", model="nothing")
        live = await server.did("GET", "live")
        assert (live["object"], live["status"]) == ("live", "ready")
        assert isinstance(live["gpus"], list)
        every = live["latency"]["all"]
        assert (every["requests"], every["failed"], every["output_tokens"]) == (3, 0, 9)
        assert every["percentiles"]["ttft"]["count"] == 3
        assert every["percentiles"]["itl"]["count"] == 6
        prompt = answers[0].json["usage"]["prompt_tokens"]
        assert every["micros"] == 3 * (prompt * 1000 + 3 * 2000)
        assert every["micros_per_1000_requests"] == 1000 * (prompt * 1000 + 3 * 2000)
        (tenant,) = live["tenants"]
        assert (tenant["tenant"], tenant["requests"]) == ("red", 3)
        assert live["latency"]["by_model"][0]["model"] == "mini"
        total = sum(stage["mean_ms"] for stage in live["stages"])
        slowest: list[dict[str, Any]] = live["slowest"]
        mean = sum(each["duration_ms"] for each in slowest if each["status"] == 200) / 3
        assert abs(total - mean) < 0.1
        assert slowest == sorted(slowest, key=lambda each: -each["duration_ms"])
        assert {each["request_id"] for each in slowest} >= {each.headers["x-request-id"] for each in answers}
        assert live["traffic"]["history"][-1]["requests"] == 4
        (budget,) = live["budgets"]
        assert budget["spent_micros"] == every["micros"]


def test_gpus_are_listed_with_the_models_of_their_engines() -> None:
    def served(kind: Any = "vllm", **managed: Any) -> Any:
        config = UpstreamConfig(kind=kind, managed=ManagedConfig(model="m", **managed))
        return SimpleNamespace(upstream=SimpleNamespace(config=config))

    fleet: Any = SimpleNamespace(
        served={
            "mini": SimpleNamespace(upstream=None),
            "all": served(),
            "one": served(gpus=(1,)),
            "intel": served("openvino", gpus=(1,)),
        }
    )
    gpus = [Gpu(0, "A", memory_used=20, memory_total=80, busy=0.5), Gpu(1, "B"), Gpu(1, "C", "amd")]
    first, second, third = gpus_json(fleet, gpus)
    assert first == {
        "gpu": 0,
        "name": "A",
        "busy_share": 0.5,
        "memory_used_bytes": 20,
        "memory_free_bytes": 60,
        "memory_total_bytes": 80,
        "celsius": None,
        "watts": None,
        "models": ["all"],
    }
    assert second["models"] == ["all", "one"]
    assert third["models"] == []


@asynchronous
async def test_events_come_until_the_client_leaves(tmp_path: Path) -> None:
    async with administered(tmp_path) as server:
        client = await server.client()
        await client.send(request("GET", "/admin/v1/live/events", **bearer(ROOT)))
        status, headers = await client.head()
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        for _ in range(2):
            chunk = await client.chunk()
            assert json.loads(chunk.removeprefix(b"data: "))["object"] == "live"
        client.leave()
        await until(server.idle)


@asynchronous
async def test_events_end_when_the_server_shuts_down(tmp_path: Path) -> None:
    async with administered(tmp_path) as server:
        client = await server.client()
        await client.send(request("GET", "/admin/v1/live/events", **bearer(ROOT)))
        assert (await client.head())[0] == 200
        assert await client.chunk()
        server.server.end()
        while await client.chunk():
            pass


@asynchronous
async def test_the_number_of_followers_is_bounded(tmp_path: Path) -> None:
    async with administered(tmp_path) as server:
        followers = [await server.client() for _ in range(16)]
        for client in followers:
            await client.send(request("GET", "/admin/v1/live/events", **bearer(ROOT)))
            assert (await client.head())[0] == 200
        assert await server.refused("GET", "live/events") == (503, "too_many_streams", None)
        for client in followers:
            client.leave()
        await until(server.idle)


@asynchronous
async def test_any_slice_of_the_traffic_has_percentiles(tmp_path: Path) -> None:
    async with administered(tmp_path) as server:
        server.engine.answer = words("a ", "b")
        await server.chat("caller-secret")
        await server.ask("POST", "/v1/completions", {"prompt": "Hello"}, **bearer("caller-secret"))
        found = await server.did("GET", "latency?by=tenant,endpoint")
        named = {(row["tenant"], row["endpoint"]): row["requests"] for row in found["data"]}
        assert named == {("red", "/v1/chat/completions"): 1, ("red", "/v1/completions"): 1}
        (row,) = (await server.did("GET", "latency?window=total&endpoint=/v1/completions"))["data"]
        assert row["requests"] == 1
        measured = {"ttft", "itl", "queue", "prefill", "decode", "post", "hop", "e2e", "tokenise"}
        assert set(row["percentiles"]) >= measured
        assert await server.refused("GET", "latency?by=colour") == (400, None, "by")
        assert (await server.did("GET", "latency?model=other"))["data"] == []


@asynchronous
async def test_lengths_tell_what_ended_answers_and_who_limited_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    surfaces = {"chat": SurfaceConfig(max_tokens=2)}
    async with administered(tmp_path, surfaces=surfaces) as server:
        server.engine.answer = words("a ", "b ", finish=FinishReason.LENGTH)
        await server.chat("caller-secret")
        await server.chat("caller-secret", max_tokens=2)
        server.engine.answer = words("a ")
        await server.chat("caller-secret")
        found = await server.did("GET", "lengths")
        (chat,) = found["data"]
        assert (chat["surface"], chat["answers"], chat["default_tokens"], chat["advice"]) == ("chat", 3, 2, "")
        assert (chat["endings"], chat["mean_tokens"]) == ({"length": 0.6667, "stop": 0.3333}, 1.7)
        assert (chat["without_max_tokens"], chat["without_max_tokens_cut_share"]) == (2, 0.5)
        (red,) = (await server.did("GET", "lengths?by=tenant&window=recent"))["data"]
        assert (red["tenant"], red["answers"]) == ("red", 3)
        assert await server.refused("GET", "lengths?by=colour") == (400, None, "by")
        arguments = ["admin", "lengths", "--by", "surface,tenant", "--url", server.url]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HEADRACE_ADMIN_KEY", ROOT)
            assert await asyncio.to_thread(main, arguments) == 0
        assert "66.7 %" in capsys.readouterr().out


@asynchronous
async def test_latencies_are_kept_apart_by_profile(tmp_path: Path) -> None:
    async with administered(tmp_path) as server:
        server.engine.answer = words("a ")
        for profile in ("standard", "fast", "fast"):
            await server.chat("caller-secret", profile=profile)
        found = await server.did("GET", "latency?by=profile")
        assert {row["profile"]: row["requests"] for row in found["data"]} == {"fast": 2, "standard": 1}


@asynchronous
async def test_requests_for_other_things_do_not_count_as_traffic(tmp_path: Path) -> None:
    async with administered(tmp_path) as server:
        await server.did("GET", "live")
        assert (await server.ask("GET", "/v1/models", **bearer("caller-secret"))).status == 200
        assert (await server.did("GET", "latency?window=total"))["data"] == []


@asynchronous
async def test_without_keys_this_machine_may_look_and_change_nothing(tmp_path: Path) -> None:
    async with administered(tmp_path, keys=()) as running:
        for path in ("live", "latency", "lengths", "history", "feedback"):
            assert (await running.ask("GET", f"/admin/v1/{path}")).status == 200, path
        for method, path in (("GET", "tenants"), ("PUT", "fast"), ("GET", "usage")):
            assert (await running.ask(method, f"/admin/v1/{path}")).status == 404, path


@asynchronous
async def test_an_engine_tells_what_it_achieves_while_it_computes(tmp_path: Path) -> None:
    async with administered(tmp_path) as server:
        counted = {"device_seconds": 2.0, "bytes_read": 4_000_000_000, "operations": 10**9}

        async def stats() -> list[dict[str, Any]]:
            return [dict(counted)]

        server.engine.stats = stats  # type: ignore[method-assign]
        live = LiveSnapshot(server.server.context, None)

        async def rates() -> tuple[int, int]:
            (engine,) = (await live.get(most_age_s=0.0))["engines"]
            return engine["bytes_per_s"], engine["operations_per_s"]

        assert await rates() == (2_000_000_000, 500_000_000)
        counted |= {"device_seconds": 3.0, "bytes_read": 10_000_000_000}
        assert await rates() == (6_000_000_000, 0)
        assert await rates() == (6_000_000_000, 0)  # it was idle
        counted |= {"device_seconds": 0.5, "bytes_read": 10**9, "operations": 10**8}  # a new process
        assert await rates() == (2 * 10**9, 2 * 10**8)
