"""Tiny random models straight from numpy, which between them use everything that the core can do.

Owns the specs, their random tensors, the packing of both for the core, and Tiny, which runs steps of one of them. Sizes
are odd on purpose: few are a multiple of 32. Knows nothing of model files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

import headrace._core as _core
from headrace.engine.executors.cpu_executor import describe
from headrace.models.distance_buckets import spread_buckets
from headrace.models.packing import aligned_bytes
from headrace.models.precision import KvType, Precision, WeightFormat
from headrace.models.spec import ExpertSpec, LatentSpec, LayerInputSpec, LayerSpec, ModelSpec, RopeSpec
from headrace.models.tensor_shapes import is_product, tensor_shapes

Floats = NDArray[np.float32]
Tensors = dict[str, Floats]
CoreTensors = dict[str, _core.Packed | Floats]

ISAS = [*_core.isa_available(), *_core.isa_emulated()]
# Those whose instructions multiply bf16 by bf16: rows that meet bf16 weights are rounded to it ...
ROUNDS_ROWS = ("avx512bf16", "amx", "amx-emulated")
# ... and queries and weights of attention, where KV is not f32.
ROUNDS_ATTENTION = ("avx512bf16", "amx", "amx-emulated")


def rope(dims: int, base: float = 10000.0, **changes: Any) -> RopeSpec:
    """Rotates the first `dims` dims of a head."""
    inv_freq = tuple(float(np.float32(base ** (-2.0 * i / dims))) for i in range(dims // 2))
    return RopeSpec(inv_freq=inv_freq, **changes)


def spec(**changes: Any) -> ModelSpec:
    """A small Llama; `changes` make it another model."""
    head_size = changes.get("head_size", 24)
    facts: dict[str, Any] = {
        "family": "tiny",
        "architecture": "TinyForCausalLM",
        "vocab_size": 77,
        "hidden_size": 72,
        "intermediate_size": 50,
        "heads": 4,
        "kv_heads": 2,
        "head_size": head_size,
        "layers": (LayerSpec(), LayerSpec()),
        "context": 512,
        "norm_eps": 1e-5,
        "attention_scale": head_size**-0.5,
        "ropes": (rope(head_size),),
    }
    return ModelSpec(**(facts | changes))


# Not the table of the short rope, and twice as long as its context: a sequence of the second variant.
LONG_ROPE = rope(
    16,
    long_inv_freq=tuple(float(np.float32(0.3**i)) for i in range(8)),
    scale=1.1,
    long_scale=0.9,
    original_context=64,
)

SPECS: dict[str, ModelSpec] = {
    "plain": spec(),
    "window": spec(layers=(LayerSpec(window=20), LayerSpec(window=65), LayerSpec()), head_size=80, hidden_size=70),
    "soft_caps": spec(
        attention_softcap=2.0,
        logit_softcap=3.0,
        out_norm=True,
        activation="gelu_tanh",
        embedding_scale=6.5,
        tied=True,
        head_size=96,
        heads=6,
        kv_heads=2,
    ),
    "head_norms": spec(qk_norm="head", head_size=40, heads=5, kv_heads=1, qkv_bias=True),
    "norm_of_each_head": spec(qk_norm="each_head", norm="layer", head_size=20),
    "full_norms": spec(qk_norm="full", pre_norm=False, out_norm=True),
    "layer_norm": spec(norm="layer", gated=False, activation="relu", qkv_bias=True, o_bias=True, mlp_bias=True),
    "gated_biases": spec(mlp_bias=True, o_bias=True, activation="gelu", intermediate_size=33),
    "partial_rope": spec(
        ropes=(LONG_ROPE, rope(24, base=100.0)),
        layers=(LayerSpec(rope=0), LayerSpec(rope=None), LayerSpec(rope=1)),
        head_size=24,
    ),
    "experts": spec(
        layers=(LayerSpec(experts=True), LayerSpec(), LayerSpec(experts=True)),
        experts=ExpertSpec(count=5, top_k=2, intermediate_size=42, normalise=True),
    ),
    "plain_experts": spec(
        layers=(LayerSpec(), LayerSpec(experts=True)),
        experts=ExpertSpec(count=3, top_k=3, intermediate_size=40, normalise=False),
        gated=False,
        activation="gelu",
        intermediate_size=90,
    ),
    "shared_expert": spec(
        layers=(LayerSpec(), LayerSpec(experts=True)),
        experts=ExpertSpec(count=4, top_k=2, intermediate_size=42, normalise=False, shared_size=50, shared_gate=True),
    ),
    "corrected_experts": spec(
        layers=(LayerSpec(experts=True), LayerSpec(experts=True)),
        experts=ExpertSpec(
            count=5,
            top_k=2,
            intermediate_size=42,
            normalise=True,
            scoring="sigmoid",
            correction=True,
            scale=1.5,
            shared_size=34,
        ),
    ),
    "sinks": spec(
        layers=(LayerSpec(window=20, experts=True), LayerSpec(experts=True)),
        activation="clamped_silu",
        gate_slope=1.7,
        gate_limit=0.8,
        sinks=True,
        qkv_bias=True,
        o_bias=True,
        experts=ExpertSpec(count=4, top_k=2, intermediate_size=42, normalise=True, bias=True),
    ),
    "latents": spec(
        heads=3,
        kv_heads=3,
        head_size=24,
        latent=LatentSpec(rank=20, query_rank=30, turning=8, value_size=14),
        ropes=(rope(8),),
        layers=(LayerSpec(), LayerSpec(experts=True)),
        experts=ExpertSpec(
            count=8,
            top_k=3,
            intermediate_size=42,
            normalise=True,
            scoring="sigmoid",
            correction=True,
            groups=4,
            top_groups=2,
            group_best=2,
        ),
    ),
    "latent": spec(
        heads=2,
        kv_heads=2,
        head_size=20,
        latent=LatentSpec(rank=33, turning=12, value_size=20),
        ropes=(rope(12),),
        layers=(LayerSpec(window=20, experts=True), LayerSpec()),
        experts=ExpertSpec(count=6, top_k=2, intermediate_size=42, normalise=False, groups=3, top_groups=2),
    ),
    "latents_of_64": spec(
        heads=2,
        kv_heads=2,
        head_size=64,
        latent=LatentSpec(rank=32, turning=32, value_size=48),
        ropes=(rope(32),),
    ),
    # More query heads of a KV head than a call of the kernel takes.
    "many_heads": spec(heads=35, kv_heads=1, head_size=4, sinks=True, layers=(LayerSpec(),)),
    "expanded_latents": spec(
        heads=2,
        kv_heads=2,
        head_size=64,
        latent=LatentSpec(rank=20, query_rank=30, turning=32, value_size=48, kept=False),
        ropes=(rope(32),),
    ),
    # Heads of other sizes and numbers, of which those of 32 and 48 dims are rotated where KV memory has codes.
    "mixed_heads": spec(
        heads=6,
        kv_heads=2,
        head_size=32,
        qk_norm="head",
        ropes=(rope(32), rope(40, base=100.0)),
        layers=(
            LayerSpec(window=20),
            LayerSpec(head_size=48, kv_heads=1, rope=1, inner=130),
            LayerSpec(kv_heads=6, inner=20),
            LayerSpec(head_size=48, rope=1, inner=130),
        ),
    ),
    "layer_inputs": spec(
        layers=(LayerSpec(), LayerSpec(experts=True, head_size=40, kv_heads=4), LayerSpec(experts=True)),
        out_norm=True,
        activation="gelu_tanh",
        layer_scale=True,
        layer_inputs=LayerInputSpec(size=20, vocab=70),
        experts=ExpertSpec(count=4, top_k=2, intermediate_size=42, normalise=True, beside=True),
    ),
    "chunks": spec(
        layers=(
            LayerSpec(chunk=24, experts=True),
            LayerSpec(rope=None, qk_norm=False, grows=True),
            LayerSpec(chunk=64, experts=True),
        ),
        qk_norm="unit",
        query_growth=0.3,
        growth_tokens=16,
        experts=ExpertSpec(
            count=4,
            top_k=2,
            intermediate_size=42,
            normalise=False,
            scoring="sigmoid",
            scales_inputs=True,
            shared_size=34,
        ),
    ),
    "experts_near_the_best": spec(
        layers=(LayerSpec(experts=True), LayerSpec(experts=True)),
        experts=ExpertSpec(count=6, top_k=2, intermediate_size=42, normalise=False, margin=0.3),
    ),
    "alibi": spec(alibi=(0.5, 0.25, 0.1, 0.01), ropes=(), layers=(LayerSpec(rope=None), LayerSpec(rope=None))),
    "positions": spec(
        learned_positions=512,
        head_bias=True,
        ropes=(),
        layers=(LayerSpec(rope=None), LayerSpec(rope=None)),
        norm="layer",
        embedding_norm=True,
    ),
    "parallel": spec(parallel=True, shared_norm=True, norm="layer", norm_bias=False, out_norm=True),
    "parallel_norms": spec(parallel=True, norm="layer", gated=False, activation="gelu"),
    "quick_gelu": spec(gated=False, activation="quick_gelu"),
    "narrow": spec(
        hidden_size=5, intermediate_size=1, heads=1, kv_heads=1, head_size=2, vocab_size=3, layers=(LayerSpec(),)
    ),
    "many_logits": spec(vocab_size=1100),  # several panels of the head in a hand-out
    "everything": spec(
        layers=(LayerSpec(window=20), LayerSpec(experts=True)),
        attention_softcap=2.0,
        logit_softcap=3.0,
        qk_norm="head",
        out_norm=True,
        qkv_bias=True,
        experts=ExpertSpec(count=4, top_k=2, intermediate_size=42, normalise=True),
    ),
}
BERT: dict[str, Any] = {
    "kind": "encoder",
    "causal": False,
    "norm": "layer",
    "pre_norm": False,
    "residual_norm": True,
    "final_norm": False,
    "gated": False,
    "activation": "gelu",
    "qkv_bias": True,
    "o_bias": True,
    "mlp_bias": True,
    "ropes": (),
    "layers": (LayerSpec(rope=None), LayerSpec(rope=None)),
    "learned_positions": 100,
    "token_types": 2,
    "embedding_norm": True,
    "intermediate_size": 90,
}
ENCODER = spec(**BERT)
ENCODERS: dict[str, ModelSpec] = {
    "bert": ENCODER,
    # Biases by distance, which most of 100 tokens are beyond.
    "distances": spec(**BERT | {"token_types": 0, "distance_buckets": 8, "max_distance": 12, "kv_heads": 4}),
    # Windows on both sides of a query, each kind of layer with its own rope; no norm before the first attention.
    "windows": spec(
        kind="encoder",
        causal=False,
        norm="layer",
        norm_bias=False,
        activation="gelu",
        embedding_norm=True,
        kv_heads=4,
        ropes=(rope(24), rope(24, base=100.0)),
        layers=(LayerSpec(attn_norm=False), LayerSpec(window=20, rope=1), LayerSpec(window=1, rope=1)),
    ),
}


@cache
def random_tensors(model: ModelSpec, seed: int = 0) -> Mapping[str, Floats]:
    """The canonical tensors: products that keep the size of what they multiply, norms near one, small biases."""
    random = np.random.default_rng(seed)
    tensors: Tensors = {}
    for name, shape in tensor_shapes(model).items():
        values = random.standard_normal(shape).astype(np.float32)
        if is_product(name) or name.endswith((".router", ".shared_gate")):
            # Queries and keys large enough that attention chooses: a flat softmax would hide wrong positions.
            size = 2.0 if name.endswith((".qkv", ".router")) else 1.0
            tensors[name] = values * np.float32(size / shape[-1] ** 0.5)
        elif name.endswith(("norm", ".scale", ".expert_scales")):
            tensors[name] = 1.0 + np.float32(0.1) * values
        else:
            tensors[name] = np.float32(0.1) * values
    tensors["embed"] *= np.float32(model.hidden_size**0.5)
    return tensors


def packed(
    matrix: NDArray[Any], format: WeightFormat = "f32", group: int = 0, pool: _core.Pool | None = None
) -> _core.Packed:
    """As models are packed: int4 in groups of 32 by multiples."""
    outputs, inputs = matrix.shape
    multiples = Precision(format, group).multiples
    out = aligned_bytes(_core.packed_bytes(format, outputs, inputs, group, multiples=multiples))
    kind = "f32" if matrix.dtype == np.float32 else "f16"
    source = np.ascontiguousarray(matrix if kind == "f32" else matrix.view(np.uint16))
    gain = _core.pack(source, kind, format, group, out, pool or _core.Pool(1), multiples)
    return _core.Packed(format, outputs, inputs, group, gain, out, multiples=multiples)


def by_turns(gate_up: Floats) -> Floats:
    """Gate rows and up rows -> a panel of 32 gates, a panel of 32 ups, and so on, as the core takes them."""
    inner = len(gate_up) // 2
    padded = -(-inner // 32) * 32
    halves = np.zeros((2, padded, *gate_up.shape[1:]), dtype=np.float32)
    halves[0, :inner], halves[1, :inner] = gate_up[:inner], gate_up[inner:]
    panels = [halves[half, start : start + 32] for start in range(0, padded, 32) for half in range(2)]
    return np.concatenate(panels)


def core_tensors(
    tensors: Mapping[str, Floats],
    format: WeightFormat = "f32",
    group: int = 0,
    *,
    embed: WeightFormat | None = None,
    max_distance: int = 0,
) -> CoreTensors:
    """What the core's Model takes; every product in one format, the router in f32."""
    pool = _core.Pool(1)
    found: CoreTensors = {}
    for name, values in tensors.items():
        if name == "distances":
            found[name] = spread_buckets(values, max_distance).reshape(-1)
        elif is_product(name) or name.endswith((".router", ".shared_gate")):
            rows = by_turns(values) if name.endswith(".gate_up") else values
            chosen = (
                "f32" if name.endswith((".router", ".shared_gate")) else embed if embed and name == "embed" else format
            )
            found[name] = packed(rows, chosen, group, pool)
        else:
            found[name] = (by_turns(values) if name.endswith(".gate_up.bias") else values).reshape(-1)
    return found


@cache
def packed_model(model: ModelSpec, format: WeightFormat = "f32", group: int = 0) -> CoreTensors:
    return core_tensors(random_tensors(model), format, group, max_distance=model.max_distance)


@dataclass(frozen=True)
class Share:
    """One sequence's part of a step."""

    tokens: Sequence[int]
    computed: int
    blocks: Sequence[int]
    variant: int = 0
    second: int = -1  # where the second text of a pair starts
    adapter: _core.Adapter | None = None


class Tiny:
    """A model and KV memory for it."""

    def __init__(
        self,
        model: ModelSpec,
        format: WeightFormat = "f32",
        group: int = 0,
        *,
        kv: KvType = "f32",
        isa: str = ISAS[0],
        threads: int = 1,
        pool: _core.Pool | None = None,
        blocks: int = 40,
        max_rows: int = 256,
        tensors: CoreTensors | None = None,
    ) -> None:
        self.spec = model
        self.pool = pool or _core.Pool(threads)
        held = packed_model(model, format, group) if tensors is None else tensors
        self.model = _core.Model(describe(model), held, self.pool, max_rows, isa)
        self.kv = _core.Kv(model.kv_shapes, blocks, kv, model.values_in_keys)

    def step(self, shares: Sequence[Share], wanted: Iterable[int] | None = None, *, hidden: bool = False) -> Floats:
        """One step; the logits (or final hidden states) of the wanted rows, by default of all."""
        tables = np.full((len(shares), max(len(share.blocks) for share in shares)), -1, dtype=np.int32)
        tokens: list[int] = []
        offsets = [0]
        for index, share in enumerate(shares):
            tables[index, : len(share.blocks)] = share.blocks
            tokens += share.tokens
            offsets.append(len(tokens))
        rows = np.arange(len(tokens), dtype=np.int32) if wanted is None else np.array(list(wanted), dtype=np.int32)
        width = self.spec.hidden_size if hidden else self.spec.vocab_size
        out = np.full((len(rows), width), np.nan, dtype=np.float32)
        adapters = list({id(share.adapter): share.adapter for share in shares if share.adapter is not None}.values())
        slots = [-1 if share.adapter is None else adapters.index(share.adapter) for share in shares]
        self.model.step(
            self.kv,
            np.array(tokens, dtype=np.int32),
            np.array(offsets, dtype=np.int32),
            np.array([share.computed for share in shares], dtype=np.int32),
            tables,
            np.array([share.variant for share in shares], dtype=np.int32),
            rows,
            out,
            hidden,
            second_texts=np.array([share.second for share in shares], dtype=np.int32),
            adapters=adapters,
            slots=np.array(slots, dtype=np.int32) if adapters else None,
        )
        return out

    def rows(
        self,
        tokens: Sequence[int],
        blocks: Sequence[int],
        *,
        computed: int = 0,
        chunk: int = 10_000,
        variant: int = 0,
        hidden: bool = False,
        second: int = -1,
        adapter: _core.Adapter | None = None,
    ) -> Floats:
        """One sequence, alone, `chunk` tokens a step, from its `computed`-th token on: every row's result."""
        found = [
            self.step([Share(tokens[start : start + chunk], start, blocks, variant, second, adapter)], hidden=hidden)
            for start in range(computed, len(tokens), chunk)
        ]
        return np.concatenate(found)


def text(length: int, model: ModelSpec, seed: int = 1) -> list[int]:
    """Random tokens."""
    return np.random.default_rng(seed).integers(0, model.vocab_size, length).tolist()


def same_bits(first: Floats, second: Floats) -> bool:
    return np.array_equal(first.view(np.uint32), second.view(np.uint32))
