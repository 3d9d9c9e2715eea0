"""A server of the bundled model, as a process of its own, and clients for it.

What the model says is not tested here, and changes with its training: tests compare answers with each other, or hold
them to a grammar.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
import openai
import pytest

START_S = 300.0  # of a server, on a machine that is busy with other things


@dataclass(frozen=True)
class Server:
    url: str
    log: Path
    process: subprocess.Popen[bytes]


def start(folder: Path, *flags: str) -> Server:
    folder.mkdir()
    log = folder / "log"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    environment |= {"HEADRACE_STORAGE_FOLDER": str(folder / "storage"), "NO_COLOR": "1"}
    if "HEADRACE_CACHE" in os.environ:
        environment["HEADRACE_CACHE"] = os.environ["HEADRACE_CACHE"]
    threads = () if flags[:1] == ("--config",) else ("--threads", "1")  # where the command names the model
    command = [sys.executable, "-m", "headrace", "serve", "--port", "0", *threads, *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=folder, env=environment)
    deadline = time.monotonic() + START_S
    while not (found := re.search(r"Serving .* at (http://\S+)/v1\.", log.read_text(errors="replace"))):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise RuntimeError(f"no server:\n{log.read_text(errors='replace')}")
        time.sleep(0.05)
    return Server(found[1], log, process)


def end(server: Server) -> int:
    server.process.send_signal(signal.SIGTERM)
    try:
        return server.process.wait(120)
    except subprocess.TimeoutExpired:
        server.process.kill()
        raise


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Open to everybody."""
    found = start(tmp_path_factory.mktemp("conformance") / "open")
    yield found
    assert end(found) == 0
    assert "Traceback" not in found.log.read_text()  # nothing that a test did made a 500


@pytest.fixture(scope="session")
def starting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Starts further servers."""
    folder = tmp_path_factory.mktemp("servers")
    started: list[Server] = []

    def one(*flags: str) -> Server:
        started.append(start(folder / str(len(started)), *flags))
        return started[-1]

    yield one
    for each in started:
        if each.process.poll() is None:
            end(each)


@pytest.fixture(scope="session")
def base_url(server: Server) -> str:
    return f"{server.url}/v1"


@pytest.fixture(scope="session")
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120) as found:
        yield found


@pytest.fixture(scope="session")
def http(server: Server) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=120) as found:
        yield found
