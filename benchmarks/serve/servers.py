"""Starts and stops the measured servers, waits until they are ready, and reads their memory.

Installing and converting is in ../core; a server whose environment is missing is skipped with its reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import commands
import engines
import install
import places

import headrace

HERE: Final = Path(__file__).resolve().parent
THREADS: Final = engines.THREADS
CONTEXT: Final = 4096  # tokens of one request
KV_TOKENS: Final = 32_768  # of all requests together, where a server asks
MOST_AT_ONCE: Final = 32
START_SECONDS: Final = 600.0


class ServerError(Exception):
    """A server did not start, or died; the message says why."""


@dataclass(frozen=True, slots=True)
class Launch:
    command: list[str | Path]
    env: Mapping[str, str]
    health: str = "/health"
    model: str | None = None  # the name to ask it by, where it does not list its model
    ignores_eos: bool = True  # or refuses a request that asks for it


@dataclass(frozen=True, slots=True)
class Server:
    peer: str
    label: str  # as the peer calls the precision
    precision: str  # what it is compared with
    form: str  # of the model, as ../core/convert.py names it
    launch: Callable[[Path, int], Launch]

    @property
    def name(self) -> str:
        return f"{self.peer} {self.label}"


CONFIGURATION: Final = {
    "headrace": "`weights` int8 (or int4, bf16) and no guesses (`speculation` none: the text of random weights goes "
    "round in circles, which n-grams foresee too well), everything else by default",
    "llama.cpp": f"llama-server from the source in xllamacpp's sdist, built for the machine: `-np {MOST_AT_ONCE} -kvu "
    f"-c {KV_TOKENS} -fa off`, chatml template, everything else by default (prefixes of a slot are reused). Flash "
    "attention, its default, was three times slower on the CPUs that we measured on",
    "openvino": "ContinuousBatchingPipeline with prefix caching and steps of at most 2,048 tokens behind "
    "openvino_http.py",
    "vllm": "its OpenAI server (`vllm.entrypoints.openai.api_server`), 1 GiB of KV, compiled as by default, "
    "tcmalloc and Intel's OpenMP preloaded",
    "transformers": "`transformers serve --continuous-batching`, asked without `ignore_eos`, which it refuses",
}


def _headrace(weights: str) -> Callable[[Path, int], Launch]:
    def launch(model: Path, port: int) -> Launch:
        config = places.BUILD / f"serve-{weights}.toml"
        options = f'weights = "{weights}"\nspeculation = "none"\n'
        config.write_text(f'[models.model]\npath = "{model}"\n[models.model.options]\n{options}')
        words = ["-m", "headrace", "serve", "--config", config, "--port", str(port)]
        env = {
            "PYTHONPATH": str(Path(headrace.__file__).parents[1]),
            "PYTHONDONTWRITEBYTECODE": "",  # a package that was installed has its bytecode, as the peers' have
            "HEADRACE_CACHE": str(places.CACHE),
            "HEADRACE_STORAGE_FOLDER": str(places.BUILD / "serve-storage"),
        }
        return Launch([sys.executable, *words], env, "/health/ready")

    return launch


def _llama(model: Path, port: int) -> Launch:
    command = [
        *(places.LLAMA_SERVER, "-m", model, "--host", "127.0.0.1", "--port", str(port), "-t", str(THREADS)),
        *("-np", str(MOST_AT_ONCE), "-kvu", "-c", str(KV_TOKENS), "--chat-template", "chatml", "-fa", "off"),
    ]
    return Launch(command, {})


def _openvino(model: Path, port: int) -> Launch:
    command = [places.python("openvino"), HERE / "openvino_http.py", model, str(port), str(THREADS)]
    return Launch(command, engines.OFFLINE)


def _vllm(model: Path, port: int) -> Launch:
    cores = sorted(os.sched_getaffinity(0))[:THREADS]
    env = {
        **engines.OFFLINE,
        "VLLM_CACHE_ROOT": str(places.CACHE / "vllm"),
        "VLLM_CPU_KVCACHE_SPACE": engines.VLLM_KV_GIB,
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    preloads = install.vllm_preloads()
    if preloads:
        env["LD_PRELOAD"] = ":".join(map(str, preloads))
    # `vllm serve` asks for the metadata of a package "vllm", which the CPU build, vllm-cpu, has not.
    program = (places.python("vllm"), "-m", "vllm.entrypoints.openai.api_server")
    command = [
        *(*program, "--model", model, "--host", "127.0.0.1", "--port", str(port)),
        *("--max-model-len", str(CONTEXT), "--max-num-seqs", str(MOST_AT_ONCE)),
    ]
    return Launch(command, env)


def _transformers(model: Path, port: int) -> Launch:
    program = places.environment("transformers") / "bin" / "transformers"
    command = [program, "serve", model, "--host", "127.0.0.1", "--port", str(port), "--continuous-batching"]
    hub = places.CACHE / "hub"  # which it looks into when it is asked for its models
    hub.mkdir(parents=True, exist_ok=True)
    env = {**engines.OFFLINE, "OMP_NUM_THREADS": str(THREADS), "HF_HUB_CACHE": str(hub)}
    return Launch(command, env, model=str(model), ignores_eos=False)


SERVERS: Final = (
    Server("headrace", "int8", "int8", "hf", _headrace("int8")),
    Server("llama.cpp", "Q8_0", "int8", "q8_0.gguf", _llama),
    Server("openvino", "int8", "int8", "openvino-int8", _openvino),
    Server("vllm", "W8A8", "int8", "w8a8", _vllm),
    Server("headrace", "int4", "int4", "hf", _headrace("int4")),
    Server("llama.cpp", "Q4_0", "int4", "q4_0.gguf", _llama),
    Server("openvino", "int4", "int4", "openvino-int4", _openvino),
    Server("headrace", "bf16", "bf16", "hf", _headrace("bf16")),
    Server("llama.cpp", "BF16", "bf16", "bf16.gguf", _llama),
    Server("openvino", "fp16", "bf16", "openvino-fp16", _openvino),
    Server("vllm", "bf16", "bf16", "hf", _vllm),
    Server("transformers", "bf16", "bf16", "hf", _transformers),
)
PEERS: Final = ("llama.cpp", "openvino", "vllm", "transformers")


class Running:
    """A server's process group."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path, launch: Launch) -> None:
        self.url = url
        self.launch = launch
        self._process = process
        self._log = log

    @property
    def flags(self) -> list[str]:
        """Return the flags that `headrace bench` needs for it."""
        flags = ["--model", self.launch.model] if self.launch.model is not None else []
        return flags if self.launch.ignores_eos else [*flags, "--no-ignore-eos"]

    def memory(self) -> int:
        """Return the bytes of all its processes, with shared pages counted once (PSS)."""
        return sum(_pss(pid) for pid in _with_children(self._process.pid))

    def why(self) -> str:
        return commands.tail(self._log)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=20)
        commands.end_group(self._process)


@contextlib.contextmanager
def started(server: Server, model: Path) -> Iterator[tuple[Running, float]]:
    """Start a server; yield it and the seconds to its first token. Raises ServerError."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    launch = server.launch(model, port)
    places.LOGS.mkdir(parents=True, exist_ok=True)
    log = places.LOGS / f"serve-{server.name}.log".replace(" ", "-")
    with log.open("wb") as out:
        begun = time.perf_counter()
        process = subprocess.Popen(
            [str(word) for word in launch.command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **launch.env},
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
    running = Running(process, f"http://127.0.0.1:{port}", log, launch)
    try:
        _wait(running, launch.health)
        _first_token(running)
        yield running, time.perf_counter() - begun
    finally:
        running.end()


def _wait(running: Running, health: str) -> None:
    give_up = time.monotonic() + START_SECONDS
    while time.monotonic() < give_up:
        if not running.alive:
            raise ServerError(f"it ended: {running.why()}")
        try:
            with urllib.request.urlopen(running.url + health, timeout=5) as answer:
                if answer.status == 200:
                    return
        except (OSError, urllib.error.URLError):
            pass
        time.sleep(0.02)
    raise ServerError(f"not ready after {START_SECONDS:.0f} s: {running.why()}")


def _first_token(running: Running) -> None:
    """Wait for the first words of a stream."""
    url, model = running.url, running.launch.model
    if model is None:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as answer:
            model = json.load(answer)["data"][0]["id"]
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "The water ran down the narrow channel to the wheel."}],
        "stream": True,
        "max_tokens": 8,
        "temperature": 0,
        **({"ignore_eos": True} if running.launch.ignores_eos else {}),
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            for line in answer:
                if line.startswith(b"data: {") and _says(json.loads(line[6:])):
                    answer.read()
                    return
    except (OSError, ValueError, KeyError) as error:
        raise ServerError(f"it does not answer: {error!r}") from None
    raise ServerError("its answer has no words")


def _says(event: dict[str, Any]) -> bool:
    choices = event.get("choices") or []
    delta = choices[0].get("delta") or {} if choices else {}
    return bool(delta.get("content") or delta.get("reasoning_content"))


def _with_children(leader: int) -> list[int]:
    """Return a process and all its descendants, in any session."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, ValueError, IndexError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = [leader]
    for process in found:
        found += children.get(process, [])
    return found


def _pss(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
