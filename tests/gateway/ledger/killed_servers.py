"""Kills servers while clients get answers from them, and prints what each client has seen of its answer.

    python killing_server.py FOLDER ROUNDS SEED

It forks rather than starts each server, because imports take longer than what they are killed in. Every server runs on
the same folder, and recovers what the one before left. What is printed is a list of what requests have seen, each with

    id        of the answer, once it was told
    kind      stream, both (a stream of two choices), whole
    tokens    that came
    usage     as it was told; null where the server was killed before
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

import uvloop

from headrace.config import Config, KeyConfig, LogConfig, PriceConfig, ServerConfig, StorageConfig
from headrace.config.tenant_section import BudgetConfig, TenantConfig
from headrace.engine.interface.outputs import SequenceEnd, SequenceOutput, SequenceUsage
from headrace.engine.interface.request import FinishReason
from headrace.engine.process.output_stream import OutputStream
from headrace.observe.logs import configure_log
from headrace.server.server import Server
from tests.support.running_server import CHAT, Answer, Client, FakeEngine, FakeFleet, request, tokenizer, until

CACHED = 4  # tokens of every prompt
CLIENTS = 12
MOST = 25  # tokens of an answer
KEY = KeyConfig(name="acme", key="key-of-acme", tenant="acme")


def sections() -> dict[str, Any]:
    huge = 10**9
    budgets = (BudgetConfig(limit_micros=huge, period="day"), BudgetConfig(limit_micros=huge, period="month"))
    return {
        "prices": {"mini": PriceConfig(input=1.0, cached=0.25, output=2.0)},
        "tenants": {"acme": TenantConfig(budgets=budgets)},
        "keys": (KEY,),
    }


async def talk(stream: OutputStream, chance: random.Random) -> None:
    tokens = chance.randrange(1, MOST)
    for number in range(tokens):
        await asyncio.sleep(chance.uniform(0.0, 0.008))
        for index in range(stream.request.n):
            if stream.closed:
                return
            usage = SequenceUsage(len(stream.request.prompt), number + 1, CACHED, 0, 0, 0.0, 0.001, 0.002)
            ending = SequenceEnd(FinishReason.STOP, usage) if number == tokens - 1 else None
            stream.push(SequenceOutput("", index, [1], "w", ending=ending))


async def serve(folder: Path, seed: int, pipe: int) -> None:
    """In the child."""
    engine, chance, talks = FakeEngine(), random.Random(seed), set[asyncio.Task[None]]()

    def answer(stream: OutputStream) -> None:
        talks.add(asyncio.create_task(talk(stream, chance)))

    engine.answer = answer
    config = Config(
        server=ServerConfig(port=0),
        log=LogConfig(requests=False),
        storage=StorageConfig(folder=str(folder)),
        **sections(),
    )
    server = Server(config, fleet=FakeFleet(engine))
    running = asyncio.create_task(server.run(signals=False))
    await until(lambda: server.context.is_ready or running.done())
    os.write(pipe, f"{server.url.rsplit(':', 1)[1]}\n".encode())
    await running


async def ask(port: int, kind: str) -> dict[str, Any]:
    seen: dict[str, Any] = {"id": None, "kind": kind, "tokens": 0, "usage": None}
    body: dict[str, Any] = CHAT | {"n": 2 if kind == "both" else 1}
    if kind != "whole":
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    with contextlib.suppress(OSError, EOFError, asyncio.IncompleteReadError):
        client = Client(*await asyncio.open_connection("127.0.0.1", port))
        try:
            await client.send(request("POST", "/v1/chat/completions", body, authorization="Bearer key-of-acme"))
            await read(client, kind, seen)
        finally:
            client.leave()
    return seen


async def read(client: Client, kind: str, seen: dict[str, Any]) -> None:
    if kind == "whole":
        answer = await client.answer()
        assert answer.status == 200, answer.body
        seen["id"], seen["usage"] = answer.json["id"], answer.json["usage"]
        seen["tokens"] = seen["usage"]["completion_tokens"]
        return
    status, _ = await client.head()
    assert status == 200
    while chunk := await client.chunk():
        seen["tokens"] += chunk.count(b'"content":"w"')
        for event in Answer(200, {}, chunk).events:
            seen["id"] = event["id"]
            seen["usage"] = event["usage"] or seen["usage"]


async def clients(port: int, pid: int, chance: random.Random) -> list[dict[str, Any]]:
    """What they saw until the server was killed, after some answers had ended."""
    found: list[dict[str, Any]] = []
    wanted = chance.randrange(9)  # of a server so slow that time alone says nothing, too
    enough = asyncio.Event()
    killed = False

    async def one() -> None:
        while not killed:
            found.append(await ask(port, chance.choice(["stream", "stream", "both", "whole"])))
            if sum(each["usage"] is not None for each in found) >= wanted:
                enough.set()

    asking = [asyncio.create_task(one()) for _ in range(CLIENTS)]
    if wanted:
        await enough.wait()
    await asyncio.sleep(chance.uniform(0.0, 0.03))
    os.kill(pid, signal.SIGKILL)
    killed = True
    await asyncio.gather(*asking)
    return found


def round_of(folder: Path, seed: int) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        try:
            uvloop.run(serve(folder, seed, write_end))
        finally:
            os._exit(1)  # it is to be killed
    os.close(write_end)
    try:
        said, until_when = b"", time.monotonic() + 30.0
        while not said.endswith(b"\n"):
            if not select.select([read_end], [], [], max(0.0, until_when - time.monotonic()))[0]:
                raise RuntimeError("the server did not start")
            some = os.read(read_end, 64)
            if not some:
                raise RuntimeError("the server has ended by itself")
            said += some
        return asyncio.run(clients(int(said), pid, chance))
    finally:
        os.close(read_end)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def main() -> None:
    folder, rounds, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    configure_log(LogConfig(), sys.stderr)
    logging.disable(logging.CRITICAL)
    tokenizer()  # opened once, before the first fork
    seen: list[dict[str, Any]] = []
    for number in range(rounds):
        seen += round_of(folder, seed + number)
    json.dump(seen, sys.stdout)


if __name__ == "__main__":
    main()
