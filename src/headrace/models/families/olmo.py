"""Reads OLMo-2: norms after each sublayer instead of before, queries and keys normalised over all heads at once."""

from __future__ import annotations

import msgspec

from headrace.models.config_json import ConfigJson
from headrace.models.families.decoder import (
    LLAMA_NAMES,
    OUT_NORM_NAMES,
    TensorNames,
    decoder_prefix,
    decoder_spec,
    head_size,
    layer_count,
    named_sources,
)
from headrace.models.families.family import TensorSources, architecture_of
from headrace.models.rope import read_rope
from headrace.models.spec import LayerSpec, ModelSpec

architectures: tuple[str, ...] = ("Olmo2ForCausalLM",)
ignored: tuple[str, ...] = ()

_NAMES: TensorNames = {**LLAMA_NAMES, **OUT_NORM_NAMES}


def spec(config: ConfigJson) -> ModelSpec:
    size = head_size(config)
    plain = decoder_spec(
        config,
        family="olmo",
        architecture=architecture_of(config),
        layers=(LayerSpec(),) * layer_count(config),
        ropes=(read_rope(config, size),),
        head_size=size,
        norm_eps=1e-5,
    )
    bias = config.flag("attention_bias", default=False)
    return msgspec.structs.replace(plain, pre_norm=False, out_norm=True, qk_norm="full", qkv_bias=bias, o_bias=bias)


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    return named_sources(spec, _NAMES, names, prefix=decoder_prefix(names))
