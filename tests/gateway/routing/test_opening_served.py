"""Openings through the server: headers, the mark, usage and the ledger."""

from __future__ import annotations

import asyncio
from pathlib import Path

from headrace.config import PriceConfig
from headrace.config.routing_section import OpeningConfig, RoutingConfig, RuleConfig
from headrace.engine.interface.outputs import SequenceEnd, SequenceOutput, SequenceUsage
from headrace.engine.interface.request import FinishReason
from headrace.engine.process.output_stream import OutputStream
from tests.gateway.routing.test_routing_served import routed
from tests.support.caching_server import RED
from tests.support.running_server import asynchronous, say, tokenizer, until, words

PRICES = {"mini": PriceConfig(input=10.0, output=100.0), "small": PriceConfig(input=1.0, output=10.0)}


def opening(**changes: object) -> RoutingConfig:
    section = OpeningConfig(small="small", large="mini", **changes)  # pyright: ignore[reportArgumentType]
    return RoutingConfig(rules=(RuleConfig(name="quick", opening="try"),), openings={"try": section})


def computed(stream: OutputStream) -> None:
    usage = SequenceUsage(len(stream.request.prompt), 0, 0, 0, 0, 0.001, 0.002, 0.0)
    stream.push(SequenceOutput("", 0, [], "", ending=SequenceEnd(FinishReason.LENGTH, usage)))


def is_read(stream: OutputStream) -> bool:
    """True if all of a stream's outputs are taken, and more are waited for."""
    return stream._listener is not None and not stream.ready  # pyright: ignore[reportPrivateUsage]


@asynchronous
async def test_an_opened_stream_is_marked_and_both_variants_are_in_the_ledger(tmp_path: Path) -> None:
    async with routed(tmp_path, opening(), "small", prices=PRICES) as (running, engines):
        engines["small"].answer = None
        engines["mini"].answer = None
        asking = asyncio.ensure_future(running.chat(key=RED, stream=True, stream_options={"include_usage": True}))
        await until(lambda: bool(engines["mini"].streams))
        (small,), (ahead,) = engines["small"].streams, engines["mini"].streams
        await until(lambda: is_read(small) and is_read(ahead))
        for text in ("Yes.", " It"):
            say(small, text)
            await until(lambda: is_read(small))
        engines["mini"].answer = words(" So", " says", " mini.")
        computed(ahead)
        for _ in range(20):  # turns of the event loop, in which the large model counts as ready
            await asyncio.sleep(0)
        say(small, " is.")
        await until(lambda: is_read(small))
        say(small, " Never sent")
        answer = await asking
        assert answer.text == "Yes. It is. So says mini."
        tokens = 3
        found = answer.headers["x-headrace-route"]
        assert found.startswith("rule quick (to opening try); opening small (begins, mini takes over)")
        _, continued = engines["mini"].streams
        prompt = ahead.request.prompt
        begun = answer.text.removesuffix(" So says mini.")
        assert continued.request.prompt == prompt + tuple(tokenizer().encode(begun, add_special_tokens=False))
        last = answer.events[-1]
        assert last["usage"]["completion_tokens"] == tokens + 3
        assert last["usage"]["prompt_tokens"] == len(prompt) + len(continued.request.prompt)
        mark = next(event["headrace"]["opening"] for event in answer.events if "opening" in event.get("headrace", {}))
        assert mark == {
            "variant": "small",
            "tokens": tokens,
            "continued_by": "mini",
            "why": "at the end of a sentence",
        }
        assert engines["small"].dropped  # what it would have said is not computed any more
        rows = {row["variant"]: row for row in await running.usage(by="variant")}
        assert {name: row["output_tokens"] for name, row in rows.items()} == {"small": tokens, "mini": 3}
        assert sum(row["requests"] for row in rows.values()) == 1


@asynchronous
async def test_requests_that_are_not_opened_say_why(tmp_path: Path) -> None:
    async with routed(tmp_path, opening(), "small") as (running, engines):
        for changes, why in (
            ({}, "the answer is not streamed"),
            ({"stream": True, "logprobs": True}, "log-probabilities are requested"),
            ({"stream": True, "degrade": "off"}, "the request restricts degradation"),
        ):
            answer = await running.chat(f"Hello {why}", key=RED, **changes)
            assert answer.status == 200, answer.text
            assert f"opening mini (answers alone: {why})" in answer.headers["x-headrace-route"]
        assert not engines["small"].streams


@asynchronous
async def test_an_opened_answer_is_not_served_to_a_request_that_is_not_opened(tmp_path: Path) -> None:
    async with routed(tmp_path, opening(takeover="tokens", tokens=1), "small") as (running, engines):

        def large(stream: OutputStream) -> None:
            (computed if stream.request.kind == "score" else words(" by", " mini"))(stream)

        engines["mini"].answer = large
        streamed = await running.chat("Who?", key=RED, stream=True, temperature=0)
        whole = await running.chat("Who?", key=RED, temperature=0)
        assert whole.json["choices"][0]["message"]["content"] == " by mini"
        assert whole.headers.get("x-headrace-cache") != "exact"
        assert streamed.status == whole.status == 200
        await until(lambda: not engines["small"].open)
