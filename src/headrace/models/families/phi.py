"""Reads Phi-3, Phi-3.5 and Phi-4-mini (fused projections, partly rotated heads, long ropes) and Phi-1, 1.5 and 2
(attention and MLP in parallel, layer norms, biases everywhere, the output head included)."""

from __future__ import annotations

import msgspec

from headrace.models.config_json import ConfigJson
from headrace.models.families.decoder import (
    LLAMA_NAMES,
    TensorNames,
    decoder_prefix,
    decoder_spec,
    head_size,
    layer_count,
    named_sources,
    sliding_window,
)
from headrace.models.families.family import TensorSources, architecture_of
from headrace.models.rope import read_rope
from headrace.models.spec import LayerSpec, ModelSpec

architectures: tuple[str, ...] = ("Phi3ForCausalLM", "PhiForCausalLM")
ignored: tuple[str, ...] = ("original_max_position_embeddings",)  # without a long rope

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
    table = _FIRST_NAMES if spec.parallel else _NAMES
    return named_sources(spec, table, names, prefix=decoder_prefix(names))


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
