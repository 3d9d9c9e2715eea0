"""Reads GLM-4: a rope that rotates neighbouring dims, over half of each head, and a fused gate. GLM-4-0414 also
normalises what each sublayer adds."""

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
    paired_sources,
)
from headrace.models.families.family import TensorSources, architecture_of
from headrace.models.rope import read_rope
from headrace.models.spec import LayerSpec, ModelSpec

architectures: tuple[str, ...] = ("GlmForCausalLM", "Glm4ForCausalLM")
ignored: tuple[str, ...] = ()

_NAMES: TensorNames = {
    **LLAMA_NAMES,
    "mlp.gate_up": ("mlp.gate_up_proj",),
    "attn.out_norm": ("post_self_attn_layernorm",),
    "mlp.out_norm": ("post_mlp_layernorm",),
}


def spec(config: ConfigJson) -> ModelSpec:
    architecture = architecture_of(config)
    config = config.with_defaults({"partial_rotary_factor": 0.5})
    size = head_size(config, default=128)
    plain = decoder_spec(
        config,
        family="glm",
        architecture=architecture,
        layers=(LayerSpec(),) * layer_count(config),
        ropes=(read_rope(config, size, partial=True),),
        head_size=size,
        norm_eps=1.5625e-07,
    )
    return msgspec.structs.replace(
        plain,
        out_norm=architecture == "Glm4ForCausalLM",
        qkv_bias=config.flag("attention_bias", default=True),
    )


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    return paired_sources(named_sources(spec, _NAMES, names, prefix=decoder_prefix(names)), spec)
