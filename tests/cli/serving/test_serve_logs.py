"""With JSON logs, every line that a server writes is JSON: from its start over crashes and errors to its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CONFIG = """
[server]
port = 0
[storage]
folder = "{folder}/state"
[log]
format = "json"
[[keys]]
name = "laptop"
key = "sk-secret-of-the-laptop"
tenant = "acme"
[models.mini]
options = {{ threads = 1 }}
"""


class Server:
    def __init__(self, folder: Path) -> None:
        config = folder / "headrace.toml"
        config.write_text(CONFIG.format(folder=folder))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headrace", "serve", "--config", str(config)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[dict[str, Any]] = []
        self.url = ""

    def until(self, event: str, **fields: Any) -> dict[str, Any]:
        """Read log lines up to one with this event and these fields."""
        assert self.process.stderr is not None
        while line := self.process.stderr.readline():
            self.lines.append(json.loads(line))
            found = self.lines[-1]
            if event in found["event"] and fields.items() <= found.items():
                return found
        raise AssertionError(self.lines)

    def ask(self, path: str, body: Any = None) -> int:
        data = None if body is None else json.dumps(body).encode()
        url = self.url + path
        headers = {"authorization": "Bearer sk-secret-of-the-laptop", "content-type": "application/json"}
        try:
            with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=120) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as error:
            return error.code


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    found = Server(tmp_path)
    try:
        yield found
    finally:
        if found.process.poll() is None:
            found.process.kill()
        found.process.communicate()


def workers(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(each) for each in children]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_every_line_is_json_and_requests_name_tenant_and_key(server: Server) -> None:
    started = server.until("started: imports")
    assert all(part in started["event"] for part in ("folder", "weights and KV memory", "tokenizer", "engine"))
    serving = server.until("serving")
    assert serving["models"] == ["mini"]
    server.url = serving["url"].removesuffix("/v1")
    assert server.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}) == 200
    line = server.until("request", status=200)
    assert (line["tenant"], line["key"], line["route"]) == ("acme", "laptop", "/v1/chat/completions")
    assert server.ask("/v1/chat/completions", {"messages": 3}) == 400
    line = server.until("request", status=400)
    assert (line["tenant"], line["key"], line["parameter"]) == ("acme", "laptop", "messages")
    (worker,) = workers(server.process.pid)
    os.kill(worker, signal.SIGABRT)
    assert server.until("ended with code -6")["logger"] == "headrace.engine.process.supervisor"
    server.process.send_signal(signal.SIGTERM)
    out, rest = server.process.communicate(timeout=120)
    assert out == ""
    for text in rest.splitlines():
        server.lines.append(json.loads(text))
    assert server.process.returncode == 0
    assert "sk-secret" not in json.dumps(server.lines)


def test_an_error_of_the_start_is_one_line_of_json(tmp_path: Path) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        running = [
            subprocess.Popen(
                [sys.executable, "-m", "headrace", "serve", "--log-format", "json", *flags],
                env={**os.environ, "HEADRACE_STORAGE_FOLDER": str(tmp_path)},
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for flags in (["--port", str(port)], ["--port", "0", str(tmp_path / "nowhere")], ["--weights", "int5"])
        ]
        for process in running:
            out, err = process.communicate(timeout=120)
            assert (process.returncode, out) == (2, "")
            (line,) = err.splitlines()
            found = json.loads(line)
            assert (found["level"], found["logger"]) == ("error", "headrace")
