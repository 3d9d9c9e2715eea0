"""A chat model as the semantic cache's verifier: when its work ends, and who pays for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.config import KeyConfig, PriceConfig
from headrace.engine.interface.outputs import SequenceEnd, SequenceOutput, SequenceUsage
from headrace.engine.interface.request import FinishReason
from headrace.engine.process.output_stream import OutputStream
from headrace.errors import HeadraceError
from headrace.gateway.serving.served_variant import ServedVariant
from tests.gateway.caches.semantic.test_semantic_served import ON, SAME, ready, remembering
from tests.support.caching_server import KEYS, PATH, RED, question
from tests.support.running_server import FakeEngine, asynchronous, request, say, tokenizer, until, words

PRICES = {"mini": PriceConfig(input=10.0), "judge": PriceConfig(input=1000.0)}


def verifying(engine: FakeEngine, **sections: Any) -> dict[str, Any]:
    """A model `judge` on this engine that verifies, a hundred times as expensive as the answers."""
    judge = ServedVariant(name="judge", engine=engine, tokenizer=tokenizer(), context=2048)
    return {"judge": judge, "verify": "judge", "verify_wait_ms": 60_000.0, "sections": {"prices": PRICES, **sections}}


@asynchronous
async def test_a_client_that_leaves_ends_the_verification_and_pays_for_what_was_computed(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.answer = lambda stream: say(stream, "yes", end=True) if len(engine.streams) == 1 else None
    async with remembering(tmp_path, **verifying(engine)) as (running, _):
        await ready(running)
        running.engine.answer = words("In the settings.")
        await running.chat(ON, key=RED)
        (before,) = await running.usage()
        client = await running.client()
        await client.send(request("POST", PATH, question(SAME, stream=True), **RED))
        await until(lambda: len(engine.streams) == 2)  # the second order runs
        client.leave()
        await until(lambda: engine.dropped == engine.streams[1:])
        await until(lambda: running.counted("headrace_answers_total", "gone", "mini", "red") == 1)
        (after,) = await running.usage()
        assert after["micros"] - before["micros"] == 1000 * len(engine.streams[0].request.prompt)
        assert len(running.engine.streams) == 1  # no answer was begun for it


@asynchronous
async def test_a_verification_before_a_failed_answer_is_charged(tmp_path: Path) -> None:
    def fail(stream: OutputStream) -> None:
        stream.end(HeadraceError("the worker has failed"))

    engine = FakeEngine()
    engine.answer = words("no")
    async with remembering(tmp_path, **verifying(engine)) as (running, _):
        await ready(running)
        running.engine.answer = words("In the settings.")
        await running.chat(ON, key=RED)
        (before,) = await running.usage()
        running.engine.answer = fail
        assert (await running.chat(SAME, key=RED)).status == 500
        (after,) = await running.usage()
        [judged] = engine.streams
        assert after["micros"] - before["micros"] == 1000 * len(judged.request.prompt)
        assert after["requests"] == before["requests"]  # what fails counts as no request


@asynchronous
async def test_a_key_that_may_not_use_the_verifier_hits_by_the_same_text_alone(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.answer = words("yes")
    keys = (KeyConfig(name="red", key="red-secret", models=("mini",)), KEYS[-1])
    async with remembering(tmp_path, **verifying(engine, keys=keys)) as (running, _):
        await ready(running)
        running.engine.answer = words("In the settings.")
        for text, cache in ((ON, None), (SAME, None), (ON, "semantic")):
            answer = await running.chat(text, key=RED)
            assert answer.headers.get("x-headrace-cache") == cache, text
        assert engine.streams == []
        assert running.semantic("refusals", "verifier_access") == 1
        (red,) = await running.usage()
        assert red["micros"] == 10 * sum(len(stream.request.prompt) for stream in running.engine.streams)


@asynchronous
async def test_a_verification_that_is_cut_in_time_costs_what_the_engine_computed(tmp_path: Path) -> None:
    def late(stream: OutputStream) -> None:
        """Its engine ends it at its deadline, while it reads the prompt."""
        assert stream.request.deadline is not None
        usage = SequenceUsage(len(stream.request.prompt), 0, 0, 0, 0, 0.0, 0.1, 0.0)
        stream.push(SequenceOutput(stream.request.id, 0, [], "", ending=SequenceEnd(FinishReason.DEADLINE, usage)))

    engine = FakeEngine()
    engine.answer = late
    async with remembering(tmp_path, **verifying(engine)) as (running, _):
        await ready(running)
        running.engine.answer = words("In the settings.")
        await running.chat(ON, key=RED)
        (before,) = await running.usage()
        assert (await running.chat(SAME, key=RED)).headers.get("x-headrace-cache") is None
        (after,) = await running.usage()
        [cut] = engine.streams
        prompts = 1000 * len(cut.request.prompt) + 10 * len(running.engine.streams[-1].request.prompt)
        assert after["micros"] - before["micros"] == prompts
        assert running.semantic("verifications", "failed") == 1
