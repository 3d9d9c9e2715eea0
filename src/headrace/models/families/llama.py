"""Reads Llama 2, 3 and 3.1+, SmolLM2 (a Llama), SmolLM3 (layers without positions) and Mistral (a sliding window)."""

from __future__ import annotations

import msgspec

from headrace.models.config_json import ConfigJson
from headrace.models.families.decoder import (
    LLAMA_NAMES,
    decoder_prefix,
    decoder_spec,
    gated_sliding_window,
    head_size,
    layer_count,
    layer_windows,
    named_sources,
    sliding_window,
)
from headrace.models.families.family import TensorSources, architecture_of
from headrace.models.rope import read_rope
from headrace.models.spec import LayerSpec, ModelSpec

architectures: tuple[str, ...] = ("LlamaForCausalLM", "MistralForCausalLM", "SmolLM3ForCausalLM")
ignored: tuple[str, ...] = ("use_sliding_window", "max_window_layers", "no_rope_layer_interval")


def spec(config: ConfigJson) -> ModelSpec:
    architecture = architecture_of(config)
    smollm3 = architecture == "SmolLM3ForCausalLM"
    config.refuse("rope_interleaved", "the rope must rotate halves", unless=(False,))
    size = head_size(config)
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
    if architecture == "MistralForCausalLM":
        return plain
    bias = config.flag("attention_bias", default=False)
    return msgspec.structs.replace(plain, qkv_bias=bias, o_bias=bias, mlp_bias=config.flag("mlp_bias", default=False))


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    return named_sources(spec, LLAMA_NAMES, names, prefix=decoder_prefix(names))


def _layers(config: ConfigJson, architecture: str) -> tuple[LayerSpec, ...]:
    count = layer_count(config)
    if architecture == "MistralForCausalLM":
        window = sliding_window(config, default=4096)
        # A config with both kinds of layers is a Ministral under the wrong class name.
        windows = layer_windows(config, window, (window is not None,) * count)
        if len(set(windows)) > 1:
            raise config.error("layer_types", "All layers of a MistralForCausalLM must be of one kind.")
        return tuple(LayerSpec(window=window) for window in windows)
    if architecture == "LlamaForCausalLM":
        return (LayerSpec(),) * count
    has_rope = _rope_layers(config, count)
    window = gated_sliding_window(config)
    windows = layer_windows(config, window, tuple(window is not None and not roped for roped in has_rope))
    return tuple(
        LayerSpec(window=window, rope=0 if roped else None) for window, roped in zip(windows, has_rope, strict=True)
    )


def _rope_layers(config: ConfigJson, count: int) -> tuple[bool, ...]:
    """Return which layers have a rope. Despite its name, `no_rope_layers` holds 1 for layers with one."""
    given = config.optional_sizes("no_rope_layers", minimum=0, maximum=1, max_items=count)
    if given is None:
        interval = config.size("no_rope_layer_interval", maximum=1 << 20, default=4)
        return tuple((index + 1) % interval != 0 for index in range(count))
    if len(given) != count:
        raise config.mismatch("no_rope_layers", f"a list of {count} integers")
    return tuple(flag == 1 for flag in given)
