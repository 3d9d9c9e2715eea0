"""Counts what a model costs on a device: bytes of weights, KV and activations, bytes and operations of a step.

Counts bytes and operations from the shape alone. Does not know times.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec
from msgspec.structs import replace

from headrace.bench.planning.devices import EngineKind
from headrace.bench.roofline import kv_bytes_per_token
from headrace.models.packing import packed_size
from headrace.models.precision import parse_kv_type, parse_plan
from headrace.models.spec import ModelSpec
from headrace.models.step_work import active_parameters
from headrace.models.tensor_shapes import is_product, tensor_shapes

# Bytes of a product's weight in the formats of GPU engines; int4 has groups of 128 with a scale and a zero of 16 bits.
_GPU_BYTES: Final = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5 + 4.0 / 128.0}
WEIGHTS: Final[dict[EngineKind, tuple[str, ...]]] = {
    "headrace": ("bf16", "int8", "int4", "int3", "int2"),
    "vllm": ("bf16", "fp8", "int8", "int4"),
}
LOSSLESS: Final = frozenset({"f32", "bf16"})
ONLY_NAMED: Final = frozenset({"int3", "int2"})  # considered if the user names them: they cost most models too much


class ModelCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Of one copy of the model, over all devices that it is split over."""

    precision: str
    weights: float  # bytes
    kv_token: float  # bytes of one token's KV
    kv_read: float  # of them, those that a step reads, again for each layer that attends to another's
    shared: float  # bytes of weights that every step reads
    expert: float  # bytes of one expert in all layers; 0 for a dense model
    experts: int
    chosen: int  # experts per token
    operations: float  # per row: a multiply and an add are two
    pair: float  # operations per pair of a decoding row and a KV token that it reads
    prefill_pair: float  # of a row of a prompt
    layers: int
    hidden: int
    row_bytes: float  # activations of one row

    def read(self, rows: int) -> float:
        """Return the bytes of weights that a step of so many rows reads, with the experts that it likely meets."""
        if not self.experts:
            return self.shared
        met = self.experts * (1.0 - (1.0 - self.chosen / self.experts) ** max(rows, 1))
        return self.shared + met * self.expert

    def activations(self, rows: int, sequences: int, vocab: int) -> float:
        """Return the bytes of a step's activations and of its logits."""
        return rows * self.row_bytes + 4.0 * sequences * vocab


def model_costs(spec: ModelSpec, precision: str, engine: EngineKind, *, kv: str = "bf16") -> ModelCosts:
    computed = spec if engine == "headrace" else _expanded(spec)
    shapes = tensor_shapes(computed)
    expert_shapes = {name: shape for name, shape in shapes.items() if ".experts." in name}
    shared_shapes = {name: shape for name, shape in shapes.items() if name not in expert_shapes}
    pair = prefill_pair = 2.0 * computed.pair_size
    idle = 0.0  # bytes of weights that a step of decoding does not read
    if engine == "headrace":
        plan = parse_plan(precision)
        shared = float(packed_size(spec, shared_shapes, plan))
        experts = float(packed_size(spec, expert_shapes, plan))
        kv_token = kv_bytes_per_token(spec)[parse_kv_type(kv)]
        embed = float(packed_size(spec, {"embed": shapes["embed"]}, plan))
    else:
        shared = sum(_gpu_bytes(name, shape, precision) for name, shape in shared_shapes.items())
        experts = sum(_gpu_bytes(name, shape, precision) for name, shape in expert_shapes.items())
        # vLLM takes fp8 for int8 and int4.
        held = sum(heads * (key + value) for heads, key, value in spec.kv_shapes)
        if (latent := spec.latent) is not None:
            # vLLM keeps the latent once, as key and value, and beside `kv_up`, by which prompts are expanded, its two
            # halves in bf16, by which queries and sums of values pass into the latent and out of it.
            held = len(spec.layers) * (latent.turning + latent.rank)
            pair = 2.0 * len(spec.layers) * spec.heads * (latent.turning + 2 * latent.rank)
            idle = sum(_gpu_bytes(name, shape, precision) for name, shape in shapes.items() if name.endswith(".kv_up"))
            shared += sum(2.0 * math.prod(shape) for name, shape in shapes.items() if name.endswith(".kv_up"))
        kv_token = held * (2.0 if kv == "bf16" else 1.0)
        embed = 2.0 * math.prod(shapes["embed"])
    count = spec.experts.count if spec.experts else 0
    inner = spec.experts.intermediate_size * spec.experts.top_k if spec.experts else spec.intermediate_size
    return ModelCosts(
        precision=precision,
        weights=shared + experts,
        kv_token=kv_token,
        kv_read=kv_token * spec.kv_reads,
        shared=shared - idle - (0.0 if spec.tied else embed),  # of a separate embedding a token reads one row
        expert=experts / count if count else 0.0,
        experts=count,
        chosen=spec.experts.top_k if spec.experts else 0,
        operations=2.0 * active_parameters(computed),
        pair=pair,
        prefill_pair=prefill_pair,
        layers=len(spec.layers),
        hidden=spec.hidden_size,
        row_bytes=2.0 * (6 * spec.hidden_size + 2 * spec.q_size + 3 * inner),
    )


def _expanded(spec: ModelSpec) -> ModelSpec:
    """Return the shape in which a latent is expanded to the keys and values of every head."""
    return spec if spec.latent is None else replace(spec, latent=replace(spec.latent, kept=False))


def _gpu_bytes(name: str, shape: tuple[int, ...], precision: str) -> float:
    quantised = is_product(name) and name not in {"embed", "head"}
    return math.prod(shape) * (_GPU_BYTES[precision] if quantised else 2.0)
