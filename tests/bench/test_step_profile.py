"""The components of a step add up to its time, and what was read and done follows from the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.bench.step_profile import DECODE_STEPS, profile
from headrace.engine.executors.cpu_executor import CpuExecutor
from headrace.models.model_folder import open_model


@pytest.fixture(scope="module")
def executor(tiny_folder: Path) -> CpuExecutor:
    return CpuExecutor.load(open_model(tiny_folder), weights="int8", kv="bf16", threads=1, context=256, max_rows=64)


def test_components_add_up_and_rates_are_the_work_by_the_time(executor: CpuExecutor) -> None:
    prefill, decode = profile(executor, bandwidth=1e9, peak=1e9)
    assert (prefill.phase, decode.phase) == ("prefill", "decode")
    assert (prefill.tokens, decode.tokens) == (256 - DECODE_STEPS - 1, 1)
    for phase in (prefill, decode):
        assert sum(each.ms for each in phase.components) == pytest.approx(phase.ms, rel=0.01)
        names = {each.component for each in phase.components}
        assert {"qkv", "attention", "up", "down", "head", "outside the core"} <= names
        assert phase.floor_ms > 0
    layers = len(executor.spec.layers)
    up = next(each for each in decode.components if each.component == "up")
    assert up.ms_per_layer == pytest.approx(up.ms / layers)
    assert next(each for each in decode.components if each.component == "head").ms_per_layer is None
    read = decode.bytes_per_s * decode.ms / 1e3
    assert read == pytest.approx(executor.work.bytes_read(prefill.tokens + (DECODE_STEPS + 1) / 2), rel=1e-6)
    assert decode.bound == "bandwidth" or decode.operations_per_s > decode.bytes_per_s


def test_the_floor_is_the_slower_of_reading_and_computing(executor: CpuExecutor) -> None:
    (_, reading), (_, computing) = (
        profile(executor, bandwidth=1e3, peak=1e15),
        profile(executor, bandwidth=1e15, peak=1e3),
    )
    assert (reading.bound, computing.bound) == ("bandwidth", "compute")
    assert reading.floor_ms == pytest.approx(executor.work.bytes_read(reading_tokens(executor)) / 1e3 * 1e3, rel=1e-6)


def reading_tokens(executor: CpuExecutor) -> float:
    return executor.capacity.context - DECODE_STEPS - 1 + (DECODE_STEPS + 1) / 2
