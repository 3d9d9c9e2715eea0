"""A pipeline keeps its deadline whatever a stage does, and its answer says what was passed over."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.config.pipeline_section import (
    AssembleStage,
    CheckStage,
    EmbedStage,
    GenerateStage,
    PipelineConfig,
    RerankStage,
    SearchStage,
)
from headrace.engine.interface.grammar_spec import Grammar
from headrace.engine.interface.sampling import SamplingParams
from headrace.gateway.api_errors import ApiError
from headrace.gateway.requests.text_request import TextRequest
from headrace.gateway.serving.exchange import Caller
from tests.support.pipeline_runs import FOREVER, HITS, Call, World, hit, says
from tests.support.running_server import asynchronous

RAG: dict[str, Any] = {
    "stages": ("search", "rerank", "assemble", "generate", "check"),
    "deadline_ms": 5000.0,
    "search": SearchStage(budget_ms=500.0),
    "rerank": RerankStage(budget_ms=400.0, keep=2, batch=1, model="ranker"),
}


def rag(**changes: Any) -> PipelineConfig:
    return PipelineConfig(**{**RAG, **changes})


@asynchronous
async def test_sources_come_first_then_the_answer_then_the_end() -> None:
    outcome = await World(rag()).run()
    assert [name for name in outcome.order if name != "progress"] == ["sources", "text", "citation", "finish"]
    assert outcome.text == "Port 8000 [1]."
    assert outcome.notes("sources")[0][0]["source"].startswith("page-")
    assert [report["outcome"] for report in outcome.report["stages"]] == ["done"] * 5
    assert outcome.report["skipped"] == []


@asynchronous
async def test_the_reranker_orders_the_sources() -> None:
    world = World(rag())
    outcome = await world.run()
    shortest = sorted(HITS, key=lambda each: len(each.text))[:2]
    assert [each["id"] for each in outcome.notes("sources")[0]] == [each.id for each in shortest]
    assert [each.id for each in world.models.requests[0].sources] == [each.id for each in shortest]


@asynchronous
async def test_the_engine_gets_the_rest_of_the_time_as_its_deadline() -> None:
    world = World(rag(check=CheckStage(budget_ms=500.0)))
    world.collection.search_s = 0.25
    await world.run()
    deadline = world.models.requests[0].deadline_s
    assert deadline is not None
    assert 4.4 < deadline <= 4.5  # 5 s minus the check's 0.5 s, and a margin for the engine to end by itself


@asynchronous
async def test_a_request_may_shorten_the_deadline_and_not_lengthen_it() -> None:
    for asked, expected in ((2.0, 2000.0), (60.0, 5000.0)):
        outcome = await World(rag()).run(deadline_s=asked)
        assert outcome.report["deadline_ms"] == expected


@asynchronous
async def test_a_frozen_search_is_skipped_and_the_answer_says_so() -> None:
    world = World(rag())
    world.collection.search_s = FOREVER
    outcome = await world.run()
    assert outcome.text == "Port 8000 [1]."
    assert outcome.seconds == pytest.approx(0.5, abs=0.01)
    assert outcome.stage("search")["outcome"] == "skipped"
    assert outcome.stage("search")["why"] == "late"
    assert outcome.report["skipped"] == ["search"]
    assert outcome.run.headers()["x-headrace-skipped"] == "search"


@asynchronous
async def test_a_slow_reranker_puts_first_what_it_has_ranked() -> None:
    world = World(rag(rerank=RerankStage(budget_ms=400.0, keep=3, batch=1, model="ranker")))
    world.models.rank_s = 0.3
    outcome = await world.run()
    assert outcome.stage("rerank")["outcome"] == "fewer"
    assert outcome.stage("rerank")["ranked"] == 1
    assert [each["id"] for each in outcome.notes("sources")[0]] == ["c1", "c2", "c3"]
    assert outcome.seconds == pytest.approx(0.4, abs=0.01)


@asynchronous
async def test_a_wrong_stage_is_skipped_with_its_error() -> None:
    world = World(rag())
    world.collection.error = RuntimeError("broken")
    outcome = await world.run()
    assert outcome.stage("search")["why"] == "internal_error"
    assert outcome.finish == "stop"


@asynchronous
async def test_a_flooding_search_is_cut_to_what_was_asked_for() -> None:
    world = World(rag(search=SearchStage(k=3), stages=("search", "generate")), says("Yes."))
    world.collection.hits = [hit(number, "word " * 100_000) for number in range(200)]
    outcome = await world.run()
    assert len(outcome.notes("sources")[0]) == 3
    assert max(len(each["text"]) for each in outcome.notes("sources")[0]) <= 20_000


@asynchronous
async def test_a_stage_that_must_not_be_skipped_ends_the_pipeline() -> None:
    world = World(rag(search=SearchStage(budget_ms=500.0, late="stop")))
    world.collection.search_s = FOREVER
    outcome = await world.run()
    assert outcome.error is not None
    assert (outcome.error.code, outcome.error.status) == ("stage_late", 504)
    assert world.models.requests == []


@asynchronous
async def test_a_late_search_may_use_an_earlier_result() -> None:
    world = World(rag(search=SearchStage(budget_ms=500.0, late="cached")))
    await world.run()
    world.collection.search_s = FOREVER
    outcome = await world.run()
    assert outcome.stage("search")["outcome"] == "cached"
    assert len(outcome.notes("sources")[0]) == 2


@asynchronous
async def test_a_frozen_model_leaves_sentences_of_the_sources() -> None:
    outcome = await World(rag(), says(FOREVER)).run()
    assert outcome.seconds <= 5.0
    assert "8000" in outcome.text
    assert outcome.run.exchange.notes["extracted"] is True
    assert outcome.stage("generate")["outcome"] == "fewer"


@asynchronous
async def test_other_texts_stand_in_only_where_the_client_can_read_them() -> None:
    json = Grammar("json_object")
    early = rag(generate=GenerateStage(order=("extract", "large"), extract_confidence=0.3))
    for shape in ({"grammar": json}, {"sampling": SamplingParams(logprobs=1)}):
        outcome = await World(early, says('{"port": 8000}')).run("On which port does the server listen?", **shape)
        assert (outcome.text, outcome.report["answered_by"]) == ('{"port": 8000}', "large")
        late = await World(rag(), says(FOREVER)).run(**shape)  # sentences of the sources are no JSON
        assert late.error is not None
        assert (late.error.status, late.error.code, late.text) == (504, "stage_late", "")


@asynchronous
async def test_a_slow_model_is_cut_at_the_deadline_with_what_it_said() -> None:
    outcome = await World(rag(), says("Port ", FOREVER)).run()
    assert outcome.seconds <= 5.0
    assert outcome.text == "Port "
    assert outcome.finish == "deadline"
    assert outcome.report["skipped"] == ["generate"]


@asynchronous
async def test_a_broken_model_leaves_sentences_of_the_sources() -> None:
    lost = ApiError("The engine is not available.", kind="overloaded_error", code="engine_lost")
    outcome = await World(rag(), says(lost)).run()
    assert "8000" in outcome.text
    assert outcome.stage("generate")["why"] == "engine_lost"


@asynchronous
async def test_without_sources_a_broken_model_is_an_error() -> None:
    lost = ApiError("The engine is not available.", kind="overloaded_error", code="engine_lost")
    outcome = await World(PipelineConfig(stages=("generate",)), says(lost)).run()
    assert outcome.error is lost


@asynchronous
async def test_a_model_that_breaks_in_its_midst_is_an_error_after_the_text() -> None:
    lost = ApiError("The engine is not available.", kind="overloaded_error", code="engine_lost")
    outcome = await World(rag(), says("Port ", lost)).run()
    assert outcome.text == "Port "
    assert outcome.error is lost


@asynchronous
async def test_every_model_call_is_settled_once() -> None:
    for script in (says("Yes."), says(FOREVER), says("a", FOREVER), says(ApiError("no", kind="server_error"))):
        world = World(rag(followups=2), script)
        await world.run()
        assert world.models.flows
        assert [flow.settled for flow in world.models.flows] == [1] * len(world.models.flows)


@asynchronous
async def test_a_client_that_leaves_ends_the_stage_in_progress() -> None:
    world = World(rag())
    world.collection.search_s = FOREVER
    run = world.open()
    task = asyncio.ensure_future(world.finish(run))
    while not world.collection.searches:
        await asyncio.sleep(0)
    run.cancel()
    outcome = await task
    assert run.is_client_gone
    assert outcome.text == ""
    assert world.models.requests == []


@asynchronous
async def test_usage_is_the_sum_of_all_model_calls() -> None:
    outcome = await World(rag(followups=1), says('["Why?"]')).run()
    assert outcome.run.exchange.usage.prompt_tokens == 20
    assert outcome.deltas[-1].usage is not None
    assert outcome.deltas[-1].usage.output_tokens == 10


@asynchronous
async def test_followups_come_after_the_answer() -> None:
    def script(request: TextRequest) -> Call:
        return Call(("Yes.",)) if request.grammar is None else Call(('["Which port?", "Why?"]',))

    outcome = await World(rag(followups=2), script).run()
    assert outcome.notes("followups") == [["Which port?", "Why?"]]
    assert outcome.order.index("followups") > outcome.order.index("text")


@asynchronous
async def test_late_followups_are_left_out() -> None:
    def script(request: TextRequest) -> Call:
        return Call(("Yes.",)) if request.grammar is None else Call((FOREVER,))

    outcome = await World(rag(followups=2), script).run()
    assert outcome.finish == "stop"
    assert outcome.report["skipped"] == ["followups"]
    assert outcome.seconds <= 5.0


@asynchronous
async def test_prefetched_passages_are_used_by_the_next_question_and_counted() -> None:
    def script(request: TextRequest) -> Call:
        return Call(("Yes.",)) if request.grammar is None else Call(('["Which port?"]',))

    world = World(rag(followups=1, prefetch=1), script)
    await world.run()
    await world.clock.run(asyncio.wait_for(asyncio.gather(*world.background), None))
    assert [each["query"] for each in world.collection.searches][1:] == ["Which port?"]
    outcome = await world.run("Which port?")
    assert outcome.stage("search")["cache"] == "prefetch"
    assert world.pipelines.described(Caller())[0]["prefetch"]["used"] == 1
    assert world.pipelines.described(Caller("key", "other"))[0]["prefetch"] == {}


@asynchronous
async def test_nothing_is_prefetched_by_default() -> None:
    world = World(rag(followups=1), says('["Why?"]'))
    await world.run()
    assert world.background == []


@asynchronous
async def test_cached_results_of_one_tenant_are_not_visible_to_another() -> None:
    world = World(rag(search=SearchStage(cache_s=60.0), generate=GenerateStage(order=("cache", "large"))))
    for tenant, searches, answers in (("a", 1, 1), ("a", 1, 1), ("b", 2, 2)):
        await world.run(caller=Caller("key", tenant))
        assert len(world.collection.searches) == searches
        assert len(world.models.requests) == answers


@asynchronous
async def test_a_popular_question_is_answered_from_the_cache_without_a_search() -> None:
    world = World(rag(generate=GenerateStage(order=("cache", "large"))))
    first = await world.run("What is the port?")
    again = await world.run("what is the port")
    assert again.text == first.text
    assert again.report["answered_by"] == "cache"
    assert again.notes("sources") == first.notes("sources")
    assert len(world.models.requests) == 1
    world.clock.now += 700.0
    await world.run("What is the port?")
    assert len(world.models.requests) == 2


@asynchronous
async def test_an_answer_in_another_shape_is_not_one_of_the_cache() -> None:
    world = World(rag(generate=GenerateStage(order=("cache", "large"))))

    def asked(url: str) -> list[dict[str, Any]]:
        return [{"role": "user", "content": "What is this?", "images": [{"url": url}]}]

    shapes: tuple[dict[str, Any], ...] = (
        {},
        {"grammar": Grammar("json_object")},
        {"sampling": SamplingParams(temperature=0.9)},
        {"messages": asked("data:image/png;base64,aa")},
        {"messages": asked("data:image/png;base64,bb")},
    )
    for count, shape in enumerate(shapes, start=1):
        for _ in range(2):
            await world.run(**shape)
        assert len(world.models.requests) == count, shape
    for uncached in ({"messages": asked("https://example.org/now.png")}, {"sampling": SamplingParams(logprobs=1)}):
        before = len(world.models.requests)
        for _ in range(2):
            await world.run(**uncached)
        assert len(world.models.requests) == before + 2


@asynchronous
async def test_no_cached_result_shows_a_passage_whose_document_is_gone() -> None:
    config = rag(search=SearchStage(cache_s=60.0), generate=GenerateStage(order=("cache", "large")))
    world = World(config)
    for searches in (1, 1):
        await world.run()
        assert (len(world.collection.searches), len(world.models.requests)) == (searches, 1)
    world.collection.gone.add(HITS[0].id)
    await world.run()
    assert (len(world.collection.searches), len(world.models.requests)) == (2, 2)
    other = World(config)
    await other.run()
    other.pipelines.collection_removed("", "docs")
    await asyncio.gather(*other.background)
    await other.run()
    assert (len(other.collection.searches), len(other.models.requests)) == (2, 2)


@asynchronous
async def test_a_collection_of_the_same_name_on_another_server_shares_no_results() -> None:
    config = rag(search=SearchStage(cache_s=60.0), generate=GenerateStage(order=("cache", "large")))
    world = World(config)
    await world.run()
    world.collection.uid = "collection-2"  # another server's, beside the same shared cache
    await world.run()
    assert (len(world.collection.searches), len(world.models.requests)) == (2, 2)


@asynchronous
async def test_a_collection_that_does_not_answer_costs_the_cached_result_and_no_wait() -> None:
    world = World(rag(generate=GenerateStage(order=("cache", "large"))))
    await world.run()
    world.collection.is_stuck = True
    await world.run()
    assert len(world.models.requests) == 2


@asynchronous
async def test_scores_are_not_those_of_other_weights_of_the_reranker() -> None:
    world = World(rag(stages=("search", "rerank", "generate"), rerank=RerankStage(model="ranker", cache_s=60.0)))
    for _ in range(2):
        await world.run()
    assert len(world.models.ranked) == 1
    world.models.fingerprint = "fp_2"
    await world.run()
    assert len(world.models.ranked) == 2


@asynchronous
async def test_a_request_may_refuse_cached_answers() -> None:
    world = World(rag(generate=GenerateStage(order=("cache", "large"))))
    await world.run()
    await world.run(cache="off")
    assert len(world.models.requests) == 2


@asynchronous
async def test_confident_sentences_of_the_sources_need_no_model() -> None:
    order = GenerateStage(order=("extract", "large"), extract_confidence=0.3)
    world = World(rag(generate=order))
    outcome = await world.run("On which port does the server listen?")
    assert outcome.report["answered_by"] == "extract"
    assert "8000" in outcome.text
    assert world.models.requests == []


@asynchronous
async def test_an_unsure_small_model_gives_way_to_the_large_one() -> None:
    config = rag(generate=GenerateStage(order=("small", "large"), small="tiny", small_confidence=0.5))
    world = World(config, says("Large.", micros=70), tiny=says("Small.", micros=3))
    outcome = await world.run()
    assert outcome.run.exchange.cost_micros == 73
    assert outcome.text == "Large."
    assert outcome.report["answered_by"] == "large"
    assert [request.model for request in world.models.requests] == ["tiny", "mini"]


@asynchronous
async def test_a_short_answer_comes_first_and_the_details_on_demand() -> None:
    world = World(rag(mode="answer-first", short_tokens=20))
    short = await world.run()
    detail = await world.run(pipeline={"detail": True})
    assert [request.max_tokens for request in world.models.requests] == [20, None]
    first, second = [(request.messages or [])[-1]["content"] for request in world.models.requests]
    assert first.startswith("What is the port of the server?\n\n")
    assert first.splitlines()[:-1] == second.splitlines()[:-1]  # the same beginning: the prefix cache has it
    assert (short.report["detail"], detail.report["detail"]) == ("available", "given")


@asynchronous
async def test_stable_order_depends_on_the_passages_alone() -> None:
    world = World(rag(stages=("search", "assemble", "generate"), assemble=AssembleStage(order="stable")))
    world.collection.hits = list(reversed(HITS))
    await world.run()
    assert [each.id for each in world.models.requests[0].sources] == ["c1", "c2", "c3"]


@asynchronous
async def test_voice_gets_sentences_and_can_be_interrupted() -> None:
    world = World(rag(sentences=True), says("It is port 8000. ", "You can change it. ", "More", FOREVER))
    run = world.open()
    task = asyncio.ensure_future(world.finish(run))
    while len(run.state.sentences) < 2:
        await asyncio.sleep(0)
    told = world.pipelines.interrupt(Caller(), run.exchange.id, 1)
    outcome = await task
    assert told["heard"] == "It is port 8000."
    assert outcome.order[-2:] == ["interrupted", "finish"]
    assert not run.is_client_gone
    assert [note["text"] for note in outcome.notes("sentence")] == ["It is port 8000.", "You can change it."]


@asynchronous
async def test_the_run_of_another_tenant_cannot_be_interrupted() -> None:
    world = World(rag())
    run = world.open(caller=Caller("key", "a"))
    with pytest.raises(ApiError, match="No run"):
        world.pipelines.interrupt(Caller("key", "b"), run.exchange.id, None)
    run.settle()
    with pytest.raises(ApiError, match="No run"):
        world.pipelines.interrupt(Caller("key", "a"), run.exchange.id, None)


@asynchronous
async def test_the_questions_vector_is_reused() -> None:
    world = World(rag(stages=("embed", "search", "generate"), embed=EmbedStage()))
    first, second = await world.run(), await world.run()
    assert "cache" not in first.stage("embed")
    assert second.stage("embed")["cache"] == "hit"
    assert [each["vector"].values for each in world.collection.searches] == [(0.0, 1.0)] * 2


@pytest.mark.parametrize(
    ("request_fields", "parameter"),
    [
        ({"n": 2}, "n"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages"),
        ({"pipeline": {"filters": {"a": "b"}}}, "pipeline.filters"),
    ],
)
def test_what_a_pipeline_does_not_take_is_rejected(request_fields: dict[str, Any], parameter: str) -> None:
    with pytest.raises(ApiError) as caught:
        World(rag()).open(**request_fields)
    assert caught.value.parameter == parameter


def test_a_pipeline_whose_models_are_out_of_reach_does_not_exist() -> None:
    world = World(rag(rerank=RerankStage(model="missing")))
    assert world.pipelines.described(Caller()) == []
    with pytest.raises(ApiError, match="Unknown pipeline 'docs'"):
        world.open()
