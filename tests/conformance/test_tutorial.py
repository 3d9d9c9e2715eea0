"""Runs docs/tutorials/first-gateway.md from a clean folder: its configuration, its server, its commands in order."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "tutorials" / "first-gateway.md").read_text(encoding="utf-8")
START_S = 60


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """The environment of the reader's terminals: a `headrace` on the path, and nothing that earlier runs left."""
    command = tmp_path / "bin" / "headrace"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m headrace "$@"\n')
    command.chmod(0o755)
    return {**os.environ, "PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "120"}


@pytest.fixture
def port(tmp_path: Path, shell: dict[str, str]) -> Iterator[int]:
    """The port of the tutorial's server, which is ready."""
    (configuration,) = blocks("toml")
    (tmp_path / "headrace.toml").write_text(configuration, encoding="utf-8")
    port = free_port()
    environment = {**shell, "HEADRACE_SERVER_PORT": str(port)}
    server = subprocess.Popen(["headrace", "serve"], cwd=tmp_path, env=environment)
    try:
        wait_until_ready(port)
        yield port
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=60) == 0


def wait_until_ready(port: int) -> None:
    end = time.monotonic() + START_S
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=5).close()
            return
        except (urllib.error.URLError, ConnectionError):
            assert time.monotonic() < end
            time.sleep(0.1)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_tutorial_works_from_a_clean_folder(tmp_path: Path, shell: dict[str, str], port: int) -> None:
    outputs: list[str] = []
    exported = ""
    for script in blocks("sh"):
        script = script.replace("localhost:8000", f"127.0.0.1:{port}")
        command = ["bash", "-euc", exported + script]
        run = subprocess.run(command, cwd=tmp_path, env=shell, capture_output=True, text=True, check=False, timeout=120)
        assert run.returncode == 0, (script, run.stdout, run.stderr)
        outputs.append(run.stdout)
        exported += "".join(line + "\n" for line in script.splitlines() if line.startswith("export "))
    _, answer, hit, budget, usage, _, degraded, compared = outputs
    assert "headrace" in json.loads(answer)
    assert re.match(r"x-headrace-cache: exact; age=\d+", hit)
    first, second, error = budget.split("\n", 2)
    assert (first, second) == ("200", "429")
    assert json.loads(error)["error"]["code"] == "insufficient_quota"
    assert "shop" in usage
    assert "office" in usage
    assert 'step="max_tokens"' in degraded
    assert "no difference" in compared
    assert (tmp_path / "report.html").stat().st_size > 1000
