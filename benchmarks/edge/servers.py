"""Starts and stops the measured programs, pins them to cores, and reads their CPU time and memory.

Also installs LiteLLM's proxy. Every wait has a timeout, and every process ends with the run.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from client import KEY

HERE: Final = Path(__file__).resolve().parent
REPOSITORY: Final = HERE.parent.parent
BUILD: Final = REPOSITORY / "build" / "edge"  # ignored by git
LITELLM: Final = BUILD / "litellm"
_READY: Final = re.compile(rb"http://[\w.]+:(\d+) (\d+)\n")


class ServerError(Exception):
    """A server could not be installed or started; the message says why."""


class Running:
    def __init__(self, name: str, process: subprocess.Popen[bytes], port: int, pid: int | None = None) -> None:
        """`pid`: of the process that serves, if it is a child of the one that was started."""
        self.name = name
        self.port = port
        self._process = process
        self._pid = process.pid if pid is None else pid

    def ended(self) -> int | None:
        """Return the exit code; None while it runs."""
        return self._process.poll()

    def cpu(self) -> float:
        """Return the CPU seconds of all threads, with nanosecond resolution."""
        return time.clock_gettime((~self._pid << 3) | 2)  # the kernel's clock of another process

    def memory(self) -> int:
        """Return the resident bytes."""
        status = Path(f"/proc/{self._pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) * 1024

    def settle(self, patience: float = 120.0) -> None:
        """Wait until the server is idle, so that leftover work does not disturb the next measurement."""
        give_up = time.monotonic() + patience
        while time.monotonic() < give_up:
            used = self.cpu()
            time.sleep(0.5)
            if self.cpu() - used < 0.025:  # 5 %
                return

    def end(self) -> None:
        for kind in (signal.SIGINT, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, kind)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10)
                return


def start(name: str, script: str, arguments: Sequence[str], *, core: int | None) -> Running:
    """Start one of our own servers, which prints its URL once it is ready."""
    process = _spawn(name, [sys.executable, str(HERE / script), *arguments], core, stdout=subprocess.PIPE)
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    said, give_up = b"", time.monotonic() + 60
    while time.monotonic() < give_up and process.poll() is None:
        said += process.stdout.read() or b""
        found = _READY.search(said)
        if found:
            return Running(name, process, int(found[1]), int(found[2]))
        time.sleep(0.05)
    Running(name, process, 0).end()
    raise ServerError(f"{name} did not start: {_tail(name)}")


def start_litellm(upstream: Running, *, core: int | None) -> Running:
    """Start the proxy in front of `upstream`, set up for production: no debugging, no request log."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    models = "".join(
        f"  - model_name: {model}\n    litellm_params:\n      model: openai/{model}\n"
        f"      api_base: http://127.0.0.1:{upstream.port}/v1\n      api_key: none\n"
        for model in ("at-once", "paced")
    )
    config = BUILD / "litellm.yaml"
    config.write_text(
        f"model_list:\n{models}litellm_settings:\n  set_verbose: false\n  json_logs: true\n"
        "general_settings:\n  disable_spend_logs: true\n  disable_error_logs: true\n"
    )
    command = [str(LITELLM / "bin" / "litellm"), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    environment = {
        "LITELLM_LOG": "ERROR",
        "LITELLM_MODE": "PRODUCTION",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_MASTER_KEY": KEY,
    }
    process = _spawn("litellm", [*command, "--num_workers", "1"], core, environment=environment)
    running = Running("litellm", process, port)
    give_up = time.monotonic() + 300  # it takes 15 s where nothing else runs
    while time.monotonic() < give_up and process.poll() is None:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health/liveliness", timeout=5).close()
            return running
        time.sleep(0.5)
    running.end()
    raise ServerError(f"litellm did not start: {_tail('litellm')}")


def set_up_litellm() -> str:
    """Install LiteLLM if needed; return its version."""
    python = LITELLM / "bin" / "python"
    BUILD.mkdir(parents=True, exist_ok=True)
    try:
        if not python.exists():
            _run([sys.executable, "-m", "venv", str(LITELLM)])
        if not (LITELLM / "bin" / "litellm").exists():
            _run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "litellm[proxy]"])
        return _run(
            [str(python), "-c", "import importlib.metadata as metadata; print(metadata.version('litellm'))"]
        ).strip()
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", "") or ""
        raise ServerError(f"cannot be installed: {_short(str(said) or str(error))}") from None


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=1800).stdout


def _spawn(
    name: str,
    command: list[str],
    core: int | None,
    *,
    stdout: int | None = None,
    environment: dict[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log if stdout is None else stdout,
            stderr=log,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
    if core is not None:
        os.sched_setaffinity(process.pid, {core})  # before it has threads, which would keep what they have
    return process


def _end_with_parent() -> None:
    """Stop the servers however the run ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _tail(name: str) -> str:
    try:
        return _short((BUILD / f"{name}.log").read_text(errors="replace"))
    except OSError:
        return "no log"


def _short(text: str) -> str:
    """Return the end of a log on one line, without this machine's folders."""
    line = " | ".join(line.strip() for line in text[-400:].splitlines() if line.strip())
    return line.replace(str(REPOSITORY), ".").replace(str(Path.home()), "~")
