"""Reads Gemma 2, Gemma 3 (text), and Gemma 3 with vision, whose image part is in `vision/gemma3_tower`.

They differ from the plain decoder in norms that store their weight minus one, on both sides of each sublayer; scaled
embeddings; soft caps (Gemma 2) or normalised heads (Gemma 3); and sliding layers, which in Gemma 3 have their own rope.
EmbeddingGemma is a Gemma 3 whose tokens see the whole text, or in sliding layers a window on both sides.
"""

from __future__ import annotations

import msgspec

from headrace.models.config_json import MAX_LAYERS, ConfigJson
from headrace.models.families.decoder import (
    LLAMA_NAMES,
    OUT_NORM_NAMES,
    TensorNames,
    decoder_spec,
    find_prefix,
    head_size,
    layer_count,
    layer_windows,
    named_sources,
    sliding_window,
)
from headrace.models.families.family import TensorSources, architecture_of
from headrace.models.families.vision import gemma3_tower
from headrace.models.rope import read_rope, read_ropes_by_kind
from headrace.models.spec import LayerSpec, ModelSpec, RopeSpec

architectures: tuple[str, ...] = ("Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
# `hidden_activation` is used.
ignored: tuple[str, ...] = ("hidden_act", "sliding_window_size", "mm_tokens_per_image", *gemma3_tower.IGNORED)

_NAMES: TensorNames = {**LLAMA_NAMES, **OUT_NORM_NAMES}
# Converters have used each of these prefixes for the text part.
_PREFIXES = ("model.", "", "language_model.model.", "model.language_model.", "model.language_model.model.")

# Gemma 3 configs omit keys whose values equal those of the 4B model.
_GEMMA3_DEFAULTS: dict[str, object] = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}


def spec(config: ConfigJson) -> ModelSpec:
    architecture = architecture_of(config)
    span = 0
    if architecture == gemma3_tower.ARCHITECTURE:
        if config.has("vision_config"):
            span = gemma3_tower.read_tower(config).tile_tokens
        config = config.sub("text_config").with_defaults(
            {"tie_word_embeddings": config.flag("tie_word_embeddings", default=True)}
        )
        config.refuse("quantization_config", "it belongs beside text_config, not into it")
    gemma3 = architecture != "Gemma2ForCausalLM"
    if gemma3:
        config = config.with_defaults(_GEMMA3_DEFAULTS)
    both_ways = gemma3 and config.flag("use_bidirectional_attention", default=False)
    size = head_size(config, default=256)
    plain = decoder_spec(
        config,
        family="gemma",
        architecture=architecture,
        layers=_layers(config, gemma3=gemma3, both_ways=both_ways),
        ropes=_ropes(config, size) if gemma3 else (read_rope(config, size),),
        head_size=size,
        norm_eps=1e-6,
        activation_key="hidden_activation",
        default_activation="gelu_pytorch_tanh",
        default_tied=True,
    )
    if gemma3:
        config.refuse("attn_logit_softcapping", "Gemma 3 normalises its heads instead of capping scores")
    bias = config.flag("attention_bias", default=False)
    return msgspec.structs.replace(
        plain,
        causal=not both_ways,
        image_span=0 if both_ways else span,
        kind="encoder" if both_ways else "decoder",
        norm_offset=1.0,
        out_norm=True,
        qk_norm="head" if gemma3 else "none",
        qkv_bias=bias,
        o_bias=bias,
        attention_scale=config.positive("query_pre_attn_scalar", default=256.0) ** -0.5,
        attention_softcap=0.0 if gemma3 else _softcap(config, "attn_logit_softcapping", 50.0),
        logit_softcap=_softcap(config, "final_logit_softcapping", None if gemma3 else 30.0),
        embedding_scale=plain.hidden_size**0.5,
    )


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    prefix = find_prefix(names, _PREFIXES, "embed_tokens.weight")
    head = find_prefix(names, ("", "language_model."), "lm_head.weight")
    return named_sources(spec, _NAMES, names, prefix=prefix, head=f"{head}lm_head")


def _layers(config: ConfigJson, *, gemma3: bool, both_ways: bool) -> tuple[LayerSpec, ...]:
    period = config.size("sliding_window_pattern", maximum=MAX_LAYERS, default=6) if gemma3 else 2
    default = tuple((index + 1) % period != 0 for index in range(layer_count(config)))
    window = sliding_window(config, default=4096)
    if both_ways and window is not None:
        window = window // 2 + 1  # half on each side of a token, and the token
    windows = layer_windows(config, window, default)
    return tuple(LayerSpec(window=window, rope=1 if gemma3 and window else 0) for window in windows)


def _ropes(config: ConfigJson, size: int) -> tuple[RopeSpec, RopeSpec]:
    return read_ropes_by_kind(
        config,
        size,
        theta=config.positive("rope_theta", default=1_000_000.0),
        local_theta=config.positive("rope_local_base_freq", default=10_000.0),
    )


def _softcap(config: ConfigJson, key: str, default: float | None) -> float:
    return config.optional_positive(key, default=default) or 0.0
