"""Routing through the server: rules, splits, cascades, chains, hedges, breakers, and profiles."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.config import ConfigError, ModelConfig, PriceConfig
from headrace.config.breaker_section import BreakerConfig
from headrace.config.cache_section import ExactConfig
from headrace.config.routing_section import (
    CascadeConfig,
    ChainConfig,
    HedgeConfig,
    RoutingConfig,
    RuleConditions,
    RuleConfig,
    SplitConfig,
    StepConfig,
)
from headrace.engine.interface.outputs import SequenceEnd, SequenceOutput, SequenceUsage
from headrace.engine.interface.sampling import SampledToken
from headrace.engine.process.client_errors import OverloadedError, WorkerLostError
from headrace.engine.process.output_stream import OutputStream
from headrace.gateway.routing.hedge import MIN_SAMPLES
from headrace.gateway.serving.served_variant import ServedVariant
from tests.support.caching_server import PATH, RED, Caching, caching, question, rest, told
from tests.support.config_text import read
from tests.support.running_server import (
    Answer,
    FakeEngine,
    FinishReason,
    asynchronous,
    fails,
    request,
    say,
    tokenizer,
    until,
    words,
)

LOST = WorkerLostError("it is gone")


class Idle(FakeEngine):
    """With a replica that has nothing to do."""

    idle = True


def served(name: str, engine: FakeEngine) -> ServedVariant:
    return ServedVariant(name=name, engine=engine, tokenizer=tokenizer(), context=2048, fingerprint=f"fp_{name}")


@contextlib.asynccontextmanager
async def routed(
    folder: Path, routing: RoutingConfig, *others: str, **sections: Any
) -> AsyncGenerator[tuple[Caching, dict[str, FakeEngine]]]:
    """A server with `mini` and others, each with an engine of its own that says its name."""
    engines: dict[str, FakeEngine] = {name: Idle() for name in others}
    models = {name.partition("@")[0]: ModelConfig() for name in ("mini", *others)}
    sections = {"exact": ExactConfig(), "models": models, **sections}
    more = {name: served(name, engine) for name, engine in engines.items()}
    async with caching(folder, routing=routing, others=more, **sections) as running:
        engines["mini"] = running.engine
        for name, engine in engines.items():
            engine.answer = words(f"{name} ", "says ", "so")
        yield running, engines


def content(answer: Answer) -> str:
    return answer.json["choices"][0]["message"]["content"]


def rule(name: str, **target: Any) -> RuleConfig:
    return RuleConfig(name=name, when=RuleConditions(**target.pop("when", {})), **target)


# Rules


@asynchronous
async def test_rules_choose_by_what_a_request_is_like(tmp_path: Path) -> None:
    rules = (
        rule("paid", when={"tags": {"tier": "paid"}}, variant="large"),
        rule("spoken", when={"surfaces": ("voice",)}, variant="small"),
        rule("quick", when={"profiles": ("fast",)}, variant="small"),
        rule("long", when={"least_characters": 200}, variant="large"),
        rule("long prompt", when={"least_tokens": 150, "models": ("mini",)}, variant="large"),
    )
    async with routed(tmp_path, RoutingConfig(rules=rules), "large", "small") as (running, _):
        cases: tuple[tuple[dict[str, Any], str, str | None], ...] = (
            ({}, "mini", None),
            ({"metadata": {"tier": "paid"}}, "large", "rule paid (to large)"),
            ({"metadata": {"tier": "free"}}, "mini", None),
            ({"surface": "voice"}, "small", "rule spoken (to small)"),
            ({"profile": "fast"}, "small", "rule quick (to small)"),
            ({"text": "word " * 50}, "large", "rule long (to large)"),
        )
        for changes, model, why in cases:
            answer = await running.chat(changes.pop("text", "Hello"), key=RED, **changes)
            assert answer.json["model"] == model, changes
            assert content(answer) == f"{model} says so"
            assert answer.headers.get("x-headrace-route") == why
            streamed = await running.chat("Hello", key=RED, stream=True, **changes)
            if "text" not in changes and why != "rule long (to large)":
                assert (streamed.events[0]["model"], streamed.text) == (model, f"{model} says so")
                assert streamed.headers.get("x-headrace-route") == why
        assert running.counted("headrace_routes_total", "paid", "rule") == 2


@asynchronous
async def test_rules_look_at_the_tokens_of_the_prompt_as_the_client_sent_it(tmp_path: Path) -> None:
    rules = (
        rule("long", when={"least_tokens": 150}, variant="large"),
        rule("short", when={"most_tokens": 60}, variant="small"),
    )
    async with routed(tmp_path, RoutingConfig(rules=rules), "large", "small") as (running, _):
        for count, model in ((1, "small"), (100, "mini"), (200, "large")):
            answer = await running.chat("a " * count, key=RED)
            assert answer.json["model"] == model, count
        answer = await running.chat("Why?", key=RED, sources=[{"id": "a", "text": "a " * 200}])
        assert answer.json["model"] == "large"  # sources are in the prompt
        answer = await running.chat("a " * 9000, key=RED)
        assert answer.status == 400
        assert "large" in answer.json["error"]["message"]  # also what fits nowhere has a length


@asynchronous
async def test_a_split_keeps_a_conversation_where_it_is(tmp_path: Path) -> None:
    splits = {"half": SplitConfig(percent={"mini": 50.0, "other": 50.0})}
    routing = RoutingConfig(rules=(rule("canary", split="half"),), splits=splits)
    async with routed(tmp_path, routing, "other") as (running, _):
        chosen: dict[str, str] = {}
        for place in range(24):
            answer = await running.chat(f"Talk {place}", key=RED)
            chosen[f"Talk {place}"] = answer.json["model"]
            model = answer.json["model"]
            assert answer.headers["x-headrace-route"] == (
                f"rule canary (to split half); split {model} (the conversation's share of half)"
            )
        assert set(chosen.values()) == {"mini", "other"}
        for text, model in list(chosen.items())[:6]:
            turns = [
                {"role": "user", "content": text},
                {"role": "assistant", "content": "so"},
                {"role": "user", "content": "And then?"},
            ]
            assert (await running.chat(key=RED, messages=turns)).json["model"] == model
        named = {(await running.chat(f"{n}", key=RED, metadata={"conversation": "c7"})).json["model"] for n in range(6)}
        assert len(named) == 1


# Profiles


@asynchronous
async def test_the_fast_profile_without_a_variant_is_the_model_itself_and_golden_is_not(tmp_path: Path) -> None:
    async with routed(tmp_path, RoutingConfig(), "large", "large@fast") as (running, engines):
        answer = await running.chat(key=RED, profile="fast", temperature=1.0)
        assert answer.json["model"] == "mini"
        sent = engines["mini"].streams[-1].request
        assert (sent.max_tokens, sent.sampling.temperature, sent.sampling.top_p) == (160, 0.3, 0.9)
        assert answer.headers["x-headrace-shaped"] == "max_tokens=None>160, temperature=1>0.3, top_p=1>0.9".replace(
            "None>", ""
        )
        assert (await running.chat(key=RED, model="large", profile="fast")).json["model"] == "large@fast"
        golden = await running.chat(key=RED, profile="golden")
        assert (golden.status, golden.error["param"]) == (400, "profile")
        missing = await running.chat(key=RED, model="nothing", profile="fast")
        assert (missing.status, missing.error["code"]) == (404, "model_not_found")


# Cascades


def sure(logprob: float, *texts: str) -> Callable[[OutputStream], None]:
    """Says the texts, so sure of each token."""

    def answer(stream: OutputStream) -> None:
        for place, text in enumerate(texts):
            end = place == len(texts) - 1
            usage = SequenceUsage(len(stream.request.prompt), place + 1, 0, 0, 0, 0.001, 0.002, 0.003)
            chosen = None
            if stream.request.sampling.logprobs is not None:
                chosen = [SampledToken(100, logprob, ((100, logprob),))]
            ending = SequenceEnd(FinishReason.STOP, usage) if end else None
            stream.push(SequenceOutput("", 0, [100], text, chosen, ending=ending))

    return answer


def cascading(**changes: Any) -> RoutingConfig:
    cascade = CascadeConfig(small="small", large="mini", threshold=0.8, **changes)
    return RoutingConfig(rules=(rule("cheap first", cascade="try"),), cascades={"try": cascade})


@asynchronous
async def test_a_cascade_serves_the_small_answer_where_it_was_sure_and_the_large_one_else(tmp_path: Path) -> None:
    prices = {"mini": PriceConfig(input=10.0, output=100.0), "small": PriceConfig(input=1.0, output=10.0)}
    async with routed(tmp_path, cascading(), "small", prices=prices) as (running, engines):
        engines["small"].answer = sure(-0.05, "surely ", "small")
        for stream in (False, True):
            answer = await running.chat(key=RED, stream=stream)
            text = answer.text if stream else content(answer)
            model = answer.events[0]["model"] if stream else answer.json["model"]
            assert (text, model) == ("surely small", "small"), answer.headers
            found = answer.headers["x-headrace-route"]
            assert found == "rule cheap first (to cascade try); cascade small (mean 0.951 >= 0.800)"
        assert answer.events[0]["choices"][0]["logprobs"] is None  # which only the cascade had asked for
        assert not engines["mini"].streams

        engines["small"].answer = sure(math.log(0.5), "hardly ", "small ", "at all")
        answer = await running.chat(key=RED)
        assert (content(answer), answer.json["model"]) == ("mini says so", "mini")
        assert answer.headers["x-headrace-route"].endswith("cascade mini (small: mean 0.500 < 0.800)")
        length = len(engines["mini"].streams[0].request.prompt)
        assert answer.json["usage"]["completion_tokens"] == 6
        assert answer.json["usage"]["prompt_tokens"] == 2 * length
        rows = {row["variant"]: row for row in await running.usage(by="variant")}
        assert {name: row["output_tokens"] for name, row in rows.items()} == {"small": 7, "mini": 3}
        assert rows["mini"]["requests"] == 1
        assert sum(row["requests"] for row in rows.values()) == 3


@asynchronous
async def test_a_cascade_whose_small_model_fails_is_answered_by_the_large_one(tmp_path: Path) -> None:
    async with routed(tmp_path, cascading(), "small") as (running, engines):
        engines["small"].answer = fails(LOST, "a beginning ")
        answer = await running.chat(key=RED)
        assert (answer.status, content(answer)) == (200, "mini says so")
        assert "cascade mini (small: failed (engine_lost))" in answer.headers["x-headrace-route"]
        engines["small"].answer = fails(OverloadedError("full", retry_after=1.0))
        assert (await running.chat(key=RED, stream=True)).text == "mini says so"


# Chains


def chained(then: str = "error", **changes: Any) -> RoutingConfig:
    steps = (StepConfig(variant="mini"), StepConfig(variant="other", then=then))  # pyright: ignore[reportArgumentType]
    return RoutingConfig(chains={"safe": ChainConfig(steps=steps, **changes)})


@asynchronous
async def test_what_fails_before_its_first_piece_is_answered_by_the_next_step(tmp_path: Path) -> None:
    async with routed(tmp_path, chained(), "other") as (running, engines):
        for error in (LOST, OverloadedError("full", retry_after=2.0)):
            engines["mini"].answer = fails(error)
            for stream in (False, True):
                answer = await running.chat(key=RED, stream=stream)
                text = answer.text if stream else content(answer)
                model = answer.events[0]["model"] if stream else answer.json["model"]
                assert (answer.status, text, model) == (200, "other says so", "other")
                assert (
                    "chain mini (safe, then other); fallback other (the step before failed:"
                    in answer.headers["x-headrace-route"]
                )


@asynchronous
async def test_a_whole_answer_that_breaks_is_begun_anew_whatever_streams_do(tmp_path: Path) -> None:
    async with routed(tmp_path, chained("error"), "other") as (running, engines):
        engines["mini"].answer = fails(LOST, "half of ")
        answer = await running.chat(key=RED)
        assert (answer.status, content(answer), answer.json["model"]) == (200, "other says so", "other")
        assert answer.json["usage"]["completion_tokens"] == 3


@asynchronous
async def test_a_stream_that_breaks_goes_on_byte_for_byte(tmp_path: Path) -> None:
    async with routed(tmp_path, chained("continue"), "other") as (running, engines):
        engines["mini"].answer = fails(LOST, "One, two", ", thr")
        engines["other"].answer = words("One", ", two, three", ", four")
        answer = await running.chat(key=RED, stream=True, stream_options={"include_usage": True})
        assert answer.text == "One, two, three, four"
        assert not any("restart" in event.get("headrace", {}) for event in answer.events)
        assert answer.events[-1]["usage"]["completion_tokens"] == 3
        # Where the other says something else there is no way to go on.
        engines["other"].answer = words("Uno, due", ", tre")
        broken = await running.chat(key=RED, stream=True)
        assert broken.events[-1]["error"]["code"] == "generation_failed"
        assert broken.text == "One, two, thr"


@asynchronous
async def test_a_stream_that_is_begun_anew_is_marked(tmp_path: Path) -> None:
    async with routed(tmp_path, chained("restart"), "other") as (running, engines):
        engines["mini"].answer = fails(LOST, "half of ")
        answer = await running.chat(key=RED, stream=True)
        place, mark = next((n, each) for n, each in enumerate(answer.events) if each.get("headrace"))
        assert (mark["choices"], mark["headrace"]) == (
            [],
            {"restart": {"index": 0, "model": "other", "why": "engine_lost"}},
        )
        after = [each["choices"][0]["delta"].get("content") or "" for each in answer.events[place + 1 :]]
        assert "".join(after) == "other says so"
        assert answer.text == "half of other says so"

        completed = await running.ask("POST", "/v1/completions", {"prompt": "Hi", "stream": True}, **RED)
        assert b'"restart"' in completed.body
        body = {"model": "mini", "max_tokens": 16, "stream": True, **question()}
        message = await running.ask("POST", "/v1/messages", body, **RED)
        assert b"event: error" in message.body
        assert b"other" not in message.body
        response = {"input": "Hello", "stream": True, "store": False}
        answered = await running.ask("POST", "/v1/responses", response, **RED)
        assert b"event: response.failed" in answered.body
        assert b"other says" not in answered.body


@asynchronous
async def test_a_stream_that_breaks_ends_with_an_error_where_nothing_else_is_declared(tmp_path: Path) -> None:
    async with routed(tmp_path, chained(), "other") as (running, engines):
        engines["mini"].answer = fails(LOST, "half of ")
        answer = await running.chat(key=RED, stream=True)
        assert answer.text == "half of "
        assert answer.events[-1]["error"]["code"] == "engine_lost"
        assert not engines["other"].streams


@asynchronous
async def test_who_says_nothing_in_time_is_followed_by_the_next(tmp_path: Path) -> None:
    async with routed(tmp_path, chained(patience_s=0.05), "other") as (running, engines):
        engines["mini"].answer = None
        answer = await running.chat(key=RED, stream=True)
        assert answer.text == "other says so"
        assert "fallback other (the step before failed: too_late)" in answer.headers["x-headrace-route"]
        await until(lambda: not engines["mini"].open)


@asynchronous
async def test_only_the_part_that_the_client_has_is_charged(tmp_path: Path) -> None:
    prices = {"mini": PriceConfig(output=100.0), "other": PriceConfig(output=10.0)}
    async with routed(tmp_path, chained("restart"), "other", prices=prices) as (running, engines):
        engines["mini"].answer = fails(LOST, "half of ")
        await running.chat(key=RED, stream=True)
        rows = [row for row in await running.usage(by="variant") if row["output_tokens"]]
        assert [(row["variant"], row["output_tokens"], row["requests"]) for row in rows] == [("other", 3, 1)]


# Health and hedges


@asynchronous
async def test_a_variant_that_fails_again_and_again_is_left_alone(tmp_path: Path) -> None:
    steps = (StepConfig(variant="mini"), StepConfig(variant="other"))
    routing = RoutingConfig(
        chains={"safe": ChainConfig(steps=steps)}, breaker=BreakerConfig(least_calls=3, failures=0.5, open_s=60.0)
    )
    async with routed(tmp_path, routing, "other") as (running, engines):
        engines["mini"].answer = fails(LOST)
        for _ in range(3):
            assert (await running.chat(key=RED)).json["model"] == "other"
        asked = len(engines["mini"].streams)
        answer = await running.chat(key=RED)
        assert answer.json["model"] == "other"
        assert answer.headers["x-headrace-route"].startswith("health other (mini: ")
        assert len(engines["mini"].streams) == asked
        assert running.counted("headrace_breaker_total", "mini", "open") == 1


@asynchronous
async def test_a_late_first_token_is_asked_for_twice_where_a_replica_idles(tmp_path: Path) -> None:
    hedges = {"other": HedgeConfig(share=0.5, least_ms=5.0, most_ms=20.0)}
    routing = RoutingConfig(rules=(rule("all", variant="other"),), hedges=hedges)
    prices = {"other": PriceConfig(output=10.0)}
    async with routed(tmp_path, routing, "other", prices=prices) as (running, engines):
        other = engines["other"]
        for _ in range(MIN_SAMPLES):
            await running.chat(key=RED)
        assert len(other.streams) == MIN_SAMPLES
        other.answer = None
        client = await running.client()
        await client.send(request("POST", PATH, question(stream=True), **RED))
        await until(lambda: len(other.streams) == MIN_SAMPLES + 2)
        first, second = other.streams[-2:]
        say(second, "the second ", end=False)
        status, headers = await client.head()
        assert status == 200
        assert headers["x-headrace-route"].endswith("hedge other (the second of two requests answered first)")
        await until(lambda: first in other.dropped)
        say(second, "one", end=True)
        assert b'"one"' in await rest(client)
        (row,) = [row for row in await running.usage(by="variant") if row["output_tokens"]]
        assert (row["requests"], row["output_tokens"]) == (MIN_SAMPLES + 1, 3 * MIN_SAMPLES + 2)


@asynchronous
async def test_a_client_that_leaves_takes_every_part_with_it(tmp_path: Path) -> None:
    async with routed(tmp_path, chained("continue"), "other") as (running, engines):
        engines["mini"].answer = fails(LOST, "One")
        engines["other"].answer = None
        client = await running.client()
        await client.send(request("POST", PATH, question(stream=True), **RED))
        assert (await client.head())[0] == 200
        assert b"One" in await told(client)
        await until(lambda: bool(engines["other"].streams))
        client.leave()
        await until(lambda: bool(engines["other"].dropped))


def test_what_is_routed_to_must_be_there() -> None:
    with pytest.raises(ConfigError) as raised:
        read('[models.mini]\n[[routing.rules]]\nname = "a"\nvariant = "gone"\n')
    assert "routing.rules[0].variant" in str(raised.value)
