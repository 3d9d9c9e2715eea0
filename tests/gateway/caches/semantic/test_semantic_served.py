"""The semantic cache through the server, with an encoder that goes by words."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.config import ConfigError, ModelConfig, PriceConfig, TenantConfig
from headrace.config.cache_section import ExactConfig, SemanticConfig
from headrace.config.limit_section import LimitSet
from headrace.engine.interface.request import FinishReason, GenerationRequest
from headrace.engine.process.output_stream import OutputStream
from headrace.gateway.flow.model_verifier import probability_of_yes
from headrace.gateway.output.tool_formats import tool_format_by_name
from headrace.gateway.requests.text_request import Choice, TokenLogprob
from headrace.gateway.serving.exchange import Caller
from headrace.gateway.serving.served_variant import ServedVariant
from headrace.models.spec import RankingSpec
from tests.support.caching_server import BLUE, BOSS, PATH, RED, Caching, caching, question
from tests.support.running_server import FakeEngine, asynchronous, request, say, tokenizer, until, words
from tests.support.stores.fake_encoders import EncoderEngine, WordEngine

ON = "How do I turn on notifications?"
SAME = "How can I turn on notifications?"
OPPOSITE = "How do I turn off notifications?"
OFF = ExactConfig(mode="off")


@contextlib.asynccontextmanager
async def remembering(
    folder: Path,
    *,
    exact: ExactConfig = OFF,
    sections: dict[str, Any] | None = None,
    judge: ServedVariant | None = None,
    **options: Any,
) -> AsyncGenerator[tuple[Caching, WordEngine]]:
    encoder = WordEngine(tokenizer())
    others = {
        "words": ServedVariant(
            name="words", engine=encoder, tokenizer=tokenizer(), context=64, kind="encoder", width=64, fingerprint="w1"
        )
    }
    if judge is not None:
        others[judge.name] = judge
    given: dict[str, Any] = {"mode": "on", "embedder": "words", "threshold": 0.3, "wait_ms": 5000.0, **options}
    models = {"mini": ModelConfig(), "words": ModelConfig()}
    sections = {"models": models, **(sections or {})}
    async with caching(folder, exact=exact, semantic=SemanticConfig(**given), others=others, **sections) as running:
        yield running, encoder


async def ready(running: Caching, *tenants: str) -> None:
    """What the tenants have on disk is there; a request does not wait for that."""
    cache = running.server.services.semantic
    assert cache is not None
    for tenant in tenants or ("red", "blue"):
        await cache.load(tenant, cache.embedder_for(Caller(tenant=tenant), "batch"))


def answered(answer: Any) -> tuple[str | None, str]:
    return answer.headers.get("x-headrace-cache"), answer.json["choices"][0]["message"]["content"]


@asynchronous
async def test_a_question_that_asks_the_same_gets_the_kept_answer(tmp_path: Path) -> None:
    prices = {"mini": PriceConfig(input=10.0, output=100.0)}
    async with remembering(tmp_path, sections={"prices": prices}) as (running, _):
        await ready(running)
        running.engine.answer = words("In the ", "settings.")
        assert answered(await running.chat(ON, key=RED)) == (None, "In the settings.")
        again = await running.chat(SAME, key=RED)
        assert answered(again) == ("semantic", "In the settings.")
        assert again.json["headrace"]["cache"] == "semantic"
        prompt = len(running.engine.streams[0].request.prompt)
        assert again.json["usage"]["completion_tokens"] == 2
        assert again.json["usage"]["prompt_tokens"] == prompt  # "can" in the place of "do"
        streamed = await running.chat(SAME, key=RED, stream=True)
        assert (streamed.headers["x-headrace-cache"], streamed.text) == ("semantic", "In the settings.")
        assert len(running.engine.streams) == 1
        assert running.counted("headrace_answered_by_total", "mini", "semantic") == 0  # by, model
        assert running.counted("headrace_answered_by_total", "semantic", "mini") == 2
        assert (running.semantic("outcomes", "miss"), running.semantic("outcomes", "hit")) == (1, 2)
        (red,) = await running.usage()
        assert red["micros"] == 10 * prompt + 200
        assert red["saved"]["semantic"] == {"requests": 2, "micros": 2 * (10 * prompt + 200)}
        shown = (await running.ask("GET", "/metrics", **RED)).body.decode()
        assert 'headrace_cache_entries{cache="semantic"} 1.0' in shown


@asynchronous
async def test_what_asks_something_else_is_generated(tmp_path: Path) -> None:
    async with remembering(tmp_path, floor=0.2) as (running, _):
        await ready(running)
        running.engine.answer = words("In the settings.")
        await running.chat(ON, key=RED)
        running.engine.answer = words("Something else.")
        assert answered(await running.chat(OPPOSITE, key=RED))[0] is None
        assert running.semantic("refusals", "polarity") == 1
        different: tuple[dict[str, Any], ...] = (
            {"max_tokens": 5},
            {"response_format": {"type": "json_object"}},
            {"metadata": {"cache_tags": "docs"}},
            {"temperature": 0.7},
            {"surface": "agent"},
            {"cache": "off"},
            {"logprobs": True},
        )
        for changes in different:
            answer = await running.chat(SAME, key=RED, **changes)
            assert "x-headrace-cache" not in answer.headers, changes
        system = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": SAME}]
        assert "x-headrace-cache" not in (await running.chat(SAME, key=RED, messages=system)).headers


@asynchronous
async def test_tenants_are_walls(tmp_path: Path) -> None:
    async with remembering(tmp_path) as (running, encoder):
        await ready(running)
        running.engine.answer = words("red's")
        await running.chat(ON, key=RED)
        running.engine.answer = words("blue's")
        assert answered(await running.chat(SAME, key=BLUE)) == (None, "blue's")
        assert answered(await running.chat(SAME, key=RED)) == ("semantic", "red's")
        assert {request.tenant for request in encoder.text_request} == {"red", "blue"}  # each in its own fair share
        assert all(request.salt == request.tenant for request in encoder.text_request)


@asynchronous
async def test_a_cache_that_records_serves_nothing(tmp_path: Path) -> None:
    async with remembering(tmp_path, mode="record") as (running, _):
        await ready(running)
        for text in ("one", "one", "not two"):
            running.engine.answer = words(text)
            assert answered(await running.chat(SAME, key=RED)) == (None, text)
        assert running.semantic("outcomes", "record") == 2
        assert running.semantic("comparisons", "right") == 1
        assert running.semantic("comparisons", "wrong") == 1


@asynchronous
async def test_a_tenants_mode_changes_while_the_server_runs(tmp_path: Path) -> None:
    async with remembering(tmp_path, mode="off") as (running, encoder):
        running.engine.answer = words("ok")
        await running.ask("POST", "/admin/v1/tenants", {"name": "green"}, **BOSS)
        made = await running.ask("POST", "/admin/v1/keys", {"name": "app", "tenant": "green"}, **BOSS)
        green = {"authorization": f"Bearer {made.json['secret']}"}
        await ready(running, "green")
        for _ in range(2):
            assert answered(await running.chat(ON, key=green))[0] is None
        assert not encoder.text_request
        await running.ask("PATCH", "/admin/v1/tenants/green", {"caches": {"semantic": "on"}}, **BOSS)
        assert answered(await running.chat(ON, key=green))[0] is None
        assert answered(await running.chat(SAME, key=green))[0] == "semantic"
        assert answered(await running.chat(SAME, key=RED))[0] is None


@asynchronous
async def test_the_exact_cache_comes_first(tmp_path: Path) -> None:
    async with remembering(tmp_path, exact=ExactConfig(mode="on")) as (running, encoder):
        await ready(running)
        running.engine.answer = words("ok")
        await running.chat(ON, key=RED)
        asked = len(encoder.text_request)
        assert (answered(await running.chat(ON, key=RED))[0] or "").startswith("exact; age=")
        assert len(encoder.text_request) == asked
        assert answered(await running.chat(SAME, key=RED))[0] == "semantic"
        # What was served in other words is no entry of the exact cache.
        assert running.exact("stored") == 1


@asynchronous
async def test_identical_questions_under_way_share_one_generation_and_one_entry(tmp_path: Path) -> None:
    async with remembering(tmp_path, exact=ExactConfig(mode="on")) as (running, _):
        await ready(running)
        first, stream = await running.begun(ON, key=RED)
        second, none = await running.begun(ON, key=RED)
        assert none is None
        say(stream, "ok", end=True)
        for client in (first, second):
            assert (await client.answer()).text == "ok"
        await running.quiet()
        assert running.server.services.semantic is not None
        assert running.server.services.semantic.about("red")["entries"] == 1


# What is kept


@asynchronous
async def test_only_answers_that_ended_by_themselves_are_kept(tmp_path: Path) -> None:
    async with remembering(tmp_path, tools=True) as (running, _):
        await ready(running)
        mini = running.fleet.served["mini"]
        mini.tools = tool_format_by_name("hermes", tokenizer())
        cache = running.server.services.semantic
        assert cache is not None

        def cut(stream: OutputStream) -> None:
            say(stream, "half", end=True, finish=FinishReason.LENGTH)

        tool = {"type": "function", "function": {"name": "switch", "parameters": {"type": "object"}}}
        call = '<tool_call>\n{"name": "switch", "arguments": {}}\n</tool_call>'
        named = {"type": "function", "function": {"name": "switch"}}
        for answer, changes in (
            (cut, {}),
            (words(""), {}),
            (words("I will. ", call), {"tools": [tool]}),
            (words(call), {"tools": [tool], "tool_choice": named}),  # which ends with stop
        ):
            running.engine.answer = answer
            found = await running.chat(ON, key=RED, **changes)
            assert found.status == 200, found.body
            assert bool(found.json["choices"][0]["message"].get("tool_calls")) is bool(changes)
            assert cache.about("red")["entries"] == 0, changes
        running.engine.answer = words("No need to.")
        await running.chat(ON, key=RED, tools=[tool])
        assert answered(await running.chat(SAME, key=RED, tools=[tool])) == ("semantic", "No need to.")


@asynchronous
async def test_tags_and_an_administrator_end_entries(tmp_path: Path) -> None:
    exact = ExactConfig(mode="off", events={"new-app": ("app",)})
    async with remembering(tmp_path, exact=exact) as (running, _):
        await ready(running)
        running.engine.answer = words("ok")
        tagged: dict[str, Any] = {"metadata": {"cache_tags": "app"}}
        for body in ({"tags": ["app"]}, {"events": ["new-app"]}, {"all": True, "tenant": "red"}):
            assert answered(await running.chat(ON, key=RED, **tagged))[0] is None
            assert answered(await running.chat(SAME, key=RED, **tagged))[0] == "semantic"
            removed = await running.ask("POST", "/admin/v1/cache/invalidate", body, **BOSS)
            assert removed.json["removed"]["semantic"] == 1
        # And what is being generated is not kept.
        client, stream = await running.begun(ON, key=RED, **tagged)
        await running.ask("POST", "/admin/v1/cache/invalidate", {"tags": ["app"]}, **BOSS)
        say(stream, "old", end=True)
        await client.answer()
        await running.quiet()
        assert answered(await running.chat(SAME, key=RED, **tagged))[0] is None


@asynchronous
async def test_entries_outlive_a_restart(tmp_path: Path) -> None:
    async with remembering(tmp_path) as (running, _):
        await ready(running)
        running.engine.answer = words("ok")
        await running.chat(ON, key=RED)
    async with remembering(tmp_path) as (running, _):
        await ready(running)
        again = await running.chat(SAME, key=RED)
        assert answered(again) == ("semantic", "ok")
        assert again.json["usage"]["completion_tokens"] == 1
        assert answered(await running.chat(SAME, key=RED))[0] == "semantic"


# Checks


@asynchronous
async def test_hits_are_checked_behind_the_clients_back(tmp_path: Path) -> None:
    async with remembering(tmp_path, check_share=1.0) as (running, _):
        await ready(running)
        running.engine.answer = words("In the settings.")
        await running.chat(ON, key=RED)
        assert answered(await running.chat(SAME, key=RED))[0] == "semantic"
        assert running.semantic("comparisons", "right") == 1
        assert running.engine.streams[-1].request.surface == "batch"
        running.engine.answer = words("Not any more.")
        assert answered(await running.chat(SAME, key=RED)) == ("semantic", "In the settings.")
        assert running.semantic("comparisons", "wrong") == 1
        # A fresh answer that was cut says nothing of the kept one.

        def cut(stream: OutputStream) -> None:
            say(stream, "In", end=True, finish=FinishReason.LENGTH)

        running.engine.answer = cut
        assert answered(await running.chat(SAME, key=RED))[0] == "semantic"
        assert running.semantic("comparisons", "wrong") == 1
        (red,) = await running.usage()
        assert red["requests"] == 4  # nobody pays for a check


# Priming


@asynchronous
async def test_a_model_is_shown_the_kept_answer_and_pays_for_it(tmp_path: Path) -> None:
    prices = {"mini": PriceConfig(input=10.0, output=100.0)}
    exact = ExactConfig(mode="on")
    async with remembering(tmp_path, exact=exact, serve="prime", sections={"prices": prices}) as (running, _):
        await ready(running)
        running.engine.answer = words("In the settings.")
        assert answered(await running.chat(ON, key=RED))[0] is None
        running.engine.answer = words("There.")
        primed = await running.chat(SAME, key=RED)
        assert answered(primed) == ("primed", "There.")
        assert primed.json["headrace"]["cache"] == "primed"
        plain, shown = (stream.request.prompt for stream in running.engine.streams)
        text = tokenizer().decode(shown)
        assert text.index(ON) < text.index("In the settings.") < text.index(SAME)
        assert primed.json["usage"]["prompt_tokens"] == len(shown) > len(plain)
        (red,) = await running.usage()
        assert red["micros"] == 10 * (len(plain) + len(shown)) + 200
        # An answer with an example before it is not what the same request gets by itself: neither kept nor shared.
        assert running.exact("stored") == 1
        assert (answered(await running.chat(ON, key=RED))[0] or "").startswith("exact; age=")
        assert answered(await running.chat(SAME, key=RED))[0] == "primed"


@asynchronous
async def test_an_example_that_does_not_fit_is_left_out(tmp_path: Path) -> None:
    async with remembering(tmp_path, serve="prime") as (running, _):
        await ready(running)
        running.engine.answer = words("In the settings. " * 20)
        await running.chat(ON, key=RED)
        running.fleet.served["mini"].context = len(running.engine.streams[0].request.prompt) + 20
        running.engine.answer = words("There.")
        assert answered(await running.chat(SAME, key=RED)) == (None, "There.")


@asynchronous
async def test_an_example_counts_before_limits(tmp_path: Path) -> None:
    async with remembering(tmp_path, serve="prime") as (running, _):
        await ready(running)
        running.engine.answer = words("ok")
        await running.chat(ON, key=RED)
        await running.chat(SAME, key=RED)
        lengths = [len(stream.request.prompt) for stream in running.engine.streams]
    tenants = {"red": TenantConfig(limits=LimitSet(input_tokens_per_min=sum(lengths) - 1))}
    folder = tmp_path / "limited"
    async with remembering(folder, serve="prime", sections={"tenants": tenants}) as (running, _):
        await ready(running)
        running.engine.answer = words("ok")
        assert (await running.chat(ON, key=RED)).status == 200
        assert (await running.chat(SAME, key=RED)).status == 429


# What goes wrong


@asynchronous
async def test_a_silent_encoder_costs_a_bounded_wait_and_then_nothing(tmp_path: Path) -> None:
    async with remembering(tmp_path, wait_ms=20.0) as (running, encoder):
        await ready(running)
        encoder.silent = True
        running.engine.answer = words("ok")
        assert answered(await running.chat(ON, key=RED)) == (None, "ok")
        encoder.fails = True
        encoder.text_request.clear()
        for _ in range(7):
            assert answered(await running.chat(ON, key=RED)) == (None, "ok")
        assert running.semantic("outcomes", "unavailable") == 8
        assert 1 <= len(encoder.text_request) <= 4  # five failures in a row, the first of them silent


@asynchronous
async def test_a_question_that_is_too_long_for_the_encoder_troubles_nobody_else(tmp_path: Path) -> None:
    async with remembering(tmp_path) as (running, encoder):
        await ready(running)
        running.engine.answer = words("ok")
        for place in range(6):
            assert (await running.chat(f"{place} {'∮ ' * 200}", key=RED)).status == 200
        assert not encoder.text_request
        await running.chat(ON, key=RED)
        assert answered(await running.chat(SAME, key=RED))[0] == "semantic"


@asynchronous
async def test_who_leaves_while_it_is_looked_for_costs_no_generation(tmp_path: Path) -> None:
    async with remembering(tmp_path, wait_ms=200.0) as (running, encoder):
        await ready(running)
        encoder.silent = True
        client = await running.client()
        await client.send(request("POST", PATH, question(ON), **RED))
        await until(lambda: bool(encoder.text_request))
        client.leave()
        await until(lambda: running.server.context.running == 0)
        assert not running.engine.streams
        await asyncio.sleep(0)


def test_an_embedder_must_be_an_encoder(tmp_path: Path) -> None:
    async def test() -> None:
        with pytest.raises(ConfigError, match=r"cache\.semantic\.embedder"):
            async with caching(tmp_path, semantic=SemanticConfig(embedder="mini")):
                pass

    asynchronous(test)()


class JudgingEngine(EncoderEngine):
    """A reranker's engine: one logit for every pair."""

    def __init__(self, logit: float) -> None:
        super().__init__()
        self.logit = logit

    def stream(self, request: GenerationRequest) -> Any:
        stream = super().stream(request)
        stream.vector = np.array([self.logit], dtype="<f4")
        return stream


@asynchronous
async def test_a_served_reranker_reads_every_hit(tmp_path: Path) -> None:
    engine = JudgingEngine(-3.0)
    judge = ServedVariant(
        name="judge",
        engine=engine,
        tokenizer=tokenizer(),
        context=64,
        kind="reranker",
        ranking=RankingSpec(template="pair", activation="sigmoid"),
    )
    async with remembering(tmp_path, judge=judge, verify="judge") as (running, _):
        await ready(running)
        running.engine.answer = words("In the settings.")
        await running.chat(ON, key=RED)
        assert engine.text_request == []
        assert answered(await running.chat(SAME, key=RED))[0] is None
        assert running.semantic("refusals", "verifier") == 1
        engine.logit = 3.0
        assert answered(await running.chat(SAME, key=RED))[0] == "semantic"  # its own entry by now
        assert answered(await running.chat(SAME + " please", key=RED))[0] == "semantic; verified=0.95"
        assert [request.tenant for request in engine.text_request] == ["red"] * 4  # each pair in both orders


def judging(*verdicts: str, answer: str = "In the settings.") -> Callable[[OutputStream], None]:
    """Gives a verdict to each question about two questions, and the answer to every other request."""
    left = list(verdicts)

    def say_it(stream: OutputStream) -> None:
        is_judged = "Decide whether two questions" in tokenizer().decode(list(stream.request.prompt))
        say(stream, left.pop(0) if is_judged else answer, end=True)

    return say_it


async def verify_part(running: Caching, answer: Any) -> dict[str, Any]:
    """The verification in the trace of a request."""
    found = (await running.ask("GET", f"/v1/requests/{answer.headers['x-request-id']}", **RED)).json
    recall = next(span for span in found["spans"] if span["name"] == "recall")
    part = next(part for part in recall["parts"] if part["name"] == "verify")
    return {**part, **part.get("attributes", {})}


@asynchronous
async def test_the_model_itself_verifies_a_hit_and_the_tenant_pays_for_it(tmp_path: Path) -> None:
    prices = {"mini": PriceConfig(input=10.0, output=100.0)}
    options: dict[str, Any] = {"verify": "model", "sections": {"prices": prices}}
    async with remembering(tmp_path, **options) as (running, _):
        await ready(running)
        running.engine.answer = judging("Yes", " yes")
        await running.chat(ON, key=RED)
        (before,) = await running.usage()
        hit = await running.chat(SAME, key=RED)
        assert answered(hit) == ("semantic; verified=1.00", "In the settings.")
        assert running.semantic("verifications", "yes") == 1
        first, second = (stream.request for stream in running.engine.streams[1:])
        texts = [tokenizer().decode(list(each.prompt)) for each in (first, second)]
        assert all(f'First: "{one}"' in text for one, text in zip((ON, SAME), texts, strict=True))
        assert {(each.max_tokens, each.tenant, each.surface) for each in (first, second)} == {(1, "red", "chat")}
        (after,) = await running.usage()
        assert after["micros"] - before["micros"] == 10 * (len(first.prompt) + len(second.prompt)) + 2 * 100
        assert after["requests"] == before["requests"] + 1
        part = await verify_part(running, hit)
        assert (part["variant"], part["outcome"], part["score"]) == ("mini", "hit", 1.0)


@asynchronous
async def test_a_model_that_says_no_in_either_order_refuses_and_its_work_is_charged_too(tmp_path: Path) -> None:
    prices = {"mini": PriceConfig(input=10.0)}
    for number, verdicts in enumerate((("no",), ("yes", "No."))):
        sections = {"prices": prices}
        async with remembering(tmp_path / str(number), verify="model", sections=sections) as (running, _):
            await ready(running)
            running.engine.answer = judging(*verdicts)
            await running.chat(ON, key=RED)
            refused = await running.chat(SAME, key=RED)
            assert answered(refused)[0] is None
            part = await verify_part(running, refused)
            assert (part["outcome"], part["score"]) == ("refused", 0.0)
            assert running.semantic("refusals", "verifier") == 1
            assert len(running.engine.streams) == 2 + len(verdicts)  # no second order after a no
            (red,) = await running.usage()
            assert red["micros"] == 10 * sum(len(stream.request.prompt) for stream in running.engine.streams)


@asynchronous
async def test_another_chat_model_verifies_and_a_verdict_that_is_none_is_a_bounded_miss(tmp_path: Path) -> None:
    engine = FakeEngine()
    judge = ServedVariant(name="judge", engine=engine, tokenizer=tokenizer(), context=2048)
    async with remembering(tmp_path, judge=judge, verify="judge") as (running, _):
        await ready(running)
        running.engine.answer = words("In the settings.")
        engine.answer = words("Maybe")
        await running.chat(ON, key=RED)
        for _ in range(7):
            assert answered(await running.chat(SAME, key=RED))[0] is None
        assert len(engine.streams) == 5  # five failures in a row, and then it is skipped
        assert running.semantic("verifications", "failed") == 7
        assert running.semantic("outcomes", "unavailable") == 7


@asynchronous
async def test_a_verifier_that_is_too_late_is_cancelled_and_the_question_is_answered(tmp_path: Path) -> None:
    engine = FakeEngine()  # it says nothing
    judge = ServedVariant(name="judge", engine=engine, tokenizer=tokenizer(), context=2048)
    async with remembering(tmp_path, judge=judge, verify="judge", verify_wait_ms=20.0) as (running, _):
        await ready(running)
        running.engine.answer = words("In the settings.")
        await running.chat(ON, key=RED)
        late = await running.chat(SAME, key=RED)
        assert answered(late) == (None, "In the settings.")
        part = await verify_part(running, late)
        assert (part["outcome"], "score" in part) == ("unavailable", False)
        assert engine.dropped == engine.streams
        assert len(engine.streams) <= 1


def test_a_verifier_must_be_a_reranker_or_a_chat_model(tmp_path: Path) -> None:
    async def test() -> None:
        for options in ({"verify": "words"}, {"verify": "model", "serve": "prime"}):
            with pytest.raises(ConfigError, match=r"cache\.semantic\.verify"):
                async with remembering(tmp_path, **options):
                    pass

    asynchronous(test)()


def token(text: str, logprob: float, *top: tuple[str, float]) -> TokenLogprob:
    return TokenLogprob(text, text.encode(), logprob, [(each, each.encode(), at) for each, at in top])


def test_the_probability_of_yes_sums_its_spellings_and_leaves_other_words_out() -> None:
    likeliest = (("Yes", math.log(0.3)), (" yes", math.log(0.15)), ("No", math.log(0.05)), ("Well", math.log(0.4)))
    choice = Choice(0, "Yes", logprobs=[token("Yes", math.log(0.3), *likeliest)])
    assert probability_of_yes(choice) == pytest.approx(0.9)
    assert probability_of_yes(Choice(0, "No.")) == 0.0  # an upstream without log-probabilities
    for unclear in (Choice(0, "Well"), Choice(0, "Well", logprobs=[token("Well", -0.1, ("Hm", -3.0))])):
        with pytest.raises(ValueError, match="neither yes nor no"):
            probability_of_yes(unclear)
