"""Reads Command R, Command R+ (each head has a norm of its own) and Command R7B (Cohere 2): attention and MLP read the
same normalised rows, and the rope rotates neighbouring dims. In Cohere 2, sliding layers have positions and the others
have none."""

from __future__ import annotations

import msgspec

from headrace.models.config_json import MAX_LAYERS, ConfigJson
from headrace.models.families.decoder import (
    LLAMA_NAMES,
    decoder_prefix,
    decoder_spec,
    head_size,
    layer_count,
    layer_windows,
    named_sources,
    paired_sources,
    sliding_window,
)
from headrace.models.families.family import TensorPart, TensorSources, architecture_of
from headrace.models.rope import read_rope
from headrace.models.spec import LayerSpec, ModelSpec

architectures: tuple[str, ...] = ("CohereForCausalLM", "Cohere2ForCausalLM")
# Some configs of Cohere 2 say again what the architecture is.
ignored: tuple[str, ...] = (
    "rotary_pct",
    "order_of_interleaved_layers",
    "position_embedding_type",
    "cache_implementation",
)


def spec(config: ConfigJson) -> ModelSpec:
    architecture = architecture_of(config)
    normed = architecture == "CohereForCausalLM" and config.flag("use_qk_norm", default=False)
    config.refuse("use_qk_norm", "heads must not be normalised", unless=(normed,))
    config.refuse("use_parallel_block", "attention and MLP must be parallel", unless=(True,))
    config.refuse("use_gated_activation", "the MLP must have a gate", unless=(True,))
    config.refuse("use_embedding_sharing", "the head must be the embedding", unless=(True,))
    config.refuse("use_parallel_embedding", "it must be off", unless=(False,))
    config.refuse("layer_switch", "the layers must have a pattern of 4", unless=(4,))
    size = head_size(config)
    plain = decoder_spec(
        config,
        family="cohere",
        architecture=architecture,
        layers=_layers(config) if architecture == "Cohere2ForCausalLM" else (LayerSpec(),) * layer_count(config),
        ropes=(read_rope(config, size),),
        head_size=size,
        norm_eps=1e-5,
        default_tied=True,
    )
    bias = config.flag("attention_bias", default=False)
    return msgspec.structs.replace(
        plain,
        norm="layer",
        norm_bias=False,
        norm_eps=config.positive("layer_norm_eps", maximum=1.0, default=1e-5),
        parallel=True,
        shared_norm=True,
        qk_norm="each_head" if normed else "none",
        qkv_bias=bias,
        o_bias=bias,
        logit_scale=config.positive("logit_scale", default=0.0625),
    )


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    found = paired_sources(named_sources(spec, LLAMA_NAMES, names, prefix=decoder_prefix(names)), spec)
    pairs = (spec.head_size, spec.head_size)
    return {
        name: (TensorPart(parts[0].name, pairs=pairs, flat=True),) if name.endswith(("q_norm", "k_norm")) else parts
        for name, parts in found.items()
    }


def _layers(config: ConfigJson) -> tuple[LayerSpec, ...]:
    period = config.size("sliding_window_pattern", maximum=MAX_LAYERS, default=4)
    default = tuple((index + 1) % period != 0 for index in range(layer_count(config)))
    windows = layer_windows(config, sliding_window(config, default=4096), default)
    return tuple(LayerSpec(window=window, rope=0 if window else None) for window in windows)
