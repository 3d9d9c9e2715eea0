"""Whatever its stages do (freeze, be slow, fail, flood), a pipeline ends by its deadline and says what was skipped."""

from __future__ import annotations

import random
from typing import Any

import pytest

from headrace.config.pipeline_section import GenerateStage, PipelineConfig, RerankStage, SearchStage
from headrace.gateway.api_errors import ApiError
from tests.support.pipeline_runs import FOREVER, HITS, World, hit, says
from tests.support.running_server import asynchronous

DEADLINE_S = 5.0
RUNS = 300
FAULTS = ("none", "frozen", "slow", "wrong", "flooding")
LOST = ApiError("The engine is not available.", kind="overloaded_error", code="engine_lost")


def config(**changes: Any) -> PipelineConfig:
    return PipelineConfig(
        **{
            "stages": ("embed", "search", "rerank", "assemble", "generate", "check"),
            "deadline_ms": DEADLINE_S * 1e3,
            "search": SearchStage(budget_ms=500.0),
            "rerank": RerankStage(budget_ms=400.0, keep=3, batch=1, model="ranker"),
            "followups": 2,
            **changes,
        }
    )


def faulty(chance: random.Random, faults: tuple[str, str, str], **changes: Any) -> World:
    """`faults`: of search, rerank and the model."""
    search, rerank, model = faults
    said: dict[str, Any] = {
        "none": ("Port ", "8000 [1]."),
        "frozen": chance.choice(((FOREVER,), ("Port ", FOREVER))),
        "slow": tuple(part for _ in range(40) for part in (chance.uniform(0.05, 0.5), "word ")),
        "wrong": (LOST,),
        "flooding": ("word " * 20,) * 50,
    }
    world = World(config(**changes), says(*said[model]))
    world.collection.search_s = {"frozen": FOREVER, "slow": chance.uniform(0.1, 0.8)}.get(search, 0.0)
    world.collection.error = LOST if search == "wrong" else None
    if search == "flooding":
        world.collection.hits = [hit(number, f"word{number} " * 200) for number in range(40)]
    world.models.rank_s = {"frozen": FOREVER, "slow": chance.uniform(0.05, 0.4)}.get(rerank, 0.0)
    return world


@asynchronous
async def test_the_99th_percentile_stays_within_the_deadline_and_skipped_stages_are_named() -> None:
    chance = random.Random(7)
    seconds: list[float] = []
    for _ in range(RUNS):
        search, rerank, model = chance.choice(FAULTS), chance.choice(FAULTS[:3]), chance.choice(FAULTS)
        outcome = await faulty(chance, (search, rerank, model)).run()
        seconds.append(outcome.seconds)
        if outcome.error is not None:  # the model broke, and there were no sources to answer from
            assert outcome.error is LOST
            assert search in ("frozen", "wrong", "slow", "flooding")
            continue
        assert outcome.text
        skipped = outcome.report["skipped"]
        if search in ("frozen", "wrong"):
            assert "search" in skipped
        elif rerank == "frozen" and search == "none":
            assert "rerank" in skipped
        if model in ("frozen", "wrong"):
            assert "generate" in skipped
    seconds.sort()
    assert seconds[int(0.99 * RUNS)] <= DEADLINE_S * 1.05
    assert seconds[-1] <= DEADLINE_S * 1.05


@pytest.mark.parametrize("stage", ["search", "rerank", "generate"])
@asynchronous
async def test_a_stage_that_must_not_be_skipped_fails_by_the_deadline_too(stage: str) -> None:
    chance = random.Random(stage)
    stops: dict[str, Any] = {
        "search": SearchStage(budget_ms=500.0, late="stop"),
        "rerank": RerankStage(budget_ms=400.0, keep=3, batch=1, model="ranker", late="stop"),
        "generate": GenerateStage(late="stop"),
    }
    faults = {name: "frozen" if name == stage else "none" for name in stops}
    world = faulty(chance, (faults["search"], faults["rerank"], "none"), **{stage: stops[stage]})
    if stage == "generate":
        world = World(config(generate=stops["generate"]), says(FOREVER))
    outcome = await world.run()
    assert outcome.error is not None
    assert outcome.error.code == "stage_late"
    assert outcome.seconds <= DEADLINE_S * 1.05
    assert world.collection.hits == HITS
