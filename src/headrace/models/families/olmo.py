"""Reads OLMo-2 and OLMo-3 (norms after each sublayer, queries and keys normalised over all heads at once) and OLMoE.

OLMo-3 has sliding layers, and stretches the rope of the others alone. OLMoE has its norms before the sublayers.
"""

from __future__ import annotations

import msgspec

from headrace.models.config_json import ConfigJson
from headrace.models.families.decoder import (
    EXPERT_NAMES,
    LLAMA_NAMES,
    OUT_NORM_NAMES,
    TensorNames,
    decoder_prefix,
    decoder_spec,
    expert_spec,
    fuse_experts,
    head_size,
    layer_count,
    layer_windows,
    named_sources,
    sliding_window,
)
from headrace.models.families.family import TensorSources, architecture_of
from headrace.models.rope import read_rope, read_ropes_by_kind
from headrace.models.spec import ExpertSpec, LayerSpec, ModelSpec

architectures: tuple[str, ...] = ("Olmo2ForCausalLM", "Olmo3ForCausalLM", "OlmoeForCausalLM")
ignored: tuple[str, ...] = ()

_NAMES: TensorNames = {**LLAMA_NAMES, **OUT_NORM_NAMES}
_MIXTURE_NAMES: TensorNames = {**LLAMA_NAMES, **EXPERT_NAMES}


def spec(config: ConfigJson) -> ModelSpec:
    architecture = architecture_of(config)
    size, count = head_size(config), layer_count(config)
    mixture = architecture == "OlmoeForCausalLM"
    if architecture == "Olmo3ForCausalLM":
        theta = config.positive("rope_theta", default=500_000.0)
        ropes = read_ropes_by_kind(config, size, theta=theta, local_theta=theta)
        layers = _windowed_layers(config, count)
    else:
        ropes = (read_rope(config, size),)
        layers = (LayerSpec(experts=mixture),) * count
    plain = decoder_spec(
        config,
        family="olmo",
        architecture=architecture,
        layers=layers,
        ropes=ropes,
        head_size=size,
        norm_eps=1e-5,
        experts=_experts(config) if mixture else None,
    )
    bias = config.flag("attention_bias", default=False)
    return msgspec.structs.replace(
        plain, pre_norm=mixture, out_norm=not mixture, qk_norm="full", qkv_bias=bias, o_bias=bias
    )


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    table = _NAMES if spec.experts is None else _MIXTURE_NAMES
    found = named_sources(spec, table, names, prefix=decoder_prefix(names))
    return fuse_experts(found, spec, names, ("layers.{layer}.mlp",))


def _windowed_layers(config: ConfigJson, count: int) -> tuple[LayerSpec, ...]:
    default = tuple((index + 1) % 4 != 0 for index in range(count))
    windows = layer_windows(config, sliding_window(config, default=4096), default)
    return tuple(LayerSpec(window=window, rope=1 if window else 0) for window in windows)


def _experts(config: ConfigJson) -> ExpertSpec:
    return expert_spec(config, size_key="intermediate_size", normalise=config.flag("norm_topk_prob", default=False))
