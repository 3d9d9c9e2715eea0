"""Reads Mixtral (a mixture of experts in every layer) and MiniMax-M2 (queries and keys normalised over all heads, a
rope over a part of each head, experts weighed by sigmoids)."""

from __future__ import annotations

import msgspec

from headrace.models.config_json import MAX_HEAD_SIZE, MAX_LAYERS, ConfigJson
from headrace.models.families.decoder import (
    decoder_prefix,
    decoder_spec,
    expert_spec,
    fuse_experts,
    head_size,
    layer_count,
    mixtral_names,
    named_sources,
    sliding_window,
)
from headrace.models.families.family import TensorSources, architecture_of
from headrace.models.rope import read_rope
from headrace.models.spec import LayerSpec, ModelSpec

architectures: tuple[str, ...] = ("MixtralForCausalLM", "MiniMaxM2ForCausalLM")
# The layers of a MiniMax-M2 that predict further tokens are not used.
ignored: tuple[str, ...] = ("use_mtp", "num_mtp_modules", "mtp_transformer_layers")

_BLOCKS = ("layers.{layer}.block_sparse_moe", "layers.{layer}.mlp")


def spec(config: ConfigJson) -> ModelSpec:
    if architecture_of(config) == "MiniMaxM2ForCausalLM":
        return _minimax_spec(config)
    size = head_size(config)
    layer = LayerSpec(window=sliding_window(config) or 0, experts=True)
    return decoder_spec(
        config,
        family="mixtral",
        architecture=architecture_of(config),
        layers=(layer,) * layer_count(config),
        ropes=(read_rope(config, size, default_theta=1_000_000.0),),
        head_size=size,
        norm_eps=1e-5,
        experts=expert_spec(config, size_key="intermediate_size", normalise=True),
    )


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    block = "mlp" if f"{decoder_prefix(names)}layers.0.mlp.gate.weight" in names else "block_sparse_moe"
    table = {**mixtral_names(block, "gate"), "mlp.router_bias": (f"{block}.e_score_correction_bias",)}
    return fuse_experts(named_sources(spec, table, names, prefix=decoder_prefix(names)), spec, names, _BLOCKS)


def _minimax_spec(config: ConfigJson) -> ModelSpec:
    config.refuse("use_qk_norm", "queries and keys must be normalised", unless=(True,))
    config.refuse("qk_norm_type", "norms must be over all heads", unless=("per_layer",))
    config.refuse("use_routing_bias", "the router must have a correction", unless=(True,))
    config.refuse("scoring_func", "experts must be weighed by sigmoids", unless=("sigmoid",))
    config.refuse("shared_intermediate_size", "all experts must be chosen", unless=(0,))
    config.optional_sizes("attn_type_list", minimum=1, maximum=1, max_items=MAX_LAYERS)  # all have full attention
    size = head_size(config, default=128)
    rotated = config.optional_size("rotary_dim", maximum=MAX_HEAD_SIZE)
    if rotated is not None:
        config = config.with_value("partial_rotary_factor", min(1.0, rotated / size))
    experts = expert_spec(config, size_key="intermediate_size", normalise=True)
    plain = decoder_spec(
        config,
        family="mixtral",
        architecture=architecture_of(config),
        layers=(LayerSpec(experts=True),) * layer_count(config),
        ropes=(read_rope(config, size, default_theta=5_000_000.0, partial=True),),
        head_size=size,
        norm_eps=1e-6,
        experts=msgspec.structs.replace(experts, scoring="sigmoid", correction=True),
    )
    return msgspec.structs.replace(plain, qk_norm="full")
