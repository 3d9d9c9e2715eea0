"""Reads ERNIE 4.5: a Llama with a rope that rotates neighbouring dims, dense or a mixture with shared experts."""

from __future__ import annotations

import msgspec

from headrace.models.config_json import MAX_EXPERTS, MAX_INTERMEDIATE, MAX_LAYERS, ConfigJson
from headrace.models.families.decoder import (
    EXPERT_NAMES,
    LLAMA_NAMES,
    TensorNames,
    decoder_prefix,
    decoder_spec,
    fuse_experts,
    head_size,
    layer_count,
    named_sources,
    paired_sources,
)
from headrace.models.families.family import TensorPart, TensorSources, architecture_of
from headrace.models.rope import read_rope
from headrace.models.spec import ExpertSpec, LayerSpec, ModelSpec

architectures: tuple[str, ...] = ("Ernie4_5ForCausalLM", "Ernie4_5_MoeForCausalLM")
# Of training; the layers that predict further tokens are not used.
ignored: tuple[str, ...] = ("moe_capacity", "moe_use_aux_free", "num_nextn_predict_layers")

_NAMES: TensorNames = {
    **LLAMA_NAMES,
    **EXPERT_NAMES,
    "mlp.router_bias": ("mlp.moe_statics.e_score_correction_bias",),
    "mlp.shared.gate_up": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "mlp.shared.down": ("mlp.shared_experts.down_proj",),
}


def spec(config: ConfigJson) -> ModelSpec:
    config.refuse("compression_ratio", "positions must not be stretched", unless=(1.0, 1))
    mixture = architecture_of(config) == "Ernie4_5_MoeForCausalLM"
    size = head_size(config, default=None if mixture else 128)
    plain = decoder_spec(
        config,
        family="ernie",
        architecture=architecture_of(config),
        layers=_expert_layers(config) if mixture else (LayerSpec(),) * layer_count(config),
        ropes=(read_rope(config, size, default_theta=500_000.0),),
        head_size=size,
        norm_eps=1e-5,
        default_tied=True,
        experts=_experts(config) if mixture else None,
    )
    if mixture:
        config.refuse("use_bias", "projections must have no biases", unless=(False,))
        return plain
    bias = config.flag("use_bias", default=False)
    return msgspec.structs.replace(plain, qkv_bias=bias, o_bias=bias, mlp_bias=bias)


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    found = paired_sources(named_sources(spec, _NAMES, names, prefix=decoder_prefix(names)), spec)
    found = {
        name: (TensorPart(parts[0].name, flat=True),) if name.endswith(".router_bias") else parts
        for name, parts in found.items()
    }
    return fuse_experts(found, spec, names, ("layers.{layer}.mlp",))


def _expert_layers(config: ConfigJson) -> tuple[LayerSpec, ...]:
    count = layer_count(config)
    step = config.size("moe_layer_interval", maximum=MAX_LAYERS, default=1)
    first = config.size("moe_layer_start_index", minimum=0, maximum=MAX_LAYERS, default=1)
    last = config.size("moe_layer_end_index", minimum=-1, maximum=MAX_LAYERS, default=-1)
    last = count - 1 if last == -1 else last
    return tuple(LayerSpec(experts=(index + 1) % step == 0 and first <= index <= last) for index in range(count))


def _experts(config: ConfigJson) -> ExpertSpec:
    if config.number("moe_norm_min", default=1e-12) > 1e-6:
        raise config.mismatch("moe_norm_min", "a number that the chosen experts' weights never fall below")
    count = config.size("moe_num_experts", maximum=MAX_EXPERTS, default=64)
    size = config.size("moe_intermediate_size", maximum=MAX_INTERMEDIATE, default=1536)
    shared = config.optional_size("moe_num_shared_experts", minimum=0, maximum=MAX_EXPERTS, default=2) or 0
    return ExpertSpec(
        count=count,
        top_k=config.size("moe_k", maximum=count, default=6),
        intermediate_size=size,
        normalise=True,
        correction=True,
        shared_size=shared * size,
    )
