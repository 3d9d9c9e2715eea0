"""The passages that prompts often begin with are kept by the engine, within bounds, until their document changes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from headrace.config.pipeline_section import AssembleStage, GenerateStage, PipelineConfig
from headrace.errors import RequestError
from headrace.gateway.accounts.account_records import AccountRecord, TenantRecord
from headrace.gateway.accounts.account_store import AccountChanges
from headrace.gateway.serving.exchange import Caller
from headrace.pipelines.collections.hits import Hit
from headrace.pipelines.pipelines import Pipelines
from headrace.pipelines.warm_passages import WarmPassages
from tests.support.pipeline_runs import HITS, World, hit, says
from tests.support.running_server import asynchronous


class WarmWorld(World):
    def __init__(self, **assemble: Any) -> None:
        self.config = PipelineConfig(
            stages=("search", "assemble", "generate"), assemble=AssembleStage(**{"warm": 2, **assemble})
        )
        super().__init__(self.config, says(0.25, "Yes."))

    async def asks(self, *hits: Hit, times: int = 1, **request: Any) -> None:
        """Answer a question for which the search finds these passages."""
        self.collection.hits = list(hits)
        for _ in range(times):
            await self.run(**request)
            await self.clock.run(self.settled())

    async def settled(self) -> None:
        await asyncio.gather(*self.background)

    @property
    def kept(self) -> list[str]:
        """The prefixes that the engine keeps."""
        return sorted("".join(map(chr, tokens)) for _, tokens in self.models.prefixes)

    @property
    def described(self) -> dict[str, Any]:
        return self.pipelines.described(Caller())[0]["warm"]

    def order(self) -> list[str]:
        """The passages of the last prompt."""
        return [source.id for source in self.models.requests[-1].sources]


@asynchronous
async def test_a_passage_that_comes_again_is_kept_and_counted() -> None:
    world = WarmWorld()
    await world.asks(HITS[0], HITS[1])
    assert world.kept == []
    await world.asks(HITS[0], HITS[2])
    assert world.kept == [HITS[0].text]
    await world.asks(HITS[0])
    assert world.described == {
        "kept": 1,
        "tokens": len(HITS[0].text),
        "failed": 0,
        "warm": {"answers": 1, "first_text_ms": 250.0},
        "cold": {"answers": 2, "first_text_ms": 250.0},
    }


@asynchronous
async def test_only_the_most_used_are_kept_and_equal_use_changes_nothing() -> None:
    world = WarmWorld()
    for each, times in zip(HITS, (2, 3, 2), strict=True):
        await world.asks(each, times=times)
    assert world.kept == sorted(each.text for each in HITS[:2])
    await world.asks(HITS[2], times=3)
    assert world.kept == sorted(each.text for each in HITS[1:])


@asynchronous
async def test_passages_that_come_together_are_kept_together() -> None:
    texts = [each.text for each in HITS]
    world = WarmWorld(warm_tokens=len(texts[0]) + len(texts[1]))
    await world.asks(HITS[0], HITS[1], times=2)
    assert world.kept == [texts[0] + texts[1]]
    await world.asks(HITS[0], HITS[2], times=9)
    assert world.kept == [texts[0] + texts[2]]
    await world.asks(*HITS, times=20)  # all three do not fit in
    assert world.kept == [texts[0] + texts[1]]
    world.services.warm.passages_removed({"c2"})
    await world.clock.run(world.settled())
    assert world.kept == [texts[0] + texts[2]]


@asynchronous
async def test_a_use_of_long_ago_counts_little() -> None:
    world = WarmWorld(warm=1)
    await world.asks(HITS[0], times=10)
    world.clock.now += 6 * 3600.0
    await world.asks(HITS[1], times=2)
    assert world.kept == [HITS[1].text]


@asynchronous
async def test_what_is_kept_stays_within_its_tokens() -> None:
    world = WarmWorld(warm=3, warm_tokens=len(HITS[0].text) + len(HITS[1].text))
    for each, times in zip(HITS, (3, 4, 2), strict=True):
        await world.asks(each, times=times)
    assert world.kept == sorted(each.text for each in HITS[:2])
    long = hit(4, "x" * 400)
    await world.asks(long, times=9)
    assert world.kept == sorted(each.text for each in HITS[:2])


@asynchronous
async def test_a_kept_passage_stands_first_if_the_order_says_so() -> None:
    for order, expected in (("score", ["c1", "c2", "c3"]), ("warm", ["c3", "c1", "c2"])):
        world = WarmWorld(order=order)
        await world.asks(HITS[2], times=2)
        await world.asks(*HITS)
        assert world.order() == expected
        assert world.described["warm"]["answers"] == (order == "warm")


@pytest.mark.parametrize("removed", ["document", "collection"])
@asynchronous
async def test_a_passage_that_is_gone_is_let_go(removed: str) -> None:
    world = WarmWorld()
    await world.asks(HITS[0], times=2)
    await world.asks(HITS[1], times=2)
    assert len(world.kept) == 2
    if removed == "document":
        world.services.warm.passages_removed({"c1", "c9"})
    else:
        world.services.warm.collection_removed("", "other")
        assert world.described["kept"] == 2
        world.services.warm.collection_removed("", "docs")
    await world.clock.run(world.settled())
    assert world.kept == ([HITS[1].text] if removed == "document" else [])


@asynchronous
async def test_a_prefix_of_two_pipelines_stays_while_one_of_them_wants_it() -> None:
    world = WarmWorld(warm=1)
    world.pipelines = Pipelines({"docs": world.config, "faq": world.config}, world.services, "mini")
    for name in ("docs", "faq"):
        await world.asks(HITS[0], times=2, name=name)
    assert world.kept == [HITS[0].text]
    await world.asks(HITS[1], times=9, name="docs")
    assert world.kept == sorted(each.text for each in HITS[:2])
    await world.asks(HITS[1], times=9, name="faq")
    assert world.kept == [HITS[1].text]


def deletion(tenant: str) -> AccountChanges:
    record = AccountRecord("tenant", tenant, 2, TenantRecord(created=1, changed=2, deleted=2))
    return AccountChanges(epoch=2, now=2.0, records=(record,))


@pytest.mark.parametrize("moment", ["kept", "being kept"])
@asynchronous
async def test_passages_of_a_deleted_tenant_are_let_go(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = WarmWorld()
    a, b = Caller("key", "a"), Caller("key", "b")
    await world.asks(HITS[0], times=2, caller=b)
    keep_prefix, warm = world.models.keep_prefix, world.services.warm
    assert isinstance(warm, WarmPassages)

    async def keep(*arguments: Any, **named: Any) -> None:
        await keep_prefix(*arguments, **named)
        if moment == "being kept" and named["keep"]:
            warm.follow(deletion("a"))

    monkeypatch.setattr(world.models, "keep_prefix", keep)
    await world.asks(HITS[1], times=2, caller=a)
    if moment == "kept":
        assert {tenant for tenant, _ in world.models.prefixes} == {"a", "b"}
        warm.follow(deletion("a"))
        await world.clock.run(world.settled())
    assert {tenant for tenant, _ in world.models.prefixes} == {"b"}
    assert warm.described("docs", "b")["kept"] == 1


@asynchronous
async def test_answers_that_end_after_their_tenant_is_deleted_are_not_kept() -> None:
    world = WarmWorld()
    world.services.warm = WarmPassages(world.models, world.clock, world._run_background, is_tenant="b".__eq__)
    for tenant in ("a", "b"):
        await world.asks(HITS[0], times=3, caller=Caller("key", tenant))
    assert {tenant for tenant, _ in world.models.prefixes} == {"b"}


@asynchronous
async def test_a_busy_tenant_leaves_the_others_their_share() -> None:
    world = WarmWorld()
    a, b = Caller("key", "a"), Caller("key", "b")
    await world.asks(HITS[0], times=2, caller=a)
    for each in HITS[1:]:
        await world.asks(each, times=9, caller=b)
    assert world.kept == sorted(each.text for each in (HITS[0], HITS[1]))
    assert {tenant for tenant, _ in world.models.prefixes} == {"a", "b"}
    world.clock.now += 24 * 3600.0  # a has left
    await world.asks(HITS[2], times=2, caller=b)
    assert world.kept == sorted(each.text for each in HITS[1:])


@asynchronous
async def test_tenants_do_not_share_a_kept_passage() -> None:
    world = WarmWorld(order="warm")
    await world.asks(HITS[2], times=2, caller=Caller("key", "a"))
    assert {tenant for tenant, _ in world.models.prefixes} == {"a"}
    seen = [world.pipelines.described(Caller("key", tenant))[0]["warm"] for tenant in ("a", "b")]
    assert [(each["kept"], each["cold"]["answers"]) for each in seen] == [(1, 2), (0, 0)]
    await world.asks(*HITS, caller=Caller("key", "b"))
    assert world.order() == ["c1", "c2", "c3"]
    assert world.described["warm"]["answers"] == 0


def turns(*texts: str) -> Sequence[dict[str, str]]:
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


@asynchronous
async def test_only_prompts_that_begin_with_the_passages_count() -> None:
    world = WarmWorld()
    await world.asks(HITS[0], times=3, messages=turns("Which port?", "8000.", "Why?"))
    await world.asks(HITS[0], times=3, cache="off")
    assert world.kept == []
    assert world.described["cold"]["answers"] == 0
    system = {"role": "system", "content": "Be brief. "}
    await world.asks(HITS[0], times=2, messages=[system, *turns("Which port?")])
    assert world.kept == [f"Be brief. {HITS[0].text}"]


@asynchronous
async def test_an_engine_that_keeps_nothing_is_not_asked_again_at_once() -> None:
    world = WarmWorld()
    world.models.keeping = RequestError("This variant reuses no prefixes.")
    await world.asks(HITS[0], times=5)
    assert (world.described["failed"], world.described["kept"]) == (1, 0)
    world.models.keeping = None
    world.clock.now += 301.0
    await world.asks(HITS[0])
    assert world.kept == [HITS[0].text]


@asynchronous
async def test_nothing_is_kept_by_default_or_for_answers_without_a_model() -> None:
    world = WarmWorld(warm=0)
    await world.asks(HITS[0], times=5)
    assert world.kept == []
    assert "warm" not in world.pipelines.described(Caller())[0]
    config = PipelineConfig(
        stages=("search", "assemble", "generate"),
        assemble=AssembleStage(warm=2),
        generate=GenerateStage(order=("extract", "large"), extract_confidence=0.1),
    )
    quoting = World(config)
    for _ in range(3):
        await quoting.run("On which port does the server listen?")
    assert quoting.models.prefixes == set()
