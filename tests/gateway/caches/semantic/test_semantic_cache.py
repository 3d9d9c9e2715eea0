"""The cache as the flow uses it: what it serves and what it does not, its walls, its bounds, and what may fail."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.engine.interface.sampling import SamplingParams
from headrace.errors import HeadraceError
from headrace.gateway.caches.semantic.agreement import answers_agree
from headrace.gateway.caches.semantic.embedder import BoundedEmbedding, ServedEmbedder
from headrace.gateway.caches.semantic.semantic_cache import OUTCOMES
from headrace.gateway.caches.semantic.semantic_entry import StoredAnswer, storable_answer, with_example
from headrace.gateway.caches.semantic.semantic_key import SemanticKey, semantic_key_for
from headrace.gateway.caches.semantic.semantic_store import SemanticStore
from headrace.gateway.database import Database
from headrace.gateway.requests.text_request import Choice, TextRequest, Tool, ToolCall
from headrace.gateway.serving.exchange import Caller
from headrace.gateway.serving.served_variant import ServedVariant
from tests.support.dialect_exchanges import tokenizer
from tests.support.file_storage import asynchronous
from tests.support.stores.fake_encoders import EncoderEngine, WordEmbedder, asking
from tests.support.stores.semantic_bench import ANSWER, QUESTION, SAME, Bench, fixed, tagged


def test_the_same_question_in_other_words_gets_the_kept_answer() -> None:
    async def test() -> None:
        bench = Bench(fixed())
        assert (await bench.answered(QUESTION)).outcome == "miss"
        recall = await bench.recall(SAME)
        assert recall.outcome == "hit"
        assert recall.entry is not None
        first, last = recall.entry.answer.pieces()
        assert (first.content, last.finish) == (ANSWER.content, "stop")
        assert last.usage is not None
        assert last.usage.output_tokens == 0
        assert recall.entry.hits == 1

    asynchronous(test)


def test_a_question_that_a_guard_refuses_gets_none() -> None:
    async def test() -> None:
        counted: list[tuple[str, str]] = []

        def count(table: str, name: str) -> None:
            counted.append((table, name))

        bench = Bench(fixed(), counted=count)
        await bench.answered("How do I turn on the alarm?")
        recall = await bench.recall("How do I turn off the alarm?")
        assert (recall.outcome, recall.reason, recall.entry) == ("miss", "", None)  # its words are too far away
        bench.reconfigure(fixed(floor=0.1))
        recall = await bench.recall("How do I turn off the alarm?")
        assert (recall.outcome, recall.reason, recall.entry) == ("refused", "polarity", None)
        assert counted[-2:] == [("outcomes", "refused"), ("refusals", "polarity")]
        bench.reconfigure(fixed(floor=0.1, least=0.0, threshold=0.0, guards=False))
        assert (await bench.recall("How do I turn off the alarm?")).outcome == "hit"

    asynchronous(test)


def test_it_is_off_unless_it_is_turned_on() -> None:
    async def test() -> None:
        bench = Bench()
        recall = await bench.answered(QUESTION)
        assert recall.outcome == "off"
        assert (await Bench(fixed()).recall(asking(QUESTION, cache="off"))).outcome == "off"
        assert bench.embedder.text_request == []
        assert bench.cache.about("a")["entries"] == 0

    asynchronous(test)


def test_tenants_are_walls() -> None:
    async def test() -> None:
        bench = Bench(fixed())
        await bench.answered(QUESTION, tenant="a")
        assert (await bench.recall(QUESTION, tenant="b")).outcome == "miss"
        await bench.answered(QUESTION, StoredAnswer("Another."), tenant="b")
        found = (await bench.recall(SAME, tenant="a")).entry
        assert found is not None
        assert found.answer == ANSWER
        assert await bench.cache.invalidate(tenant="b") == 1
        assert (await bench.recall(SAME, tenant="a")).outcome == "hit"
        assert (await bench.recall(SAME, tenant="b")).outcome == "miss"

    asynchronous(test)


SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    "other",
    [
        asking(QUESTION, before=[SYSTEM]),
        asking(QUESTION, before=[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]),
        asking(QUESTION, max_tokens=5),
        asking(QUESTION, stop=("\n",)),
        asking(QUESTION, think=True),
        asking(QUESTION, profile="fast"),
        asking(QUESTION, template={"style": "short"}),
        TextRequest(model="mini", messages=[{"role": "user", "content": QUESTION, "name": "eve"}]),
        TextRequest(
            model="mini",
            messages=[{"role": "user", "content": QUESTION}],
            sampling=SamplingParams(repetition_penalty=1.2),
        ),
    ],
)
def test_all_else_must_be_equal(other: TextRequest) -> None:
    async def test() -> None:
        bench = Bench(fixed())
        await bench.answered(QUESTION)
        assert (await bench.recall(other)).outcome == "miss"
        await bench.answered(other, StoredAnswer("Another."))
        assert (await bench.recall(other)).entry is not None
        found = (await bench.recall(QUESTION)).entry
        assert found is not None
        assert found.answer == ANSWER

    asynchronous(test)


def test_another_variant_policy_or_encoder_is_another_answer() -> None:
    asked = asking(QUESTION)
    one = semantic_key_for(asked, variant="mini fp_1")
    assert isinstance(one, SemanticKey)
    assert one == semantic_key_for(asked, variant="mini fp_1")
    assert one != semantic_key_for(asked, variant="mini@int4 fp_2")
    assert one != semantic_key_for(asked, variant="mini fp_1", policy="2")
    assert one != semantic_key_for(asked.but(skip_special_tokens=False), variant="mini fp_1")

    async def test() -> None:
        bench = Bench(fixed())
        await bench.answered(QUESTION)
        bench.embedder.name = "another"
        assert (await bench.recall(QUESTION)).outcome == "miss"

    asynchronous(test)


def test_what_a_seed_or_a_nucleus_says_of_the_likeliest_token_makes_no_difference() -> None:
    one = asking(QUESTION)
    other = TextRequest(model="mini", messages=one.messages, sampling=SamplingParams(seed=7, top_p=0.9))
    assert semantic_key_for(one, variant="mini") == semantic_key_for(other, variant="mini")


TOOL = Tool("search")


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (asking(QUESTION, tools=(TOOL,)), "tools"),
        (asking(QUESTION, before=[{"role": "tool", "content": "42"}]), "tools"),
        (asking(QUESTION, before=[{"role": "assistant", "content": "", "tool_calls": [{}]}]), "tools"),
        (asking(QUESTION, temperature=0.7), "sampled"),
        (asking(QUESTION, n=2), "shape"),
        (asking("x" * 2000), "long"),
        (asking("  "), "no question"),
        (TextRequest(model="mini", prompts=["Once"]), "no chat"),
        (TextRequest(model="mini", messages=[SYSTEM]), "no question"),
        (TextRequest(model="mini", messages=[{"role": "tool", "content": "42"}]), "no question"),
    ],
)
def test_requests_that_are_none_of_the_caches(asked: TextRequest, reason: str) -> None:
    async def test() -> None:
        bench = Bench(fixed())
        recall = await bench.answered(asked)
        assert (recall.outcome, recall.reason) == ("none", reason)
        assert bench.embedder.text_request == []
        assert bench.counts["refusals"] == {reason: 1}

    asynchronous(test)


def test_agents_and_tools_take_part_when_asked_for() -> None:
    async def test() -> None:
        asked = asking(QUESTION, tools=(TOOL,))
        bench = Bench(fixed())
        assert (await bench.recall(QUESTION, surface="agent")).reason == "agent"
        bench = Bench(fixed(tools=True))
        await bench.answered(asked)
        assert (await bench.recall(asked, surface="agent")).outcome == "hit"
        bench = Bench(fixed(surfaces=("voice",)))
        assert (await bench.recall(QUESTION, surface="chat")).reason == "surface"

    asynchronous(test)


def test_sampled_requests_take_part_when_asked_for() -> None:
    async def test() -> None:
        bench = Bench(fixed(sampled=True))
        await bench.answered(asking(QUESTION, temperature=0.7))
        assert (await bench.recall(asking(SAME, temperature=0.7))).outcome == "hit"
        assert (await bench.recall(asking(SAME, temperature=0.2))).outcome == "miss"

    asynchronous(test)


def test_only_a_whole_answer_is_kept() -> None:
    assert storable_answer([Choice(0, content="Yes.", reasoning="Hm.")]) == StoredAnswer("Yes.", "Hm.")
    assert storable_answer([Choice(0, content="Yes", finish="length")]) is None
    assert storable_answer([Choice(0, content="Yes", finish="deadline")]) is None
    assert storable_answer([Choice(0, content=" ")]) is None
    assert storable_answer([Choice(0, content="Yes", calls=[ToolCall("1", "search", "{}")])]) is None
    assert storable_answer([Choice(0, content="Yes"), Choice(1, content="No")]) is None


def test_learned_thresholds_serve_after_enough_right_answers_and_not_before() -> None:
    async def test() -> None:
        bench = Bench(fixed(threshold=None, delta=0.05, check_share=0.0))
        outcomes: list[str] = []
        for place in range(120):
            topic = f"x{chr(97 + place % 26)}q{chr(97 + place // 26)}x"
            await bench.answered(f"How do I open the {topic} panel?", StoredAnswer(f"Press {topic}."))
            recall = await bench.recall(f"How can I open the {topic} panel?")
            outcomes.append(recall.outcome)
            await bench.cache.settle(recall, StoredAnswer(f"Press {topic}."), bench.embedder)
        assert outcomes[0] == "explore"
        assert outcomes[-1] == "hit"
        assert set(outcomes) == {"explore", "hit"}
        assert bench.cache.about("a")["wrong"] == 0
        assert bench.cache.about("a")["entries"] == 120  # an answer that says the same is not kept again

    asynchronous(test)


def test_a_fresh_answer_that_says_something_else_is_learned_from_and_kept() -> None:
    async def test() -> None:
        bench = Bench(fixed(threshold=None))
        await bench.answered(QUESTION)
        recall = await bench.recall(SAME)
        assert recall.outcome == "explore"
        await bench.cache.settle(recall, StoredAnswer("Write to us."), bench.embedder)
        await bench.cache.settle(recall, StoredAnswer("Write to us."), bench.embedder)  # twice is once
        about = bench.cache.about("a")
        assert (about["entries"], about["right"], about["wrong"]) == (2, 0, 1)
        assert bench.counts["comparisons"] == {"wrong": 1}

    asynchronous(test)


def test_a_share_of_hits_is_checked_against_a_fresh_answer() -> None:
    async def test() -> None:
        bench = Bench(fixed(check_share=1.0))
        await bench.answered(QUESTION)
        recall = await bench.recall(SAME)
        assert recall.check
        assert await bench.cache.check(recall, StoredAnswer("open settings, then plan, then cancel"), bench.embedder)
        recall = await bench.recall(SAME)
        assert await bench.cache.check(recall, StoredAnswer("Write to us."), bench.embedder) is False
        assert await bench.cache.check(recall, StoredAnswer("Write to us."), bench.embedder) is None  # once
        about = bench.cache.about("a")
        assert (about["right"], about["wrong"]) == (1, 1)
        bench = Bench(fixed(check_share=0.0))
        await bench.answered(QUESTION)
        assert not (await bench.recall(SAME)).check

    asynchronous(test)


def test_record_only_tells_what_would_have_hit() -> None:
    async def test() -> None:
        bench = Bench(fixed(mode="record"))
        await bench.answered(QUESTION)
        recall = await bench.recall(SAME)
        assert recall.outcome == "record"
        assert recall.entry is not None
        assert not recall.check
        await bench.cache.settle(recall, StoredAnswer("Write to us."), bench.embedder)
        assert bench.cache.about("a")["wrong"] == 1
        bench = Bench(fixed(mode="record"))
        bench.cache.modes = replace(bench.cache.modes, tenants={"trusting": "on", "wary": "off"})
        for tenant, outcome in (("trusting", "hit"), ("wary", "off"), ("another", "record")):
            await bench.answered(QUESTION, tenant=tenant)
            assert (await bench.recall(SAME, tenant)).outcome == outcome

    asynchronous(test)


def test_a_share_of_tenants_reads_and_it_is_always_the_same() -> None:
    async def test() -> None:
        bench = Bench(fixed(mode="share", share=0.5))
        found: dict[str, set[str]] = {}
        for _ in range(2):
            for number in range(40):
                tenant = f"tenant {number}"
                await bench.answered(QUESTION, tenant=tenant)
                found.setdefault(tenant, set()).add((await bench.recall(SAME, tenant)).outcome)
        assert all(len(each) == 1 for each in found.values())
        hits = sum(each == {"hit"} for each in found.values())
        assert 10 <= hits <= 30

    asynchronous(test)


def test_a_primed_request_shows_the_model_the_kept_pair_before_the_question() -> None:
    async def test() -> None:
        bench = Bench(fixed(serve="prime", threshold=0.999))
        await bench.answered(asking(QUESTION, before=[SYSTEM]))
        asked = asking(SAME, before=[SYSTEM])
        recall = await bench.recall(asked)
        assert recall.outcome == "hit"
        assert recall.entry is not None
        messages = with_example(asked, recall.entry).messages
        assert messages == [
            SYSTEM,
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": ANSWER.content},
            {"role": "user", "content": SAME},
        ]
        assert asked.messages == [SYSTEM, {"role": "user", "content": SAME}]

    asynchronous(test)


def test_entries_live_as_long_as_the_shortest_of_their_tags() -> None:
    async def test() -> None:
        bench = Bench(fixed(ttl="100s", tags={"pricing": "10s", "docs": "1000s"}))
        await bench.answered(QUESTION, tags=["docs"])
        await bench.answered("What does a seat cost?", tags=["pricing", "docs"])
        bench.clock.now += 11
        assert (await bench.recall(tagged(SAME, "docs"))).outcome == "hit"
        assert (await bench.recall(SAME)).outcome == "miss"  # other tags: it may have to live for another time
        assert (await bench.recall(tagged("What does a seat cost?", "docs", "pricing"))).outcome == "miss"
        assert await bench.cache.sweep() == 1
        bench.clock.now += 90
        assert (await bench.recall(tagged(SAME, "docs"))).outcome == "miss"
        assert await bench.cache.sweep() == 1
        assert bench.cache.about("a")["bytes"] == 0

    asynchronous(test)


def test_entries_are_let_go_of_by_tag() -> None:
    async def test() -> None:
        bench = Bench(fixed())
        await bench.answered(QUESTION, tags=["plans"])
        await bench.answered("What does a seat cost?", tags=["pricing", "plans"])
        await bench.answered("Where is the manual?")
        await bench.answered(QUESTION, tenant="b", tags=["plans"])
        assert await bench.cache.invalidate(tenant="c", tag="plans") == 0
        assert await bench.cache.invalidate(tenant="a", tag="pricing") == 1
        assert await bench.cache.invalidate(tag="plans") == 2
        assert bench.cache.about("a")["entries"] == 1
        assert await bench.cache.invalidate() == 1

    asynchronous(test)


def test_what_was_being_generated_at_an_invalidation_is_not_kept() -> None:
    async def test() -> None:
        bench = Bench(fixed())
        asked = tagged(QUESTION, "plans")
        for scope, kept in (({"tag": "plans"}, 0), ({"tenant": "b"}, 1), ({"tag": "docs"}, 1), ({"tenant": "a"}, 0)):
            recall = await bench.recall(asked)
            await bench.cache.invalidate(**scope)
            await bench.cache.settle(recall, ANSWER, bench.embedder)
            assert bench.cache.about("a")["entries"] == kept
            await bench.cache.invalidate()
        recall = await bench.recall(asked)
        for number in range(1025):
            await bench.cache.invalidate(tag=f"tag{number}")
        await bench.cache.settle(recall, ANSWER, bench.embedder)
        assert bench.cache.about("a")["entries"] == 0

    asynchronous(test)


def test_the_least_used_entries_go_first_at_each_bound() -> None:
    async def test() -> None:
        bench = Bench(fixed(entries=2))
        await bench.answered(QUESTION)
        await bench.answered("Where is the manual?")
        assert (await bench.recall(SAME)).outcome == "hit"
        await bench.answered("Who wrote the parser?")
        about = bench.cache.about("a")
        assert (about["entries"], about["evicted"]) == (2, 1)
        assert (await bench.recall(SAME)).outcome == "hit"
        assert (await bench.recall("Where is the manual?")).outcome == "miss"

        bench = Bench(fixed(tenant_bytes=4000))
        for topic in ("manual", "parser", "scheduler", "router", "tokenizer", "sampler"):
            await bench.answered(f"Where is the {topic}?", StoredAnswer("x" * 500))
            assert bench.cache.about("a")["bytes"] <= 4000
        assert 0 < bench.cache.about("a")["entries"] < 6
        await bench.answered("Where is the log?", StoredAnswer("x" * 5000))
        assert (await bench.recall("Where is the log?")).outcome == "miss"

        bench = Bench(fixed(total_bytes=12_000))
        await bench.answered(QUESTION, tenant="small")
        for topic in ("manual", "parser", "scheduler", "router", "tokenizer", "sampler", "linter", "proxy"):
            await bench.answered(f"Where is the {topic}?", StoredAnswer("x" * 500), tenant="large")
            assert sum(bench.cache.about(tenant)["bytes"] for tenant in ("small", "large")) <= 12_000
        assert bench.cache.about("small")["entries"] == 1
        assert bench.cache.about("large")["evicted"] > 0

        bench = Bench(fixed(tenants=2, answer_bytes=10))
        for tenant in ("a", "b", "c"):
            await bench.answered(QUESTION, StoredAnswer("Short."), tenant=tenant)
        assert [bench.cache.about(tenant)["entries"] for tenant in ("a", "b", "c")] == [0, 1, 1]
        await bench.answered("Where is the manual?", StoredAnswer("Far too long."), tenant="c")
        assert bench.cache.about("c")["entries"] == 1

    asynchronous(test)


def test_an_encoder_that_is_slow_or_gone_costs_a_bounded_wait_and_then_none() -> None:
    async def test() -> None:
        now = [0.0]
        embedder = WordEmbedder()
        bounded = BoundedEmbedding(wait_s=0.005, pause_s=5.0, clock=lambda: now[0])
        embedder.delay_s = 60.0
        assert await bounded.vector(embedder, "one") is None
        embedder.delay_s, embedder.fails = 0.0, True
        for _ in range(4):
            assert await bounded.vector(embedder, "one") is None
        assert bounded.paused
        assert await bounded.vector(embedder, "two") is None
        assert "two" not in embedder.text_request
        now[0] = 6.0
        assert await bounded.vector(embedder, "three") is None  # one try, and a pause again
        assert bounded.paused
        now[0], embedder.fails = 12.0, False
        assert await bounded.vector(embedder, "four") is not None
        assert not bounded.paused

        bench = Bench(fixed())
        bench.embedder.fails = True
        recall = await bench.answered(QUESTION)
        assert recall.outcome == "unavailable"
        assert bench.cache.about("a")["entries"] == 0

    asynchronous(test)


def test_a_served_encoder_embeds_for_its_caller() -> None:
    async def test() -> None:
        engine = EncoderEngine()
        served = ServedVariant(
            name="minilm",
            engine=engine,
            tokenizer=tokenizer(),
            context=64,
            kind="encoder",
            width=4,
            fingerprint="fp_2",
        )
        embedder = ServedEmbedder(served, Caller("key", "tenant", 2.0))
        assert (embedder.name, embedder.width) == ("minilm fp_2", 4)
        vector = await BoundedEmbedding(wait_s=10.0).vector(embedder, "How do I log in?")
        assert vector is not None
        assert float(vector @ vector) == pytest.approx(1.0)
        (request,) = engine.text_request
        assert (request.kind, request.tenant, request.weight, request.surface) == ("embed", "tenant", 2.0, "chat")
        assert await BoundedEmbedding(wait_s=10.0).vector(embedder, "long " * 100) is None  # beyond its context
        with pytest.raises(HeadraceError, match="no embeddings"):
            ServedEmbedder(replace(served, kind="decoder"), Caller())

    asynchronous(test)


def test_a_restart_begins_with_what_was_kept(tmp_path: Path) -> None:
    async def test() -> None:
        db = Database(tmp_path)
        first = Bench(fixed(), store=SemanticStore(db, wait_s=10.0))
        assert (await first.recall(QUESTION)).outcome == "unavailable"  # the table is being read
        await first.cache.load("a", first.embedder)
        await first.answered(QUESTION, tags=["plans"])
        await first.answered("Where is the manual?")
        second = Bench(fixed(), store=SemanticStore(db, wait_s=10.0))
        await second.cache.load("a", second.embedder)
        found = (await second.recall(tagged(SAME, "plans"))).entry
        assert found is not None
        assert found.answer == ANSWER
        await second.answered("Who wrote the parser?")
        assert await second.cache.invalidate(tag="plans") == 1
        third = Bench(fixed(), store=SemanticStore(db, wait_s=10.0))
        await third.cache.load("a", third.embedder)
        assert third.cache.about("a")["entries"] == 2
        assert (await third.recall(tagged(SAME, "plans"))).outcome == "miss"
        await Bench(fixed(), store=SemanticStore(db, wait_s=10.0)).cache.invalidate(
            tenant="a"
        )  # nothing is loaded there
        fourth = Bench(fixed(), store=SemanticStore(db, wait_s=10.0))
        await fourth.cache.load("a", fourth.embedder)
        assert fourth.cache.about("a")["entries"] == 0
        for bench in (first, second, third, fourth):
            await bench.cache.close()
        await db.close()

    asynchronous(test)


def test_a_database_that_is_gone_costs_entries_and_no_request(tmp_path: Path) -> None:
    async def test() -> None:
        db = Database(tmp_path)
        await db.close()
        bench = Bench(fixed(), store=SemanticStore(db))
        for _ in range(3):
            assert (await bench.answered(QUESTION)).outcome == "unavailable"
            await asyncio.sleep(0)
        await bench.cache.close()

    asynchronous(test)


def test_answers_agree_by_text_by_words_or_by_meaning() -> None:
    async def test() -> None:
        embedder = WordEmbedder()
        kept = "The limit is 5 requests. Wait."
        assert await answers_agree(kept, kept, by="exact")
        assert await answers_agree(kept, "the limit is 5 requests - wait!", by="exact") is False
        assert await answers_agree(kept, "the limit is 5 requests - wait!", by="normalised")
        assert await answers_agree(kept, "Wait: the limit is 5 requests.", by="normalised") is False
        assert await answers_agree(kept, "Wait: the limit is 5 requests.", by="embedding", embedder=embedder)
        assert await answers_agree(kept, "Wait: the limit is 6 requests.", by="embedding", embedder=embedder) is False
        assert (
            await answers_agree(kept, "The limit is not 5 requests. Wait.", by="embedding", embedder=embedder) is False
        )
        assert await answers_agree(kept, "Wait: the limit is 5 requests.", by="embedding") is None

    asynchronous(test)


def test_every_outcome_is_one_of_the_counted_ones() -> None:
    async def test() -> None:
        bench = Bench(fixed(threshold=None))
        await bench.answered(QUESTION)
        for text in (SAME, "Where is it?", asking(QUESTION, n=2)):
            await bench.recall(text)
        assert set(bench.counts["outcomes"]) <= set(OUTCOMES)
        assert sum(bench.counts["outcomes"].values()) == 4

    asynchronous(test)
