"""Reads Nemotron and Arcee: an MLP of a squared ReLU, without a gate."""

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
)
from headrace.models.families.family import TensorSources, architecture_of
from headrace.models.rope import read_rope
from headrace.models.spec import LayerSpec, ModelSpec

architectures: tuple[str, ...] = ("NemotronForCausalLM", "ArceeForCausalLM")
ignored: tuple[str, ...] = ()

_NAMES: TensorNames = {**LLAMA_NAMES, "mlp.up": ("mlp.up_proj",)}


def spec(config: ConfigJson) -> ModelSpec:
    architecture = architecture_of(config)
    is_nemotron = architecture == "NemotronForCausalLM"
    if is_nemotron:
        config = config.with_defaults({"partial_rotary_factor": 0.5})
    size = head_size(config)
    bias = config.flag("attention_bias", default=False)
    plain = msgspec.structs.replace(
        decoder_spec(
            config,
            family="nemotron",
            architecture=architecture,
            layers=(LayerSpec(),) * layer_count(config),
            ropes=(read_rope(config, size, partial=is_nemotron),),
            head_size=size,
            norm_eps=1e-5,
            default_activation="relu2",
        ),
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.flag("mlp_bias", default=False),
    )
    if not is_nemotron:
        return plain
    eps = config.positive("norm_eps", maximum=1.0, default=1e-5)
    return msgspec.structs.replace(plain, norm="layer", norm_eps=eps, norm_offset=1.0)


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    return named_sources(spec, _NAMES, names, prefix=decoder_prefix(names))
