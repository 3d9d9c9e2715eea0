"""Two processes behind one port: what they share, what one leaves when it is killed, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from msgspec.structs import replace

from headrace.config import (
    AdminConfig,
    BudgetConfig,
    Config,
    KeyConfig,
    LimitSet,
    LogConfig,
    ModelConfig,
    PriceConfig,
    ServerConfig,
    StorageConfig,
    TenantConfig,
)
from headrace.config.routing_section import GoldenConfig, RoutingConfig
from headrace.server.server import Server
from tests.support import fake_upstream
from tests.support.fake_upstream import Line, chunk, faking, sse, used
from tests.support.running_server import Answer, Client, asynchronous, request, until

ADMIN = "sk-" + "a" * 40
USER = "sk-" + "b" * 40
CONNECTIONS = 24  # the chance that all are of one process is 1 in 8 million


@contextlib.asynccontextmanager
async def serving(
    folder: Path, finish: asyncio.Event, *, routing: RoutingConfig | None = None, **tenant: Any
) -> AsyncGenerator[Server]:
    """A server of two processes before an upstream whose streams wait for `finish` after two words."""

    async def answer(line: Line) -> None:
        await line.head()
        if line.heard.json["model"] == "better":
            text = [chunk('{"a": 1}'), chunk(finish="stop"), used(prompt_tokens=10, completion_tokens=5)]
            await line.say(sse(chunk(delta={"role": "assistant", "content": ""}), *text))
            return
        await line.say(sse(chunk(delta={"role": "assistant", "content": ""}), chunk("one "), chunk("two "), done=False))
        if line.heard.json.get("max_tokens") != 3:
            await finish.wait()
        await line.say(sse(chunk("three"), chunk(finish="stop"), used(prompt_tokens=10, completion_tokens=3)))

    async with faking(answer) as fake:
        upstream = fake_upstream.config(fake, tokenizer="mini")
        config = Config(
            server=ServerConfig(port=0, processes=2, drain_s=60.0),
            models={"fake": ModelConfig(upstream=upstream, upstreams={"golden": replace(upstream, model="better")})},
            routing=routing or RoutingConfig(),
            storage=StorageConfig(folder=str(folder)),
            log=LogConfig(level="warning"),
            keys=(KeyConfig(name="admin", key=ADMIN, admin="write"), KeyConfig(name="user", key=USER, tenant="acme")),
            tenants={"acme": TenantConfig(**tenant)},
            prices={"fake": PriceConfig(output=1_000.0)},  # 1,000 micros a token
            admin=AdminConfig(poll_s=3600.0),  # a change must not wait for a poll
        )
        server = Server(config)
        running = asyncio.create_task(server.run(signals=False))
        try:
            await until(lambda: server.context.is_ready and server.fronts is not None and server.fronts.are_ready)
            yield server
        finally:
            finish.set()
            server.end()
            await running


async def connect(server: Server) -> Client:
    place = urlsplit(server.url)
    return Client(*await asyncio.open_connection(place.hostname, place.port))


async def chat(client: Client, key: str = USER, **changes: Any) -> Answer:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3} | changes
    return await client.ask("POST", "/v1/chat/completions", body, authorization=f"Bearer {key}")


async def admin(client: Client, method: str, path: str, body: Any = None) -> Answer:
    return await client.ask(method, path, body, authorization=f"Bearer {ADMIN}")


async def chats(server: Server, key: str = USER, **changes: Any) -> Counter[int]:
    """Statuses of one chat on each of many connections at once."""
    clients = [await connect(server) for _ in range(CONNECTIONS)]
    answers = await asyncio.gather(*(chat(each, key, **changes) for each in clients))
    for each in clients:
        each.writer.close()
    return Counter(each.status for each in answers)


async def answered(client: Client) -> float:
    """Successful chats of all processes, by `/metrics`."""
    lines = (await client.ask("GET", "/metrics")).body.decode().splitlines()
    start = 'headrace_http_requests_total{route="/v1/chat/completions",status="200"} '
    return sum(float(line.removeprefix(start)) for line in lines if line.startswith(start))


async def spent_micros(server: Server, expected: int) -> int:
    """What the tenant has spent, as the store says within some seconds: it is written in batches."""
    client = await connect(server)
    spent = 0
    for _ in range(200):
        (row,) = (await admin(client, "GET", "/admin/v1/budgets")).json["data"]
        spent = row["spent_micros"]
        if spent >= expected:
            break
        await asyncio.sleep(0.02)
    return spent


async def begin(client: Client) -> None:
    """Ask for a stream, and return when two words of it have come."""
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 9, "stream": True}
    await client.send(request("POST", "/v1/chat/completions", body, authorization=f"Bearer {USER}"))
    assert (await client.head())[0] == 200
    text = b""
    while b"two" not in text:
        text += await client.chunk()


async def came_to_its_end(client: Client) -> bool:
    """Read the rest of a stream."""
    text = b""
    try:
        while piece := await client.chunk():
            text += piece
    except (asyncio.IncompleteReadError, ConnectionError, ValueError):
        return False
    return text.endswith(b"data: [DONE]\n\n")


def front_of(server: Server) -> int:
    assert server.fronts is not None
    (pid,) = server.fronts.pids
    return pid


async def answered_by_fronts(server: Server) -> int:
    """Chats that front processes have answered, by their own metrics."""
    assert server.fronts is not None
    return sum(
        round(value)
        for families in await server.fronts.metrics()
        for name, _, _, samples in families
        if name == "headrace_answers"
        for sample, _, value in samples
        if sample.endswith("_total")
    )


@asynchronous
async def test_a_rate_limit_holds_exactly_over_all_processes(tmp_path: Path) -> None:
    async with serving(tmp_path, asyncio.Event(), limits=LimitSet(requests_per_min=10)) as server:
        assert await chats(server) == {200: 10, 429: CONNECTIONS - 10}
        assert 0 < await answered_by_fronts(server) < CONNECTIONS


@asynchronous
async def test_a_budget_holds_exactly_over_all_processes(tmp_path: Path) -> None:
    budget = BudgetConfig(limit_micros=30_000, period="day")
    async with serving(tmp_path, asyncio.Event(), budgets=(budget,)) as server:
        statuses: Counter[int] = Counter()
        for _ in range(3):  # what running requests hold is free afterwards
            statuses += await chats(server)
        assert set(statuses) == {200, 429}
        assert statuses[200] == 10
        assert await spent_micros(server, 30_000) == 30_000


@asynchronous
async def test_a_key_that_is_revoked_is_revoked_in_all_processes(tmp_path: Path) -> None:
    async with serving(tmp_path, asyncio.Event()) as server:
        client = await connect(server)
        made = (await admin(client, "POST", "/admin/v1/keys", {"name": "app", "tenant": "acme"})).json
        assert await chats(server, made["secret"]) == {200: CONNECTIONS}
        assert (await admin(client, "DELETE", f"/admin/v1/keys/{made['id']}")).status == 200
        assert await chats(server, made["secret"]) == {401: CONNECTIONS}


@asynchronous
async def test_every_process_answers_for_files_metrics_and_requests(tmp_path: Path) -> None:
    async with serving(tmp_path, asyncio.Event()) as server:
        clients = [await connect(server) for _ in range(CONNECTIONS)]
        before = await answered(clients[0])
        answers = [await chat(each) for each in clients]
        for answer, each in zip(answers, reversed(clients), strict=True):
            found = await each.ask("GET", f"/v1/requests/{answer.json['id']}", authorization=f"Bearer {USER}")
            assert found.status == 200
        for each in clients:
            assert (await each.ask("GET", "/v1/files", authorization=f"Bearer {USER}")).json["data"] == []
            assert await answered(each) == before + CONNECTIONS
            assert (await each.ask("GET", "/v1/nothing")).status == 404
        for each in clients:
            await begin(each)
        assert 0 < server.context.running < CONNECTIONS
        client = await connect(server)
        capacity = await client.ask("GET", "/v1/capacity", authorization=f"Bearer {USER}")
        assert capacity.json["free_requests"] == 2 * 4096 - CONNECTIONS
        live = await admin(client, "GET", "/admin/v1/live")
        assert live.json["traffic"]["running"] == CONNECTIONS


@asynchronous
async def test_every_process_falls_back_to_the_golden_variant_and_the_main_one_keeps_the_cases(tmp_path: Path) -> None:
    golden = RoutingConfig(golden=GoldenConfig(checks=("json",)))
    async with serving(tmp_path, asyncio.Event(), routing=golden, record=True) as server:
        for each in [await connect(server) for _ in range(CONNECTIONS)]:
            answer = await chat(each, response_format={"type": "json_object"})
            assert (answer.json["model"], answer.headers["x-headrace-golden"]) == ("fake@golden", "json")
        assert await answered_by_fronts(server) > 0
        cases = server._lab.hard_cases
        assert cases is not None
        await until(lambda: len(cases.cases) == CONNECTIONS)
        assert {(case.check, case.variant, case.record.tenant) for case in cases.cases} == {("json", "fake", "acme")}


@asynchronous
async def test_a_killed_process_is_replaced_and_what_it_held_is_settled(tmp_path: Path) -> None:
    finish = asyncio.Event()
    limits = LimitSet(concurrent=CONNECTIONS)
    budget = BudgetConfig(limit_micros=100_000_000, period="day")
    async with serving(tmp_path, finish, limits=limits, budgets=(budget,)) as server:
        clients = [await connect(server) for _ in range(CONNECTIONS)]

        await asyncio.gather(*(begin(each) for each in clients))
        before = front_of(server)
        os.kill(before, signal.SIGKILL)
        await until(lambda: server.fronts is not None and server.fronts.pids not in ([], [before]))
        finish.set()

        whole = Counter(await asyncio.gather(*(came_to_its_end(each) for each in clients)))
        assert whole[True] > 0
        assert whole[False] > 0
        # All slots of the limit are free again, and the replacement serves.
        await until(lambda: server.fronts is not None and server.fronts.are_ready)
        assert await chats(server) == {200: CONNECTIONS}
        assert await answered_by_fronts(server) > 0
        # Whole answers have three tokens. Of those that were cut, all before the last delta is surely sent: one. A
        # process that is killed just after it sent a delta may not have noted that any more: then nothing is charged.
        least = 3_000 * (whole[True] + CONNECTIONS)
        most = least + 1_000 * whole[False]
        assert least < await spent_micros(server, most) <= most


@asynchronous
async def test_a_drain_lets_the_streams_of_all_processes_end(tmp_path: Path) -> None:
    finish = asyncio.Event()
    async with serving(tmp_path, finish) as server:
        clients = [await connect(server) for _ in range(CONNECTIONS)]
        await asyncio.gather(*(begin(each) for each in clients))
        pid = front_of(server)
        server.end()
        finish.set()
        assert all(await asyncio.gather(*(came_to_its_end(each) for each in clients)))
        await until(lambda: not Path(f"/proc/{pid}").exists())
