"""A server's start and end: signals, addresses, engines that die, and nothing taken before or after its time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main
from headrace.config import Config, ServerConfig, StorageConfig
from headrace.engine.process.engine_client import ClientTimeouts
from headrace.engine.process.supervisor import StartError
from headrace.llm import AsyncLLM
from headrace.server.server import AddressError, Server, listen, url_of
from tests.support.running_server import (
    CHAT,
    Client,
    asynchronous,
    config_of,
    ended,
    request,
    say,
    serving,
    until,
    words,
)

ROOT = Path(__file__).parents[2]


class Process:
    """A server in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process = process
        self.port = int(url.rsplit(":", 1)[1])

    async def client(self) -> Client:
        return Client(*await asyncio.open_connection("127.0.0.1", self.port))

    async def streaming(self) -> Client:
        client = await self.client()
        await client.send(request("POST", "/v1/chat/completions", CHAT | {"stream": True}))
        assert (await client.head())[0] == 200
        assert b"0 " in await client.chunk()
        return client

    async def running(self, count: int) -> None:
        """Wait until so many requests for text are under way."""
        client = await self.client()
        while f"headrace_requests_running {count}.0" not in (await client.ask("GET", "/metrics")).body.decode():
            await asyncio.sleep(0.01)
        client.leave()

    async def draining(self) -> None:
        """Wait until it takes nothing new."""
        while True:
            client = await self.client()
            answer = await client.ask("GET", "/health/ready")
            client.leave()
            if answer.json["status"] == "draining":
                return
            await asyncio.sleep(0.01)

    async def closed(self) -> None:
        """Wait until it listens no more."""
        with contextlib.suppress(ConnectionError):
            while True:
                (await self.client()).leave()
                await asyncio.sleep(0.01)

    async def ended(self) -> tuple[int, str]:
        """Its exit code and its log."""
        _, log = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, log.decode()


@contextlib.asynccontextmanager
async def process(folder: Path, **options: Any) -> AsyncIterator[Process]:
    options = {"words": 10, "pace": 0.05, "folder": str(folder)} | options
    made = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.support.running_server",
        json.dumps(options),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert made.stdout is not None
        url = (await made.stdout.readline()).decode().strip()
        found = Process(made, url)
        async with asyncio.timeout(200):
            while True:
                with contextlib.suppress(OSError):
                    client = await found.client()
                    answer = await client.ask("GET", "/health/ready")
                    client.leave()
                    if answer.status == 200 or options.get("loading"):
                        break
                await asyncio.sleep(0.02)
        yield found
    finally:
        if made.returncode is None:
            made.kill()
            await made.wait()


async def all_of(client: Client) -> str:
    said = b""
    while chunk := await client.chunk():
        said += chunk
    return said.decode()


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT])
@asynchronous
async def test_a_signal_lets_streams_finish_and_nothing_begin(tmp_path: Path, which: signal.Signals) -> None:
    async with process(tmp_path, words=12, pace=0.01, held=True) as server:
        idle = await server.client()
        streams = [await server.streaming() for _ in range(3)]
        busy = await server.client()
        await busy.send(request("POST", "/v1/chat/completions", CHAT))
        await server.running(4)
        server.process.send_signal(which)
        assert await idle.ended() == b""
        late = await server.client()
        refused = await late.ask("POST", "/v1/chat/completions", CHAT)
        assert (refused.status, refused.error["code"], refused.headers["retry-after"]) == (503, "draining", "1")
        assert refused.headers["connection"] == "close"
        other = await server.client()
        ready = await other.ask("GET", "/health/ready")
        assert (ready.status, ready.json["status"]) == (503, "draining")
        (tmp_path / "finish").touch()
        for stream in streams:
            said = await all_of(stream)
            assert "11 " in said
            assert said.endswith("data: [DONE]\n\n")
            assert await stream.ended() == b""
        assert (await busy.answer()).json["choices"][0]["message"]["content"].endswith("11 ")
        code, log = await server.ended()
        assert code == 0, log
        assert "Traceback" not in log
        with pytest.raises(ConnectionError):
            await server.client()


@asynchronous
async def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    async with process(tmp_path, words=1000, pace=0.05, held=True) as server:
        stream = await server.streaming()
        server.process.send_signal(signal.SIGTERM)
        await server.draining()
        assert server.process.returncode is None
        server.process.send_signal(signal.SIGTERM)
        code, log = await server.ended()
        assert code == 0, log
        assert b"[DONE]" not in await stream.ended()
        assert "Traceback" not in log


@asynchronous
async def test_what_still_runs_when_the_time_is_over_is_cut(tmp_path: Path) -> None:
    async with process(tmp_path, words=1000, pace=0.05, server={"drain_s": 0.5}) as server:
        stream = await server.streaming()
        server.process.send_signal(signal.SIGTERM)
        code, log = await server.ended()
        assert code == 0, log
        assert b"[DONE]" not in await stream.ended()
        assert "Traceback" not in log


@asynchronous
async def test_engines_that_do_not_end_are_left_when_somebody_is_impatient(tmp_path: Path) -> None:
    async with process(tmp_path, stuck=True) as server:
        server.process.send_signal(signal.SIGTERM)
        await server.closed()
        server.process.send_signal(signal.SIGTERM)
        assert (await server.ended())[0] == 0


@asynchronous
async def test_ctrl_c_while_models_load_ends_it(tmp_path: Path) -> None:
    async with process(tmp_path, loading=True) as server:
        server.process.send_signal(signal.SIGINT)
        code, log = await server.ended()
        assert code == 0, log
        assert "Traceback" not in log


@asynchronous
async def test_before_the_models_are_there_requests_are_told_to_come_again() -> None:
    async with serving(loaded=False) as running:
        client = await running.client()
        assert (await client.ask("GET", "/health/live")).status == 200
        ready = await client.ask("GET", "/health/ready")
        assert (ready.status, ready.json["status"]) == (503, "starting")
        for path, body in (
            ("/v1/chat/completions", CHAT),
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/embeddings", {"input": "a"}),
        ):
            answer = await client.ask("POST", path, body)
            assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (503, "starting", "1")
        assert not running.engine.streams
        running.engine.answer = words("ok")
        running.fleet.loaded.set()
        await until(lambda: running.server.context.is_ready)
        assert (await client.ask("GET", "/health/ready")).status == 200
        assert (await client.chat()).status == 200


@asynchronous
async def test_what_is_cut_at_the_end_is_settled() -> None:
    cut = ended("overloaded_error")
    async with serving(drain_s=0.2) as running:
        _, stream = await running.streaming()
        client = await running.client()
        await client.send(request("POST", "/v1/chat/completions", CHAT))
        await until(lambda: len(running.engine.open) == 2)
        running.server.end()
        answer = await client.answer()
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        await running.task
        assert stream.closed
        assert not running.server.context.running
    assert ended("overloaded_error") == cut + 2


@asynchronous
async def test_a_reader_of_the_last_answer_gets_all_of_it_before_the_end() -> None:
    async with serving() as running:
        client = await running.client()
        await client.send(request("POST", "/v1/chat/completions", CHAT))
        await until(lambda: bool(running.engine.open))
        running.server.end()
        say(running.engine.open[0], "z" * 20_000_000, end=True)
        answer = await client.answer()
        assert answer.json["choices"][0]["message"]["content"] == "z" * 20_000_000
        await running.task


@asynchronous
async def test_models_that_do_not_load_end_the_server_with_their_error(tmp_path: Path) -> None:
    from tests.support.running_server import FakeEngine, FakeFleet

    class Broken(FakeFleet):
        async def start(self, progress: Any = None) -> None:
            raise StartError("the worker died")

    fleet = Broken(FakeEngine())
    server = Server(config_of(tmp_path), fleet=fleet)
    with pytest.raises(StartError, match="the worker died"):
        await server.run(signals=False)
    assert fleet.closed
    assert server.listening.fileno() == -1


# Addresses


def _complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["serve", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.strip().count("\n") == 0, said
    return said.strip()


def test_a_port_in_use_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert _complaint(capsys, "-p", str(port)) == (
            f"headrace: cannot listen on 127.0.0.1:{port}: address already in use"
        )


def test_a_host_that_is_not_ours_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "cannot listen on 192.0.2.1:0" in _complaint(capsys, "--host", "192.0.2.1", "-p", "0", "--insecure")
    assert "cannot listen on no.such.host.invalid" in _complaint(
        capsys, "--host", "no.such.host.invalid", "-p", "0", "--insecure"
    )
    assert "cannot listen on" in _complaint(capsys, "--host", "x" * 300, "-p", "0", "--insecure")


def test_a_port_without_permission_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Socket(socket.socket):
        def bind(self, *_: object) -> None:
            raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket, "socket", Socket)
    with pytest.raises(AddressError, match=r"^cannot listen on 127\.0\.0\.1:80: permission denied$"):
        listen("127.0.0.1", 80, reader_s=30.0)


def test_the_url_names_a_host_that_a_client_can_use() -> None:
    for host, shown in (("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "localhost"), ("::1", "[::1]"), ("::", "localhost")):
        config = Config(server=ServerConfig(host=host, port=0))
        try:
            found = listen(host, 0, reader_s=30.0)
        except AddressError:  # a machine without IPv6
            continue
        with found:
            assert url_of(config, found) == f"http://{shown}:{found.getsockname()[1]}"


# Engines that die


@asynchronous
async def test_a_killed_or_frozen_worker_changes_no_byte_and_one_that_stays_away_is_an_error(tmp_path: Path) -> None:
    config = Config(
        server=ServerConfig(port=0, drain_s=5.0, heartbeat_s=1.0), storage=StorageConfig(folder=str(tmp_path))
    )
    server = Server(config)
    (engine,) = server.fleet._runs.values()
    assert isinstance(engine, AsyncLLM)
    task = asyncio.create_task(server.run(signals=False))
    await until(lambda: server.context.is_ready or task.done(), 200.0)
    port = server.listening.getsockname()[1]
    asked = CHAT | {"stream": True, "max_tokens": 160, "ignore_eos": True, "temperature": 0}

    async def readiness() -> tuple[int, dict[str, Any]]:
        client = Client(*await asyncio.open_connection("127.0.0.1", port))
        found = await client.ask("GET", "/health/ready")
        client.leave()
        return found.status, found.json

    async def answer(how: signal.Signals | None = None) -> str:
        client = Client(*await asyncio.open_connection("127.0.0.1", port))
        await client.send(request("POST", "/v1/chat/completions", asked))
        assert (await client.head())[0] == 200
        said, killed = b"", False
        while chunk := await client.chunk():
            said += chunk
            if how is not None and not killed and said.count(b"data: ") > 3:
                (pid,) = engine.supervisor.pids
                assert pid is not None
                os.kill(pid, how)
                killed = True
                while (found := await readiness())[0] == 200:
                    await asyncio.sleep(0.01)
                assert found == (503, {"status": "unavailable", "models": [], "unavailable": ["mini"]})
        client.leave()
        assert killed == (how is not None)
        events = [json.loads(each.removeprefix("data: ")) for each in said.decode().split("\n\n")[:-2]]
        assert not any("error" in event for event in events)
        assert any(event["choices"] and event["choices"][0]["finish_reason"] == "length" for event in events)
        return "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])

    try:
        undisturbed = await answer()
        assert await readiness() == (200, {"status": "ready", "models": ["mini"]})
        for how in (signal.SIGKILL, signal.SIGSTOP):
            assert await answer(how) == undisturbed
            assert (await readiness())[0] == 200
        assert engine.supervisor.restarts == [2]

        async def no_more(worker: object) -> Any:
            raise StartError("none is left")

        engine.supervisor._spawn = no_more
        engine.client._waits = ClientTimeouts(patience=0.5)
        (pid,) = engine.supervisor.pids
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        client = Client(*await asyncio.open_connection("127.0.0.1", port))
        refused = await client.ask("POST", "/v1/chat/completions", asked)
        assert (refused.status, refused.error["code"], refused.headers["retry-after"]) == (503, "engine_lost", "1")
        client.leave()
    finally:
        server.end()
        await task
