"""What differs between managed engines: their command lines, and the names of their metrics. Starts nothing."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from headrace.config.managed_section import ManagedConfig

_COMMANDS: Final[Mapping[str, Sequence[str]]] = {
    "vllm": ("vllm", "serve"),
    "sglang": (sys.executable, "-m", "sglang.launch_server"),
    "llama.cpp": ("llama-server",),
    "openvino": (sys.executable, "-m", "headrace.server.openvino_server"),
}
_METRICS: Final[Mapping[str, Mapping[str, Sequence[str]]]] = {
    "vllm": {
        "running": ("vllm:num_requests_running",),
        "waiting": ("vllm:num_requests_waiting",),
        "kv_used": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    },
    "sglang": {
        "running": ("sglang:num_running_reqs",),
        "waiting": ("sglang:num_queue_reqs",),
        "kv_used": ("sglang:token_usage",),
    },
    "llama.cpp": {
        "running": ("llamacpp:requests_processing",),
        "waiting": ("llamacpp:requests_deferred",),
        "kv_used": ("llamacpp:kv_cache_usage_ratio",),
    },
    "openvino": {
        "running": ("openvino:requests_running",),
        "waiting": ("openvino:requests_waiting",),
        "kv_used": ("openvino:kv_cache_usage_ratio",),
    },
}
_SAMPLE: Final = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{[^}]*\})?\s+([-+.\deEinfNa]+)\s*$", re.MULTILINE)


class EngineLoad(msgspec.Struct, frozen=True):
    """What an engine's metrics say. None: it does not say."""

    running: int | None = None
    waiting: int | None = None
    kv_used: float | None = None  # share


def command_of(
    kind: str,
    config: ManagedConfig,
    *,
    served_name: str,
    port: int,
    key: str,
    context: int | None,
    priority: bool = False,
) -> list[str]:
    """Return the command that starts the engine. `context`: tokens of a request. `priority`: requests have one."""
    given = [*(config.command or _COMMANDS[kind])]
    address = ["--host", "127.0.0.1", "--port", str(port)]
    adapters = [f"{name}={path}" for name, path in config.adapters.items()]
    options: dict[str, object]
    match kind:
        case "vllm":
            given += [config.model, *address, "--served-model-name", served_name]
            options = {
                "--tensor-parallel-size": config.tensor_parallel if config.tensor_parallel > 1 else None,
                "--pipeline-parallel-size": config.pipeline_parallel if config.pipeline_parallel > 1 else None,
                "--quantization": config.quantisation,
                "--kv-cache-dtype": config.kv_dtype,
                "--max-model-len": context,
                "--max-num-seqs": config.sequences,
                "--scheduling-policy": "priority" if priority else None,
            }
            if adapters:
                given += [
                    "--enable-lora",
                    "--lora-modules",
                    *(f"{name}={path}" for name, path in config.adapters.items()),
                ]
        case "sglang":
            given += ["--model-path", config.model, *address, "--served-model-name", served_name]
            given += ["--api-key", key, "--enable-metrics"]
            options = {
                "--tp-size": config.tensor_parallel if config.tensor_parallel > 1 else None,
                "--pp-size": config.pipeline_parallel if config.pipeline_parallel > 1 else None,
                "--quantization": config.quantisation,
                "--kv-cache-dtype": config.kv_dtype,
                "--context-length": context,
                "--max-running-requests": config.sequences,
            }
            if adapters:
                given += ["--lora-paths", *adapters]
        case "openvino":
            given += [config.model, *address, "--served-model-name", served_name]
            options = {
                "--device": None if config.gpus is None else f"GPU.{config.gpus[0]}",
                "--kv-cache-dtype": config.kv_dtype,
                "--max-model-len": context,
                "--max-num-seqs": config.sequences,
            }
        case _:
            given += ["--model", config.model, *address, "--alias", served_name, "--metrics"]
            split = "row" if config.tensor_parallel > 1 else "layer" if config.pipeline_parallel > 1 else None
            # llama.cpp divides the context between its slots.
            slots = config.sequences or 1
            options = {
                "--split-mode": split,
                "--n-gpu-layers": None if config.gpus is None else 999,
                "--cache-type-k": config.kv_dtype,
                "--cache-type-v": config.kv_dtype,
                "--ctx-size": None if context is None else context * slots,
                "--parallel": config.sequences,
            }
            for path in config.adapters.values():
                given += ["--lora", path]
    for name, value in options.items():
        if value is not None:
            given += [name, str(value)]
    return [*given, *config.arguments]


def environment_of(kind: str, config: ManagedConfig, environ: Mapping[str, str], *, key: str) -> dict[str, str]:
    """Return the engine's environment. The key is there and not in the arguments, which other users can see."""
    found = {**environ, **config.environment}
    if config.gpus is not None:
        found["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, config.gpus))
        found.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # the numbers of nvidia-smi; else the fastest is 0
    variable = {"vllm": "VLLM_API_KEY", "llama.cpp": "LLAMA_API_KEY", "openvino": "OPENVINO_API_KEY"}.get(kind)
    if variable is not None:
        found[variable] = key
    return found


def load_of(kind: str, exposition: str) -> EngineLoad:
    """Read an engine's load from its Prometheus metrics; several series of one name are added up."""
    values: dict[str, float] = {}
    for name, value in _SAMPLE.findall(exposition):
        try:
            values[name] = values.get(name, 0.0) + float(value)
        except ValueError:
            continue
    found: dict[str, float] = {}
    for what, names in _METRICS[kind].items():
        known = [values[name] for name in names if name in values]
        if known and known[0] == known[0]:  # not NaN
            found[what] = known[0]
    running, waiting, kv_used = found.get("running"), found.get("waiting"), found.get("kv_used")
    return EngineLoad(
        running=None if running is None else round(running),
        waiting=None if waiting is None else round(waiting),
        kv_used=kv_used,
    )
