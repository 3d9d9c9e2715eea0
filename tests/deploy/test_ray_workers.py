"""deploy/ray/workers.py, without Ray: what it starts on a node, that it starts it again, and that it drains."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.serving.worker import worker

PROGRAM = Path(__file__).parents[2] / "deploy" / "ray" / "workers.py"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("ray_workers", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    node = types.ModuleType("ray.util")
    monkeypatch.setattr(node, "get_node_ip_address", lambda: "10.0.0.7", raising=False)
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    monkeypatch.setitem(sys.modules, "ray.util", node)
    return module


def test_a_worker_announces_itself_under_the_address_of_its_node(program: Any) -> None:
    actor = program.WorkerActor("mini", "REDIS", "redis://r", "0.0.0.0", ["--weights", "int8"])
    command = actor._command
    assert command[:4] == [sys.executable, "-m", "headrace", "worker"]
    assert command[command.index("--announce") + 1] == "10.0.0.7"
    assert actor._environ["REDIS"] == "redis://r"
    local = program.WorkerActor("mini", "REDIS", "redis://r", "127.0.0.1", [])._command
    assert local[local.index("--announce") + 1] == "127.0.0.1"
    flags = {word[2:].replace("-", "_") for word in command if word.startswith("--")}
    assert flags <= set(inspect.signature(worker).parameters)


def test_what_follows_two_dashes_is_for_the_worker(program: Any) -> None:
    assert program.split_arguments(["mini", "--count", "2", "--", "--weights", "int8"]) == (
        ["mini", "--count", "2"],
        ["--weights", "int8"],
    )
    assert program.split_arguments(["mini"]) == (["mini"], [])


def test_a_worker_that_is_stopped_between_two_starts_is_not_started_again(
    program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts, ended = [], threading.Event()

    class Process:
        def __init__(self, command: list[str], **_: object) -> None:
            starts.append(command)

        def poll(self) -> int:
            return 3

        def wait(self) -> int:
            ended.set()
            return 3

    monkeypatch.setattr(program.subprocess, "Popen", Process)
    monkeypatch.setattr(program, "next_pause", lambda pause, lived_s: 3600.0)
    actor = program.WorkerActor("mini", "REDIS", "redis://r", "0.0.0.0", [])
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(actor.run()), daemon=True)
    thread.start()
    assert ended.wait(60.0)
    actor.stop()  # during the pause, or just before
    thread.join(60.0)
    assert codes == [3]
    assert len(starts) == 1


def test_a_worker_that_ends_is_started_again_until_it_is_stopped(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lives, stayed = [], threading.Event()

    class Process:
        def __init__(self, command: list[str], env: dict[str, str], preexec_fn: object) -> None:
            lives.append(command)
            self.returncode: int | None = None
            self._ended = threading.Event()
            if len(lives) < 3:  # the first two end by themselves
                self.send_signal(1)
            else:
                stayed.set()

        def send_signal(self, number: int) -> None:
            self.returncode = number
            self._ended.set()

        def poll(self) -> int | None:
            return self.returncode

        def wait(self) -> int:
            self._ended.wait()
            assert self.returncode is not None
            return self.returncode

    pauses: list[float] = []
    monkeypatch.setattr(program.subprocess, "Popen", Process)
    actor = program.WorkerActor("mini", "REDIS", "redis://r", "0.0.0.0", [])
    actor._pause = pauses.append
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(actor.run()))
    thread.start()
    assert stayed.wait(60.0)
    actor.stop()
    thread.join(60.0)
    assert codes == [15]
    assert pauses == [0.5, 1.0]
    assert len(lives) == 3
    assert program.next_pause(16.0, 1.0) == 30.0
    assert program.next_pause(30.0, 61.0) == 0.0
