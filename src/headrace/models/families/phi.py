"""Reads Phi-3, Phi-3.5 and Phi-4-mini: fused projections, partly rotated heads, long ropes."""

from __future__ import annotations

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

architectures: tuple[str, ...] = ("Phi3ForCausalLM",)
ignored: tuple[str, ...] = ("original_max_position_embeddings",)  # without a long rope

_NAMES: TensorNames = {**LLAMA_NAMES, "attn.qkv": ("self_attn.qkv_proj",), "mlp.gate_up": ("mlp.gate_up_proj",)}
# Early Phi-3 checkpoints name longrope differently.
_ROPES = {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}


def spec(config: ConfigJson) -> ModelSpec:
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
    return named_sources(spec, _NAMES, names, prefix=decoder_prefix(names))
