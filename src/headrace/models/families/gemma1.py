"""Reads the first Gemma: a Llama whose norms store their weight minus one, with scaled embeddings."""

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
from headrace.models.families.family import TensorSources, architecture_of
from headrace.models.rope import read_rope
from headrace.models.spec import LayerSpec, ModelSpec

architectures: tuple[str, ...] = ("GemmaForCausalLM",)
ignored: tuple[str, ...] = ("hidden_act",)  # "gelu" there means the approximation, and `hidden_activation` says so


def spec(config: ConfigJson) -> ModelSpec:
    config.refuse("use_bidirectional_attention", "the model must be causal", unless=(False,))
    key = "hidden_activation" if config.has("hidden_activation") else "hidden_act"
    config.refuse(key, "Gemma has one activation", unless=("gelu", "gelu_pytorch_tanh"))
    size = head_size(config, default=256)
    plain = decoder_spec(
        config,
        family="gemma",
        architecture=architecture_of(config),
        layers=(LayerSpec(),) * layer_count(config),
        ropes=(read_rope(config, size),),
        head_size=size,
        norm_eps=1e-6,
        activation_key=key,
        default_activation="gelu_pytorch_tanh",
        default_tied=True,
    )
    bias = config.flag("attention_bias", default=False)
    return msgspec.structs.replace(
        plain,
        norm_offset=1.0,
        qkv_bias=bias,
        o_bias=bias,
        activation="gelu_tanh",
        embedding_scale=plain.hidden_size**0.5,
    )


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    return named_sources(spec, LLAMA_NAMES, names, prefix=decoder_prefix(names))
