"""Limits through the whole server: what a thousand clients get together, and what one of them is told."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import pytest

from headrace.config import LimitingConfig, LimitSet, ModelConfig
from headrace.config.tenant_section import TenantConfig
from headrace.engine.process.client_errors import OverloadedError
from headrace.gateway.limits.rate_limiter import RateLimiter
from headrace.observe import metrics
from headrace.server.server import Server
from tests.support.limited_server import PATH, Counted, Serving, bearer, key, prompt_tokens, served, token
from tests.support.programs.redis_server import MISSING, PROGRAM, redis_server
from tests.support.running_server import CHAT, asynchronous, count, request, until

MANY = 1000
PROMPT = prompt_tokens()  # of edging's CHAT


def limited(**limits: Any) -> dict[str, Any]:
    """One tenant with these limits."""
    return {"tenants": {"acme": TenantConfig(limits=LimitSet(**limits))}, "keys": (key("acme"),)}


async def at_once(running: Serving, number: int, **changes: Any) -> list[Counted]:
    """So many streams together, on a connection each, while time stands still."""
    return list(await asyncio.gather(*(running.counted("acme", **changes) for _ in range(number))))


def codes(answers: list[Counted]) -> Counter[Any]:
    return Counter(200 if each.status == 200 else each.answer.error["code"] for each in answers)


# A thousand at once


@asynchronous
async def test_a_thousand_streams_get_no_token_more_than_the_limit(tmp_path: Path) -> None:
    limit = 10_000
    chance = random.Random(1)
    async with served(tmp_path, **limited(output_tokens_per_min=limit)) as running:
        for _ in range(30):  # answers were short so far, so all are let in; these are longer
            running.server.services.limiter.estimates.learn("acme", "chat", 8, 1_000_000)
        asking = [asyncio.create_task(running.counted("acme")) for _ in range(MANY)]
        await until(lambda: len(running.engine.streams) == MANY)
        running.clock.is_frozen = True
        for stream in running.engine.streams:
            running.talk(stream, chance.randrange(1, 30), at_once=3)
        found = await asyncio.gather(*asking)
        assert codes(found) == {200: MANY}
        usages = [each.last["usage"]["completion_tokens"] for each in found]
        assert usages == [each.tokens for each in found]
        assert sum(usages) == limit
        ends = Counter((each.finish, each.last["headrace"].get("cut")) for each in found)
        assert set(ends) == {("stop", None), ("length", "limit")}
        assert ends["length", "limit"] > 100
        await running.settled()
        refused = await running.chat_as("acme")
        assert (refused.status, refused.error["code"]) == (429, "tenant_output_tokens_per_min")
        running.clock.millis += 60_000
        running.says(1)
        assert codes(await at_once(running, 50)) == {200: 50}


@asynchronous
async def test_what_is_held_for_a_thousand_answers_is_free_as_soon_as_they_are_shorter(tmp_path: Path) -> None:
    some = 400
    async with served(tmp_path, **limited(output_tokens_per_min=some * 40)) as running:
        running.says(3)
        first = await at_once(running, some, max_tokens=40)
        assert codes(first) == {200: some}
        await running.settled()
        # 3 of 40 were used by each: what is left is there for others at once.
        left = some * 40 - some * 3
        head = (await running.chat_as("acme", max_tokens=1)).headers
        assert int(head["x-ratelimit-remaining-tokens"]) == left - 1
        running.says(1)
        assert codes(await at_once(running, 200, max_tokens=40)) == {200: 200}


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        ({"requests_per_min": 300}, "tenant_requests_per_min"),
        ({"input_tokens_per_min": 300 * PROMPT + PROMPT - 1}, "tenant_input_tokens_per_min"),
    ],
)
@asynchronous
async def test_of_a_thousand_requests_as_many_are_let_in_as_the_limit_says(
    tmp_path: Path, limits: dict[str, int], code: str
) -> None:
    async with served(tmp_path, **limited(**limits)) as running:
        running.says(2)
        found = await at_once(running, MANY)
        assert codes(found) == {200: 300, code: MANY - 300}
        assert {each.last["usage"]["prompt_tokens"] for each in found if each.status == 200} == {PROMPT}
        assert {each.headers["retry-after-ms"] for each in found if each.status == 429} == {"60000"}
        running.clock.millis += 59_999
        assert (await running.chat_as("acme")).status == 429
        running.clock.millis += 1
        assert codes(await at_once(running, 301)) == {200: 300, code: 1}


@asynchronous
async def test_of_a_thousand_requests_no_more_run_at_once_than_the_limit_says(tmp_path: Path) -> None:
    async with served(tmp_path, **limited(concurrent=100)) as running:
        asking = [asyncio.create_task(running.counted("acme")) for _ in range(MANY)]
        await until(lambda: sum(each.done() for each in asking) == MANY - 100)
        assert len(running.engine.open) == 100
        for stream in list(running.engine.open):
            token(stream, end=True)
        found = list(await asyncio.gather(*asking))
        assert codes(found) == {200: 100, "tenant_concurrent": MANY - 100}
        await running.settled()
        running.says(1)
        assert codes(await at_once(running, 100)) == {200: 100}


# What one client is told


@pytest.mark.parametrize(
    "limits",
    [
        {"requests_per_s": 3},
        {"requests_per_min": 3},
        {"input_tokens_per_min": 3 * PROMPT},
        {"output_tokens_per_s": 30},
        {"output_tokens_per_min": 30},
    ],
)
@asynchronous
async def test_at_the_time_that_a_429_names_the_request_is_let_in_and_a_millisecond_earlier_it_is_not(
    tmp_path: Path, limits: dict[str, int]
) -> None:
    async with served(tmp_path, **limited(**limits)) as running:
        running.says(10)
        for _ in range(3):
            assert (await running.chat_as("acme", max_tokens=10)).status == 200
            running.clock.millis += 57
        (name,) = limits
        span = 1000 if name.endswith("_s") else 60_000
        refused = await running.chat_as("acme", max_tokens=10)
        assert (refused.status, refused.error["type"], refused.error["code"]) == (
            429,
            "rate_limit_error",
            f"tenant_{name}",
        )
        assert refused.headers["retry-after-ms"] == str(span - 3 * 57)
        assert refused.headers["retry-after"] == ("1" if span == 1000 else "60")
        what = "requests" if name.startswith("requests") else "tokens"
        assert refused.headers[f"x-ratelimit-limit-{what}"] == str(limits[name])
        assert refused.headers[f"x-ratelimit-remaining-{what}"] == "0"
        assert f"Retry in {(span - 3 * 57) / 1000:g} s" in refused.error["message"]
        running.clock.millis += span - 3 * 57 - 1
        assert (await running.chat_as("acme", max_tokens=10)).status == 429
        running.clock.millis += 1
        assert (await running.chat_as("acme", max_tokens=10)).status == 200


@asynchronous
async def test_an_answer_says_how_far_its_limits_are_used(tmp_path: Path) -> None:
    limits = {"requests_per_min": 50, "requests_per_s": 20, "output_tokens_per_min": 1000}
    async with served(tmp_path, **limited(**limits)) as running:
        running.says(2)
        for answer in (await running.chat_as("acme", max_tokens=10), await running.counted("acme", max_tokens=10)):
            assert answer.headers["x-ratelimit-limit-requests"] == "20"
            assert answer.headers["x-ratelimit-limit-tokens"] == "1000"
        assert answer.headers["x-ratelimit-remaining-requests"] == "18"
        assert answer.headers["x-ratelimit-reset-requests"] == "1s"
        assert answer.headers["x-ratelimit-remaining-tokens"] == "988"  # 2 are used, 10 are held
        assert answer.headers["x-ratelimit-reset-tokens"] == "1m0s"
        root = await running.chat_as("root")
        assert not [name for name in root.headers if name.startswith("x-ratelimit")]


@asynchronous
async def test_what_never_fits_is_not_to_be_asked_again(tmp_path: Path) -> None:
    async with served(tmp_path, **limited(input_tokens_per_min=PROMPT - 1)) as running:
        refused = await running.chat_as("acme")
        assert (refused.status, refused.error["code"]) == (429, "tenant_input_tokens_per_min")
        assert refused.headers["x-should-retry"] == "false"
        assert "retry-after" not in refused.headers
    async with served(tmp_path, **limited(context=PROMPT)) as running:
        refused = await running.chat_as("acme")
        assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
    async with served(tmp_path, **limited(context=PROMPT + 4)) as running:
        running.says(2)
        assert (await running.chat_as("acme", n=2)).status == 200
        assert running.engine.streams[0].request.max_tokens == 2  # of each answer


@asynchronous
async def test_keys_models_and_surfaces_have_limits_of_their_own(tmp_path: Path) -> None:
    keys = (key("one", limits=LimitSet(requests_per_min=2)), key("two"), key("other", "other"))
    tenants = {
        "acme": TenantConfig(model_limits={"small": LimitSet(requests_per_min=1)}),
        "other": TenantConfig(surface_limits={"voice": LimitSet(requests_per_min=1)}),
    }
    models = {"mini": ModelConfig(limits=LimitSet(requests_per_min=5)), "small": ModelConfig()}
    async with served(tmp_path, "small", keys=keys, tenants=tenants, models=models) as running:
        running.says(1)
        running.says(1, "small")

        async def refused(name: str, **changes: Any) -> str | None:
            answer = await running.chat_as(name, **changes)
            return None if answer.status == 200 else answer.error["code"]

        assert [await refused("one") for _ in range(3)] == [None, None, "key_requests_per_min"]
        assert [await refused("two", model="small") for _ in range(2)] == [None, "model_requests_per_min"]
        assert await refused("other", model="small") is None
        assert [await refused("other", surface="voice") for _ in range(2)] == [None, "surface_requests_per_min"]
        assert [await refused("two") for _ in range(3)] == [None, None, "model_requests_per_min"]  # 5 of mini together


# Answers that meet a limit on their way


@asynchronous
async def test_a_stream_that_meets_a_limit_a_second_waits_and_goes_on(tmp_path: Path) -> None:
    async with served(tmp_path, **limited(output_tokens_per_s=20)) as running:
        running.says(50)
        asking = asyncio.create_task(running.counted("acme"))
        for seconds in range(1, 3):
            await until(lambda: running.clock.sleeping == 1 and not running.talks)
            assert running.server.services.limiter._local._usages["tenant", "acme"].windows[0][1].used == 20
            running.clock.millis += 1000 if seconds == 1 else 1001
        found = await asking
        assert (found.tokens, found.finish) == (50, "stop")
        assert found.last["usage"]["completion_tokens"] == 50
        assert "cut" not in found.last["headrace"]


@asynchronous
async def test_a_stream_that_meets_a_limit_a_minute_ends_as_though_at_its_length(tmp_path: Path) -> None:
    async with served(tmp_path, **limited(output_tokens_per_min=20)) as running:
        running.says(50)
        found = await running.counted("acme")
        assert (found.tokens, found.finish) == (20, "length")
        assert found.last["usage"] == found.last["usage"] | {"prompt_tokens": PROMPT, "completion_tokens": 20}
        assert found.last["headrace"]["cut"] == "limit"
        await until(lambda: not running.engine.open)  # and the engine computes no more of it


@pytest.mark.parametrize(
    ("path", "body", "ended"),
    [
        (PATH, CHAT, '"finish_reason":"length"'),
        (PATH, CHAT | {"n": 2}, '"finish_reason":"length"'),
        ("/v1/completions", {"prompt": "Hello"}, '"finish_reason":"length"'),
        ("/v1/messages", CHAT | {"max_tokens": 100}, '"stop_reason":"max_tokens"'),
        ("/v1/responses", {"input": "Hello"}, '"incomplete_details":{"reason":"max_output_tokens"}'),
    ],
)
@asynchronous
async def test_every_dialect_says_that_an_answer_was_cut(tmp_path: Path, path: str, body: Any, ended: str) -> None:
    async with served(tmp_path, **limited(output_tokens_per_min=20)) as running:
        running.says(50)
        answer = await running.ask("POST", path, body, **bearer("acme"))
        assert answer.status == 200, answer.body
        assert ended in answer.body.decode()
        assert answer.json["headrace"]["cut"] == "limit"
        usage = answer.json["usage"]
        assert usage.get("completion_tokens", usage.get("output_tokens")) == 20


@asynchronous
async def test_a_client_that_leaves_while_its_answer_waits_gives_back_its_place_at_once(tmp_path: Path) -> None:
    async with served(tmp_path, **limited(output_tokens_per_s=20, concurrent=1)) as running:
        running.says(50)
        client = await running.client()
        await client.send(request("POST", PATH, CHAT | {"stream": True}, **bearer("acme")))
        await until(lambda: running.clock.sleeping == 1)
        assert (await running.chat_as("acme")).error["code"] == "tenant_concurrent"
        client.leave()
        await until(lambda: running.server.context.running == 0)
        assert not running.engine.open
        running.clock.millis += 1000
        running.says(1)
        assert (await running.chat_as("acme", max_tokens=1)).status == 200


@asynchronous
async def test_a_client_that_leaves_uses_what_was_let_out_and_no_more(tmp_path: Path) -> None:
    async with served(tmp_path, **limited(output_tokens_per_min=600)) as running:
        asking = asyncio.create_task(running.begin("acme"))
        await until(lambda: bool(running.engine.open))
        for _ in range(7):
            token(running.engine.open[0])
        found = await asking
        while found.tokens < 7:
            await found.more()
        found.client.leave()
        await running.settled()
        running.says(1)
        head = (await running.chat_as("acme", max_tokens=1)).headers
        assert head["x-ratelimit-remaining-tokens"] == str(600 - 7 - 1)


@asynchronous
async def test_what_an_engine_refuses_counts_for_nothing(tmp_path: Path) -> None:
    async with served(tmp_path, **limited(requests_per_min=1, input_tokens_per_min=PROMPT)) as running:
        running.engine.answer = lambda stream: stream.end(OverloadedError("busy", retry_after=1.0))
        for _ in range(3):
            assert (await running.chat_as("acme")).error["code"] == "overloaded"
        running.says(1)
        assert (await running.chat_as("acme")).status == 200


# The official client


@asynchronous
async def test_the_openai_client_waits_as_long_as_it_is_told_and_is_let_in(tmp_path: Path) -> None:
    def real_time(server: Server) -> None:
        server.services.limiter = RateLimiter(note=server.services.limiter.note)

    async with served(tmp_path, prepare=real_time, **limited(requests_per_s=1)) as running:
        running.says(1)
        async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="key-of-acme", max_retries=1) as client:
            for _ in range(2):
                answer = await client.chat.completions.create(model="mini", messages=CHAT["messages"])  # type: ignore
                assert answer.choices[0].finish_reason == "stop"
            assert count(metrics.limits, "refused", "tenant_requests_per_s") >= 1
            once = client.with_options(max_retries=0)
            with pytest.raises(openai.RateLimitError) as raised:
                await once.chat.completions.create(model="mini", messages=CHAT["messages"])  # type: ignore
        assert raised.value.code == "tenant_requests_per_s"
        assert raised.value.type == "rate_limit_error"
        assert 0 < int(raised.value.response.headers["retry-after-ms"]) <= 1000


# Several gateways, and a Redis that dies


@pytest.mark.skipif(PROGRAM is None, reason=MISSING)
@asynchronous
async def test_two_gateways_hold_a_limit_together_and_each_its_own_when_redis_is_frozen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("redis")
    tenants = {
        "acme": TenantConfig(limits=LimitSet(requests_per_min=50, output_tokens_per_min=400)),
        "shut": TenantConfig(limits=LimitSet(requests_per_min=50), fail="closed"),
    }
    options: dict[str, Any] = {
        "tenants": tenants,
        "keys": (key("acme"), key("shut", "shut")),
        "limiting": LimitingConfig(redis_env="LIMITS_URL", wait_ms=400.0),
    }
    with redis_server(tmp_path) as redis:
        monkeypatch.setenv("LIMITS_URL", redis.url)
        async with served(tmp_path / "one", **options) as one, served(tmp_path / "two", **options) as two:
            for each in (one, two):
                each.says(20)
            found = [
                *await asyncio.gather(*(each.counted("acme", max_tokens=20) for _ in range(60) for each in (one, two)))
            ]
            total = sum(each.tokens for each in found if each.status == 200)
            assert total <= 400
            assert sum(each.status == 200 for each in found) <= 50
            assert total == sum(each.last["usage"]["completion_tokens"] for each in found if each.status == 200)
            assert total > 300
            gone = count(metrics.limits, "gone", "timeout")
            os.kill(redis.process.pid, signal.SIGSTOP)
            try:
                refused = await one.chat_as("shut")
                assert (refused.status, refused.error["code"]) == (503, "limits_unavailable")
                assert int(refused.headers["retry-after"]) >= 1
                assert count(metrics.limits, "gone", "timeout") == gone + 1
                # Each counts for itself now, and begins with nothing.
                alone = await asyncio.gather(*(two.counted("acme", max_tokens=20) for _ in range(60)))
                assert sum(each.tokens for each in alone if each.status == 200) <= 400
                assert any(each.status == 200 for each in alone)
            finally:
                os.kill(redis.process.pid, signal.SIGCONT)
