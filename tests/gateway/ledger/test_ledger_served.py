"""Charges through the whole server: what clients were told they used is what is charged, whatever ends an answer."""

from __future__ import annotations

import asyncio
import json
import math
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from msgspec.structs import replace

from headrace.config import (
    CacheConfig,
    Config,
    ExactConfig,
    LedgerConfig,
    LimitSet,
    LogConfig,
    ModelConfig,
    PriceConfig,
    ServerConfig,
    StorageConfig,
)
from headrace.config.routing_section import CascadeConfig, RoutingConfig, RuleConditions, RuleConfig
from headrace.config.tenant_section import BudgetConfig, TenantConfig
from headrace.engine.interface.outputs import SequenceEnd, SequenceOutput, SequenceUsage
from headrace.engine.interface.request import FinishReason
from headrace.engine.interface.sampling import SampledToken
from headrace.engine.process.client_errors import OverloadedError
from headrace.engine.process.output_stream import OutputStream
from headrace.gateway.ledger.prices import Price
from headrace.gateway.output.tool_formats import TOOL_FORMATS
from headrace.observe import metrics
from headrace.server.server import Server
from tests.gateway.ledger import killed_servers as killing_server
from tests.support.limited_server import ADMIN, PATH, Serving, bearer, key, prompt_tokens, served, token
from tests.support.programs.postgres_server import serving as postgres_serving
from tests.support.programs.postgres_server import why_not
from tests.support.running_server import CHAT, Answer, Client, asynchronous, count, tokenizer, until

ROOT = Path(__file__).parents[3]
PROMPT = prompt_tokens()  # of edging's CHAT
# A micro for a token of a prompt, two for one of an answer; small costs a tenth.
PRICES = {"mini": PriceConfig(input=1.0, cached=0.25, output=2.0), "small": PriceConfig(input=0.1, output=0.2)}
SUM = Price(1_000_000, 250_000, 2_000_000).micros


def priced(*budgets: BudgetConfig, **options: Any) -> dict[str, Any]:
    tenants = {"acme": TenantConfig(budgets=budgets, fail=options.pop("fail", "open"), **options.pop("tenant", {}))}
    return {"prices": PRICES, "tenants": tenants, "keys": (key("acme"),), **options}


def budget(micros: int, **options: Any) -> BudgetConfig:
    return BudgetConfig(limit_micros=micros, period="day", **options)


async def row(running: Serving, tenant: str = "acme") -> dict[str, Any]:
    (found,) = [each for each in await running.usage() if each["tenant"] == tenant]
    return found


def totals(row: dict[str, Any]) -> tuple[int, int, int, int]:
    return row["requests"], row["input_tokens"], row["output_tokens"], row["micros"]


# What clients were told is what is charged


@asynchronous
async def test_the_export_is_the_sum_of_the_usages_that_clients_were_told(tmp_path: Path) -> None:
    """With the bundled model: every endpoint, streamed and whole, several choices, several prompts, a batch."""
    config = Config(
        server=ServerConfig(port=0),
        models={"mini": ModelConfig(options={"threads": 1})},
        log=LogConfig(requests=False),
        storage=StorageConfig(folder=str(tmp_path)),
        prices={"mini": PriceConfig(input=1.0, cached=0.25, output=2.0)},
        keys=(key("acme"), ADMIN),
    )
    server = Server(config)
    task = asyncio.create_task(server.run(signals=False))
    told = Counter[str]()

    async def ask(method: str, path: str, body: Any = None, name: str = "acme", **headers: str) -> Answer:
        client = Client(*await asyncio.open_connection("127.0.0.1", server.listening.getsockname()[1], limit=2**20))
        answer = await client.ask(method, path, body, **bearer(name), **headers)
        client.leave()
        return answer

    def note(path: str, usage: dict[str, Any], extras: dict[str, Any] | None = None) -> None:
        told[f"{path} micros"] += (extras or {}).get("cost_micros", 0)
        cached = usage.get("prompt_tokens_details", usage.get("input_tokens_details", {})).get("cached_tokens", 0)
        read = usage.get("cache_read_input_tokens", 0)
        prompt = usage.get("prompt_tokens", usage.get("input_tokens", 0)) + read
        output = usage.get("completion_tokens", usage.get("output_tokens", 0))
        told.update({f"{path} requests": 1, f"{path} input": prompt, f"{path} output": output})
        told[f"{path} cached"] += cached + read

    async def whole(path: str, **body: Any) -> None:
        answer = await ask("POST", path, body)
        assert answer.status == 200, answer.body
        note(path, answer.json["usage"], answer.json.get("headrace"))

    async def streamed(path: str, **body: Any) -> None:
        answer = await ask("POST", path, body | {"stream": True})
        assert answer.status == 200, answer.body
        found = [json.loads(line[6:]) for line in answer.body.decode().splitlines() if line.startswith("data: {")]
        if path == "/v1/responses":
            note(path, found[-1]["response"]["usage"], found[-1]["response"]["headrace"])
        elif path == "/v1/messages":
            note(path, found[-2]["usage"], found[-2].get("headrace"))
        else:
            note(path, found[-1]["usage"], found[-1]["headrace"])

    async def batch() -> None:
        lines = [
            {"custom_id": str(n), "method": "POST", "url": PATH, "body": {**CHAT, "max_tokens": 6}} for n in range(3)
        ]
        content = "\n".join(map(json.dumps, lines))
        form = (
            '--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
            'content-disposition: form-data; name="file"; filename="f.jsonl"\r\n\r\n' + content + "\r\n--b--\r\n"
        )
        file = await ask("POST", "/v1/files", form.encode(), content_type="multipart/form-data; boundary=b")
        asked = {"input_file_id": file.json["id"], "endpoint": PATH, "completion_window": "24h"}
        id = (await ask("POST", "/v1/batches", asked)).json["id"]
        while (found := (await ask("GET", f"/v1/batches/{id}")).json)["status"] != "completed":
            assert found["status"] in ("validating", "in_progress", "finalizing"), found
            await asyncio.sleep(0.02)
        output = await ask("GET", f"/v1/files/{found['output_file_id']}/content")
        for line in output.body.splitlines():
            body = json.loads(line)["response"]["body"]
            note(PATH, body["usage"], body["headrace"])

    try:
        await until(lambda: server.context.is_ready or task.done(), 200.0)
        usage = {"stream_options": {"include_usage": True}}
        chat = {**CHAT, "max_tokens": 8}
        await asyncio.gather(
            whole(PATH, **chat),
            whole(PATH, **chat, n=3, temperature=1.0),
            streamed(PATH, **chat, **usage),
            streamed(PATH, **chat, **usage, n=2, temperature=1.0),
            whole("/v1/completions", prompt=["One", "Two and three"], max_tokens=5),
            streamed("/v1/completions", prompt="Four", max_tokens=5, **usage),
            whole("/v1/messages", **chat),
            streamed("/v1/messages", **chat),
            whole("/v1/responses", input="Hello", max_output_tokens=16),
            streamed("/v1/responses", input="Hello", max_output_tokens=16),
            whole("/v1/embeddings", input=["one", "and two"]),
            whole("/v1/rerank", query="one", documents=["one", "two"]),
            whole("/v1/score", prompt="One", continuations=[" two", " three"]),
            batch(),
        )
        await whole(PATH, **{"messages": [{"role": "user", "content": "Hello " * 100}], "max_tokens": 4})
        await whole(PATH, **{"messages": [{"role": "user", "content": "Hello " * 100}], "max_tokens": 4})
        rows = (await ask("GET", "/admin/v1/usage?format=json&by=endpoint", name="root")).json["rows"]
        found = Counter[str]()
        for each in rows:
            path = each["endpoint"]
            found.update({f"{path} requests": each["requests"], f"{path} input": each["input_tokens"]})
            found.update({f"{path} output": each["output_tokens"], f"{path} cached": each["cached_tokens"]})
            if path in (PATH, "/v1/completions", "/v1/messages", "/v1/responses"):
                found[f"{path} micros"] = each["micros"]
        assert +found == +told
        assert told[f"{PATH} cached"] > 0
        csv = (await ask("GET", "/admin/v1/usage?by=tenant", name="root")).body.decode().splitlines()
        named = dict(zip(csv[0].split(","), csv[1].split(","), strict=True))
        inputs, cached, outputs = (int(named[name]) for name in ("input_tokens", "cached_tokens", "output_tokens"))
        # Every request is rounded for itself, by half a micro at most.
        assert abs(int(named["micros"]) - (inputs - cached + cached / 4 + 2 * outputs)) <= int(named["requests"]) / 2
    finally:
        server.end()
        await task


@asynchronous
async def test_every_end_of_an_answer_is_charged_once(tmp_path: Path) -> None:
    async with served(tmp_path, **priced(tenant={"limits": LimitSet(context=PROMPT + 200)})) as running:
        running.says(5)
        assert (await running.chat_as("acme")).status == 200
        assert (await running.counted("acme", n=2)).last["usage"]["completion_tokens"] == 10
        assert (await running.chat_as("acme", max_tokens="many")).status == 400
        running.engine.answer = lambda stream: stream.end(OverloadedError("busy", retry_after=1.0))
        assert (await running.chat_as("acme")).status == 503
        running.engine.answer = None
        leaving = asyncio.create_task(running.begin("acme"))
        await until(lambda: bool(running.engine.open))
        for _ in range(3):
            token(running.engine.open[0])
        client = await leaving
        while client.tokens < 3:
            await client.more()
        client.client.leave()
        await running.settled()
        broken = asyncio.create_task(running.counted("acme"))
        await until(lambda: bool(running.engine.open))
        token(running.engine.open[0])
        await asyncio.sleep(0.01)
        running.engine.open[0].end(RuntimeError("gone"))
        assert (await broken).answer.events[-1]["error"]["type"] == "server_error"
        await running.settled()
        failed = asyncio.create_task(running.chat_as("acme"))
        await until(lambda: bool(running.engine.open))
        token(running.engine.open[0])
        running.engine.open[0].end(RuntimeError("gone"))
        assert (await failed).status == 500  # nothing of it was sent, so it costs nothing
        await running.settled()
        found = await row(running)
        micros = SUM(PROMPT, 0, 5) + SUM(PROMPT, 0, 10) + SUM(PROMPT, 0, 3) + SUM(PROMPT, 0, 1)
        assert totals(found) == (4, 4 * PROMPT, 19, micros)


@asynchronous
async def test_a_hit_is_charged_its_share_and_so_is_who_joins(tmp_path: Path) -> None:
    prices = {"mini": PriceConfig(input=100.0, output=200.0, hit_percent=10)}
    options = priced(prices=prices, cache=CacheConfig(exact=ExactConfig(mode="on")))
    async with served(tmp_path, **options) as running:
        asked: dict[str, Any] = {"temperature": 0, "max_tokens": 20}
        joined = count(metrics.caches, "exact", "joined")
        asking = [asyncio.create_task(running.counted("acme", **asked)) for _ in range(3)]
        await until(lambda: bool(running.engine.open) and count(metrics.caches, "exact", "joined") == joined + 2)
        for number in range(5):
            token(running.engine.open[0], end=number == 4)
        found = await asyncio.gather(*asking)
        await running.settled()
        found.append(await running.counted("acme", **asked))
        assert len(running.engine.streams) == 1
        assert {each.last["usage"]["completion_tokens"] for each in found} == {5}
        whole = (100 * PROMPT + 200 * 5) * 1
        exported = await row(running)
        assert totals(exported) == (4, 4 * PROMPT, 4 * 5, whole + 3 * whole // 10)
        assert sum(each.last["headrace"]["cost_micros"] for each in found) == exported["micros"]
        assert exported["saved"]["exact"] == {"requests": 1, "micros": whole - whole // 10}
        assert exported["saved"]["shared"] == {"requests": 2, "micros": 2 * (whole - whole // 10)}


def sure(probability: float) -> Callable[[OutputStream], None]:
    """Answers of three tokens, as sure as that where the log-probabilities are wanted."""

    id, logprob = tokenizer().encode("w", add_special_tokens=False)[0], math.log(probability)

    def answer(stream: OutputStream) -> None:
        for number in range(3):
            usage = SequenceUsage(len(stream.request.prompt), number + 1, 0, 0, 0, 0.0, 0.001, 0.002)
            wanted = stream.request.sampling.logprobs is not None
            chosen = [SampledToken(id, logprob, ((id, logprob),))] if wanted else None
            ending = SequenceEnd(FinishReason.STOP, usage) if number == 2 else None
            stream.push(SequenceOutput("", 0, [id], tokenizer().decode([id]), chosen=chosen, ending=ending))

    return answer


@asynchronous
async def test_a_cascade_is_charged_by_variant_and_counts_as_one_request(tmp_path: Path) -> None:
    routing = RoutingConfig(
        rules=(RuleConfig(name="all", when=RuleConditions(), cascade="up"),),
        cascades={"up": CascadeConfig(small="small", large="mini", threshold=0.5)},
    )
    async with served(tmp_path, "small", **priced(routing=routing)) as running:
        running.engines["small"].answer = sure(0.9)
        running.says(5)
        taken = await running.counted("acme")
        running.engines["small"].answer = sure(0.1)
        escalated = await running.counted("acme")
        usages = [each.last["usage"] for each in (taken, escalated)]
        assert [(each["prompt_tokens"], each["completion_tokens"]) for each in usages] == [
            (PROMPT, 3),
            (2 * PROMPT, 3 + 5),
        ]
        rows = {each["variant"]: each for each in await running.usage("variant")}
        assert (rows["small"]["requests"], rows["mini"]["requests"]) == (1, 1)
        assert (rows["small"]["input_tokens"], rows["small"]["output_tokens"]) == (2 * PROMPT, 6)
        assert (rows["mini"]["input_tokens"], rows["mini"]["output_tokens"]) == (PROMPT, 5)
        assert rows["mini"]["micros"] == SUM(PROMPT, 0, 5)
        costs = [each.last["headrace"]["cost_micros"] for each in (taken, escalated)]
        assert sum(costs) == rows["small"]["micros"] + rows["mini"]["micros"]
        assert costs[1] > costs[0]


@asynchronous
async def test_a_cascade_that_meets_a_limit_tells_what_is_charged(tmp_path: Path) -> None:
    routing = RoutingConfig(
        rules=(RuleConfig(name="all", when=RuleConditions(), cascade="up"),),
        cascades={"up": CascadeConfig(small="small", large="mini", threshold=0.5)},
    )
    tenant = {"limits": LimitSet(output_tokens_per_min=4)}
    async with served(tmp_path, "small", **priced(routing=routing, tenant=tenant)) as running:
        running.engines["small"].answer = sure(0.1)
        running.says(50)
        found = await running.counted("acme")
        assert (found.tokens, found.finish, found.last["headrace"]["cut"]) == (4, "length", "limit")
        told = found.last["usage"]
        assert (told["prompt_tokens"], told["completion_tokens"]) == (2 * PROMPT, 3 + 4)
        charged = await row(running)
        assert totals(charged)[:3] == (1, 2 * PROMPT, 3 + 4)
        assert found.last["headrace"]["cost_micros"] == charged["micros"]


# Budgets


@asynchronous
async def test_at_the_end_of_a_budget_openais_client_and_anthropics_are_told_in_their_own_words(tmp_path: Path) -> None:
    async with served(tmp_path, **priced(budget(SUM(PROMPT, 0, 10)))) as running:
        running.says(10)
        assert (await running.chat_as("acme", max_tokens=10)).status == 200
        refused = await running.chat_as("acme", max_tokens=10)
        assert refused.status == 429
        assert refused.error == {
            "message": refused.error["message"],
            "type": "insufficient_quota",
            "param": None,
            "code": "insufficient_quota",
        }
        assert "The daily budget has no room for this request" in refused.error["message"]
        assert refused.headers["x-should-retry"] == "false"
        assert 0 < int(refused.headers["retry-after"]) <= 86_400
        before = count(metrics.ledger, "refused_budget")
        async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="key-of-acme", max_retries=3) as client:
            with pytest.raises(openai.RateLimitError) as raised:
                await client.chat.completions.create(model="mini", messages=CHAT["messages"], max_tokens=10)  # type: ignore
        assert (raised.value.code, raised.value.type) == ("insufficient_quota", "insufficient_quota")
        async with anthropic.AsyncAnthropic(base_url=running.url, api_key="key-of-acme", max_retries=3) as client:
            with pytest.raises(anthropic.RateLimitError) as refusal:
                await client.messages.create(model="mini", messages=CHAT["messages"], max_tokens=10)  # type: ignore
        body: Any = refusal.value.body
        assert body["error"]["type"] == "rate_limit_error"
        assert count(metrics.ledger, "refused_budget") == before + 2  # neither asked again by itself
        assert totals(await row(running)) == (1, PROMPT, 10, SUM(PROMPT, 0, 10))


@asynchronous
async def test_at_the_end_of_a_budget_another_variant_answers_and_under_its_own_limits(tmp_path: Path) -> None:
    end = SUM(PROMPT, 0, 10)
    models = {"mini": ModelConfig(), "small": ModelConfig(limits=LimitSet(requests_per_min=2))}
    options = priced(budget(end, then="small", allowance_micros=9), models=models)
    async with served(tmp_path, "small", **options) as running:
        running.says(10)
        running.says(10, "small")
        assert (await running.chat_as("acme", max_tokens=10)).json["model"] == "mini"
        for _ in range(2):
            fell = await running.chat_as("acme", max_tokens=10)
            assert fell.json["model"] == "small"
            assert "budget=mini>small" in fell.headers["x-headrace-shaped"].replace(" ", ""), fell.headers
        assert (await running.chat_as("acme", max_tokens=10)).error["code"] == "model_requests_per_min"
        running.clock.millis += 60_001
        assert (await running.chat_as("acme", max_tokens=10)).json["model"] == "small"
        refused = await running.chat_as("acme", max_tokens=10)
        assert refused.error["code"] == "insufficient_quota"
        rows = {each["variant"]: each for each in await running.usage("variant")}
        assert (rows["small"]["requests"], rows["small"]["micros"]) == (3, 3 * 3)
        assert (rows["mini"]["requests"], rows["mini"]["micros"]) == (1, end)


@asynchronous
async def test_a_variant_that_cannot_take_the_request_does_not_stand_in_for_another(tmp_path: Path) -> None:
    models = {"mini": ModelConfig(), "small": ModelConfig()}
    options = priced(budget(SUM(PROMPT, 0, 10), then="small", allowance_micros=99), models=models)
    async with served(tmp_path, "small", **options) as running:
        running.says(10)
        running.server.fleet.served["mini"].tools = TOOL_FORMATS["hermes"]
        assert (await running.chat_as("acme", max_tokens=10)).status == 200
        tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
        refused = await running.chat_as("acme", max_tokens=10, tools=tools)
        assert (refused.status, refused.error["code"]) == (429, "insufficient_quota")


@asynchronous
async def test_a_budget_that_ends_while_an_answer_runs_ends_the_answer(tmp_path: Path) -> None:
    limit = SUM(PROMPT, 0, 60)
    async with served(tmp_path, **priced(budget(limit))) as running:
        for _ in range(30):
            running.server.services.limiter.estimates.learn("acme", "chat", 8, 1_000_000)
        running.says(500)
        found = await running.counted("acme", max_tokens=1000)
        assert (found.finish, found.last["headrace"]["cut"]) == ("length", "budget")
        told = found.last["usage"]["completion_tokens"]
        assert told == found.tokens
        assert 60 - 16 <= told <= 60
        assert totals(await row(running)) == (1, PROMPT, told, SUM(PROMPT, 0, told))


@asynchronous
async def test_a_thousand_answers_at_once_spend_no_budget_twice(tmp_path: Path) -> None:
    limit = 100 * SUM(PROMPT, 0, 8)
    async with served(tmp_path, **priced(budget(limit))) as running:
        running.says(6)
        found = await asyncio.gather(*(running.counted("acme", max_tokens=8) for _ in range(1000)))
        codes = Counter(200 if each.status == 200 else each.answer.error["code"] for each in found)
        told = [each.last["usage"] for each in found if each.status == 200]
        spent = sum(SUM(each["prompt_tokens"], 0, each["completion_tokens"]) for each in told)
        assert spent <= limit
        assert set(codes) <= {200, "budget_held", "insufficient_quota"}
        await running.settled()
        more = 0
        while (await running.chat_as("acme", max_tokens=8)).status == 200:  # what was held is there again
            more += 1
        assert totals(await row(running)) == (
            len(told) + more,
            *((len(told) + more) * each for each in (PROMPT, 6, SUM(PROMPT, 0, 6))),
        )
        assert limit - SUM(PROMPT, 0, 8) < spent + more * SUM(PROMPT, 0, 6) <= limit


@asynchronous
async def test_a_clock_that_jumps_back_finds_the_budget_of_that_day_spent(tmp_path: Path) -> None:
    async with served(tmp_path, **priced(budget(SUM(PROMPT, 0, 10)))) as running:
        running.says(10)
        now = 1_763_812_800.0  # 2025-11-22 12:00 UTC
        running.ledger._clock = lambda: now
        assert (await running.chat_as("acme", max_tokens=10)).status == 200
        refused = await running.chat_as("acme", max_tokens=10)
        assert refused.headers["retry-after"] == str(12 * 3600)
        now += 86_400.0
        assert (await running.chat_as("acme", max_tokens=10)).status == 200
        now -= 86_400.0
        assert (await running.chat_as("acme", max_tokens=10)).error["code"] == "insufficient_quota"
        days = {each["day"]: each["micros"] for each in await running.usage("day")}
        assert days == {"2025-11-22": SUM(PROMPT, 0, 10), "2025-11-23": SUM(PROMPT, 0, 10)}


# Stores that die


@asynchronous
async def test_with_a_full_disk_open_tenants_are_served_and_charged_later_and_closed_ones_wait(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "prices": PRICES,
        "tenants": {"acme": TenantConfig(), "shut": TenantConfig(budget_fail="closed")},
        "keys": (key("acme"), key("shut", "shut")),
        "ledger": LedgerConfig(wait_ms=20.0, gather_ms=1.0),
    }
    async with served(tmp_path, **options) as running:
        running.says(3)
        assert (await running.chat_as("shut")).status == 200
        await running.ledger.flush()
        database = running.server.database
        database._limit_bytes = await database.run(_grows_no_more)  # pyright: ignore[reportPrivateUsage]
        for _ in range(80):  # some of them find room in the file's own pages
            assert (await running.chat_as("acme")).status == 200
        await until(lambda: running.ledger.statistics().behind_s > 0.05)
        refused = await running.chat_as("shut")
        assert (refused.status, refused.error["code"]) == (503, "ledger_unavailable")
        assert refused.headers["retry-after"] == "1"
        assert running.ledger.statistics().waiting > 10
        running.ledger._bounds = replace(running.ledger._bounds, drain_s=0.1)  # nobody mends the disk meanwhile
    async with served(tmp_path, **options) as running:  # the disk has room again
        rows = {each["tenant"]: totals(each)[:3] for each in await running.usage()}
        assert rows == {"acme": (80, 80 * PROMPT, 240), "shut": (1, PROMPT, 3)}


def _grows_no_more(connection: sqlite3.Connection) -> int:
    """The file's bytes, which are as many as it may have from now on."""
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    (size,) = connection.execute("PRAGMA page_size").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}")
    return pages * size


@pytest.mark.skipif(why_not() is not None, reason=f"there is no Postgres server: {why_not()}")
@asynchronous
async def test_with_a_frozen_postgres_what_is_leased_is_served_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("asyncpg")
    budgets = (budget(10**9),)
    options: dict[str, Any] = {
        "prices": PRICES,
        "tenants": {
            "acme": TenantConfig(budgets=budgets),
            "shut": TenantConfig(budgets=budgets, budget_fail="closed"),
            "free": TenantConfig(budgets=budgets, budget_fail="open"),
        },
        "keys": (key("acme"), key("shut", "shut"), key("free", "free")),
        "ledger": LedgerConfig(store="postgres", dsn_env="LEDGER_DSN", wait_ms=1_000.0),
    }
    with postgres_serving() as postgres:
        monkeypatch.setenv("LEDGER_DSN", postgres.dsn)
        async with served(tmp_path, **options) as running:
            running.says(3)
            for tenant in ("acme", "shut"):
                assert (await running.chat_as(tenant, max_tokens=5)).status == 200
            await running.ledger.flush()
            unchecked = count(metrics.ledger, "unchecked")
            with postgres.frozen():
                found = await asyncio.gather(*(running.counted("acme", max_tokens=5) for _ in range(20)))
                assert {each.status for each in found} == {200}
                assert count(metrics.ledger, "unchecked") == unchecked
                await until(lambda: running.ledger.statistics().down)
                refused = await running.chat_as("shut", max_tokens=5)
                assert (refused.status, refused.error["code"]) == (503, "ledger_unavailable")
            await running.ledger.flush()
            rows = {each["tenant"]: totals(each)[:3] for each in await running.usage()}
            assert rows == {"acme": (21, 21 * PROMPT, 63), "shut": (1, PROMPT, 3)}
    monkeypatch.setenv("LEDGER_DSN", "postgresql://tests@127.0.0.1:1/postgres")
    async with served(tmp_path / "other", **options) as running:  # it is not there at all
        running.says(3)
        assert (await running.chat_as("free", max_tokens=5)).status == 200
        for tenant in ("acme", "shut"):
            assert (await running.chat_as(tenant, max_tokens=5)).error["code"] == "ledger_unavailable"


# Servers that are killed


@asynchronous
async def test_a_server_killed_at_any_point_loses_no_charge_and_doubles_none(tmp_path: Path) -> None:
    rounds = 12
    command = [sys.executable, "-m", "tests.gateway.ledger.killed_servers", str(tmp_path), str(rounds), "11"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr
    seen: list[dict[str, Any]] = json.loads(run.stdout)
    ended = [each for each in seen if each["usage"] is not None]
    cut = [each for each in seen if each["usage"] is None and each["id"] is not None]
    assert len(ended) > rounds, "they were killed before they could do anything"
    assert len(cut) > rounds
    exported: dict[str, Any] = {}
    for _ in range(2):  # a further start changes nothing
        async with served(tmp_path, **killing_server.sections()) as running:
            exported = await row(running)
    with closing(sqlite3.connect(tmp_path / "headrace.sqlite")) as connection:
        found = connection.execute(
            "SELECT id, ended, prompt_tokens, cached_tokens, output_tokens, micros FROM ledger_charges"
        ).fetchall()
        charges = {id: each for id, *each in found}
        spent = connection.execute("SELECT SUM(spent) FROM ledger_periods WHERE endpoint = ''").fetchall()
    for each in ended:
        usage = each["usage"]
        prompt, output = usage["prompt_tokens"], usage["completion_tokens"]
        assert output == each["tokens"]
        charge = charges.pop(each["id"].removeprefix("chatcmpl-"))
        assert charge == ["finished", prompt, killing_server.CACHED, output, SUM(prompt, killing_server.CACHED, output)]
    for each in cut:
        how, prompt, cached, output, micros = charges.pop(each["id"].removeprefix("chatcmpl-"))
        choices = 2 if each["kind"] == "both" else 1
        assert how in ("crashed", "finished")
        if how == "crashed":  # no more than was sent, and all but what was sent in the last turns of the loop
            assert each["tokens"] - 4 * choices <= output <= each["tokens"], (each, output)
        assert prompt == (PROMPT if output else 0)
        assert micros == (SUM(prompt, cached, output) if output else 0)
    # The others are of clients that had heard nothing before the server died: only answers that had ended cost
    # anything.
    assert len(charges) <= sum(each["id"] is None for each in seen)
    assert all(micros == 0 for how, *_, micros in charges.values() if how == "crashed")
    assert sum(how == "crashed" for how, *_ in charges.values()) > 0
    total = sum(each[5] for each in found)
    assert (exported["requests"], exported["micros"]) == (len(found), total)
    assert spent == [(2 * total,)]  # in the day and in the month
