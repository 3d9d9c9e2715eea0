"""Reads StableLM 2 and StableLM Zephyr: layer norms, and a rope over a quarter of each head."""

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

architectures: tuple[str, ...] = ("StableLmForCausalLM",)
ignored: tuple[str, ...] = ()


def spec(config: ConfigJson) -> ModelSpec:
    config.refuse("use_parallel_residual", "attention and MLP must follow each other", unless=(False,))
    config.refuse("qk_layernorm", "heads must not be normalised", unless=(False,))
    config = config.with_defaults({"partial_rotary_factor": 0.25})
    size = head_size(config)
    plain = decoder_spec(
        config,
        family="stablelm",
        architecture=architecture_of(config),
        layers=(LayerSpec(),) * layer_count(config),
        ropes=(read_rope(config, size, partial=True),),
        head_size=size,
        norm_eps=1e-5,
    )
    return msgspec.structs.replace(
        plain,
        norm="layer",
        norm_eps=config.positive("layer_norm_eps", maximum=1.0, default=1e-5),
        qkv_bias=config.flag("use_qkv_bias", default=False),
    )


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    return named_sources(spec, LLAMA_NAMES, names, prefix=decoder_prefix(names))
