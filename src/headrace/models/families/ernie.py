"""Reads dense ERNIE 4.5: a Llama with a rope that rotates neighbouring dims."""

from __future__ import annotations

import msgspec

from headrace.models.config_json import ConfigJson
from headrace.models.families.decoder import (
    LLAMA_NAMES,
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

architectures: tuple[str, ...] = ("Ernie4_5ForCausalLM",)
ignored: tuple[str, ...] = ()


def spec(config: ConfigJson) -> ModelSpec:
    config.refuse("compression_ratio", "positions must not be stretched", unless=(1.0, 1))
    size = head_size(config, default=128)
    plain = decoder_spec(
        config,
        family="ernie",
        architecture=architecture_of(config),
        layers=(LayerSpec(),) * layer_count(config),
        ropes=(read_rope(config, size, default_theta=500_000.0),),
        head_size=size,
        norm_eps=1e-5,
        default_tied=True,
    )
    bias = config.flag("use_bias", default=False)
    return msgspec.structs.replace(plain, qkv_bias=bias, o_bias=bias, mlp_bias=bias)


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    return paired_sources(named_sources(spec, LLAMA_NAMES, names, prefix=decoder_prefix(names)), spec)
