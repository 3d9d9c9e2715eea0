"""A pipeline with too little time answers with less, and says so. It fails only if its configuration says that."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.config.pipeline_section import AssembleStage, GenerateStage, PipelineConfig, RerankStage, SearchStage
from headrace.errors import RequestError
from headrace.gateway.api_errors import ApiError, as_api_error
from tests.support.pipeline_runs import FOREVER, World, says
from tests.support.running_server import asynchronous

BUSY = ApiError("The first token comes too late.", kind="overloaded_error", code="overloaded", retry_after=0.3)
UNREACHABLE = ApiError("The deadline is too short.", kind="overloaded_error", code="deadline_unreachable")
LOST = ApiError("The engine is not available.", kind="overloaded_error", code="engine_lost")
SLOW_MODEL = says(0.8, "Port ", 0.1, "8000 [1].")


def docs(**changes: Any) -> PipelineConfig:
    """As a configuration that sets no budget: generate keeps one second free."""
    return PipelineConfig(**{"stages": ("search", "assemble", "generate", "check"), **changes})


@pytest.mark.parametrize("model", [SLOW_MODEL, says(FOREVER), says(BUSY), says(UNREACHABLE), says(LOST)])
@asynchronous
async def test_a_quarter_of_a_second_is_enough_for_sentences_of_the_sources(model: Any) -> None:
    world = World(docs(), model)
    world.collection.search_s = 0.12
    outcome = await world.run(deadline_s=0.25)
    assert outcome.error is None
    assert "8000" in outcome.text
    assert outcome.run.exchange.notes["extracted"] is True
    assert outcome.report["skipped"] == ["generate"]
    assert outcome.seconds <= 0.25


@asynchronous
async def test_no_deadline_is_too_short_for_an_answer() -> None:
    for ms in (1, 5, 20, 50, 100, 150, 250, 500, 900, 1000, 1019, 1021, 1100, 1500, 2000, 3000):
        for search_s in (0.0, 0.06, 0.4, FOREVER):
            world = World(docs(), SLOW_MODEL)
            world.collection.search_s = search_s
            outcome = await world.run(deadline_s=ms / 1e3)
            assert outcome.error is None
            assert outcome.text
            assert outcome.seconds <= ms / 1e3 * 1.05
            if search_s <= ms / 1e3 * 0.75:  # the search has most of the time
                assert [each["source"] for each in outcome.notes("sources")[0]]
                assert "Port" in outcome.text or "8000" in outcome.text
            if outcome.finish == "deadline" or outcome.run.exchange.notes.get("extracted"):
                assert "generate" in outcome.report["skipped"]


@asynchronous
async def test_a_deadline_a_little_over_the_answers_budget_leaves_time_for_the_search() -> None:
    world = World(docs(), says("Port 8000 [1]."))
    world.collection.search_s = 0.5
    outcome = await world.run(deadline_s=1.03)
    assert outcome.stage("search")["outcome"] == "done"
    assert outcome.text == "Port 8000 [1]."


@asynchronous
async def test_a_slow_reranker_does_not_take_the_answers_time() -> None:
    config = docs(
        stages=("search", "rerank", "assemble", "generate"),
        rerank=RerankStage(budget_ms=400.0, keep=2, batch=1, model="ranker"),
        assemble=AssembleStage(keep=2),
    )
    world = World(config, SLOW_MODEL)
    world.collection.search_s, world.models.rank_s = 0.05, FOREVER
    outcome = await world.run(deadline_s=0.25)
    assert "8000" in outcome.text
    assert outcome.report["skipped"] == ["rerank", "generate"]
    assert outcome.seconds <= 0.25


@pytest.mark.parametrize("model", [says(FOREVER), says(BUSY), says(UNREACHABLE)])
@asynchronous
async def test_where_nothing_is_known_the_answer_says_so(model: Any) -> None:
    world = World(docs(followups=2), model)
    world.collection.search_s = FOREVER
    outcome = await world.run(deadline_s=0.25)
    assert outcome.error is None
    assert outcome.text == GenerateStage().no_answer
    assert outcome.finish == "deadline"
    assert outcome.run.exchange.notes["unanswered"] is True
    assert outcome.report["skipped"] == ["search", "generate"]
    assert outcome.seconds <= 0.25


def test_a_prompt_that_takes_longer_than_the_deadline_is_a_matter_of_time() -> None:
    error = as_api_error(RequestError("The first token is predicted in 0.3 s.", parameter="deadline"))
    assert (error.status, error.code) == (503, "deadline_unreachable")


@asynchronous
async def test_an_answer_that_says_nothing_is_not_kept() -> None:
    world = World(docs(generate=GenerateStage(order=("cache", "large"))), says(FOREVER))
    world.collection.search_s = FOREVER
    await world.run(deadline_s=0.25)
    world.collection.search_s = 0.0
    assert "8000" in (await world.run(deadline_s=0.25)).text


@pytest.mark.parametrize(
    ("generate", "code"), [(GenerateStage(late="stop"), "stage_late"), (GenerateStage(no_answer=""), "stage_late")]
)
@asynchronous
async def test_a_pipeline_may_declare_that_it_fails_instead(generate: GenerateStage, code: str) -> None:
    world = World(docs(generate=generate), says(FOREVER))
    world.collection.search_s = FOREVER
    outcome = await world.run(deadline_s=0.25)
    assert outcome.error is not None
    assert (outcome.error.code, outcome.error.status) == (code, 504)


@asynchronous
async def test_a_broken_engine_is_not_a_matter_of_time() -> None:
    world = World(docs(), says(LOST))
    world.collection.search_s = FOREVER
    outcome = await world.run(deadline_s=0.25)
    assert outcome.error is LOST


@asynchronous
async def test_a_search_that_left_something_out_is_named_and_not_kept() -> None:
    world = World(docs(search=SearchStage(cache_s=60.0)), says("Yes."))
    world.collection.skipped = {"vector": "deadline"}
    outcome = await world.run()
    assert outcome.stage("search")["outcome"] == "fewer"
    assert outcome.stage("search")["why"] == "late"
    assert outcome.stage("search")["skipped"] == {"vector": "late"}
    assert outcome.report["skipped"] == ["search"]
    world.collection.skipped = {}
    assert (await world.run()).report["skipped"] == []
    assert len(world.collection.searches) == 2
    await world.run()
    assert len(world.collection.searches) == 2
