"""Reads Phi-3, Phi-3.5 and Phi-4-mini (fused projections, partly rotated heads, long ropes) and Phi-1, 1.5 and 2
(attention and MLP in parallel, layer norms, biases everywhere, the output head included), and Phi-3.5-MoE (layer norms,
and experts that are chosen one by one). Beyond its trained context a Phi-3.5-MoE has the long rope, as its own code."""

from __future__ import annotations

import msgspec

from headrace.models.config_json import ConfigJson
from headrace.models.families.decoder import (
    LLAMA_NAMES,
    TensorNames,
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

architectures: tuple[str, ...] = ("Phi3ForCausalLM", "PhiForCausalLM", "PhimoeForCausalLM")
# Without a long rope; of training.
ignored: tuple[str, ...] = ("original_max_position_embeddings", "input_jitter_noise")

_NAMES: TensorNames = {**LLAMA_NAMES, "attn.qkv": ("self_attn.qkv_proj",), "mlp.gate_up": ("mlp.gate_up_proj",)}
_FIRST_NAMES: TensorNames = {
    **LLAMA_NAMES,
    "norm": ("final_layernorm",),
    "attn.o": ("self_attn.dense",),
    "mlp.up": ("mlp.fc1",),
    "mlp.down": ("mlp.fc2",),
}
# Early Phi-3 checkpoints name longrope differently.
_ROPES = {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}


def spec(config: ConfigJson) -> ModelSpec:
    if architecture_of(config) == "PhiForCausalLM":
        return _first_spec(config)
    if architecture_of(config) == "PhimoeForCausalLM":
        return _mixture_spec(config)
    for key in ("full_attn_mod", "interpolate_factor"):
        config.refuse(key, "Headrace does not support it", unless=(1,))
    size = head_size(config)
    return decoder_spec(
        config,
        family="phi",
        architecture=architecture_of(config),
        layers=(LayerSpec(window=sliding_window(config) or 0),) * layer_count(config),
        ropes=(read_rope(config, size, default_original=4096, partial=True, kinds=_ROPES),),
        head_size=size,
        norm_eps=1e-5,
    )


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    prefix = decoder_prefix(names)
    if spec.experts is not None:
        block = "mlp" if f"{prefix}layers.0.mlp.router.weight" in names else "block_sparse_moe"
        gate = "router" if block == "mlp" else "gate"
        table = mixtral_names(block, gate)
        blocks = ("layers.{layer}.block_sparse_moe", "layers.{layer}.mlp")
        return fuse_experts(named_sources(spec, table, names, prefix=prefix), spec, names, blocks)
    table = _FIRST_NAMES if spec.parallel else _NAMES
    return named_sources(spec, table, names, prefix=prefix)


def _mixture_spec(config: ConfigJson) -> ModelSpec:
    size = head_size(config)
    experts = expert_spec(config, size_key="intermediate_size", normalise=False)
    if experts.top_k != 2:
        raise config.mismatch("num_experts_per_tok", "2, the only number that the router is defined for")
    margin = config.positive("router_jitter_noise", default=0.01)
    plain = decoder_spec(
        config,
        family="phi",
        architecture=architecture_of(config),
        layers=(LayerSpec(window=sliding_window(config) or 0, experts=True),) * layer_count(config),
        ropes=(read_rope(config, size, default_theta=1_000_000.0, kinds=_ROPES),),
        head_size=size,
        norm_eps=1e-5,
        experts=msgspec.structs.replace(experts, margin=margin),
    )
    bias = config.flag("attention_bias", default=False)
    head_bias = config.flag("lm_head_bias", default=False)
    return msgspec.structs.replace(plain, norm="layer", qkv_bias=bias, o_bias=bias, head_bias=head_bias)


def _first_spec(config: ConfigJson) -> ModelSpec:
    config.refuse("qk_layernorm", "heads must not be normalised", unless=(False,))
    config = config.with_defaults({"partial_rotary_factor": 0.5})
    size = head_size(config)
    plain = decoder_spec(
        config,
        family="phi",
        architecture=architecture_of(config),
        layers=(LayerSpec(),) * layer_count(config),
        ropes=(read_rope(config, size, partial=True),),
        head_size=size,
        norm_eps=1e-5,
        default_activation="gelu_new",
    )
    return msgspec.structs.replace(
        plain,
        norm="layer",
        norm_eps=config.positive("layer_norm_eps", maximum=1.0, default=1e-5),
        parallel=True,
        shared_norm=True,
        gated=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        head_bias=True,
    )
