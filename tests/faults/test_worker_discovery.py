"""Workers that a server finds in a registry, and loses again: the same bytes, and each token charged once."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from headrace.config import Config, KeyConfig, ModelConfig, ServerConfig, StorageConfig, WorkersConfig
from headrace.engine.process.engine_client import EngineClient
from headrace.server.server import Server
from tests.support.accounts import bearer
from tests.support.admin_server import ADMIN, ROOT
from tests.support.programs.certificates import CertificateAuthority
from tests.support.programs.redis_server import MISSING, PROGRAM, redis_server
from tests.support.remote_workers import CuttingProxy, worker_host
from tests.support.running_server import CHAT, FakeEngine, Running, asynchronous, living, until

OPTIONS = ("--weights", "int8", "--context", "512", "--threads", "1", "--drain-s", "20")
REGISTRY = ("--registry", "TEST_REGISTRY", "--name", "tiny", "--lease-s", "1")


@asynchronous
async def test_a_server_finds_workers_loses_them_and_charges_each_token_once(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("redis", reason="the package redis is not installed")
    if PROGRAM is None:
        pytest.skip(MISSING)
    authority = CertificateAuthority(tmp_path / "ca")
    mine, tls = authority.issue("server"), authority.issue("worker")
    cache = tmp_path / "cache"
    (tmp_path / "redis").mkdir()
    caller = KeyConfig(name="caller", key="caller-secret", tenant="red")
    config = Config(
        server=ServerConfig(port=0, heartbeat_s=2.0, worker_s=60.0),
        storage=StorageConfig(folder=str(tmp_path / "state")),
        keys=(ADMIN, caller),
        workers=WorkersConfig(
            cert_file=mine.cert, key_file=mine.key, ca_file=mine.ca, redis_env="TEST_REGISTRY", poll_s=0.1
        ),
        models={
            "tiny": ModelConfig(
                path=str(tiny_folder), options={"weights": "int8", "context": 512}, discover_workers=True
            )
        },
    )
    with redis_server(tmp_path / "redis") as redis:
        monkeypatch.setenv("TEST_REGISTRY", redis.url)
        server = Server(config)
        async with living(server, lambda task: Running(server, FakeEngine(), server.fleet, task)) as running:
            client = server.fleet.served["tiny"].engine
            assert isinstance(client, EngineClient)

            async def chat(seed: int) -> str:
                wish = {"max_tokens": 100, "ignore_eos": True, "seed": seed, "temperature": 1.0}
                answer = await running.ask("POST", "/v1/chat/completions", CHAT | wish, **bearer("caller-secret"))
                assert answer.status == 200, answer.body
                assert answer.json["usage"]["completion_tokens"] == 100
                return answer.json["choices"][0]["message"]["content"]

            async def admin(path: str) -> dict[str, object]:
                answer = await running.ask("GET", f"/admin/v1/{path}", **bearer(ROOT))
                assert answer.status == 200, answer.body
                return answer.json

            def have_begun(asked: list[asyncio.Task[str]]) -> bool:
                """Whether every request that is not done has brought tokens."""
                streams = list(client._streams)
                return len(streams) == sum(not each.done() for each in asked) and all(
                    any(stream.tokens) for stream in streams
                )

            def states() -> list[str]:
                return [each.state for each in client.replicas()]

            assert (await running.ask("GET", "/health/ready")).status == 503
            early = asyncio.create_task(chat(0))  # waits for the first worker
            async with (
                CuttingProxy(delay_s=0.02) as slow,
                worker_host(tiny_folder, tls, cache, *OPTIONS, *REGISTRY) as first,
            ):
                expected = [await early, await chat(1), await chat(2)]
                assert (await running.ask("GET", "/health/ready")).status == 200
                announced = (*REGISTRY, "--announce", f"127.0.0.1:{slow.port}")
                async with worker_host(tiny_folder, tls, cache, *OPTIONS, *announced) as second:
                    slow.target = second.port
                    await until(lambda: states() == ["ready", "ready"])
                    (one, two) = (await admin("workers"))["data"]  # type: ignore[misc]
                    assert {one["address"], two["address"]} == {first.address, f"tls://127.0.0.1:{slow.port}"}
                    assert one["discovered"]
                    assert one["announced"]["precision"].startswith("int8")

                    # The first is killed while it answers; the second, over a slow link, continues byte for byte.
                    asked = [asyncio.create_task(chat(seed)) for seed in (0, 1, 2)]
                    await until(lambda: all(each.requests for each in client.replicas()))
                    first.signal(signal.SIGKILL)
                    assert await asyncio.gather(*asked) == expected
                    await until(lambda: states() == ["ready"])  # its lease has ended

                    # SIGTERM: the second finishes what it has, and leaves.
                    asked = [asyncio.create_task(chat(seed)) for seed in (0, 1, 2)]
                    await until(lambda: have_begun(asked))
                    second.signal(signal.SIGTERM)
                    assert await asyncio.gather(*asked) == expected
                    assert await second.ended() == 0
                    await until(lambda: states() == [])
            assert (await running.ask("GET", "/health/ready")).status == 503
            (row,) = (await admin("usage?format=json&by=tenant"))["rows"]  # type: ignore[misc]
            assert (row["requests"], row["output_tokens"]) == (9, 900), row
