"""How long an engine of a running server takes to its next first token: after its process was killed, and from zero.

    python benchmarks/start_again.py --model build/0.5b --weights int4 --rounds 5

By turns with and without a spare worker (`server.spare_worker`). Printed are medians of the time on the clock, which
counts only on a quiet machine, and of the processor time that the new process used. Linux only.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from start import children, cpu_seconds, first_token, wait_until_ready

IDLE_S = 3  # before the last replica stops
CONFIG = """
[models.model]
path = "{model}"
options = {{ weights = "{weights}" }}

[models.model.autoscale]
least = 0
most = 1
idle_stop_s = {idle}.0

[server]
spare_worker = "{spare}"
"""


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60.0
    while not condition():
        if time.monotonic() > until:
            raise RuntimeError("it did not happen within a minute")
        time.sleep(0.01)


def has_model(pid: int) -> bool:
    """Whether a process has mapped packed weights."""
    try:
        return ".pack" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


def engines(server: int) -> list[int]:
    return [pid for pid in children(server) if has_model(pid)]


def measure(given: argparse.Namespace, folder: Path, *, spare: bool) -> dict[str, tuple[float, float]]:
    """Return seconds on the clock and processor seconds of the new process."""
    config = folder / "headrace.toml"
    facts = {"model": given.model, "weights": given.weights, "idle": IDLE_S, "spare": "on" if spare else "off"}
    config.write_text(CONFIG.format(**facts))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    environ = {
        **os.environ,
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": str(folder / "bytecode"),
        "HEADRACE_CACHE": given.cache or str(folder / "cache"),
        "HEADRACE_STORAGE_FOLDER": str(folder / "storage"),
        "HEADRACE_LOG_LEVEL": "warning",
    }
    command = [sys.executable, "-m", "headrace", "serve", "--config", str(config), "--port", str(port)]
    found: dict[str, tuple[float, float]] = {}
    with subprocess.Popen(
        command, env=environ, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:

        def is_spare_ready() -> bool:
            waiting = [pid for pid in children(server.pid) if not has_model(pid)]
            return not spare or any("_core" in Path(f"/proc/{pid}/maps").read_text() for pid in waiting)

        def next_token() -> tuple[float, float]:
            began = time.perf_counter()
            first_token(port)
            seconds = time.perf_counter() - began
            return seconds, sum(map(cpu_seconds, engines(server.pid)))

        try:
            wait_until_ready(port, server)
            wait_for(is_spare_ready)
            first_token(port)  # which starts an engine, if it stopped meanwhile
            for engine in engines(server.pid):
                os.kill(engine, signal.SIGKILL)
            found["killed"] = next_token()
            wait_for(lambda: not engines(server.pid))
            wait_for(is_spare_ready)
            found["from zero"] = next_token()
        finally:
            server.send_signal(signal.SIGINT)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True, help="folder, GGUF file or name")
    parser.add_argument("--weights", default="int4")
    parser.add_argument("--cache", help="cache folder to use; default: an empty one")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if os.path.exists(given.model):
        given.model = str(Path(given.model).resolve())
    rounds: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        measure(given, Path(temporary), spare=False)
        for _ in range(given.rounds):
            for spare in (False, True):
                for case, figures in measure(given, Path(temporary), spare=spare).items():
                    rounds.setdefault((case, spare), []).append(figures)
    print(f"{'clock s':>10}{'engine s':>10}  case")
    for (case, spare), figures in rounds.items():
        clock, cpu = (statistics.median(column) for column in zip(*figures, strict=True))
        print(f"{clock:>10.2f}{cpu:>10.2f}  {case}, {'with' if spare else 'without'} a spare worker")


if __name__ == "__main__":
    main()
