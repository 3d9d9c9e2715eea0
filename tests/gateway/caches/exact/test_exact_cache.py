"""The exact cache as the flow uses it: hits, what is kept and what is not, modes, invalidations, stores that die."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.config.cache_section import ExactConfig, lifetime_s
from headrace.engine.interface.request import FinishReason
from headrace.engine.interface.sampling import SamplingParams
from headrace.engine.process.output_stream import OutputStream
from headrace.gateway.api_errors import ApiError
from headrace.gateway.caches.cache_modes import CachePolicy
from headrace.gateway.caches.exact.cache_entry import pack
from headrace.gateway.caches.exact.cache_key import CacheKey, cache_key_for
from headrace.gateway.caches.exact.entry_store import InvalidationScope, StoreLookup
from headrace.gateway.caches.exact.exact_cache import OUTCOMES
from headrace.gateway.caches.exact.in_flight import Flights, JoinTerms
from headrace.gateway.caches.exact.memory import MemoryStore
from headrace.gateway.flow.shared_generation import SharedGeneration
from headrace.gateway.requests.text_request import (
    ChoiceDelta,
    RestartDelta,
    TokenLogprob,
    TokenUsage,
    Tool,
    ToolCallDelta,
)
from headrace.gateway.routing.router import RoutePlan
from headrace.gateway.serving.engine_answering import EngineAnswering, prompts_of
from headrace.gateway.serving.exchange import Caller, Exchange
from headrace.server.api.chat_completions import ChatStream
from headrace.server.api.completions import CompletionStream
from headrace.server.api.messages import MessageStream
from tests.support.dialect_exchanges import called, exchange_for, streamed
from tests.support.running_server import FakeEngine, asynchronous, say
from tests.support.stores.exact_caches import (
    USAGE,
    Broken,
    Caching,
    Mouth,
    asked,
    cache_key,
    heard,
    said,
    saying,
    served,
    text_of,
    turns,
)

NO_TERMS = JoinTerms()
LATE = TokenUsage(prompt_tokens=20, output_tokens=3, cached_tokens=16)  # as of USAGE, without its times


# Hits


@asynchronous
async def test_the_second_time_it_is_a_hit_and_nothing_is_generated() -> None:
    caching = Caching()
    assert text_of(await caching.ask(cache_key(), saying("Hello", " there."))) == "Hello there."
    mouth = saying("something else")
    pieces = await caching.ask(cache_key(), mouth)
    assert pieces == said("Hello", " there.", usage=LATE)
    assert mouth.runs == 0
    assert {outcome: caching.counted(outcome) for outcome in OUTCOMES if caching.counted(outcome)} == {
        "miss": 1,
        "stored": 1,
        "hit": 1,
    }


@asynchronous
async def test_a_hit_says_what_it_saved_and_how_old_it_is() -> None:
    caching = Caching()
    await caching.ask(cache_key())
    caching.clock.now += 7.0
    lookup = await caching.look(cache_key())
    assert lookup.hit is not None
    facts = lookup.hit.facts()
    assert (facts.role, facts.pays, facts.age_s) == ("hit", False, 7.0)
    assert facts.saved == replace(LATE, decode_s=0.5)  # the machine's time, too


@asynchronous
async def test_what_another_than_the_keys_own_variant_said_is_shared_and_not_kept() -> None:
    caching, mouth = Caching(), saying("from the spare")
    mouth.own = False
    assert text_of(await caching.ask(cache_key(), mouth)) == "from the spare"
    restarted = Mouth(ChoiceDelta(0, "half "), RestartDelta(0, variant="mini@spare", why="gone"), *said("whole"))
    restarted.end()
    assert text_of(await caching.ask(cache_key(), restarted)) == "half whole"
    assert [caching.counted(each) for each in ("stood_in", "unfinished", "stored")] == [1, 1, 0]


@asynchronous
async def test_a_hit_is_read_at_its_clients_pace_and_can_be_left() -> None:
    caching = Caching()
    await caching.ask(cache_key(), saying(*"abcdef"))
    hit = (await caching.look(cache_key())).hit
    assert hit is not None
    pieces: list[ChoiceDelta] = []

    def take(piece: ChoiceDelta) -> bool:
        pieces.append(piece)
        return len(pieces) % 2 == 1

    rounds = 0
    while not await hit.run(take):
        rounds += 1
    assert (text_of(pieces), rounds) == ("abcdef", 3)
    left = (await caching.look(cache_key())).hit
    assert left is not None
    left.cancel()
    assert await left.run(take)
    assert len(pieces) == 7


def chunks_of(stream: bytes) -> list[Any]:
    """Its events, without what a clock says: how long the whole and its stages took."""
    events: list[Any] = []
    for block in stream.decode().split("\n\n")[:-1]:
        data = block.removeprefix("data: ")
        event = data if data == "[DONE]" else json.loads(data)
        if isinstance(event, dict) and "headrace" in event:
            event["headrace"] |= {"total_ms": 0.0, "stages_ms": {}}
        events.append(event)
    return events


ANSWERS: dict[str, list[ChoiceDelta]] = {
    "text": said("Hel", "lo", "", " 🌊"),
    "reasoning": [ChoiceDelta(0, reasoning="Hm. "), ChoiceDelta(0, reasoning="Yes."), *said("Yes.")],
    "calls": [
        *called(0, "weather", '{"place": ', '"Bergen"}'),
        *called(1, "weather", "{}"),
        *said(finish="tool_calls"),
    ],
    "logprobs": [
        ChoiceDelta(
            0,
            "ä",
            logprobs=[
                TokenLogprob("\ufffd", b"\xc3", -0.5, [("x", b"x", -1.5)], ""),
                TokenLogprob("\ufffd", b"\xa4", None, [], "ä"),
            ],
        ),
        *said(),
    ],
    "choices": [ChoiceDelta(1, "b"), ChoiceDelta(0, "a"), ChoiceDelta(1, finish="length", usage=USAGE), *said(".")],
    "stop": [*said("x", stop="\n")],
}


@pytest.mark.parametrize("answer", ANSWERS)
@asynchronous
async def test_a_hit_streams_the_very_chunks_that_were_recorded(answer: str) -> None:
    pieces = ANSWERS[answer]
    n = 2 if answer == "choices" else 1
    logprobs = SamplingParams(logprobs=1) if answer == "logprobs" else SamplingParams()
    caching = Caching()
    one = cache_key(n=n, sampling=logprobs)
    mouth = Mouth(*pieces)
    mouth.end()
    fresh = await caching.ask(one, mouth)
    hit = await caching.ask(one)
    assert caching.counted("hit") == 1
    exchange = exchange_for(asked(stream=True, include_usage=True, n=n, sampling=logprobs))
    told = [chunks_of(streamed(ChatStream(exchange), each)) for each in (fresh, hit)]
    for chunk in told[0]:  # only what the engine took is different: it took nothing
        if isinstance(chunk, dict) and "headrace" in chunk:
            chunk["headrace"] |= {"queue_ms": 0.0, "prefill_ms": 0.0, "decode_ms": 0.0}
    assert told[0] == told[1]
    assert len(told[0]) > len(pieces)


@asynchronous
async def test_what_one_endpoint_stored_another_one_can_tell() -> None:
    caching = Caching()
    await caching.ask(cache_key(), saying("Yes."))
    pieces = await caching.ask(cache_key())
    exchange = exchange_for(asked(stream=True))
    for events in (MessageStream(exchange), CompletionStream(exchange)):
        assert b"Yes." in streamed(events, pieces)


# What is kept


@pytest.mark.parametrize(
    "mouth",
    [
        saying("cut", finish="deadline"),
        saying("a part", index=1),
        Mouth(ChoiceDelta(0, "a part")),
    ],
)
def test_an_answer_that_did_not_come_to_its_own_end_is_not_kept(mouth: Mouth) -> None:
    @asynchronous
    async def test() -> None:
        caching = Caching()
        mouth.end()
        await caching.ask(cache_key(), mouth)
        assert (caching.counted("unfinished"), caching.counted("stored")) == (1, 0)
        assert (await caching.look(cache_key())).hit is None

    test()


@asynchronous
async def test_an_answer_that_failed_or_that_everybody_left_is_not_kept() -> None:
    caching = Caching()
    failing = Mouth(ChoiceDelta(0, "a part"))
    failing.end(ApiError("it broke", kind="server_error"))
    with pytest.raises(ApiError):
        await caching.ask(cache_key(), failing)
    await turns()
    mouth = Mouth(ChoiceDelta(0, "a part"))
    answer = caching.cache.generate(await caching.look(cache_key()), NO_TERMS, lambda: mouth)
    await answer.run(lambda piece: False)
    answer.cancel()
    await turns()
    assert mouth.cancelled
    assert (caching.counted("unfinished"), caching.counted("stored")) == (2, 0)


@asynchronous
async def test_what_is_drawn_without_a_seed_is_neither_kept_nor_shared_unless_told_otherwise() -> None:
    drawn = cache_key(sampling=SamplingParams(temperature=0.7, seed=1))
    caching = Caching()
    for _ in range(2):
        lookup = await caching.look(drawn)
        assert caching.cache.generate(lookup, NO_TERMS, lambda: saying("x")).role == "alone"
    assert (caching.counted("skipped"), caching.counted("miss")) == (2, 0)
    seeded = cache_key(sampling=SamplingParams(temperature=0.7, seed=1), seeded=True)
    await caching.ask(seeded)
    await caching.ask(seeded)
    assert caching.counted("hit") == 1
    told_otherwise = Caching(config=ExactConfig(repeatable_only=False))
    await told_otherwise.ask(drawn)
    await told_otherwise.ask(cache_key(sampling=SamplingParams(temperature=0.7, seed=2)))
    assert told_otherwise.counted("hit") == 1


@asynchronous
async def test_a_request_with_cache_off_and_one_without_a_key_neither_read_nor_write() -> None:
    caching = Caching()
    await caching.ask(cache_key(), requested="off")
    assert (await caching.look(cache_key())).hit is None
    await caching.ask(cache_key(), saying("Hello"))
    assert text_of(await caching.ask(cache_key(), saying("anew"), requested="off")) == "anew"
    lookup = await caching.look(None)
    assert caching.cache.generate(lookup, NO_TERMS, lambda: saying("x")).role == "alone"
    assert text_of(await caching.ask(cache_key())) == "Hello"


@asynchronous
async def test_an_answer_that_is_too_long_is_not_kept() -> None:
    caching = Caching(config=ExactConfig(entry_bytes=100))
    await caching.ask(cache_key(1), saying("x" * 100))
    await caching.ask(cache_key(2), saying("x" * 20))
    assert (caching.counted("too_long"), caching.counted("stored")) == (1, 1)
    short = Caching(flights=Flights(most_bytes=100))
    await short.ask(cache_key(), saying("x" * 100, "y"))
    assert (short.counted("too_long"), short.counted("stored")) == (1, 0)
    narrow = Caching(store=MemoryStore(most_bytes=500))
    await narrow.ask(cache_key())
    assert narrow.counted("too_long") == 1


@asynchronous
async def test_half_a_character_is_not_kept_and_hurts_nobody() -> None:
    caching = Caching()
    assert text_of(await caching.ask(cache_key(), saying("x", stop="\ud800"))) == "x"
    assert caching.counted("unstored") == 1


# For how long


@asynchronous
async def test_an_entry_lives_as_long_as_its_tags_say() -> None:
    caching = Caching(config=ExactConfig(ttl="100s", tags={"pricing": "5s", "docs": "50s"}))
    lives = {(): 100.0, ("pricing",): 5.0, ("docs",): 50.0, ("docs", "pricing"): 5.0, ("other",): 100.0}
    for tags, seconds in lives.items():
        start = caching.clock.now
        one = cache_key(tags=tags)
        await caching.ask(one)
        caching.clock.now = start + seconds - 0.1
        assert (await caching.look(one)).hit is not None
        caching.clock.now = start + seconds
        assert (await caching.look(one)).hit is None
    assert lifetime_s("5m") == 300.0


@asynchronous
async def test_a_shorter_ttl_applies_to_stored_entries() -> None:
    caching = Caching(config=ExactConfig(ttl="100s"))
    await caching.ask(cache_key())
    caching.clock.now += 20
    restarted = Caching(config=ExactConfig(ttl="10s"), store=caching.store, clock=caching.clock)
    assert (await restarted.look(cache_key())).hit is None


@asynchronous
async def test_a_stale_entry_is_served_only_if_accepted() -> None:
    caching = Caching(config=ExactConfig(ttl="10s", stale="100s"))
    await caching.ask(cache_key(), saying("old"))
    caching.clock.now += 50
    assert (await caching.look(cache_key())).hit is None
    stale = (await caching.look(cache_key(), stale=True)).hit
    assert stale is not None
    assert (stale.stale, stale.age_s, caching.counted("stale")) == (True, 50.0, 1)
    caching.clock.now += 60
    assert (await caching.look(cache_key(), stale=True)).hit is None


@asynchronous
async def test_an_entry_from_the_future_is_a_miss() -> None:
    clock = Caching().clock
    caching = Caching(clock=clock, store=MemoryStore())
    await caching.ask(cache_key())
    clock.now -= 30  # two gateways' clocks may differ so much
    assert (await caching.look(cache_key())).hit is not None
    clock.now -= 86_400
    assert (await caching.look(cache_key())).hit is None


@pytest.mark.parametrize(
    ("span", "seconds"), [("90s", 90), ("5m", 300), ("1.5h", 5400), ("7d", 604_800), ("250ms", 0.25)]
)
def test_time_spans_are_read(span: str, seconds: float) -> None:
    assert lifetime_s(span) == seconds


@pytest.mark.parametrize("span", ["", "5", "m", "-5m", "0s", "5 m", "5m5s", "1e3s"])
def test_other_texts_are_no_time_spans(span: str) -> None:
    with pytest.raises(ValueError, match="Invalid lifetime"):
        lifetime_s(span)


# Invalidation


@asynchronous
async def test_entries_go_by_tag_tenant_key_and_event() -> None:
    config = ExactConfig(events={"prices-changed": ("pricing", "offers")})
    caching = Caching(config=config)
    kinds: list[tuple[str, ...]] = [(), ("pricing",), ("docs",), ("docs", "offers")]
    all_of_them = [cache_key(number, tenant=tenant, tags=kinds[number]) for tenant in "ab" for number in range(4)]

    async def fill() -> None:
        for each in all_of_them:
            await caching.ask(each)

    async def there() -> str:
        hits = [(await caching.look(each)).hit is not None for each in all_of_them]
        return "".join("-x"[hit] for hit in hits)

    await fill()
    assert await there() == "xxxxxxxx"
    assert await caching.cache.invalidate(tag="docs") == 4
    assert await there() == "xx--xx--"
    await fill()
    assert await caching.cache.invalidate(tag="docs", tenant="b") == 2
    assert await there() == "xxxxxx--"
    assert await caching.cache.happened("prices-changed") == {"pricing": 2, "offers": 1}
    assert await there() == "x-x-x---"
    assert await caching.cache.invalidate(tenant="a") == 2
    await fill()
    assert await caching.cache.happened("prices-changed", tenant="a") == {"pricing": 1, "offers": 1}
    assert await caching.cache.invalidate(tenant="a", key=all_of_them[0].digest) == 1
    assert await caching.cache.invalidate(tenant="b", key=all_of_them[2].digest) == 0
    assert await there() == "--x-xxxx"
    assert await caching.cache.invalidate() == 5
    assert await there() == "--------"
    with pytest.raises(ApiError) as unknown:
        await caching.cache.happened("something")
    assert unknown.value.status == 404
    with pytest.raises(ValueError, match="A key needs its tenant"):
        await caching.cache.invalidate(key=b"x")


@asynchronous
async def test_what_was_begun_before_an_invalidation_is_neither_stored_nor_joined_after_it() -> None:
    caching = Caching()
    one, other = cache_key(tags=["pricing"]), cache_key(tags=["docs"])
    mouths = [Mouth(ChoiceDelta(0, "old ")) for _ in range(2)]
    answers = [
        caching.cache.generate(await caching.look(each), NO_TERMS, lambda mouth=mouth: mouth)
        for each, mouth in zip((one, other), mouths, strict=True)
    ]
    await turns()
    await caching.cache.invalidate(tag="pricing")
    lookup = await caching.look(one)
    later = caching.cache.generate(lookup, NO_TERMS, lambda: saying("new"))
    assert later.role == "leader"
    assert caching.cache.generate(await caching.look(other), NO_TERMS, Mouth).role == "joiner"
    assert text_of(await heard(later)) == "new"
    await turns()
    for mouth in mouths:
        mouth.say(*said("prices"))
        mouth.end()
    for answer in answers:
        assert text_of(await heard(answer)) == "old prices"
    await turns()
    assert (caching.counted("outdated"), caching.counted("stored")) == (1, 2)
    assert text_of(await caching.ask(one)) == "new"


@asynchronous
async def test_an_invalidation_while_the_store_is_asked_makes_it_a_miss() -> None:
    class Slow(Broken):
        async def get(self, cache_key: CacheKey) -> StoreLookup:
            found = await super().get(cache_key)
            if found.data is not None:
                await caching.cache.invalidate(tag="docs")
            return found

    caching = Caching(store=Slow())
    one = cache_key(tags=["docs"])
    await caching.ask(one)
    assert caching.counted("stored") == 1
    assert (await caching.look(one)).hit is None


# Sharing


@asynchronous
async def test_identical_requests_under_way_share_one_generation_and_fill_one_entry() -> None:
    caching = Caching()
    mouth = Mouth(ChoiceDelta(0, "Hel"))
    answers = [caching.cache.generate(await caching.look(cache_key()), NO_TERMS, lambda: mouth) for _ in range(5)]
    assert [answer.role for answer in answers] == ["leader", *["joiner"] * 4]
    mouth.say(*said("lo"))
    mouth.end()
    texts = [text_of(pieces) for pieces in await asyncio.gather(*map(heard, answers))]
    assert texts == ["Hello"] * 5
    await turns()
    assert mouth.runs == 1
    assert (caching.counted("joined"), caching.counted("stored"), caching.counted("miss")) == (4, 1, 5)
    assert [answer.facts().pays for answer in answers] == [True, False, False, False, False]


@asynchronous
async def test_sharing_can_be_left_out() -> None:
    caching = Caching(config=ExactConfig(joins=False))
    lookup = [await caching.look(cache_key()) for _ in range(2)]
    answers = [caching.cache.generate(each, NO_TERMS, lambda: saying("x")) for each in lookup]
    assert [answer.role for answer in answers] == ["leader", "leader"]
    for answer in answers:
        answer.cancel()


@asynchronous
async def test_tenants_share_nothing() -> None:
    caching = Caching()
    mouth = Mouth(ChoiceDelta(0, "of a"))
    first = caching.cache.generate(await caching.look(cache_key()), NO_TERMS, lambda: mouth)
    other = caching.cache.generate(await caching.look(cache_key(tenant="b")), NO_TERMS, lambda: saying("of b"))
    assert (first.role, other.role) == ("leader", "leader")
    assert text_of(await heard(other)) == "of b"
    mouth.say(*said())
    mouth.end()
    await heard(first)
    await turns()
    assert text_of(await caching.ask(cache_key(tenant="b"))) == "of b"
    assert text_of(await caching.ask(cache_key())) == "of a"
    assert text_of(await caching.ask(cache_key(tenant="c"), saying("of c"))) == "of c"


# Modes


@asynchronous
async def test_record_serves_nothing_and_compares_what_it_would_have_served() -> None:
    caching = Caching(modes=CachePolicy(mode="record"))
    assert text_of(await caching.ask(cache_key(), saying("Hello"))) == "Hello"
    assert text_of(await caching.ask(cache_key(), saying("Hel", "lo"))) == "Hello"
    assert text_of(await caching.ask(cache_key(), saying("Goodbye"))) == "Goodbye"
    counts = ("stored", "hit", "would_hit", "same", "different")
    assert [caching.counted(outcome) for outcome in counts] == [1, 0, 2, 1, 1]
    mouth = Mouth()
    answers = [caching.cache.generate(await caching.look(cache_key(2)), NO_TERMS, lambda: mouth) for _ in range(2)]
    assert [answer.role for answer in answers] == ["leader", "leader"]
    assert (caching.counted("would_join"), caching.counted("joined")) == (1, 0)
    for answer in answers:
        answer.cancel()


@asynchronous
async def test_in_the_mode_record_an_entry_comes_to_its_time_as_it_would_if_it_were_served() -> None:
    caching = Caching(modes=CachePolicy(mode="record"), config=ExactConfig(ttl="10s"))
    for _ in range(4):
        await caching.ask(cache_key())
        caching.clock.now += 6.0
    assert (caching.counted("would_hit"), caching.counted("stored")) == (2, 2)


@asynchronous
async def test_a_mode_can_be_changed_while_it_is_in_use() -> None:
    caching = Caching(modes=CachePolicy(mode="off"))
    await caching.ask(cache_key(), saying("Hello"))
    assert not caching.counts
    caching.cache.modes = CachePolicy(mode="on", tenants={"b": "record"})
    await caching.ask(cache_key(), saying("Hello"))
    await caching.ask(cache_key(tenant="b"), saying("b"))
    await caching.ask(cache_key())
    await caching.ask(cache_key(tenant="b"), saying("b"))
    assert (caching.counted("hit"), caching.counted("hit", "b"), caching.counted("would_hit", "b")) == (1, 0, 1)


# Stores that die, and entries that lie


@pytest.mark.parametrize("call", ["get", "put"])
@pytest.mark.parametrize("how", ["failing", "hanging"])
def test_a_store_that_dies_costs_hits_and_never_an_answer(call: str, how: str) -> None:
    @asynchronous
    async def test() -> None:
        store = Broken()
        caching = Caching(store=store)
        caching.cache._store._get_s = caching.cache._store._put_s = 0.01  # pyright: ignore[reportPrivateUsage]
        await caching.ask(cache_key(1), saying("one"))
        getattr(store, how).add(call)
        assert text_of(await caching.ask(cache_key(1), saying("again"))) == ("again" if call == "get" else "one")
        assert text_of(await caching.ask(cache_key(2), saying("two"))) == "two"
        getattr(store, how).clear()
        assert text_of(await caching.ask(cache_key(1))) == "one"
        assert text_of(await caching.ask(cache_key(2), saying("two"))) == "two"
        assert set(caching.failures) == {call}
        # A store that could not be asked is not written to either: what it has may be newer.
        assert store.calls.count("put") == (2 if call == "get" else 3)

    test()


@asynchronous
async def test_a_store_that_dies_between_a_look_and_its_answer_costs_nothing() -> None:
    store = Broken()
    caching = Caching(store=store)
    mouth = Mouth(ChoiceDelta(0, "Hel"))
    answers = [caching.cache.generate(await caching.look(cache_key()), NO_TERMS, lambda: mouth) for _ in range(3)]
    store.failing = {"get", "put", "size", "sweep", "close"}
    mouth.say(*said("lo"))
    mouth.end()
    assert [text_of(pieces) for pieces in await asyncio.gather(*map(heard, answers))] == ["Hello"] * 3
    await turns()
    assert caching.counted("unstored") == 1
    assert await caching.cache.sweep() == 0
    assert await caching.cache.size() is None


def entry(text: str, one: CacheKey, **last: Any) -> bytes:
    return pack(said(text, **last), key=one.digest, made=1_000_000.0)


@pytest.mark.parametrize(
    "poison",
    [
        b"",
        b"nonsense",
        entry("of another key", cache_key(2)),
        entry("of another tenant", cache_key(tenant="b")),
        entry("cut", cache_key(), finish="deadline"),
        entry("of another choice", cache_key(), index=1),
        entry("damaged", cache_key())[:-1],
    ],
)
def test_a_poisoned_entry_is_a_miss_and_is_replaced(poison: bytes) -> None:
    @asynchronous
    async def test() -> None:
        caching = Caching()
        assert caching.store is not None
        await caching.store.put(cache_key(), poison, 3600.0, None)
        assert text_of(await caching.ask(cache_key(), saying("right"))) == "right"
        assert (caching.counted("corrupt"), caching.counted("miss"), caching.counted("stored")) == (1, 1, 1)
        assert text_of(await caching.ask(cache_key())) == "right"

    test()


@asynchronous
async def test_with_a_secret_a_forged_entry_is_a_miss() -> None:
    caching = Caching(secret=b"ours")
    assert caching.store is not None
    await caching.store.put(cache_key(), entry("forged", cache_key()), 3600.0, None)
    assert text_of(await caching.ask(cache_key(), saying("right"))) == "right"
    assert text_of(await caching.ask(cache_key())) == "right"


@asynchronous
async def test_when_the_server_ends_what_runs_is_told() -> None:
    caching = Caching()
    answer = caching.cache.generate(await caching.look(cache_key()), NO_TERMS, Mouth)
    reading = asyncio.create_task(heard(answer))
    await turns()
    await caching.cache.close()
    with pytest.raises(ApiError, match="The server is shutting down"):
        await reading


# With the flow's own answers


def exchange_of(engine: FakeEngine, **changes: Any) -> Exchange:
    return Exchange(caller=Caller(tenant="a"), text_request=asked(**changes), served=served(engine=engine))


async def begun(exchange: Exchange) -> tuple[SharedGeneration, CacheKey]:
    prompts = [prompt.tokens for prompt in await prompts_of(exchange)]
    found = cache_key_for(
        tenant="a", served=exchange.served, text_request=exchange.text_request, prompts=prompts, seeded=False
    )
    assert found is not None
    return SharedGeneration(EngineAnswering(exchange), RoutePlan(exchange.served.name)), found


@asynchronous
async def test_what_an_engine_says_is_shared_stored_and_streamed_again() -> None:
    caching, engine = Caching(), FakeEngine()
    exchange = exchange_of(engine, stream=True, include_usage=True)
    answering, one = await begun(exchange)
    leader = caching.cache.generate(await caching.look(one), NO_TERMS, lambda: answering)
    joiner = caching.cache.generate(await caching.look(one), NO_TERMS, lambda: answering)
    heard_by = [asyncio.create_task(heard(each)) for each in (leader, joiner)]
    await turns()
    (stream,) = engine.streams
    for word in ("Hello", " there"):
        say(stream, word)
        await asyncio.sleep(0)
    say(stream, ".", end=True)
    fresh, joined = [await each for each in heard_by]
    await turns()
    hit = await caching.ask(one)
    # The same bytes but for the last chunk, which says how long it took.
    told = [chunks_of(streamed(ChatStream(exchange), pieces))[:-2] for pieces in (fresh, joined, hit)]
    assert told[0] == told[1] == told[2]
    assert text_of(hit) == "Hello there."
    assert len(engine.streams) == 1


@asynchronous
async def test_when_the_last_client_leaves_the_engine_stops() -> None:
    caching, engine = Caching(), FakeEngine()
    answering, one = await begun(exchange_of(engine))
    answers = [caching.cache.generate(await caching.look(one), NO_TERMS, lambda: answering) for _ in range(3)]
    await turns()
    (stream,) = engine.streams
    say(stream, "Hello")
    for answer in answers:
        assert not engine.dropped
        answer.cancel()
    assert engine.dropped == [stream]
    await turns()
    assert len(caching.cache.flights) == 0
    assert caching.counted("unfinished") == 1


@asynchronous
async def test_an_answer_that_the_engine_cut_at_its_deadline_is_told_and_not_kept() -> None:
    caching, engine = Caching(), FakeEngine()
    engine.answer = _cut
    answering, one = await begun(exchange_of(engine, deadline_s=5.0))
    pieces = await caching.ask(one, answering)  # pyright: ignore[reportArgumentType]
    assert pieces[-1].finish == "deadline"
    assert caching.counted("unfinished") == 1


def _cut(stream: OutputStream) -> None:
    say(stream, "Hel", end=True, finish=FinishReason.DEADLINE)


@asynchronous
async def test_tool_calls_come_again_with_the_same_ids() -> None:
    caching = Caching()
    one = cache_key(tools=(Tool("weather"),))
    mouth = Mouth(ChoiceDelta(0, calls=[ToolCallDelta(0, "call_x", "weather", "{}")]), *said(finish="tool_calls"))
    mouth.end()
    await caching.ask(one, mouth)
    pieces = await caching.ask(one)
    assert pieces[0].calls == [ToolCallDelta(0, "call_x", "weather", "{}")]
    assert pieces[-1].finish == "tool_calls"


@asynchronous
async def test_removing_everything_leaves_nothing() -> None:
    caching = Caching()
    for number in range(10):
        await caching.ask(cache_key(number))
    size = await caching.cache.size()
    assert size is not None
    assert size.entries == 10
    assert caching.store is not None
    assert await caching.store.remove(InvalidationScope()) == 10
