"""Reads Llama 2, 3 and 3.1+, SmolLM2 (a Llama), SmolLM3 (layers without positions), Mistral (a sliding window),
Ministral (some layers slide), Ministral 3 (queries that grow), and Seed-OSS (biases on q, k and v)."""

from __future__ import annotations

import msgspec

from headrace.models.config_json import MAX_CONTEXT, ConfigJson
from headrace.models.families.decoder import (
    LLAMA_NAMES,
    decoder_prefix,
    decoder_spec,
    gated_sliding_window,
    head_size,
    layer_count,
    layer_windows,
    named_sources,
    rope_layers,
    sliding_window,
)
from headrace.models.families.family import TensorSources, architecture_of
from headrace.models.rope import read_rope
from headrace.models.spec import LayerSpec, ModelSpec

architectures: tuple[str, ...] = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MinistralForCausalLM",
    "Ministral3ForCausalLM",
    "SeedOssForCausalLM",
    "SmolLM3ForCausalLM",
)
ignored: tuple[str, ...] = (
    "use_sliding_window",
    "max_window_layers",
    "no_rope_layer_interval",
)

_WINDOWED = ("MistralForCausalLM", "MinistralForCausalLM", "Ministral3ForCausalLM")
_MINISTRAL3_DEFAULTS: dict[str, object] = {"sliding_window": None, "head_dim": 128, "rms_norm_eps": 1e-5}


def spec(config: ConfigJson) -> ModelSpec:
    architecture = architecture_of(config)
    grows = architecture == "Ministral3ForCausalLM"
    if grows:
        config = config.with_defaults(_MINISTRAL3_DEFAULTS)
    smollm3 = architecture == "SmolLM3ForCausalLM"
    config.refuse("rope_interleaved", "the rope must rotate halves", unless=(False,))
    size = head_size(config, default=128 if architecture == "SeedOssForCausalLM" else None)
    plain = decoder_spec(
        config,
        family="llama",
        architecture=architecture,
        layers=_layers(config, architecture),
        ropes=(read_rope(config, size, default_theta=2_000_000.0 if smollm3 else 10_000.0),),
        head_size=size,
        norm_eps=1e-6,
        default_tied=smollm3,
    )
    if grows:
        return _growing(plain, config)
    if architecture in _WINDOWED:
        return plain
    seed = architecture == "SeedOssForCausalLM"
    bias = config.flag("attention_bias", default=seed)
    o_bias = config.flag("attention_out_bias", default=False) if seed else bias
    return msgspec.structs.replace(plain, qkv_bias=bias, o_bias=o_bias, mlp_bias=config.flag("mlp_bias", default=False))


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    return named_sources(spec, LLAMA_NAMES, names, prefix=decoder_prefix(names))


def _growing(plain: ModelSpec, config: ConfigJson) -> ModelSpec:
    """Return a spec whose queries grow with each multiple of the context that the rope was trained with."""
    rope = config.optional_sub("rope_parameters") or config.optional_sub("rope_scaling")
    if rope is None or not rope.has("llama_4_scaling_beta"):
        raise config.error("rope_parameters", "Expected a rope with llama_4_scaling_beta.")
    rope.optional_size("max_position_embeddings", maximum=MAX_CONTEXT)  # the config's own again
    return msgspec.structs.replace(
        plain,
        layers=tuple(msgspec.structs.replace(layer, grows=True) for layer in plain.layers),
        query_growth=rope.number("llama_4_scaling_beta"),
        growth_tokens=rope.size("original_max_position_embeddings", maximum=MAX_CONTEXT),
        growth_first=0,
    )


def _layers(config: ConfigJson, architecture: str) -> tuple[LayerSpec, ...]:
    count = layer_count(config)
    if architecture in _WINDOWED:
        window = sliding_window(config, default=4096)
        windows = layer_windows(config, window, (window is not None,) * count)
        if len(set(windows)) > 1 and architecture != "MinistralForCausalLM":
            raise config.error(
                "layer_types", "All layers of a Mistral must be of one kind. Models with both are MinistralForCausalLM."
            )
        return tuple(LayerSpec(window=window) for window in windows)
    if architecture != "SmolLM3ForCausalLM":
        return (LayerSpec(),) * count
    has_rope = rope_layers(config, count)
    window = gated_sliding_window(config)
    windows = layer_windows(config, window, tuple(window is not None and not roped for roped in has_rope))
    return tuple(
        LayerSpec(window=window, rope=0 if roped else None) for window, roped in zip(windows, has_rope, strict=True)
    )
