"""Counting of parameters, bytes and operations, and the floors that follow from them."""

from __future__ import annotations

from pathlib import Path

import pytest

import headrace._core as _core
from headrace.bench.machine import Machine, bandwidth, probe_machine
from headrace.bench.roofline import (
    best_peak,
    floor,
    kv_bytes_per_token,
    operations,
    parameters,
)
from headrace.models.model_folder import open_model
from headrace.models.precision import parse_plan
from headrace.models.step_work import active_parameters, decode_bytes, step_work
from headrace.models.synthetic.random_model import write_random_model

PEAKS = {"fma_f32": 1e9, "dot_int8": 4e9, "dot_bf16": 2e9, "amx_int8": 0.0, "amx_bf16": 0.0}
MACHINE = Machine(cpu="x", threads=1, isa="avx2", memory=10**9, peaks=PEAKS)


@pytest.fixture(scope="module")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe") / "mixtral"
    write_random_model("mixtral-tiny", folder)
    return folder


def test_parameters_are_those_in_the_files(tiny_folder: Path, moe_folder: Path) -> None:
    for path in (tiny_folder, moe_folder):
        folder = open_model(path)
        assert 2 * parameters(folder.spec) == folder.weights.total_bytes  # bf16


def test_a_token_meets_only_the_chosen_experts(moe_folder: Path) -> None:
    spec = open_model(moe_folder).spec
    experts = spec.experts
    assert experts is not None
    idle = experts.count - experts.top_k
    per_expert = 3 * spec.hidden_size * experts.intermediate_size
    layers = sum(layer.experts for layer in spec.layers)
    embedding = 0 if spec.tied else spec.vocab_size * spec.hidden_size
    assert parameters(spec) - active_parameters(spec) == idle * per_expert * layers + embedding


def test_decode_reads_the_bytes_of_its_precision(tiny_folder: Path) -> None:
    spec = open_model(tiny_folder).spec
    sizes = [decode_bytes(spec, parse_plan(name)) for name in ("f32", "bf16", "int8", "int4")]
    assert sizes[0] == pytest.approx(2 * sizes[1], rel=0.05)
    assert sizes[1] > 1.8 * sizes[2] > sizes[3]


def test_operations_grow_with_tokens_and_attention(tiny_folder: Path) -> None:
    spec = open_model(tiny_folder).spec
    one, many = operations(spec, 1), operations(spec, 512)
    assert one >= 2 * (active_parameters(spec) - 100_000)
    assert many < 512 * one * 1.5
    assert many > 512 * (one - 2 * spec.vocab_size * spec.hidden_size)


def test_a_floor_is_the_slower_of_memory_and_arithmetic(tiny_folder: Path) -> None:
    spec = open_model(tiny_folder).spec
    plan = parse_plan("int8")
    slow_memory = floor(spec, plan, MACHINE, 1e6)
    assert slow_memory.decode_ms == pytest.approx(decode_bytes(spec, plan) / 1e6 * 1e3)
    fast_memory = floor(spec, plan, MACHINE, 1e15)
    assert fast_memory.decode_ms == pytest.approx(2 * active_parameters(spec) / 4e9 * 1e3)
    assert fast_memory.prefill_ms == pytest.approx(operations(spec, 512) / 4e9 * 1e3)


def test_a_precision_may_use_the_instructions_that_lose_nothing() -> None:
    peaks = {name: best_peak(MACHINE, parse_plan(name).default) for name in ("f32", "bf16", "int4", "int4-a16")}
    assert peaks == {"f32": 1e9, "bf16": 2e9, "int4": 4e9, "int4-a16": 1e9}


def test_kv_bytes_follow_from_the_type(tiny_folder: Path) -> None:
    spec = open_model(tiny_folder).spec
    sizes = kv_bytes_per_token(spec)
    plain = 2 * len(spec.layers) * spec.kv_heads * spec.head_size
    assert sizes["f32"] == 4 * plain
    assert sizes["bf16"] == 2 * plain
    assert sizes["int8"] == plain + 2 * 2 * len(spec.layers) * spec.kv_heads


def test_the_machine_is_probed() -> None:
    pool = _core.Pool(2)
    machine = probe_machine(pool, seconds=0.01)
    assert machine.peaks["fma_f32"] > 1e8
    assert machine.memory > 0
    assert bandwidth(pool, 1 << 20, seconds=0.01) > 1e8


def test_the_work_of_a_step_is_its_weights_once_and_its_products_for_each_row(tiny_folder: Path) -> None:
    spec = open_model(tiny_folder).spec
    work = step_work(spec, parse_plan("int8"), 100.0)
    assert work.bytes_read(10) == decode_bytes(spec, parse_plan("int8")) + 1000.0
    # A prefill of one causal sequence that wants one result: as `operations` counts it.
    tokens = 24
    assert work.operations(tokens, 1, tokens * (tokens + 1) // 2) == pytest.approx(operations(spec, tokens), rel=1e-3)
