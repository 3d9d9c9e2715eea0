"""The engines under measurement: which peer, at which precision, started how, on which converted model.

Owns the table and each engine's configuration as a reader should know it. Installing is install.py's, converting
convert.py's.
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

import millrace

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


ALL: Final = ("start", "decode", "prefill", "batch")
CONFIGURATION: Final = {
    "millrace": "the bare core: engine.cpu through engine.offline, steps of at most 512 rows, KV in bf16",
    "llama.cpp": "native build of the source in xllamacpp's sdist, driven through its library (no HTTP, no sampler "
    "chain), KV in f16, batches of 2,048 in steps of 512; flash attention as the library chooses, and for the batch "
    "workloads also without it (`-fa off`)",
    "openvino": "ContinuousBatchingPipeline, prefix caching off, 1 GiB of KV, steps of at most 2,048 tokens (faster "
    "than the default of 256), everything else by default (a model cache was no faster); IR from "
    "optimum-intel: int8 per channel, int4 symmetric in groups of 128, fp16",
    "vllm": "LLMEngine in one process, prefix caching off, 1 GiB of KV, compiled (the default), tcmalloc and Intel's "
    "OpenMP preloaded where they could be had; W8A8 as compressed-tensors, embedding and head in bf16",
    "transformers": "generate(), bf16, sdpa attention, static batch",
}
OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}


def engines(peers: list[str], precisions: list[str], kinds: list[str]) -> list[Engine]:
    """Millrace and the peers asked for, where they have to do with those kinds; the same bits next to each other."""
    return [
        engine
        for precision in precisions
        for engine in _TABLE
        if engine.precision == precision and engine.peer in ("millrace", *peers) and set(kinds) & set(engine.kinds)
    ]


def _millrace(weights: str) -> Callable[[Path], Launch]:
    def launch(model: Path) -> Launch:
        source = str(Path(millrace.__file__).parents[1])  # the one that this program measures the machine with
        adapter = places.ADAPTERS / "drive_millrace.py"
        return Launch([sys.executable, adapter, model, weights, str(THREADS), places.CACHE], {"PYTHONPATH": source})

    return launch


def _llama(flash: str) -> Callable[[Path], Launch]:
    def launch(model: Path) -> Launch:
        return Launch([places.LLAMA_DRIVER, model, str(THREADS), flash], {})

    return launch


def _openvino(model: Path) -> Launch:
    return Launch([places.python("openvino"), places.ADAPTERS / "drive_openvino.py", model, str(THREADS)], OFFLINE)


def _transformers(model: Path) -> Launch:
    adapter = places.ADAPTERS / "drive_transformers.py"
    return Launch(
        [places.python("transformers"), adapter, model, str(THREADS)], {**OFFLINE, "OMP_NUM_THREADS": str(THREADS)}
    )


def _vllm(model: Path) -> Launch:
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
    return Launch([places.python("vllm"), places.ADAPTERS / "drive_vllm.py", model], env)


_TABLE: Final = (
    Engine("millrace", "int8", "int8", "hf", ALL, _millrace("int8")),
    Engine("millrace", "int4", "int4", "hf", ALL, _millrace("int4")),
    Engine("millrace", "bf16", "bf16", "hf", ALL, _millrace("bf16")),
    Engine("llama.cpp", "Q8_0", "int8", "q8_0.gguf", ALL, _llama("auto")),
    Engine("llama.cpp", "Q4_0", "int4", "q4_0.gguf", ALL, _llama("auto")),
    Engine("llama.cpp", "BF16", "bf16", "bf16.gguf", ALL, _llama("auto")),
    Engine("llama.cpp", "Q8_0 -fa off", "int8", "q8_0.gguf", ("batch",), _llama("off")),
    Engine("llama.cpp", "Q4_0 -fa off", "int4", "q4_0.gguf", ("batch",), _llama("off")),
    Engine("llama.cpp", "BF16 -fa off", "bf16", "bf16.gguf", ("batch",), _llama("off")),
    Engine("openvino", "int8", "int8", "openvino-int8", ALL, _openvino),
    Engine("openvino", "int4", "int4", "openvino-int4", ALL, _openvino),
    Engine("openvino", "fp16", "bf16", "openvino-fp16", ALL, _openvino),
    Engine("vllm", "W8A8", "int8", "w8a8", ALL, _vllm),
    Engine("vllm", "bf16", "bf16", "hf", ALL, _vllm),
    Engine("transformers", "bf16", "bf16", "hf", ALL, _transformers),
)
PEERS: Final = ("llama.cpp", "openvino", "vllm", "transformers")
