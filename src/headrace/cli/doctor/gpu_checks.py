"""Checks the GPUs: those of this machine, and those that managed engines are to use."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from typing import Final

from headrace.cli.doctor.check_result import CheckResult, fail, ok, warn
from headrace.config import Config
from headrace.config.managed_section import ManagedConfig
from headrace.engine.executors.memory import gib
from headrace.observe.gpus.gpu import Gpu, numbered_gpus
from headrace.observe.gpus.gpu_watch import open_gpus

_VLLM_SHARE: Final = 0.9  # of a GPU's memory, unless its arguments name another
_SHARE_FLAG: Final = "--gpu-memory-utilization"


def check_gpus(config: Config | None, seconds: float) -> Iterator[CheckResult]:
    """`seconds`: that the drivers may take to answer."""
    found = _read(seconds)
    if isinstance(found, str):
        yield warn("gpus", found, "Run nvidia-smi, and look for errors of the driver in the kernel's log.")
        return
    for gpu in found:
        yield ok(f"gpu {gpu.number}", _described(gpu))
    if config is None:
        return
    for name, model in config.models.items():
        upstream = model.upstream
        # OpenVINO counts Intel's GPUs, which are not listed here.
        if upstream is None or upstream.managed is None or upstream.kind == "openvino":
            continue
        yield from _check_engine(f"gpus of {name}", upstream.kind, upstream.managed, numbered_gpus(found))


def _read(seconds: float) -> Sequence[Gpu] | str:
    """Return the GPUs, or why they cannot be read. In a thread: a driver may hang."""
    found: list[Sequence[Gpu] | str] = []

    def read() -> None:
        try:
            reader = open_gpus()
            found.append(() if reader is None else reader())
        except OSError as error:
            found.append(str(error))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else f"the driver of the GPUs does not answer within {seconds:g} s"


def _described(gpu: Gpu) -> str:
    if gpu.memory_free is None or gpu.memory_total is None:
        return gpu.name
    return f"{gpu.name}: {gib(gpu.memory_free)} of {gib(gpu.memory_total)} free"


def _check_engine(check: str, kind: str, managed: ManagedConfig, here: dict[int, Gpu]) -> Iterator[CheckResult]:
    if not here:
        if managed.gpus is not None:
            advice = "Install the driver of NVIDIA or AMD. Other GPUs are not shown here."
            yield warn(check, "this machine shows no GPU of NVIDIA or AMD", advice)
        return
    if managed.gpus is None and "CUDA_VISIBLE_DEVICES" in {**os.environ, **managed.environment}:
        return  # the engine sees others
    needed = managed.tensor_parallel * managed.pipeline_parallel
    numbers = managed.gpus if managed.gpus is not None else sorted(here)[:needed]
    missing = [number for number in numbers if number not in here]
    if missing or (kind != "llama.cpp" and len(numbers) < needed):
        listed = f"{', '.join(map(str, missing))} not found" if missing else f"{needed} needed"
        advice = "Change managed.gpus or managed.tensor_parallel: nvidia-smi lists NVIDIA's GPUs."
        yield fail(check, f"{listed}; this machine has {len(here)}", advice)
        return
    if kind != "vllm":
        return
    share = _vllm_share(managed.arguments)
    for number in numbers:
        free, total = here[number].memory_free, here[number].memory_total
        if free is not None and total is not None and free < share * total:
            found = f"gpu {number}: {gib(free)} free, vLLM takes {gib(int(share * total))}"
            advice = f"End what uses the GPU, or add {_SHARE_FLAG}=SHARE to managed.arguments."
            yield warn(check, found, advice)


def _vllm_share(arguments: Sequence[str]) -> float:
    share = _VLLM_SHARE
    for argument, following in zip(arguments, (*arguments[1:], ""), strict=False):
        flag, _, value = argument.partition("=")
        if flag.replace("_", "-") == _SHARE_FLAG:
            try:
                share = float(value or following)
            except ValueError:
                continue
    return share
