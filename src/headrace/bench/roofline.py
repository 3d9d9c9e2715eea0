"""Computes floors: the least time of a model's steps on a machine, per precision.

A decode token must read every weight that it uses once; a prefill must do every multiplication once. This counts bytes
and operations, and is independent of how Headrace computes.
"""

from __future__ import annotations

from typing import Final, get_args

import msgspec
import numpy as np

import headrace._core as _core
from headrace.bench.machine import Machine
from headrace.models.packing import packed_size
from headrace.models.precision import KvType, Precision, WeightPlan
from headrace.models.spec import ModelSpec
from headrace.models.step_work import active_parameters, active_shapes, decode_bytes
from headrace.models.tensor_shapes import is_product, tensor_shapes

PREFILL: Final = 512  # tokens


class Floor(msgspec.Struct, frozen=True):
    precision: str
    weight_bytes: int
    decode_bytes: int  # read per token
    bandwidth: float  # bytes per second
    peak: float  # operations per second
    decode_ms: float
    prefill_ms: float  # for 512 tokens


def parameters(spec: ModelSpec) -> int:
    return sum(int(np.prod(shape)) for shape in tensor_shapes(spec).values())


def operations(spec: ModelSpec, tokens: int) -> float:
    """Count the operations of a prefill: products for every token, the head once, attention over each window."""
    shapes = active_shapes(spec)
    head = shapes.pop("embed" if spec.tied else "head", (0,))
    products = sum(int(np.prod(shape)) for name, shape in shapes.items() if is_product(name))
    pairs = 0.0
    for layer in spec.layers:
        if not layer.attends:
            continue
        window = min(layer.window or tokens, tokens)
        if not spec.causal:
            seen = tokens * tokens - (tokens - window) * (tokens - window + 1)
        else:
            seen = window * (window + 1) / 2 + (tokens - window) * window
        _, key, value = spec.kv_shape(layer)
        pairs += spec.heads * (key + value) * seen
    return 2.0 * products * tokens + 2.0 * int(np.prod(head)) + 2.0 * pairs


def kv_bytes_per_token(spec: ModelSpec) -> dict[KvType, float]:
    shapes, shared = spec.kv_shapes, spec.values_in_keys
    return {kind: _core.Kv.block_bytes(shapes, kind, shared) / _core.BLOCK for kind in get_args(KvType)}


def floor(spec: ModelSpec, plan: WeightPlan, machine: Machine, bytes_per_second: float) -> Floor:
    read = decode_bytes(spec, plan)
    peak = best_peak(machine, plan.default)
    decode = max(read / bytes_per_second, 2.0 * active_parameters(spec) / peak)
    prefill = max(read / bytes_per_second, operations(spec, PREFILL) / peak)
    return Floor(
        precision=plan.default.name,
        weight_bytes=packed_size(spec, tensor_shapes(spec), plan),
        decode_bytes=read,
        bandwidth=bytes_per_second,
        peak=peak,
        decode_ms=decode * 1e3,
        prefill_ms=prefill * 1e3,
    )


def best_peak(machine: Machine, weights: Precision) -> float:
    """Return the rate of the fastest instructions that can multiply such weights without loss."""
    kinds = ["fma_f32"]
    if weights.format != "f32" and not weights.float_rows:
        kinds += ["dot_bf16", "amx_bf16"]
    if weights.is_integer and not weights.float_rows:
        kinds += ["dot_int8", "amx_int8"]
    return max(machine.peaks[kind] for kind in kinds)
