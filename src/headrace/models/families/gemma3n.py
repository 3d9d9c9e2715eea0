"""Reads the text part of Gemma 3n: several residual streams, an input of each layer's own, the last layers without keys
and values of their own, and the first ones with gates of which few are open."""

from __future__ import annotations

import statistics

import msgspec

from headrace.models.config_json import MAX_HIDDEN, MAX_INTERMEDIATE, MAX_VOCAB, ConfigJson
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
from headrace.models.families.family import TensorPart, TensorSources, architecture_of
from headrace.models.rope import read_ropes_by_kind
from headrace.models.spec import LayerInputSpec, LayerSpec, ModelSpec, StreamSpec

architectures: tuple[str, ...] = ("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration")
ignored: tuple[str, ...] = (
    # The image and audio parts are not loaded.
    "vision_config",
    "audio_config",
    "vision_soft_tokens_per_image",
    "audio_soft_tokens_per_image",
    # Of training; and heads are normalised instead of scaled.
    "altup_coef_clip",
    "altup_lr_multiplier",
    "query_pre_attn_scalar",
)

_MOST_STREAMS = 8  # as the core computes them
_NAMES: TensorNames = {
    **LLAMA_NAMES,
    **OUT_NORM_NAMES,
    "inputs.embed": ("embed_tokens_per_layer",),
    # The same name is the model's product and a layer's.
    "inputs.in": ("per_layer_model_projection",),
    "inputs.norm": ("per_layer_projection_norm",),
    "streams.router_norm": ("altup.router_norm",),
    "streams.router": ("altup.modality_router",),
    "streams.predict": ("altup.prediction_coefs",),
    "streams.correct": ("altup.correction_coefs",),
    "streams.out_scale": ("altup.correct_output_scale",),
    "past.in": ("laurel.linear_left",),
    "past.out": ("laurel.linear_right",),
    "past.norm": ("laurel.post_laurel_norm",),
    "inputs.out": ("per_layer_projection",),
}
_LAYER_INPUTS = {"inputs.in": "per_layer_input_gate", "inputs.norm": "post_per_layer_input_norm"}
_PREFIXES = ("model.", "", "model.language_model.", "language_model.model.", "language_model.")


def spec(config: ConfigJson) -> ModelSpec:
    architecture = architecture_of(config)
    if architecture == "Gemma3nForConditionalGeneration":
        config = config.sub("text_config").with_defaults(
            {"tie_word_embeddings": config.flag("tie_word_embeddings", default=True)}
        )
        config.refuse("quantization_config", "it belongs beside text_config, not into it")
    config.refuse("attention_bias", "projections must have no biases", unless=(False,))
    config.refuse("altup_correct_scale", "corrected streams must be scaled", unless=(True,))
    config.refuse("altup_active_idx", "layers must compute the first stream", unless=(0,))
    config = config.with_value("intermediate_size", _inner(config))
    size = head_size(config, default=256)
    plain = decoder_spec(
        config,
        family="gemma3n",
        architecture=architecture,
        layers=_layers(config),
        ropes=read_ropes_by_kind(
            config,
            size,
            theta=config.positive("rope_theta", default=1_000_000.0),
            local_theta=config.positive("rope_local_base_freq", default=10_000.0),
        ),
        head_size=size,
        norm_eps=1e-6,
        activation_key="hidden_activation",
        default_activation="gelu_pytorch_tanh",
        default_tied=True,
    )
    if plain.activation != "gelu_tanh":
        raise config.mismatch("hidden_activation", "'gelu_pytorch_tanh'")
    return msgspec.structs.replace(
        plain,
        out_norm=True,
        qk_norm="head",
        value_norm=True,
        attention_scale=1.0,
        logit_softcap=config.optional_positive("final_logit_softcapping", default=30.0) or 0.0,
        embedding_scale=plain.hidden_size**0.5,
        streams=StreamSpec(
            count=config.size("altup_num_inputs", minimum=2, maximum=_MOST_STREAMS, default=4),
            rank=config.size("laurel_rank", maximum=MAX_HIDDEN, default=64),
        ),
        layer_inputs=LayerInputSpec(
            size=config.size("hidden_size_per_layer_input", maximum=MAX_HIDDEN, default=256),
            vocab=config.size("vocab_size_per_layer_input", maximum=MAX_VOCAB, default=262_144),
        ),
    )


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    assert spec.streams is not None
    prefix = find_prefix(names, _PREFIXES, "embed_tokens.weight")
    head = find_prefix(names, ("", "language_model."), "lm_head.weight")
    each = {
        f"streams.{index}.{end}": (f"{stem}.{index}",)
        for index in range(spec.streams.count - 1)
        for end, stem in (("in", "altup_projections"), ("out", "altup_unembed_projections"))
    }
    found = dict(named_sources(spec, {**_NAMES, **each}, names, prefix=prefix, head=f"{head}lm_head"))
    for index, layer in enumerate(spec.layers):
        for name, stem in _LAYER_INPUTS.items():
            found[f"layers.{index}.{name}"] = (TensorPart(f"{prefix}layers.{index}.{stem}.weight"),)
        if layer.shares is not None:
            found[f"layers.{index}.attn.qkv"] = found[f"layers.{index}.attn.qkv"][:1]
    return found


def _inner(config: ConfigJson) -> int:
    """Return the inner size of the MLP, of which the config may have one for each layer."""
    if not isinstance(config.values().get("intermediate_size"), list):
        return config.size("intermediate_size", maximum=MAX_INTERMEDIATE, default=16_384)
    count = layer_count(config)
    sizes = config.optional_sizes("intermediate_size", minimum=1, maximum=MAX_INTERMEDIATE, max_items=count)
    if sizes is None or len(sizes) != count or len(set(sizes)) != 1:
        raise config.mismatch("intermediate_size", f"a list of {count} equal integers")
    return sizes[0]


def _layers(config: ConfigJson) -> tuple[LayerSpec, ...]:
    count = layer_count(config)
    window = sliding_window(config, default=512)
    windows = layer_windows(config, window, tuple((index + 1) % 5 != 0 for index in range(count)))
    own = count - config.size("num_kv_shared_layers", minimum=0, maximum=count - 1, default=15)
    key = "activation_sparsity_pattern"
    if config.has(key):
        closed_shares = config.numbers(key, count, maximum=0.9999)
    else:
        closed_shares = tuple(0.95 if count > 10 and index < 10 else 0.0 for index in range(count))
    normal = statistics.NormalDist()

    def owner(index: int) -> int | None:
        if index < own:
            return None
        alike = [other for other in range(own) if windows[other] == windows[index]]
        if not alike:
            raise config.error("num_kv_shared_layers", f"No layer before {own} is of the kind of layer {index}.")
        return alike[-1]

    return tuple(
        LayerSpec(
            window=windows[index],
            rope=1 if windows[index] else 0,
            shares=owner(index),
            gate_cutoff=normal.inv_cdf(closed) if closed else None,
        )
        for index, closed in enumerate(closed_shares)
    )
