"""Reads EuroBERT: the layers of a Llama whose tokens see the whole text."""

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
)
from headrace.models.families.encoders.encoder import refuse_decoder
from headrace.models.families.family import TensorSources, architecture_of
from headrace.models.rope import read_rope
from headrace.models.spec import LayerSpec, ModelSpec

architectures: tuple[str, ...] = ("EuroBertModel", "EuroBertForMaskedLM")
ignored: tuple[str, ...] = ("classifier_pooling", "clf_pooling", "mask_token", "mask_token_id", "bos_token")


def spec(config: ConfigJson) -> ModelSpec:
    refuse_decoder(config)
    size = head_size(config)
    plain = decoder_spec(
        config,
        family="eurobert",
        architecture=architecture_of(config),
        layers=(LayerSpec(),) * layer_count(config),
        ropes=(read_rope(config, size),),
        head_size=size,
        norm_eps=1e-5,
    )
    bias = config.flag("attention_bias", default=False)
    return msgspec.structs.replace(
        plain,
        kind="encoder",
        causal=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.flag("mlp_bias", default=False),
        pooling="mean",
    )


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    return named_sources(spec, LLAMA_NAMES, names, prefix=decoder_prefix(names))
