"""Reads EXAONE 4: norms after each sublayer, normalised heads, and layers without positions between sliding ones."""

from __future__ import annotations

import msgspec

from headrace.models.config_json import MAX_LAYERS, ConfigJson
from headrace.models.families.decoder import (
    LLAMA_NAMES,
    OUT_NORM_NAMES,
    TensorNames,
    decoder_prefix,
    decoder_spec,
    head_size,
    layer_count,
    layer_windows,
    named_sources,
    sliding_window,
)
from headrace.models.families.family import TensorSources, architecture_of
from headrace.models.rope import read_rope
from headrace.models.spec import LayerSpec, ModelSpec

architectures: tuple[str, ...] = ("Exaone4ForCausalLM",)
# Without a window; and `layer_types` takes the place of a pattern.
ignored: tuple[str, ...] = ("sliding_window_pattern", "layer_types")

_NAMES: TensorNames = {**LLAMA_NAMES, **OUT_NORM_NAMES}


def spec(config: ConfigJson) -> ModelSpec:
    size = head_size(config)
    plain = decoder_spec(
        config,
        family="exaone",
        architecture=architecture_of(config),
        layers=_layers(config),
        ropes=(read_rope(config, size),),
        head_size=size,
        norm_eps=1e-5,
    )
    return msgspec.structs.replace(plain, pre_norm=False, out_norm=True, qk_norm="head")


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    return named_sources(spec, _NAMES, names, prefix=decoder_prefix(names))


def _layers(config: ConfigJson) -> tuple[LayerSpec, ...]:
    count = layer_count(config)
    window = sliding_window(config, default=4096)
    if window is None:
        return (LayerSpec(),) * count
    period = 1 if config.has("layer_types") else config.size("sliding_window_pattern", maximum=MAX_LAYERS, default=4)
    windows = layer_windows(config, window, tuple((index + 1) % period != 0 for index in range(count)))
    return tuple(LayerSpec(window=window, rope=0 if window else None) for window in windows)
