"""Replicas of a server that start and stop with its load, and a standby that takes over at once."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

from headrace.config import AutoscaleConfig, Config, ModelConfig, ServerConfig, StorageConfig
from headrace.engine.process.engine_client import ClientTimeouts
from headrace.gateway.serving.autoscaler import Autoscaler
from headrace.gateway.serving.scale_policy import ScaleRules
from headrace.llm import AsyncLLM
from headrace.server.server import Server
from tests.support.running_server import CHAT, FakeEngine, Running, asynchronous, living, until

OPTIONS: dict[str, Any] = {"weights": "int8", "context": 256, "kv_tokens": 2048}


@asynchronous
async def test_the_last_replica_stops_when_idle_and_the_next_request_starts_it_and_late_ones_start_more(
    tiny_folder: Path, tmp_path: Path
) -> None:
    scale = AutoscaleConfig(least=0, most=2, idle_stop_s=0.05, ttft_ms=1e9, down_s=1.0)
    config = Config(
        server=ServerConfig(port=0, worker_s=120.0),
        storage=StorageConfig(folder=str(tmp_path / "state")),
        models={"tiny": ModelConfig(path=str(tiny_folder), options=OPTIONS, autoscale=scale)},
    )
    server = Server(config)
    async with living(server, lambda task: Running(server, FakeEngine(), server.fleet, task)) as running:
        engine = server.fleet._runs["tiny"]
        assert isinstance(engine, AsyncLLM)
        await until(lambda: engine.active_replicas == 0 and not engine.client.addresses)
        assert (await running.ask("GET", "/health/ready")).status == 200  # it takes requests

        answer = await running.ask("POST", "/v1/chat/completions", CHAT | {"max_tokens": 3, "ignore_eos": True})
        assert (answer.status, answer.json["usage"]["completion_tokens"]) == (200, 3)

        # While a request runs, rules by which any wait is too long start the second one.
        asked = CHAT | {"max_tokens": 200, "ignore_eos": True}
        running_one = asyncio.create_task(running.ask("POST", "/v1/chat/completions", asked))
        await until(lambda: engine.client.running == 1 and engine.active_replicas == 1)
        eager = Autoscaler(server.fleet, {"tiny": ScaleRules(most=2, wait_s=1e-9, up_s=1e-9)})
        async with asyncio.timeout(120.0):
            while engine.active_replicas < 2:
                await eager.turn("tiny")
        assert (await running_one).json["usage"]["completion_tokens"] == 200
        await until(lambda: engine.active_replicas == 0 and not engine.client.addresses)


@asynchronous
async def test_a_standby_goes_on_with_the_streams_of_a_replica_that_died(tiny_folder: Path) -> None:
    waits = ClientTimeouts(patience=60.0, ping=0.1)
    async with AsyncLLM(tiny_folder, standby=1, waits=waits, **OPTIONS) as llm:
        client = llm.client
        await until(lambda: [each.state for each in client.replicas()] == ["ready", "standby"])
        calm = await llm.generate("Once", max_tokens=150, ignore_eos=True)
        generating = asyncio.create_task(llm.generate("Once", max_tokens=150, ignore_eos=True))
        await until(lambda: client.replicas()[0].requests == 1)
        assert client.replicas()[1].requests == 0
        pid = llm.supervisor.pids[0]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda: client.replicas()[1].requests == 1)  # before another process could have started
        assert client.replicas()[0].state == "down"
        assert (await generating)[0].completions[0].tokens == calm[0].completions[0].tokens
        await until(lambda: [each.state for each in client.replicas()] == ["ready", "standby"])
