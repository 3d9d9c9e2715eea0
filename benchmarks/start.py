"""How long `headrace serve` takes from its start to the first token of an answer, with files in memory.

    python benchmarks/start.py --model build/0.5b --weights int4 --rounds 7
    python benchmarks/start.py --model build/0.5b --weights int4 --rounds 7 --beside ../before/.venv/bin/python
    python benchmarks/start.py --model build/0.5b --weights int4 --rounds 7 --llama build/0.5b.q4_0.gguf --chat

Each Python serves the model once untimed, so that weights are packed and modules compiled, and then takes its turn in
every round. Printed are the least and the median of the processor time (user and system) that the server and its worker
have used when the first token comes, and of the time on the clock, which counts only on a quiet machine.

`--llama` takes turns with llama.cpp's server from xllamacpp, a Python extension that has the library in it. Its times
count from the start of the process too; the part until Python has imported the library is printed apart. Linux only.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from llama_server import llama_server

SECONDS = 600.0  # that one start may take: the first one packs the weights
PROMPT = "The water ran"
ASK = {"max_tokens": 8, "stream": True, "ignore_eos": True}
TICK = os.sysconf("SC_CLK_TCK")


class Start(NamedTuple):
    server_s: float  # processor time
    worker_s: float
    clock_s: float
    imports_s: float = 0.0  # processor time of the server that Python took until it had imported llama.cpp


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until_ready(port: int, server: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + SECONDS
    while time.monotonic() < until and server.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        try:
            connection.request("GET", "/health/ready")
            if connection.getresponse().status == 200:
                return
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()
        time.sleep(0.005)
    raise RuntimeError(f"the server did not start (exit code {server.poll()})")


def first_token(port: int, *, chat: bool = False) -> None:
    """Ask for a few tokens, and return when the first text comes."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    asked = {"messages": [{"role": "user", "content": PROMPT}]} if chat else {"prompt": PROMPT}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    connection.request("POST", path, json.dumps({**ASK, **asked}), {"content-type": "application/json"})
    reply = connection.getresponse()
    if reply.status != 200:
        raise RuntimeError(f"status {reply.status}: {reply.read()!r}")
    while line := reply.readline():
        if line.startswith(b"data: {"):
            choice = json.loads(line[6:])["choices"][0]
            if choice.get("text") or choice.get("delta", {}).get("content"):
                connection.close()
                return
    raise RuntimeError("the answer has no text")


def start(python: str, given: argparse.Namespace, folder: Path) -> Start:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    environ = {
        **os.environ,
        "PYTHONDONTWRITEBYTECODE": "",  # an installed package has its bytecode
        "PYTHONPYCACHEPREFIX": str(folder / "bytecode"),
        "HEADRACE_CACHE": given.cache or str(folder.parent / "cache"),
        "HEADRACE_STORAGE_FOLDER": str(folder / "storage"),
        "HEADRACE_LOG_LEVEL": "warning",
    }
    command = [python, "-m", "headrace", "serve", given.model, "--weights", given.weights, "--port", str(port)]
    command += ["--threads", str(given.threads)]
    began = time.perf_counter()
    with subprocess.Popen(
        command, env=environ, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        try:
            wait_until_ready(port, server)
            first_token(port, chat=given.chat)
            seconds = time.perf_counter() - began
            workers = children(server.pid)
            return Start(cpu_seconds(server.pid), sum(map(cpu_seconds, workers)), seconds)
        finally:
            server.send_signal(signal.SIGINT)


def start_llama(given: argparse.Namespace) -> Start:
    began = time.perf_counter()
    with llama_server(Path(given.llama), given.threads) as server:
        first_token(server.port, chat=given.chat)
        seconds = time.perf_counter() - began
        return Start(cpu_seconds(server.process), 0.0, seconds, server.imports_cpu_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True, help="folder, GGUF file or name")
    parser.add_argument("--weights", default="int4")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads of the engines")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--beside", action="append", default=[], help="Python of another installation to take turns")
    parser.add_argument("--cache", help="cache folder to use; default: an empty one")
    parser.add_argument("--llama", help="GGUF file that llama.cpp serves in turn")
    parser.add_argument("--chat", action="store_true", help="ask for a chat, whose prompt a template makes")
    given = parser.parse_args()
    if os.path.exists(given.model):
        given.model = str(Path(given.model).resolve())
    found: dict[str, list[Start]] = {each: [] for each in (sys.executable, *given.beside)}
    with tempfile.TemporaryDirectory() as temporary:
        folders = {each: Path(temporary) / str(place) for place, each in enumerate(found)}
        for python, folder in folders.items():
            folder.mkdir()
            start(python, given, folder)
        for _ in range(given.rounds):
            for python, folder in folders.items():
                found[python].append(start(python, given, folder))
            if given.llama:
                found.setdefault("llama.cpp", []).append(start_llama(given))
    print("".join(f"{title:>16}" for title in ("server s", "worker s", "clock s", "imports s")), " least, median")
    for python, rounds in found.items():
        columns = [f"{min(each):.2f}, {statistics.median(each):.2f}" for each in zip(*rounds, strict=True)]
        print("".join(f"{column:>16}" for column in columns), "", python)


if __name__ == "__main__":
    main()
