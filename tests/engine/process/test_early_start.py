"""Workers that begin to load before there is an event loop: adopted by the one that comes, or ended and forgotten."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from headrace.config import Config, ModelConfig
from headrace.engine.interface.request import GenerationRequest
from headrace.engine.process import early_worker, wire
from headrace.engine.process.engine_client import EngineClient
from headrace.engine.process.supervisor import StartError, Supervisor
from headrace.errors import HeadraceError
from headrace.gateway.serving.fleet import Fleet
from headrace.models.model_folder import BUNDLED_NAMES
from headrace.variant import Variant


def config_of(folder: Path, public_prefixes: tuple[tuple[int, ...], ...] = ()) -> wire.WorkerConfig:
    variant = Variant.of(
        str(folder),
        weights="int8",
        cache=False,
        context=512,
        kv_tokens=1024,
        threads=1,
        public_prefixes=public_prefixes,
    )
    return wire.WorkerConfig(variant=variant)


def is_there(pid: int | None) -> bool:
    """Whether it runs; a process that has ended and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def answered(supervisor: Supervisor) -> int:
    async with EngineClient(supervisor.paths) as client:
        (answer,) = await client.complete(GenerationRequest(id="a", prompt=(5, 6, 7), max_tokens=8))
        return len(answer.tokens)


def test_one_that_was_begun_is_the_one_that_serves(tiny_folder: Path) -> None:
    supervisor = Supervisor([config_of(tiny_folder)] * 2)
    supervisor.begin()
    begun = supervisor.pids
    assert all(is_there(pid) for pid in begun)

    async def serve() -> None:
        async with supervisor:
            assert supervisor.pids == begun
            assert await answered(supervisor) == 8
            assert supervisor.restarts == [0, 0]

    asyncio.run(asyncio.wait_for(serve(), 60.0))
    assert not any(is_there(pid) for pid in begun)


def test_a_killed_worker_is_replaced_by_the_one_that_waits(tiny_folder: Path) -> None:
    supervisor = Supervisor([config_of(tiny_folder)])

    async def serve() -> None:
        async with supervisor:
            early_worker.launch_early()
            assert early_worker.is_waiting()
            (killed,) = supervisor.pids
            assert killed is not None
            os.kill(killed, signal.SIGKILL)
            while supervisor.restarts == [0] or early_worker.is_waiting():
                await asyncio.sleep(0.01)
            (successor,) = supervisor.pids
            assert successor != killed
            assert await answered(supervisor) == 8
            assert supervisor.pids == [successor]

    try:
        asyncio.run(asyncio.wait_for(serve(), 60.0))
    finally:
        early_worker.discard()


def test_one_that_dies_before_it_is_started_is_an_error_of_the_start(tiny_folder: Path) -> None:
    supervisor = Supervisor([config_of(tiny_folder)])
    supervisor.begin()
    (pid,) = supervisor.pids
    assert pid is not None
    os.kill(pid, 9)

    async def start() -> None:
        with pytest.raises(StartError, match="died"):
            await supervisor.start()

    asyncio.run(asyncio.wait_for(start(), 60.0))
    assert not supervisor.paths[0].parent.exists()


def test_of_what_is_abandoned_nothing_is_left(tiny_folder: Path) -> None:
    supervisor = Supervisor([config_of(tiny_folder)] * 2)
    supervisor.begin()
    begun = supervisor.pids
    supervisor.abandon()
    assert not any(is_there(pid) for pid in begun)
    assert not supervisor.paths[0].parent.exists()


def test_a_configuration_that_no_pipe_holds_holds_nobody_up(tiny_folder: Path) -> None:
    prefixes = tuple(tuple(range(place, place + 400)) for place in range(100))
    supervisor = Supervisor([config_of(tiny_folder, prefixes)])
    supervisor.begin()

    async def serve() -> None:
        async with supervisor:
            assert await answered(supervisor) == 8

    asyncio.run(asyncio.wait_for(serve(), 60.0))


def test_a_fleet_that_cannot_be_ends_what_it_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int | None] = []
    begin = Supervisor.begin

    def noted(self: Supervisor) -> None:
        begin(self)
        begun.extend(self.pids)

    monkeypatch.setattr(Supervisor, "begin", noted)
    name = next(iter(BUNDLED_NAMES))
    models = {name: ModelConfig(), "broken": ModelConfig(path="/nowhere/at/all")}
    with pytest.raises(HeadraceError, match="nowhere"):
        Fleet.of(Config(models=models), early=True)
    assert len(begun) == 1  # of the first model alone: the others wait until it is there
    assert not any(is_there(pid) for pid in begun)
