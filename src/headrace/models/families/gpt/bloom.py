"""Reads BLOOM and MPT, whose scores fall with distance (ALiBi) instead of a rope."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from headrace.models.config_json import ConfigJson
from headrace.models.families.decoder import (
    TensorNames,
    decoder_spec,
    find_prefix,
    four_times_hidden,
    grouped_sources,
    head_size,
    layer_count,
    named_sources,
)
from headrace.models.families.family import TensorSources, architecture_of
from headrace.models.spec import LayerSpec, ModelSpec

architectures: tuple[str, ...] = ("BloomForCausalLM", "MPTForCausalLM", "MptForCausalLM")
ignored: tuple[str, ...] = (
    # How other implementations compute the same.
    "attention_softmax_in_fp32",
    "masked_softmax_fusion",
    "bias_dropout_fusion",
    "skip_bias_add",
    "skip_bias_add_qkv",
    "slow_but_exact",
    "offset_alibi",
    "norm_type",
    # Of training, and positions that ALiBi replaces.
    "embedding_fraction",
    "init_config",
    "init_device",
    "learned_pos_emb",
    "emb_init_std",
    "emb_init_uniform_lim",
    "fan_mode",
    "init_div_is_residual",
    "init_gain",
    "init_nonlinearity",
    "init_std",
    "param_init_fn",
    "verbose",
    "tokenizer_name",
)

_MOST = 1 << 18  # tokens of a context: heads have a table of all distances
_NAMES: TensorNames = {
    "embed": ("word_embeddings",),
    "embed_norm": ("word_embeddings_layernorm",),
    "norm": ("ln_f",),
    "attn.norm": ("input_layernorm",),
    "attn.qkv": ("self_attention.query_key_value",),
    "attn.o": ("self_attention.dense",),
    "mlp.norm": ("post_attention_layernorm",),
    "mlp.up": ("mlp.dense_h_to_4h",),
    "mlp.down": ("mlp.dense_4h_to_h",),
}
_MPT_NAMES: TensorNames = {
    "embed": ("wte",),
    "norm": ("norm_f",),
    "attn.norm": ("norm_1",),
    "attn.qkv": ("attn.Wqkv",),
    "attn.o": ("attn.out_proj",),
    "mlp.norm": ("norm_2",),
    "mlp.up": ("ffn.up_proj",),
    "mlp.down": ("ffn.down_proj",),
}
_KEYS = {
    "n_embed": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "seq_length": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "max_seq_len": "max_position_embeddings",
}


def spec(config: ConfigJson) -> ModelSpec:
    architecture = architecture_of(config)
    bloom = architecture == "BloomForCausalLM"
    config = four_times_hidden(config.renamed(_KEYS)).with_defaults({"max_position_embeddings": 2048})
    config.size("max_position_embeddings", maximum=_MOST)
    plain = decoder_spec(
        config,
        family="bloom",
        architecture=architecture,
        layers=(LayerSpec(rope=None),) * layer_count(config),
        ropes=(),
        head_size=head_size(config),
        norm_eps=1e-5,
        default_activation="gelu_new" if bloom else "gelu",
        default_tied=True,
    )
    if bloom:
        config.refuse("apply_residual_connection_post_layernorm", "residuals must not be normalised", unless=(False,))
        slopes, scale = bloom_slopes(plain.heads), plain.attention_scale
    else:
        slopes, scale = _mpt_attention(config, plain)
    return msgspec.structs.replace(
        plain,
        norm="layer",
        norm_eps=config.positive("layer_norm_epsilon", maximum=1.0, default=1e-5),
        norm_bias=bloom,
        gated=False,
        qkv_bias=bloom,
        o_bias=bloom,
        mlp_bias=bloom,
        embedding_norm=bloom,
        attention_scale=scale,
        alibi=slopes,
    )


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    if spec.architecture != "BloomForCausalLM":
        prefix = find_prefix(names, ("transformer.", ""), "wte.weight")
        return named_sources(spec, _MPT_NAMES, names, prefix=prefix, layer="blocks")
    prefix = find_prefix(names, ("transformer.", ""), "word_embeddings.weight")
    return grouped_sources(named_sources(spec, _NAMES, names, prefix=prefix, layer="h"), spec)


def bloom_slopes(heads: int) -> tuple[float, ...]:
    """Return powers of 2 ** (-8 / n) for n heads, a power of two; further heads take every second one for 2 n heads."""
    whole = 1 << heads.bit_length() - 1
    found = [2.0 ** (-8 * (i + 1) / whole) for i in range(whole)]
    found += [2.0 ** (-4 * (2 * i + 1) / whole) for i in range(heads - whole)]
    return _rounded(found)


def mpt_slopes(heads: int, most: float) -> tuple[float, ...]:
    """Return 2 ** -x for x up to `most`; of more slopes than heads, every second one first."""
    whole = 1 << math.ceil(math.log2(heads))
    found = [2.0 ** (-most * (i + 1) / whole) for i in range(whole)]
    return _rounded(found if whole == heads else (found[1::2] + found[::2])[:heads])


def _rounded(slopes: list[float]) -> tuple[float, ...]:
    return tuple(float(np.float32(slope)) for slope in slopes)


def _mpt_attention(config: ConfigJson, plain: ModelSpec) -> tuple[tuple[float, ...], float]:
    """Return slopes and scale of an MPT."""
    config.refuse("expansion_ratio", "the MLP must be four times as wide", unless=(4,))
    config.refuse("no_bias", "layers must have no biases", unless=(True,))
    config.refuse("logit_scale", "logits must not be scaled")
    attention = config.optional_sub("attn_config") or ConfigJson({}, path=config.path, prefix="attn_config.")
    attention.refuse("attn_type", "all heads must have keys", unless=("multihead_attention",))
    attention.refuse("alibi", "positions must be ALiBi", unless=(True,))
    for key in ("qk_ln", "prefix_lm", "attn_uses_sequence_id"):
        attention.refuse(key, "Headrace does not support it", unless=(False,))
    attention.refuse("clip_qkv", "Headrace does not clip projections")
    attention.has("attn_impl")  # without an effect
    most = attention.size("alibi_bias_max", maximum=1 << 10, default=8)
    scale = attention.optional_positive("softmax_scale") or plain.attention_scale
    return mpt_slopes(plain.heads, most), scale
