"""Checks the GPUs: those of this machine, and those that managed engines are to use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from headrace.cli.doctor.check_result import CheckResult, fail, ok, warn
from headrace.config import Config
from headrace.config.managed_section import ManagedConfig
from headrace.engine.executors.memory import gib
from headrace.observe.gpus.gpu import Gpu
from headrace.observe.gpus.gpu_watch import open_gpus

_VLLM_SHARE: Final = 0.9  # of a GPU's memory, unless its arguments name another


def check_gpus(config: Config | None, gpus: Sequence[Gpu] | None = None) -> Iterator[CheckResult]:
    """`gpus`: default: those of this machine."""
    if gpus is None:
        reader = open_gpus()
        gpus = [] if reader is None else reader()
    for gpu in gpus:
        yield ok(f"gpu {gpu.number}", _described(gpu))
    if config is None:
        return
    for name, model in config.models.items():
        upstream = model.upstream
        # OpenVINO counts Intel's GPUs, which are not listed here.
        if upstream is None or upstream.managed is None or upstream.kind == "openvino":
            continue
        yield from _check_engine(f"gpus of {name}", upstream.kind, upstream.managed, gpus)


def _described(gpu: Gpu) -> str:
    if gpu.memory_free is None or gpu.memory_total is None:
        return gpu.name
    return f"{gpu.name}: {gib(gpu.memory_free)} of {gib(gpu.memory_total)} free"


def _check_engine(check: str, kind: str, managed: ManagedConfig, gpus: Sequence[Gpu]) -> Iterator[CheckResult]:
    here = {gpu.number: gpu for gpu in reversed(gpus)}  # NVIDIA's before AMD's of the same number
    missing = [number for number in managed.gpus or () if number not in here]
    if missing:
        found = f"{', '.join(map(str, missing))} not found; this machine has {len(gpus)}"
        yield fail(check, found, "Change managed.gpus, or install the driver: nvidia-smi lists NVIDIA's GPUs.")
        return
    share = _vllm_share(managed.arguments) if kind == "vllm" else None
    for number in managed.gpus if managed.gpus is not None else sorted(here):
        gpu = here[number]
        if share is None or gpu.memory_free is None or gpu.memory_total is None:
            continue
        if gpu.memory_free < share * gpu.memory_total:
            found = f"gpu {number}: {gib(gpu.memory_free)} free, vLLM takes {gib(int(share * gpu.memory_total))}"
            advice = "End what uses the GPU, or add --gpu-memory-utilization=SHARE to managed.arguments."
            yield warn(check, found, advice)


def _vllm_share(arguments: Sequence[str]) -> float:
    flag = "--gpu-memory-utilization"
    for number, argument in enumerate(arguments):
        value = argument.removeprefix(f"{flag}=")
        if argument == flag and number + 1 < len(arguments):
            value = arguments[number + 1]
        if value != argument:
            try:
                return float(value)
            except ValueError:
                break
    return _VLLM_SHARE
