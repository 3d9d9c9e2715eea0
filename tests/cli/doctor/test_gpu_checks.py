"""What `headrace doctor` says about GPUs and the engines that are to use them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from headrace.cli.doctor import gpu_checks
from headrace.cli.doctor.check_result import CheckResult
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


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[CheckResult]]:
    def check(config: Config | None, *gpus: Gpu) -> list[CheckResult]:
        monkeypatch.setattr(gpu_checks, "open_gpus", lambda: (lambda: gpus) if gpus else None)
        return list(check_gpus(config, 60.0))

    return check


Check = Callable[..., list[CheckResult]]


def test_each_gpu_is_listed_with_its_free_memory(check: Check) -> None:
    first, second = check(None, EMPTY, Gpu(1, "AMD GPU", "amd"))
    assert (first.check, first.state, first.found) == ("gpu 0", "ok", "NVIDIA A: 79.0 GiB of 80.0 GiB free")
    assert (second.check, second.found) == ("gpu 1", "AMD GPU")


def test_a_machine_without_gpus_has_nothing_to_say(check: Check) -> None:
    assert check(Config()) == []
    assert check(config()) == []


@pytest.mark.parametrize("kind", ["vllm", "sglang", "llama.cpp"])
def test_a_gpu_that_is_not_there_fails(kind: str, check: Check) -> None:
    *_, found = check(config(kind, gpus=(1, 2, 3)), EMPTY, USED)
    assert (found.check, found.state) == ("gpus of big", "fail")
    assert found.found == "2, 3 not found; this machine has 2"


def test_gpus_that_cannot_be_seen_are_a_warning(check: Check) -> None:
    (found,) = check(config("llama.cpp", gpus=(0,)))
    assert (found.state, found.found) == ("warn", "this machine shows no GPU of NVIDIA or AMD")


def test_too_few_for_the_parts_of_a_model_fail(check: Check) -> None:
    *_, found = check(config("sglang", tensor_parallel=2, pipeline_parallel=2), EMPTY, USED)
    assert (found.state, found.found) == ("fail", "4 needed; this machine has 2")


def test_openvino_counts_other_gpus(check: Check) -> None:
    assert check(config("openvino", gpus=(3,))) == []


def test_numbers_are_of_nvidias_gpus_where_there_are_some(check: Check) -> None:
    *_, found = check(config(gpus=(1,)), EMPTY, Gpu(1, "AMD GPU", "amd"))
    assert found.found == "1 not found; this machine has 1"


@pytest.mark.parametrize(
    ("arguments", "warned"),
    [
        ((), [1]),
        (("--gpu-memory-utilization=0.7",), []),
        (("--gpu_memory_utilization", "0.99"), [0, 1]),
        (("--gpu-memory-utilization=0.99", "--gpu-memory-utilization=0.7"), []),
        (("--gpu-memory-utilization",), [1]),
        (("--gpu-memory-utilization=much",), [1]),
    ],
)
def test_more_memory_for_vllm_than_is_free_is_a_warning(
    arguments: tuple[str, ...], warned: list[int], check: Check
) -> None:
    results = check(config(arguments=arguments, tensor_parallel=2), EMPTY, USED)
    found = [each.found.partition(":")[0] for each in results if each.state == "warn"]
    assert found == [f"gpu {number}" for number in warned]


def test_only_the_gpus_that_an_engine_uses_are_checked(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(each.state == "ok" for each in check(config(), EMPTY, USED))  # the first
    assert all(each.state == "ok" for each in check(config(gpus=(0,)), EMPTY, USED))
    *_, found = check(config(gpus=(1,)), EMPTY, USED)
    assert found.found == "gpu 1: 60.0 GiB free, vLLM takes 72.0 GiB"
    assert all(each.state == "ok" for each in check(config(environment={"CUDA_VISIBLE_DEVICES": "1"}), USED))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert all(each.state == "ok" for each in check(config(), USED))


def test_a_driver_that_hangs_or_fails_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(gpu_checks, "open_gpus", lambda: never.wait() and None)
    (found,) = check_gpus(config(), 0.01)
    assert (found.state, found.found) == ("warn", "the driver of the GPUs does not answer within 0.01 s")
    never.set()

    def fail() -> None:
        raise OSError("NVML error 999")

    monkeypatch.setattr(gpu_checks, "open_gpus", fail)
    (found,) = check_gpus(config(), 60.0)
    assert (found.state, found.found) == ("warn", "NVML error 999")
