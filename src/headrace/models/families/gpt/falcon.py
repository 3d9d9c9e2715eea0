"""Reads Falcon: 7B (one key head for all queries, one norm for attention and MLP in parallel), 40B and 180B (groups of
queries, two norms) and Falcon 2. Models with ALiBi are rejected: the reference rounds their positions to bf16."""

from __future__ import annotations

import msgspec

from headrace.models.config_json import MAX_HEADS, ConfigJson
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
from headrace.models.rope import read_rope
from headrace.models.spec import LayerSpec, ModelSpec

architectures: tuple[str, ...] = ("FalconForCausalLM",)
ignored: tuple[str, ...] = ("rotary", "num_kv_heads", "n_head_kv")  # with one key head for all queries

_NAMES: TensorNames = {
    "embed": ("word_embeddings",),
    "norm": ("ln_f",),
    "attn.norm": ("input_layernorm",),
    "attn.qkv": ("self_attention.query_key_value",),
    "attn.o": ("self_attention.dense",),
    "mlp.norm": ("post_attention_layernorm",),
    "mlp.up": ("mlp.dense_h_to_4h",),
    "mlp.down": ("mlp.dense_4h_to_h",),
}
_TWO_NORMS: TensorNames = {**_NAMES, "attn.norm": ("ln_attn",), "mlp.norm": ("ln_mlp",)}
_KEYS = {
    "n_embed": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_head_kv": "num_kv_heads",
    "activation": "hidden_act",
    "ffn_hidden_size": "intermediate_size",
}


def spec(config: ConfigJson) -> ModelSpec:
    config = four_times_hidden(config.renamed(_KEYS)).with_defaults({"max_position_embeddings": 2048})
    config.refuse("alibi", "positions must be a rope", unless=(False,))
    config.refuse("apply_residual_connection_post_layernorm", "residuals must not be normalised", unless=(False,))
    grouped = config.flag("new_decoder_architecture", default=False)
    heads = config.size("num_attention_heads", maximum=MAX_HEADS)
    kv_heads = 1 if config.flag("multi_query", default=True) else heads
    if grouped:
        kv_heads = config.optional_size("num_kv_heads", maximum=MAX_HEADS, default=heads) or heads
    parallel = config.flag("parallel_attn", default=True) or grouped
    norms = config.optional_size("num_ln_in_parallel_attn", maximum=2, default=2 if grouped else 1)
    if not grouped and norms == 2:
        raise config.error("num_ln_in_parallel_attn", "Two norms need new_decoder_architecture.")
    size = head_size(config)
    plain = decoder_spec(
        config.with_value("num_key_value_heads", kv_heads),
        family="falcon",
        architecture=architecture_of(config),
        layers=(LayerSpec(),) * layer_count(config),
        ropes=(read_rope(config, size),),
        head_size=size,
        norm_eps=1e-5,
        default_activation="gelu",
        default_tied=True,
    )
    bias = config.flag("bias", default=False)
    return msgspec.structs.replace(
        plain,
        norm="layer",
        norm_eps=config.positive("layer_norm_epsilon", maximum=1.0, default=1e-5),
        parallel=parallel,
        shared_norm=parallel and not (grouped and norms != 1),
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    prefix = find_prefix(names, ("transformer.", ""), "word_embeddings.weight")
    table = _TWO_NORMS if spec.parallel and not spec.shared_norm else _NAMES
    return grouped_sources(named_sources(spec, table, names, prefix=prefix, layer="h"), spec)
