"""Reads StarCoder2: layer norms, biases, and an MLP without a gate."""

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

architectures: tuple[str, ...] = ("Starcoder2ForCausalLM",)
# Configs of the published models name both, and only say again what the architecture is.
ignored: tuple[str, ...] = ("mlp_type", "norm_type")

_NAMES: TensorNames = {**LLAMA_NAMES, "mlp.up": ("mlp.c_fc",), "mlp.down": ("mlp.c_proj",)}


def spec(config: ConfigJson) -> ModelSpec:
    config.refuse("mlp_type", "the MLP must have no gate", unless=("default",))
    config.refuse("norm_type", "norms must be layer norms", unless=("layer_norm",))
    size = head_size(config)
    plain = decoder_spec(
        config,
        family="starcoder",
        architecture=architecture_of(config),
        layers=(LayerSpec(window=sliding_window(config) or 0),) * layer_count(config),
        ropes=(read_rope(config, size),),
        head_size=size,
        norm_eps=1e-5,
        default_activation="gelu_pytorch_tanh",
        default_tied=True,
    )
    bias = config.flag("use_bias", default=True)
    return msgspec.structs.replace(
        plain,
        norm="layer",
        norm_eps=config.positive("norm_epsilon", maximum=1.0, default=1e-5),
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    return named_sources(spec, _NAMES, names, prefix=decoder_prefix(names))
