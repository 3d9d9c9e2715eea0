"""What `headrace doctor` says about GPUs and the engines that are to use them."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.cli.doctor.gpu_checks import check_gpus
from headrace.config import Config, ModelConfig
from headrace.config.managed_section import ManagedConfig
from headrace.config.upstream_section import UpstreamConfig
from headrace.observe.gpus.gpu import Gpu

GIB = 2**30
EMPTY = Gpu(0, "NVIDIA A", memory_used=GIB, memory_total=80 * GIB)
USED = Gpu(1, "NVIDIA A", memory_used=20 * GIB, memory_total=80 * GIB)


def config(kind: Any = "vllm", **managed: Any) -> Config:
    upstream = UpstreamConfig(kind=kind, managed=ManagedConfig(model="m", **managed))
    return Config(models={"big": ModelConfig(upstream=upstream)})


def test_each_gpu_is_listed_with_its_free_memory() -> None:
    first, second = check_gpus(None, [EMPTY, Gpu(1, "AMD GPU")])
    assert (first.check, first.state, first.found) == ("gpu 0", "ok", "NVIDIA A: 79.0 GiB of 80.0 GiB free")
    assert (second.check, second.found) == ("gpu 1", "AMD GPU")


def test_a_machine_without_gpus_has_nothing_to_say() -> None:
    assert list(check_gpus(Config(), [])) == []


@pytest.mark.parametrize("kind", ["vllm", "sglang", "llama.cpp"])
def test_a_gpu_that_is_not_there_fails(kind: str) -> None:
    *_, found = check_gpus(config(kind, gpus=(1, 2, 3)), [EMPTY, USED])
    assert (found.check, found.state) == ("gpus of big", "fail")
    assert found.found == "2, 3 not found; this machine has 2"


def test_openvino_counts_other_gpus() -> None:
    assert list(check_gpus(config("openvino", gpus=(3,)), [])) == []


@pytest.mark.parametrize(
    ("arguments", "warned"),
    [
        ((), [1]),
        (("--gpu-memory-utilization=0.7",), []),
        (("--gpu-memory-utilization", "0.99"), [0, 1]),
        (("--gpu-memory-utilization",), [1]),
        (("--gpu-memory-utilization=much",), [1]),
    ],
)
def test_more_memory_for_vllm_than_is_free_is_a_warning(arguments: tuple[str, ...], warned: list[int]) -> None:
    found = [each for each in check_gpus(config(arguments=arguments), [EMPTY, USED]) if each.state == "warn"]
    assert [each.found.partition(":")[0] for each in found] == [f"gpu {number}" for number in warned]


def test_only_the_gpus_that_an_engine_may_use_are_checked() -> None:
    assert all(each.state == "ok" for each in check_gpus(config(gpus=(0,)), [EMPTY, USED]))
    *_, found = check_gpus(config(gpus=(1,)), [EMPTY, USED])
    assert found.found == "gpu 1: 60.0 GiB free, vLLM takes 72.0 GiB"
