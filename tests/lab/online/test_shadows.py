"""Shadows on a running server: what they find, and that what is served never notices them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.config import KeyConfig, ModelConfig
from headrace.config.cache_section import ExactConfig
from headrace.config.routing_section import GoldenConfig, RoutingConfig, ShadowConfig
from headrace.config.tenant_section import TenantConfig
from headrace.engine.interface.request import AdapterRef
from headrace.engine.process.client_errors import OverloadedError, WorkerLostError
from headrace.gateway.output.tool_formats import TOOL_FORMATS
from headrace.gateway.serving.served_variant import ServedVariant
from headrace.lab.comparison.similarity import lexical_overlap
from headrace.lab.online.online_lab import _runs_here
from headrace.lab.online.shadows import Shadow
from tests.support.caching_server import BOSS, KEYS, PATH, RED, Caching, caching, finish, question
from tests.support.config_text import mistakes
from tests.support.running_server import FakeEngine, asynchronous, fails, tokenizer, until, words


@contextlib.asynccontextmanager
async def shadowed(folder: Path, **changes: Any) -> AsyncGenerator[tuple[Caching, FakeEngine, Shadow]]:
    """A server whose `mini` has a shadow with an engine of its own."""
    sections = {"keys": changes.pop("keys", KEYS), "exact": changes.pop("exact", ExactConfig())}
    sections["tenants"] = changes.pop("accounts", {})
    golden, engine = changes.pop("golden", GoldenConfig()), FakeEngine()
    other = ServedVariant(name="mini@new", engine=engine, tokenizer=tokenizer(), context=2048, fingerprint="fp_new")
    shadow = ShadowConfig(variant="mini@new", **{"share": 1.0, **changes})
    models = {"mini": ModelConfig(variants={"new": {}}), "draft": ModelConfig()}
    others = {"mini@new": other, "draft": replace(other, name="draft", engine=FakeEngine())}
    routing = RoutingConfig(shadows={"trial": shadow}, golden=golden)
    async with caching(folder, routing=routing, models=models, others=others, **sections) as running:
        running.engine.answer = words("the ", "served ", "answer")
        engine.answer = words("the ", "other ", "answer")
        [found] = [each for each in running.server.services.answer_observers if isinstance(each, Shadow)]
        yield running, engine, found


async def seen(running: Caching, shadow: Shadow, outcome: str, count: int = 1) -> dict[str, Any]:
    await until(lambda: shadow.outcomes[outcome] >= count)
    answer = await running.ask("GET", "/admin/v1/shadows/trial", **BOSS)
    assert answer.status == 200
    return answer.json


@asynchronous
async def test_a_shadow_answers_a_copy_and_its_differences_are_shown(tmp_path: Path) -> None:
    async with shadowed(tmp_path) as (running, engine, shadow):
        answer = await running.chat("Hello", key=RED, max_tokens=7)
        assert answer.json["model"] == "mini"
        assert answer.json["choices"][0]["message"]["content"] == "the served answer"
        found = await seen(running, shadow, "copied")
        await until(lambda: shadow.total.compared == 1)
        [copy] = engine.streams
        assert (copy.request.surface, copy.request.tenant, copy.request.max_tokens) == ("batch", "red", 7)
        assert copy.request.prompt == running.engine.streams[0].request.prompt
        found = (await running.ask("GET", "/admin/v1/shadows", **BOSS)).json["data"][0]
        assert found["differences"]["compared"] == 1
        assert found["differences"]["exact_share"] == 0.0
        assert found["differences"]["similarity"] == pytest.approx(
            lexical_overlap("the served answer", "the other answer"), abs=1e-4
        )
        assert [(each["variant"], each["compared"]) for each in found["routes"]] == [("mini", 1)]
        assert running.counted("headrace_shadow_total", "copied", "trial") == 1


@asynchronous
async def test_copies_are_not_charged(tmp_path: Path) -> None:
    async with shadowed(tmp_path) as (running, _, shadow):
        await running.chat("Hello", key=RED)
        await running.chat("Hello", key=RED, stream=True)
        await seen(running, shadow, "copied", 2)
        [row] = await running.usage(by="variant")
        assert (row["variant"], row["requests"]) == ("mini", 2)


@asynchronous
async def test_a_stream_is_the_same_with_a_shadow(tmp_path: Path) -> None:
    async with shadowed(tmp_path) as (running, _, shadow):
        answer = await running.chat("Hello", key=RED, stream=True)
        assert answer.text == "the served answer"
        assert answer.events[0]["model"] == "mini"
        await seen(running, shadow, "copied")


@asynchronous
async def test_a_shadow_that_hangs_is_given_up_and_live_requests_go_on(tmp_path: Path) -> None:
    async with shadowed(tmp_path, timeout_s=0.05, queue=1) as (running, engine, shadow):
        engine.answer = None  # says nothing
        for _ in range(6):
            answer = await running.chat("Hello", key=RED)
            assert answer.json["choices"][0]["message"]["content"] == "the served answer"
        await seen(running, shadow, "timeout")
        await until(lambda: not shadow.copies.waiting and not engine.open)
        assert engine.dropped  # its work was cancelled
        assert shadow.outcomes["copied"] == 0


@asynchronous
async def test_a_shadow_that_dies_costs_only_a_count(tmp_path: Path) -> None:
    async with shadowed(tmp_path) as (running, engine, shadow):
        for error in (WorkerLostError("it is gone"), OverloadedError("full", retry_after=1.0), ValueError("a bug")):
            engine.answer = fails(error, "the ")
            answer = await running.chat("Hello", key=RED)
            assert answer.status == 200
        found = await seen(running, shadow, "failed", 3)
        assert found["differences"]["compared"] == 0
        engine.answer = words("well again")
        await running.chat("Hello", key=RED)
        await seen(running, shadow, "copied")


@asynchronous
async def test_a_flood_of_copies_is_dropped_at_the_queues_bound(tmp_path: Path) -> None:
    async with shadowed(tmp_path, queue=2, concurrent=1) as (running, engine, shadow):
        engine.answer = None
        for _ in range(8):
            assert (await running.chat("Hello", key=RED)).status == 200
        await until(lambda: shadow.outcomes["queue_full"] == 5)  # one runs and two wait
        assert (len(engine.open), shadow.copies.waiting) == (1, 2)
        engine.answer = words("late")
        for stream in engine.open:
            words("late")(stream)
        await seen(running, shadow, "copied", 3)


@asynchronous
async def test_copies_wait_for_an_idle_server_if_they_are_told_to(tmp_path: Path) -> None:
    async with shadowed(tmp_path, when="idle") as (running, engine, shadow):
        running.engine.answer = None
        client, stream = await running.begun("A long answer", key=RED)
        running.engine.answer = words("the ", "served ", "answer")
        await running.ask("POST", PATH, question("Hello"), **RED)
        await until(lambda: running.server.context.running == 1)
        assert (engine.streams, shadow.outcomes["copied"]) == ([], 0)
        finish(stream)
        await until(lambda: shadow.outcomes["copied"] == 2)
        client.leave()


@asynchronous
async def test_copies_for_an_engine_of_this_machine_wait_for_an_idle_server_by_default(tmp_path: Path) -> None:
    async with shadowed(tmp_path) as (running, _, shadow):
        assert shadow.when == "idle"
        assert (await running.ask("GET", "/admin/v1/shadows/trial", **BOSS)).json["when"] == "idle"
        config, [served] = running.server.config, [running.server.fleet.served["mini@new"]]
        assert _runs_here(config, served)
        elsewhere = replace(config.models["mini"], workers=("tcp://10.0.0.9:9000",))
        assert not _runs_here(replace(config, models={**config.models, "mini": elsewhere}), served)
    async with shadowed(tmp_path, when="always") as (_, _, shadow):
        assert shadow.when == "always"


@asynchronous
async def test_an_answer_that_was_held_back_for_a_check_has_no_first_output_to_compare(tmp_path: Path) -> None:
    checked = GoldenConfig(variant="draft", checks=("confidence",), confidence=0.0)
    async with shadowed(tmp_path, golden=checked) as (running, _, shadow):
        assert (await running.chat("Hello", key=RED)).status == 200
        await until(lambda: shadow.total.compared == 1)
        found = shadow.total.as_json()
        assert (found["served"]["ttft"], found["other"]["ttft"]) == (None, None)
        assert found["served"]["e2e"] is not None
    async with shadowed(tmp_path / "unchecked") as (running, _, shadow):
        await running.chat("Hello", key=RED)
        await until(lambda: shadow.total.compared == 1)
        found = shadow.total.as_json()
        assert found["served"]["ttft"] is not None
        assert found["other"]["ttft"] is not None


@asynchronous
async def test_requests_that_the_shadow_cannot_answer_are_not_copied(tmp_path: Path) -> None:
    async with shadowed(tmp_path) as (running, engine, shadow):
        tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
        running.server.fleet.served["mini"].tools = TOOL_FORMATS["hermes"]
        assert (await running.chat("Hello", key=RED, tools=tools)).status == 200
        adapter = replace(running.server.fleet.served["mini"], adapter=AdapterRef("shop", "", "00"), base="mini")
        running.server.fleet.adapters["mini:shop"] = replace(adapter, name="mini:shop")
        assert (await running.chat("Hello", key=RED, model="mini:shop")).json["model"] == "mini:shop"
        await running.chat("Hello", key=RED)
        await seen(running, shadow, "copied")
        assert (len(engine.streams), shadow.outcomes) == (1, {"copied": 1})


@asynchronous
async def test_a_days_budget_bounds_the_copies(tmp_path: Path) -> None:
    async with shadowed(tmp_path, tokens_per_day=1) as (running, engine, shadow):
        await running.chat("Hello", key=RED)
        await seen(running, shadow, "copied")
        for _ in range(3):
            await running.chat("Hello", key=RED)
        found = await seen(running, shadow, "budget", 3)
        assert (len(engine.streams), found["outcomes"]["copied"]) == (1, 1)
        assert found["tokens_today"] > 1


@asynchronous
async def test_only_the_chosen_tenants_are_copied(tmp_path: Path) -> None:
    async with shadowed(tmp_path, tenants=("red",)) as (running, engine, shadow):
        await running.chat("Hello", key={"authorization": "Bearer blue-secret"})
        await running.chat("Hello", key=RED)
        await seen(running, shadow, "copied")
        assert [stream.request.tenant for stream in engine.streams] == ["red"]


@asynchronous
async def test_requests_of_keys_that_may_not_use_the_variant_are_not_copied(tmp_path: Path) -> None:
    tenants = {"green": TenantConfig(models=("draft",))}
    keys = (*KEYS, KeyConfig(name="green", key="green-secret", tenant="green"))
    async with shadowed(tmp_path, of=("draft",), keys=keys, accounts=tenants) as (running, engine, shadow):
        running.server.fleet.served["draft"].engine.answer = words("drafted")
        answer = await running.chat("Hello", key={"authorization": "Bearer green-secret"}, model="draft")
        assert answer.json["model"] == "draft"
        await running.chat("Hello", key=RED, model="draft")
        await seen(running, shadow, "copied")
        assert [stream.request.tenant for stream in engine.streams] == ["red"]


@asynchronous
async def test_a_double_check_measures_the_quality_of_the_route(tmp_path: Path) -> None:
    async with shadowed(tmp_path, judge="shadow") as (running, engine, shadow):
        engine.answer = words("the ", "served ", "answer")
        await running.chat("Hello", key=RED)
        await seen(running, shadow, "exact")
        [found] = (await running.ask("GET", "/admin/v1/quality", **BOSS)).json["data"]
        assert (found["variant"], found["judge"], found["quality"]) == ("mini", "mini@new", 1.0)
        assert running.counted("headrace_route_quality_count", "mini", found["route"]) == 1


@asynchronous
async def test_answers_from_a_cache_and_of_the_shadow_itself_are_not_copied(tmp_path: Path) -> None:
    async with shadowed(tmp_path, exact=ExactConfig(mode="on")) as (running, _, shadow):
        await running.chat("Hello", key=RED)
        await seen(running, shadow, "copied")
        cached = await running.chat("Hello", key=RED)
        assert cached.headers["x-headrace-cache"].startswith("exact")
        assert (await running.chat("Hello", key=RED, model="mini@new")).json["model"] == "mini@new"
        await until(lambda: not shadow.copies.waiting)
        assert shadow.outcomes["copied"] == 1


def test_a_shadow_of_an_unknown_variant_is_reported() -> None:
    found = mistakes('[models.mini]\n[routing.shadows.trial]\nvariant = "mini@gone"\nof = ["nowhere"]\n')
    assert len(found) == 2
    assert 'routing.shadows.trial.variant: unknown variant "mini@gone"' in found[0]
    assert 'routing.shadows.trial.of[0]: unknown variant "nowhere"' in found[1]


@asynchronous
async def test_an_unknown_shadow_is_named_in_the_error(tmp_path: Path) -> None:
    async with shadowed(tmp_path) as (running, _, _):
        answer = await running.ask("GET", "/admin/v1/shadows/none", **BOSS)
        assert (answer.status, answer.error["code"]) == (404, "shadow_not_found")
        assert "trial" in answer.error["message"]
