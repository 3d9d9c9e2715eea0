"""Reads ModernBERT encoders, and the embedders built on them: ModernBERT Embed, GTE ModernBERT, Granite R2.

They are pre-norm, with a gated MLP. Most layers see a window on both sides of a token and have their own rope; every
third sees the whole text.
"""

from __future__ import annotations

from typing import Final

from headrace.models.config_json import (
    MAX_CONTEXT,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_INTERMEDIATE,
    MAX_LAYERS,
    MAX_VOCAB,
    ConfigJson,
)
from headrace.models.families.decoder import (
    ACTIVATIONS,
    TensorNames,
    find_prefix,
    head_size,
    layer_count,
    layer_windows,
    named_sources,
)
from headrace.models.families.family import TensorSources, architecture_of
from headrace.models.rope import rope_of
from headrace.models.spec import LayerSpec, ModelSpec, RopeSpec

architectures: tuple[str, ...] = ("ModernBertModel", "ModernBertForMaskedLM")
# Of the heads, of training and of other implementations' kernels. Its positions are rotary and its norms have
# `norm_eps`, whatever the first two say.
ignored: tuple[str, ...] = (
    "position_embedding_type",
    "layer_norm_eps",
    "classifier_activation",
    "classifier_bias",
    "classifier_pooling",
    "decoder_bias",
    "deterministic_flash_attn",
    "initializer_cutoff_factor",
    "reference_compile",
    "repad_logits_with_grad",
    "sparse_pred_ignore_index",
    "sparse_prediction",
    "tie_word_embeddings",
)

_NAMES: Final[TensorNames] = {
    "embed": ("embeddings.tok_embeddings",),
    "embed_norm": ("embeddings.norm",),
    "attn.norm": ("attn_norm",),
    "attn.qkv": ("attn.Wqkv",),
    "attn.o": ("attn.Wo",),
    "mlp.norm": ("mlp_norm",),
    "mlp.gate_up": ("mlp.Wi",),
    "mlp.down": ("mlp.Wo",),
    "norm": ("final_norm",),
}


def spec(config: ConfigJson) -> ModelSpec:
    size = head_size(config)
    heads = config.size("num_attention_heads", maximum=MAX_HEADS)
    context = config.size("max_position_embeddings", maximum=MAX_CONTEXT, default=8192)
    bias = config.flag("attention_bias", default=False)
    return ModelSpec(
        family="modernbert",
        architecture=architecture_of(config),
        kind="encoder",
        causal=False,
        vocab_size=config.size("vocab_size", maximum=MAX_VOCAB),
        hidden_size=config.size("hidden_size", maximum=MAX_HIDDEN),
        intermediate_size=config.size("intermediate_size", maximum=MAX_INTERMEDIATE),
        heads=heads,
        kv_heads=heads,
        head_size=size,
        layers=_layers(config),
        context=context,
        norm="layer",
        norm_eps=config.positive("norm_eps", maximum=1.0, default=1e-5),
        norm_bias=config.flag("norm_bias", default=False),
        activation=config.choice("hidden_activation", ACTIVATIONS, default="gelu"),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.flag("mlp_bias", default=False),
        ropes=_ropes(config, size),
        attention_scale=size**-0.5,
        embedding_norm=True,
        pooling="mean",
    )


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    prefix = find_prefix(names, ("", "model."), "embeddings.tok_embeddings.weight")
    return named_sources(spec, _NAMES, names, prefix=prefix)


def _layers(config: ConfigJson) -> tuple[LayerSpec, ...]:
    period = config.size("global_attn_every_n_layers", maximum=MAX_LAYERS, default=3)
    default = tuple(index % period != 0 for index in range(layer_count(config)))
    # Half of `local_attention` on each side of a token, and the token.
    window = config.size("local_attention", minimum=2, maximum=MAX_CONTEXT, default=128) // 2 + 1
    return tuple(
        LayerSpec(window=window, rope=1 if window else 0, attn_norm=index > 0)
        for index, window in enumerate(layer_windows(config, window, default))
    )


def _ropes(config: ConfigJson, size: int) -> tuple[RopeSpec, RopeSpec]:
    """Return the rope of layers that see everything, then that of layers with a window."""
    none = ConfigJson({}, path=config.path, prefix="rope_parameters.")
    both = config.optional_sub("rope_parameters") or none
    theta = config.positive("global_rope_theta", default=160_000.0)
    local_theta = config.optional_positive("local_rope_theta", default=10_000.0) or theta
    return (
        rope_of(config, both.optional_sub("full_attention") or none, size, theta=theta),
        rope_of(config, both.optional_sub("sliding_attention") or none, size, theta=local_theta),
    )
