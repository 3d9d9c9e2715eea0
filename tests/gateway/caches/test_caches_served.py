"""The exact cache through the server: hits in every form, tenants, tags, modes, shared generations, stores."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import pytest

from headrace.config import LogConfig, ModelConfig, PriceConfig, TenantConfig
from headrace.config.cache_section import ExactConfig
from headrace.config.limit_section import LimitSet
from headrace.config.routing_section import ChainConfig, RoutingConfig, StepConfig
from headrace.engine.interface.request import FinishReason
from headrace.engine.process.client_errors import OverloadedError
from headrace.gateway.caches.cache_modes import CachePolicy
from headrace.gateway.serving.served_variant import ServedVariant
from headrace.observe.logs import configure_log
from tests.support.caching_server import BLUE, BOSS, PATH, RED, caching, finish, heard, question, rest, told
from tests.support.clock import Clock
from tests.support.running_server import FakeEngine, asynchronous, fails, say, tokenizer, until, words

FULL = OverloadedError("full", retry_after=1.0)
PRICES = {"mini": PriceConfig(input=10.0, output=100.0)}  # micros of a token


# Hits


@asynchronous
async def test_what_was_answered_is_answered_again_whole_and_streamed(tmp_path: Path) -> None:
    async with caching(tmp_path) as running:
        running.engine.answer = words("one ", "two ", "three")
        fresh = await running.chat(key=RED)
        assert "x-headrace-cache" not in fresh.headers
        assert "cache" not in fresh.json["headrace"]
        again = await running.chat(key=RED)
        assert again.headers["x-headrace-cache"] == "exact; age=0"
        assert again.json["choices"] == fresh.json["choices"]
        assert again.json["usage"] == fresh.json["usage"]
        assert again.json["id"] != fresh.json["id"]
        told_of = again.json["headrace"]
        assert (told_of["cache"], told_of["queue_ms"], told_of["prefill_ms"], told_of["decode_ms"]) == (
            "exact",
            0,
            0,
            0,
        )

        streamed = await running.chat(key=RED, stream=True, stream_options={"include_usage": True})
        assert streamed.headers["x-headrace-cache"] == "exact; age=0"
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert streamed.text == "one two three"
        texts = [each["choices"][0]["delta"].get("content") for each in streamed.events if each["choices"]]
        assert [text for text in texts if text] == ["one ", "two ", "three"]  # as it came at first
        assert streamed.events[-1]["usage"] == fresh.json["usage"]
        assert streamed.events[-1]["headrace"]["cache"] == "exact"
        assert len(running.engine.streams) == 1
        assert [running.exact(each) for each in ("miss", "stored", "hit")] == [1, 1, 2]
        assert running.counted("headrace_answered_by_total", "exact", "mini") == 2
        shown = (await running.ask("GET", "/metrics", **RED)).body.decode()
        assert 'headrace_cache_entries{cache="exact"} 1.0' in shown
        assert "\nheadrace_cache_bytes{" in shown


@asynchronous
async def test_what_was_streamed_is_given_whole(tmp_path: Path) -> None:
    async with caching(tmp_path) as running:
        running.engine.answer = words("one ", "two")
        assert (await running.chat(key=RED, stream=True)).text == "one two"
        again = await running.chat(key=RED)
        assert again.json["choices"][0]["message"]["content"] == "one two"
        assert again.json["choices"][0]["finish_reason"] == "stop"
        assert len(running.engine.streams) == 1


@asynchronous
async def test_an_answer_of_one_endpoint_is_anothers_where_the_prompts_are_the_same(tmp_path: Path) -> None:
    async with caching(tmp_path) as running:
        running.engine.answer = words("It ", "turns.")
        await running.chat(key=RED, max_tokens=16)
        anthropic = {"model": "mini", "max_tokens": 16, **question()}
        given = await running.ask("POST", "/v1/messages", anthropic, **RED)
        assert given.headers["x-headrace-cache"] == "exact; age=0"
        assert given.json["content"] == [{"type": "text", "text": "It turns."}]
        streamed = await running.ask("POST", "/v1/messages", {**anthropic, "stream": True}, **RED)
        assert b'"text_delta","text":"It "' in streamed.body.replace(b": ", b":").replace(b", ", b",")
        response = {"input": "Hello", "temperature": 0, "max_output_tokens": 16, "store": False}
        given = await running.ask("POST", "/v1/responses", response, **RED)
        assert given.headers["x-headrace-cache"] == "exact; age=0"
        assert given.json["output"][-1]["content"][0]["text"] == "It turns."
        assert len(running.engine.streams) == 1
        # A completion's prompt is a text of its own.
        completed = await running.ask("POST", "/v1/completions", {"prompt": "Hello", "temperature": 0}, **RED)
        assert "x-headrace-cache" not in completed.headers
        await running.quiet()
        again = await running.ask(
            "POST", "/v1/completions", {"prompt": "Hello", "temperature": 0, "stream": True}, **RED
        )
        assert again.headers["x-headrace-cache"] == "exact; age=0"
        assert len(running.engine.streams) == 2


@asynchronous
async def test_what_is_not_the_same_is_generated(tmp_path: Path) -> None:
    async with caching(tmp_path) as running:
        running.engine.answer = words("ok")
        different: tuple[dict[str, Any], ...] = (
            {},
            {"max_tokens": 5},
            {"stop": ["x"]},
            {"frequency_penalty": 0.5},
            {"response_format": {"type": "json_object"}},
            {"metadata": {"cache_tags": "docs"}},
            {"temperature": 0.7, "seed": 1},
            {"temperature": 0.7, "seed": 2},
        )
        for place, changes in enumerate(different):
            await running.chat(key=RED, **changes)
            assert running.exact("hit") == 0, place
        for place, changes in enumerate(different):
            assert "x-headrace-cache" in (await running.chat(key=RED, **changes)).headers, place
        # Drawn at random, without a seed: whoever asks twice wants two.
        for _ in range(2):
            assert "x-headrace-cache" not in (await running.chat(key=RED, temperature=0.7)).headers
        assert running.exact("skipped") == 2


@asynchronous
async def test_what_was_cut_or_failed_is_not_kept(tmp_path: Path) -> None:
    async with caching(tmp_path) as running:

        def cut(stream: Any) -> None:
            say(stream, "half", end=True, finish=FinishReason.DEADLINE)

        for answer in (
            cut,
            fails(FULL),
            fails(FULL, "half"),
        ):
            running.engine.answer = answer
            await running.chat(key=RED)
        assert running.exact("stored") == 0
        assert running.exact("unfinished") == 3
        running.engine.answer = fails(FULL)
        refused = await running.chat(key=RED, stream=True)
        assert (refused.status, refused.error["code"]) == (503, "overloaded")
        running.engine.answer = words("whole")
        assert (await running.chat(key=RED)).json["choices"][0]["message"]["content"] == "whole"


@asynchronous
async def test_a_request_can_go_past_it(tmp_path: Path) -> None:
    async with caching(tmp_path) as running:
        running.engine.answer = words("ok")
        for _ in range(2):
            assert "x-headrace-cache" not in (await running.chat(key=RED, cache="off")).headers
            away = await running.ask("POST", PATH, question(), x_headrace_cache="off", **RED)
            assert "x-headrace-cache" not in away.headers
        assert running.exact("stored") == 0
        await running.chat(key=RED)
        await running.chat(key=RED, cache="off")
        assert len(running.engine.streams) == 6


@asynchronous
async def test_the_log_says_who_answered(tmp_path: Path) -> None:
    async with caching(tmp_path) as running:
        stream = io.StringIO()
        configure_log(LogConfig(format="json"), stream)
        running.engine.answer = words("ok")
        for _ in range(2):
            await running.chat(key=RED)
        fresh, again = [line for line in stream.getvalue().splitlines() if PATH in line]
        assert '"by"' not in fresh
        assert '"by":"exact"' in again.replace(" ", "")


# Tenants, tags, invalidation


@asynchronous
async def test_tenants_are_walls(tmp_path: Path) -> None:
    async with caching(tmp_path) as running:
        for key, text in ((RED, "red's"), (BLUE, "blue's")):
            running.engine.answer = words(text)
            assert "x-headrace-cache" not in (await running.chat(key=key)).headers
        for key, text in ((RED, "red's"), (BLUE, "blue's")):
            again = await running.chat(key=key)
            assert again.headers["x-headrace-cache"] == "exact; age=0"
            assert again.json["choices"][0]["message"]["content"] == text
        removed = await running.ask("POST", "/admin/v1/cache/invalidate", {"all": True, "tenant": "red"}, **BOSS)
        assert removed.json["removed"]["exact"] == 1
        assert "x-headrace-cache" not in (await running.chat(key=RED)).headers
        assert "x-headrace-cache" in (await running.chat(key=BLUE)).headers


@asynchronous
async def test_tags_say_how_long_an_answer_lives(tmp_path: Path) -> None:
    async with caching(tmp_path, exact=ExactConfig(mode="on", ttl="1h", tags={"pricing": "5m"})) as running:
        clock = Clock()
        assert running.server.services.exact is not None
        running.server.services.exact._clock = clock
        running.engine.answer = words("ok")
        tagged: dict[str, Any] = {"metadata": {"cache_tags": "pricing, small"}}
        await running.chat(key=RED)
        await running.chat(key=RED, **tagged)
        clock.now += 299
        assert (await running.chat(key=RED, **tagged)).headers["x-headrace-cache"] == "exact; age=299"
        clock.now += 2
        assert "x-headrace-cache" not in (await running.chat(key=RED, **tagged)).headers
        assert (await running.chat(key=RED)).headers["x-headrace-cache"] == "exact; age=301"
        wrong = await running.chat(key=RED, metadata={"cache_tags": "no tag!"})
        assert (wrong.status, wrong.error["param"]) == (400, "metadata.cache_tags")


@asynchronous
async def test_an_administrator_ends_entries_by_tag_and_by_event(tmp_path: Path) -> None:
    exact = ExactConfig(mode="on", events={"price-list": ("pricing", "offers")})
    async with caching(tmp_path, exact=exact) as running:
        running.engine.answer = words("ok")

        async def kept(*tags: str) -> bool:
            answer = await running.chat(key=RED, metadata={"cache_tags": ",".join(tags)})
            return "x-headrace-cache" in answer.headers

        for tags in (("pricing",), ("offers", "eu"), ("docs",)):
            assert not await kept(*tags)
        by_tag = await running.ask("POST", "/admin/v1/cache/invalidate", {"tags": ["docs"]}, **BOSS)
        assert by_tag.json["removed"] == {"exact": 1}
        assert [await kept("docs"), await kept("pricing"), await kept("offers", "eu")] == [False, True, True]
        by_event = await running.ask("POST", "/admin/v1/cache/invalidate", {"events": ["price-list"]}, **BOSS)
        assert by_event.json["removed"] == {"exact": 2}
        assert [await kept("docs"), await kept("pricing"), await kept("offers", "eu")] == [True, False, False]
        refused = await running.ask("POST", "/admin/v1/cache/invalidate", {"tags": ["docs"]}, **RED)
        assert refused.status == 403


@asynchronous
async def test_what_is_being_generated_is_neither_kept_nor_shared_after_an_invalidation(tmp_path: Path) -> None:
    async with caching(tmp_path) as running:
        tagged: dict[str, Any] = {"metadata": {"cache_tags": "pricing"}}
        old, before = await running.begun(key=RED, **tagged)
        say(before, "old ")
        await running.ask("POST", "/admin/v1/cache/invalidate", {"tags": ["pricing"]}, **BOSS)
        new, after = await running.begun(key=RED, **tagged)
        assert after is not None  # it did not join
        finish(before, "price")
        assert (await old.head())[0] == 200
        assert heard(await rest(old)) == "old price"
        assert running.exact("outdated") == 1
        finish(after, "new price")
        await new.head()
        assert heard(await rest(new)) == "new price"
        assert (await running.chat(key=RED, **tagged)).json["choices"][0]["message"]["content"] == "new price"


# Modes


@asynchronous
async def test_a_cache_that_only_records_serves_nothing_and_compares(tmp_path: Path) -> None:
    async with caching(tmp_path, exact=ExactConfig(mode="record")) as running:
        for text in ("one", "one", "two"):
            running.engine.answer = words(text)
            answer = await running.chat(key=RED)
            assert "x-headrace-cache" not in answer.headers
            assert answer.json["choices"][0]["message"]["content"] == text
        assert [running.exact(each) for each in ("would_hit", "same", "different", "hit")] == [2, 1, 1, 0]


@asynchronous
async def test_a_share_of_the_tenants_is_served(tmp_path: Path) -> None:
    modes = CachePolicy(mode="share", share=0.5, salt="exact")
    assert (modes.is_selected("red"), modes.is_selected("blue")) == (False, True)
    async with caching(tmp_path, exact=ExactConfig(mode="share", share=0.5)) as running:
        running.engine.answer = words("ok")
        for key, served in ((RED, False), (BLUE, True)):
            await running.chat(key=key)
            assert ("x-headrace-cache" in (await running.chat(key=key)).headers) is served
        assert (running.exact("hit"), running.exact("would_hit")) == (1, 1)


@asynchronous
async def test_a_tenants_mode_changes_while_the_server_runs(tmp_path: Path) -> None:
    async with caching(tmp_path, exact=ExactConfig(mode="off")) as running:
        running.engine.answer = words("ok")
        await running.ask("POST", "/admin/v1/tenants", {"name": "green"}, **BOSS)
        made = await running.ask("POST", "/admin/v1/keys", {"name": "app", "tenant": "green"}, **BOSS)
        green = {"authorization": f"Bearer {made.json['secret']}"}

        async def hits(mode: str | None) -> bool:
            change = {"caches": {"exact": mode}} if mode else {"unset": ["caches"]}
            changed = await running.ask("PATCH", "/admin/v1/tenants/green", change, **BOSS)
            assert changed.status == 200, changed.body
            return "x-headrace-cache" in (await running.chat(key=green)).headers

        assert not await hits(None)
        assert not await hits("on")  # nothing was kept before
        assert await hits("on")
        assert not await hits("record")
        assert running.exact("would_hit") == 1
        assert not await hits("off")
        assert await hits("on")
        assert not await hits(None)
        # The others' is as the configuration says.
        for _ in range(2):
            assert "x-headrace-cache" not in (await running.chat(key=RED)).headers


@asynchronous
async def test_a_declared_tenant_has_a_mode_of_its_own(tmp_path: Path) -> None:
    from headrace.config.tenant_section import CachesConfig

    tenants = {"red": TenantConfig(caches=CachesConfig(exact="off"))}
    async with caching(tmp_path, tenants=tenants) as running:
        running.engine.answer = words("ok")
        for _ in range(2):
            assert "x-headrace-cache" not in (await running.chat(key=RED)).headers
        await running.chat(key=BLUE)
        assert "x-headrace-cache" in (await running.chat(key=BLUE)).headers


# Shared generations


@asynchronous
async def test_who_comes_late_gets_what_is_there_and_then_what_comes(tmp_path: Path) -> None:
    async with caching(tmp_path, prices=PRICES) as running:
        first, stream = await running.begun(key=RED)
        say(stream, "one ")
        assert (await first.head())[1].get("x-headrace-cache") is None
        assert heard(await told(first)) == "one "
        say(stream, "two ")
        assert heard(await told(first)) == "two "
        late, none = await running.begun(key=RED)
        assert none is None
        assert (await late.head())[1]["x-headrace-cache"] == "shared"
        assert heard(await told(late)) == "one "
        assert heard(await told(late)) == "two "
        # One that wants it whole joins too.
        whole = asyncio.create_task(running.ask("POST", PATH, question(), **RED))
        await until(lambda: running.exact("joined") == 2)
        finish(stream, "three")
        assert heard(await rest(first)) == "three"
        last = await rest(late)
        assert heard(last) == "three"
        answer = await whole
        assert answer.json["choices"][0]["message"]["content"] == "one two three"
        assert answer.json["headrace"]["cache"] == "shared"
        assert answer.json["usage"]["completion_tokens"] == 3
        assert len(running.engine.streams) == 1
        await running.quiet()
        assert running.exact("stored") == 1
        prompt = len(stream.request.prompt)
        (red,) = await running.usage()
        assert (red["requests"], red["input_tokens"], red["output_tokens"]) == (3, 3 * prompt, 9)
        assert red["micros"] == 10 * prompt + 300  # one of the three paid
        assert red["saved"]["shared"] == {"requests": 2, "micros": 2 * (10 * prompt + 300)}


@asynchronous
async def test_when_the_leader_leaves_the_others_go_on_and_one_of_them_pays(tmp_path: Path) -> None:
    async with caching(tmp_path, prices=PRICES) as running:
        first, stream = await running.begun(key=RED)
        say(stream, "one ")
        await first.head()
        second, _ = await running.begun(key=RED)
        third, _ = await running.begun(key=RED)
        first.leave()
        await until(lambda: running.server.context.running == 2)
        assert not running.engine.dropped
        finish(stream, "two")
        for client in (second, third):
            await client.head()
            assert heard(await rest(client)) == "one two"
        await running.quiet()
        assert running.exact("stored") == 1
        prompt = len(stream.request.prompt)
        (red,) = await running.usage()
        assert (red["requests"], red["micros"]) == (3, 10 * prompt + 200)
        assert red["saved"]["shared"] == {"requests": 1, "micros": 10 * prompt + 200}
        # Counted once among the engine's tokens, too.
        assert running.counted("headrace_tokens_total", "output", "mini", "red") == 2
        assert running.counted("headrace_answered_by_total", "shared", "mini") == 1


@asynchronous
async def test_when_all_leave_the_engines_request_ends(tmp_path: Path) -> None:
    async with caching(tmp_path, prices=PRICES) as running:
        first, stream = await running.begun(key=RED)
        second, _ = await running.begun(key=RED)
        say(stream, "one ")
        for client in (first, second):
            await client.head()
            await told(client)
        second.leave()
        await until(lambda: running.server.context.running == 1)
        assert not running.engine.dropped
        first.leave()
        await until(lambda: running.engine.dropped == [stream])
        await running.settled()
        await running.quiet()
        assert running.exact("unfinished") == 1
        (red,) = await running.usage()
        assert red["micros"] == 10 * len(stream.request.prompt) + 100  # what was computed, once


@asynchronous
async def test_a_request_joins_only_what_runs_on_terms_as_good_as_its_own(tmp_path: Path) -> None:
    async with caching(tmp_path) as running:
        terms: dict[str, Any] = {"deadline_ms": 60_000, "priority": 1}
        _, stream = await running.begun(key=RED, **terms)
        assert stream is not None
        # A deadline that is a little later, and less of a hurry: what it joins is as good as its own would be.
        assert (await running.begun(key=RED, deadline_ms=60_500, priority=0))[1] is None
        worse: tuple[dict[str, Any], ...] = (
            {"surface": "voice"},
            {"priority": 2},
            {"deadline_ms": 100_000},  # it would be cut before its time
            {"deadline_ms": 30_000},  # it would be late
        )
        for changes in worse:
            assert (await running.begun(key=RED, **{**terms, **changes}))[1] is not None, changes
        assert (await running.begun(key=RED, priority=1))[1] is not None  # and one without a deadline
        for each in running.engine.open:
            finish(each, "ok")
        await running.quiet()


@asynchronous
async def test_an_error_reaches_all_who_share_it(tmp_path: Path) -> None:
    async with caching(tmp_path) as running:
        first, stream = await running.begun(key=RED)
        second, none = await running.begun(key=RED)
        assert none is None
        stream.end(FULL)
        for client in (first, second):
            answer = await client.answer()
            assert (answer.status, answer.error["code"]) == (503, "overloaded")
        await running.quiet()
        assert running.exact("stored") == 0


@asynchronous
async def test_without_joins_everybody_has_a_generation_of_their_own(tmp_path: Path) -> None:
    async with caching(tmp_path, exact=ExactConfig(mode="on", joins=False)) as running:
        streams = [(await running.begun(key=RED))[1] for _ in range(2)]
        assert None not in streams
        for stream in streams:
            finish(stream, "ok")
        await running.quiet()


@asynchronous
async def test_who_reads_slowly_holds_up_nobody(tmp_path: Path) -> None:
    async with caching(tmp_path) as running:
        slow, stream = await running.begun(key=RED)
        say(stream, "x" * 100_000)
        quick, _ = await running.begun(key=RED)
        for _ in range(60):
            say(stream, "y" * 100_000)
        finish(stream, "end")
        await quick.head()
        assert heard(await rest(quick)).endswith("end")
        slow.leave()


# What it has to do with limits, the ledger, and who else may answer


@asynchronous
async def test_a_hit_takes_no_tokens_of_a_limit_and_is_charged_as_a_hit(tmp_path: Path) -> None:
    prices = {"mini": PriceConfig(input=10.0, output=100.0, second=1.0, hit_percent=10)}
    tenants = {"red": TenantConfig(limits=LimitSet(output_tokens_per_min=6, requests_per_s=100))}
    async with caching(tmp_path, prices=prices, tenants=tenants) as running:
        running.engine.answer = words("one ", "two ", "three")
        assert (await running.chat(key=RED, max_tokens=3)).status == 200
        for _ in range(5):
            again = await running.chat(key=RED, max_tokens=3)
            assert (again.status, again.headers["x-headrace-cache"]) == (200, "exact; age=0")
        prompt = len(running.engine.streams[0].request.prompt)
        whole = 10 * prompt + 300 + 5000  # and five milliseconds of the machine
        (red,) = await running.usage()
        assert red["requests"] == 6
        assert red["saved"]["exact"]["requests"] == 5
        assert red["saved"]["exact"]["micros"] == pytest.approx(5 * 0.9 * whole, abs=5)
        assert red["micros"] == pytest.approx(whole + 5 * 0.1 * whole, abs=5)


@asynchronous
async def test_who_goes_on_with_an_answer_keeps_to_its_own_limits(tmp_path: Path) -> None:
    tenants = {"red": TenantConfig(limits=LimitSet(output_tokens_per_min=7))}
    async with caching(tmp_path, tenants=tenants) as running:
        first, stream = await running.begun(key=RED, max_tokens=3)
        second, none = await running.begun(key=RED, max_tokens=3)
        assert none is None
        say(stream, "one ")
        first.leave()
        await until(lambda: running.server.context.running == 1)
        say(stream, "two ")
        finish(stream, "three")
        await second.head()
        assert heard(await rest(second)) == "one two three"
        await running.quiet()
        # One token went to the first before it left, three to the second: there is room for three more.
        running.engine.answer = words("a ", "b ", "c")
        assert (await running.chat("Another", key=RED, max_tokens=3)).status == 200
        assert (await running.chat("A third", key=RED, max_tokens=3)).status == 429


def other(name: str, engine: FakeEngine) -> ServedVariant:
    return ServedVariant(name=name, engine=engine, tokenizer=tokenizer(), context=2048, fingerprint=f"fp_{name}")


@asynchronous
async def test_what_another_variant_answered_is_told_and_charged_so_and_not_kept(tmp_path: Path) -> None:
    spare = FakeEngine()
    spare.answer = words("from the spare")
    chain = ChainConfig(steps=(StepConfig(variant="mini"), StepConfig(variant="mini@spare", then="restart")))
    prices = {**PRICES, "mini@spare": PriceConfig(input=1.0, output=1.0)}
    async with caching(
        tmp_path,
        models={"mini": ModelConfig(variants={"spare": {}})},
        others={"mini@spare": other("mini@spare", spare)},
        routing=RoutingConfig(chains={"safe": chain}),
        prices=prices,
    ) as running:
        running.engine.answer = fails(FULL)
        for _ in range(2):
            answer = await running.chat(key=RED)
            assert answer.json["choices"][0]["message"]["content"] == "from the spare"
            assert answer.json["model"] == "mini@spare"
            assert answer.headers["x-headrace-route"]
            assert "x-headrace-cache" not in answer.headers
        assert running.exact("stood_in") == 2
        streamed = await running.chat(key=RED, stream=True)
        assert (streamed.text, streamed.events[0]["model"]) == ("from the spare", "mini@spare")
        rows = {row["variant"]: row for row in await running.usage(by="variant")}
        assert set(rows) == {"mini@spare"}
        assert rows["mini@spare"]["micros"] == 3 * (len(spare.streams[0].request.prompt) + 1)
        # Who streams does not join what nobody is to hear of before it is whole.
        running.engine.answer = None
        whole = asyncio.create_task(running.ask("POST", PATH, question(), **RED))
        await until(lambda: bool(running.engine.open))
        (held,) = running.engine.open
        say(held, "half ")
        client, own = await running.begun(key=RED)
        assert own is not None
        held.end(FULL)
        finish(own, "all of it")
        assert (await whole).json["choices"][0]["message"]["content"] == "from the spare"
        await client.head()
        assert heard(await rest(client)) == "all of it"
        await running.quiet()
        await running.ask("POST", "/admin/v1/cache/invalidate", {"all": True}, **BOSS)
        # And what begins anew by another variant is none of an entry either.
        running.engine.answer = fails(FULL, "half ")
        broken = await running.chat(key=RED, stream=True)
        assert b"from the spare" in broken.body
        running.engine.answer = words("from mini")
        fresh = await running.chat(key=RED)
        assert (fresh.json["choices"][0]["message"]["content"], fresh.json["model"]) == ("from mini", "mini")


# Traces


@asynchronous
async def test_a_trace_shows_what_each_cache_did_and_the_savings_are_counted(tmp_path: Path) -> None:
    async with caching(tmp_path, prices=PRICES) as running:
        running.engine.answer = words("one ", "two")
        outcomes: list[Any] = []
        for _ in range(2):
            answer = await running.chat(key=RED)
            found = (await running.ask("GET", f"/v1/requests/{answer.json['id']}", **RED)).json
            outcomes += [
                part["attributes"]["outcome"]
                for span in found["spans"]
                for part in span.get("parts", ())
                if part["name"] == "exact"
            ]
        assert outcomes == ["miss", "hit"]
        assert any(span["name"] == "replay" for span in found["spans"])
        rows = [row for _, row in running.server.services.observer.latencies.total() if row.saved]
        prompt, output = answer.json["usage"]["prompt_tokens"], answer.json["usage"]["completion_tokens"]
        assert [row.saved["exact"][2] for row in rows] == [prompt * 10 + output * 100]
        assert rows[0].saved["exact"][1] > 0.0
