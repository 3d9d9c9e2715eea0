"""The table of measured engines: peer, precision, command and converted model.

Installing is in install.py, converting in convert.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import install
import places
from summary import OURS

import headrace

THREADS: Final = 2
VLLM_KV_GIB: Final = "1"  # room for the 8,192 tokens that the largest workload may hold
PRECISION_BITS: Final = {"int8": 8, "int4": 4, "bf16": 16}


@dataclass(frozen=True, slots=True)
class Launch:
    command: list[str | Path]
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Engine:
    peer: str
    label: str  # as the peer calls the precision
    precision: str  # what it is compared with: int8, int4 or bf16
    form: str  # of the model
    kinds: tuple[str, ...]  # of workloads, as --only says them
    launch: Callable[[Path], Launch]

    @property
    def name(self) -> str:
        return f"{self.peer} {self.label}"


CORE: Final = ("start", "decode", "prefill", "batch")
SERVING: Final = ("batch", "cached", "chats")
CONFIGURATION: Final = {
    "headrace": "the core's board: engine.cpu through engine.offline, steps of at most 512 rows, KV in bf16; the "
    "engine's: AsyncLLM with one worker process, no speculation, everything else by default",
    "bare core": "engine.cpu through engine.offline, as on the core's board",
    "llama.cpp": "native build of the source in xllamacpp's sdist, driven through its library (no HTTP, no sampler "
    "chain), KV in f16, batches of 2,048 in steps of 512; flash attention as the library chooses, and for the batch "
    "workloads also without it (`-fa off`)",
    "openvino": "ContinuousBatchingPipeline, prefix caching on the engine's board alone, 1 GiB of KV, steps of at most "
    "2,048 tokens (faster than the default of 256), everything else by default (a model cache was no faster); IR from "
    "optimum-intel: int8 per channel, int4 symmetric in groups of 128, fp16",
    "vllm": "LLMEngine in one process, prefix caching on the engine's board alone, 1 GiB of KV, compiled (the "
    "default), tcmalloc and Intel's OpenMP preloaded where they could be had; W8A8 as compressed-tensors, embedding "
    "and head in bf16",
    "transformers": "generate(), bf16, sdpa attention, static batch",
}
OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}


def engines(board: str, peers: list[str], precisions: list[str], kinds: list[str]) -> list[Engine]:
    """Return Headrace and the selected peers for these kinds, ordered by bits."""
    return [
        engine
        for precision in precisions
        for engine in _BOARDS[board]
        if engine.precision == precision and engine.peer in (*OURS, *peers) and set(kinds) & set(engine.kinds)
    ]


def _core(weights: str) -> Callable[[Path], Launch]:
    def launch(model: Path) -> Launch:
        source = str(Path(headrace.__file__).parents[1])  # the one that this program measures the machine with
        adapter = places.ADAPTERS / "drive_headrace.py"
        return Launch([sys.executable, adapter, model, weights, str(THREADS), places.CACHE], {"PYTHONPATH": source})

    return launch


def _engine(weights: str, kv: str = "bf16") -> Callable[[Path], Launch]:
    def launch(model: Path) -> Launch:
        env = {"PYTHONPATH": str(Path(headrace.__file__).parents[1]), "HEADRACE_CACHE": str(places.CACHE)}
        return Launch([sys.executable, places.ADAPTERS / "drive_engine.py", model, weights, kv, str(THREADS)], env)

    return launch


def _llama(flash: str) -> Callable[[Path], Launch]:
    def launch(model: Path) -> Launch:
        return Launch([places.LLAMA_DRIVER, model, str(THREADS), flash], {})

    return launch


def _openvino(caching: str = "0") -> Callable[[Path], Launch]:
    def launch(model: Path) -> Launch:
        adapter = places.ADAPTERS / "drive_openvino.py"
        return Launch([places.python("openvino"), adapter, model, str(THREADS), caching], OFFLINE)

    return launch


def _transformers(model: Path) -> Launch:
    adapter = places.ADAPTERS / "drive_transformers.py"
    return Launch(
        [places.python("transformers"), adapter, model, str(THREADS)], {**OFFLINE, "OMP_NUM_THREADS": str(THREADS)}
    )


def _vllm(caching: str = "0") -> Callable[[Path], Launch]:
    def launch(model: Path) -> Launch:
        cores = sorted(os.sched_getaffinity(0))[:THREADS]
        env = {
            **OFFLINE,
            "VLLM_CACHE_ROOT": str(places.CACHE / "vllm"),
            "VLLM_CPU_KVCACHE_SPACE": VLLM_KV_GIB,
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
        }
        preloads = install.vllm_preloads()
        if preloads:
            env["LD_PRELOAD"] = ":".join(map(str, preloads))
        return Launch([places.python("vllm"), places.ADAPTERS / "drive_vllm.py", model, caching], env)

    return launch


_CORE_TABLE: Final = (
    Engine("headrace", "int8", "int8", "hf", CORE, _core("int8")),
    Engine("headrace", "int4", "int4", "hf", CORE, _core("int4")),
    Engine("headrace", "bf16", "bf16", "hf", CORE, _core("bf16")),
    Engine("llama.cpp", "Q8_0", "int8", "q8_0.gguf", CORE, _llama("auto")),
    Engine("llama.cpp", "Q4_0", "int4", "q4_0.gguf", CORE, _llama("auto")),
    Engine("llama.cpp", "BF16", "bf16", "bf16.gguf", CORE, _llama("auto")),
    Engine("llama.cpp", "Q8_0 -fa off", "int8", "q8_0.gguf", ("batch",), _llama("off")),
    Engine("llama.cpp", "Q4_0 -fa off", "int4", "q4_0.gguf", ("batch",), _llama("off")),
    Engine("llama.cpp", "BF16 -fa off", "bf16", "bf16.gguf", ("batch",), _llama("off")),
    Engine("openvino", "int8", "int8", "openvino-int8", CORE, _openvino()),
    Engine("openvino", "int4", "int4", "openvino-int4", CORE, _openvino()),
    Engine("openvino", "fp16", "bf16", "openvino-fp16", CORE, _openvino()),
    Engine("vllm", "W8A8", "int8", "w8a8", CORE, _vllm()),
    Engine("vllm", "bf16", "bf16", "hf", CORE, _vllm()),
    Engine("transformers", "bf16", "bf16", "hf", CORE, _transformers),
)
_ENGINE_TABLE: Final = (
    Engine("headrace", "int8", "int8", "hf", SERVING, _engine("int8")),
    Engine("headrace", "int4", "int4", "hf", SERVING, _engine("int4")),
    Engine("headrace", "int8, KV int8", "int8", "hf", ("batch",), _engine("int8", "int8")),
    Engine("bare core", "int8", "int8", "hf", ("batch",), _core("int8")),
    Engine("bare core", "int4", "int4", "hf", ("batch",), _core("int4")),
    Engine("llama.cpp", "Q8_0", "int8", "q8_0.gguf", ("batch", "cached"), _llama("auto")),
    Engine("llama.cpp", "Q4_0", "int4", "q4_0.gguf", ("batch", "cached"), _llama("auto")),
    Engine("llama.cpp", "Q8_0 -fa off", "int8", "q8_0.gguf", ("batch", "cached"), _llama("off")),
    Engine("llama.cpp", "Q4_0 -fa off", "int4", "q4_0.gguf", ("batch", "cached"), _llama("off")),
    Engine("openvino", "int8", "int8", "openvino-int8", SERVING, _openvino("1")),
    Engine("openvino", "int4", "int4", "openvino-int4", SERVING, _openvino("1")),
    Engine("vllm", "W8A8", "int8", "w8a8", SERVING, _vllm("1")),
)
_BOARDS: Final = {"core": _CORE_TABLE, "engine": _ENGINE_TABLE}
BOARDS: Final = tuple(_BOARDS)
NAMES: Final = tuple(dict.fromkeys(engine.name for board in _BOARDS.values() for engine in board))
PEERS: Final = ("llama.cpp", "openvino", "vllm", "transformers")
