"""Reads GPT-NeoX and Pythia: attention and MLP in parallel, each with a norm of its own, and a rope over a part of each
head; and GPT-J: one norm for both, a rope over neighbouring dims, and a bias of the output head."""

from __future__ import annotations

import msgspec

from headrace.models.config_json import MAX_HEAD_SIZE, ConfigJson
from headrace.models.families.decoder import (
    LLAMA_NAMES,
    TensorNames,
    decoder_spec,
    find_prefix,
    four_times_hidden,
    grouped_sources,
    head_size,
    layer_count,
    named_sources,
    paired_sources,
)
from headrace.models.families.family import TensorSources, architecture_of
from headrace.models.rope import read_rope
from headrace.models.spec import LayerSpec, ModelSpec

architectures: tuple[str, ...] = ("GPTNeoXForCausalLM", "GPTJForCausalLM")
ignored: tuple[str, ...] = ("rotary", "n_ctx", "scale_attn_weights", "rope_theta")

_NAMES: TensorNames = {
    "embed": ("embed_in",),
    "norm": ("final_layer_norm",),
    "attn.norm": ("input_layernorm",),
    "attn.qkv": ("attention.query_key_value",),
    "attn.o": ("attention.dense",),
    "mlp.norm": ("post_attention_layernorm",),
    "mlp.up": ("mlp.dense_h_to_4h",),
    "mlp.down": ("mlp.dense_4h_to_h",),
}
_J_NAMES: TensorNames = {
    **LLAMA_NAMES,
    "embed": ("wte",),
    "norm": ("ln_f",),
    "attn.norm": ("ln_1",),
    "attn.qkv": ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    "attn.o": ("attn.out_proj",),
    "mlp.up": ("mlp.fc_in",),
    "mlp.down": ("mlp.fc_out",),
}
_KEYS = {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}
_J_KEYS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "activation_function": "hidden_act",
}


def spec(config: ConfigJson) -> ModelSpec:
    architecture = architecture_of(config)
    neox = architecture == "GPTNeoXForCausalLM"
    if neox:
        config = config.renamed(_KEYS).with_defaults({"partial_rotary_factor": 0.25})
        size = head_size(config)
    else:
        config = four_times_hidden(config.renamed(_J_KEYS))
        size = head_size(config)
        rotated = config.optional_size("rotary_dim", maximum=MAX_HEAD_SIZE, default=64) or size
        config = config.with_value("partial_rotary_factor", min(1.0, rotated / size))
    plain = decoder_spec(
        config,
        family="gpt-neox",
        architecture=architecture,
        layers=(LayerSpec(),) * layer_count(config),
        ropes=(read_rope(config, size, partial=True),),
        head_size=size,
        norm_eps=1e-5,
        default_activation="gelu" if neox else "gelu_new",
    )
    key = "layer_norm_eps" if neox else "layer_norm_epsilon"
    bias = neox and config.flag("attention_bias", default=True)
    return msgspec.structs.replace(
        plain,
        norm="layer",
        norm_eps=config.positive(key, maximum=1.0, default=1e-5),
        parallel=config.flag("use_parallel_residual", default=True) if neox else True,
        shared_norm=not neox,
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=True,
        head_bias=not neox,
    )


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    if spec.architecture.startswith("GPTJ"):
        prefix = find_prefix(names, ("transformer.", ""), "wte.weight")
        return paired_sources(named_sources(spec, _J_NAMES, names, prefix=prefix, layer="h"), spec)
    prefix = find_prefix(names, ("gpt_neox.", ""), "embed_in.weight")
    head = find_prefix(names, ("embed_out", "lm_head"), ".weight")
    return grouped_sources(named_sources(spec, _NAMES, names, prefix=prefix, head=head), spec)
