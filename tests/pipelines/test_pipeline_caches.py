"""Pipelines and tools keep results in the cache of intermediate results, under its modes, tags and tenant walls."""

from __future__ import annotations

from typing import Any

from headrace.config.pipeline_section import GenerateStage, PipelineConfig, SearchStage
from headrace.gateway.caches.cache_modes import CachePolicy
from headrace.gateway.serving.exchange import Caller
from headrace.observe import metrics
from tests.support.pipeline_runs import World
from tests.support.running_server import asynchronous, count


def searching(**changes: Any) -> World:
    stages: dict[str, Any] = {"stages": ("search", "generate"), "search": SearchStage(cache_s=60.0), **changes}
    return World(PipelineConfig(**stages))


@asynchronous
async def test_an_invalidated_tag_ends_cached_stages_and_answers() -> None:
    world = searching(tags=("manual",), generate=GenerateStage(order=("cache", "large")))
    await world.run()
    await world.run()
    assert (len(world.collection.searches), len(world.models.requests)) == (1, 1)
    await world.results.invalidate(tag="other")
    await world.run()
    assert len(world.models.requests) == 1
    await world.results.invalidate(tag="manual")
    await world.run()
    assert (len(world.collection.searches), len(world.models.requests)) == (2, 2)


@asynchronous
async def test_the_mode_record_serves_fresh_results_and_counts_what_it_would_have_served() -> None:
    world = searching()
    world.results.modes = CachePolicy(mode="record")
    before = count(metrics.caches, "stage", "would_hit"), count(metrics.caches, "stage", "same")
    for _ in range(2):
        await world.run()
    assert len(world.collection.searches) == 2
    assert (count(metrics.caches, "stage", "would_hit"), count(metrics.caches, "stage", "same")) == (
        before[0] + 1,
        before[1] + 1,
    )


@asynchronous
async def test_a_tenant_that_is_off_has_nothing_kept() -> None:
    world = searching()
    world.results.modes = CachePolicy(tenants={"a": "off"})
    for tenant, searches in (("a", 1), ("a", 2), ("b", 3), ("b", 3)):
        await world.run(caller=Caller("key", tenant))
        assert len(world.collection.searches) == searches


@asynchronous
async def test_a_late_stage_uses_a_result_that_has_expired() -> None:
    world = searching(search=SearchStage(cache_s=10.0, late="cached", budget_ms=500.0))
    await world.run()
    world.clock.now += 60.0
    world.collection.search_s = 1e6
    outcome = await world.run()
    assert outcome.stage("search")["outcome"] == "cached"
    world.clock.now += 4000.0
    outcome = await world.run()
    assert outcome.stage("search")["outcome"] == "skipped"
