"""Reads GPT-2 (learned positions, matrices as [inputs, outputs]), StarCoder 1 (GPTBigCode: one key head for all
queries) and OPT (positions from row 2 on, ReLU)."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from headrace.models.config_json import ConfigJson
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
)
from headrace.models.families.family import TensorPart, TensorSources, architecture_of
from headrace.models.spec import LayerSpec, ModelSpec

architectures: tuple[str, ...] = ("GPT2LMHeadModel", "GPTBigCodeForCausalLM", "OPTForCausalLM")
ignored: tuple[str, ...] = (
    "n_ctx",  # the context again
    # How the reference computes the same attention.
    "reorder_and_upcast_attn",
    "attention_softmax_in_fp32",
    "scale_attention_softmax_in_fp32",
    "inference_runner",
    "validate_runner_input",
    "pre_allocate_kv_cache",
    "max_sequence_length",
    "max_batch_size",
    "layerdrop",
    "init_std",
    "prefix",
)

_NAMES: TensorNames = {
    "embed": ("wte",),
    "positions": ("wpe",),
    "norm": ("ln_f",),
    "attn.norm": ("ln_1",),
    "attn.qkv": ("attn.c_attn",),
    "attn.o": ("attn.c_proj",),
    "mlp.norm": ("ln_2",),
    "mlp.up": ("mlp.c_fc",),
    "mlp.down": ("mlp.c_proj",),
}
_OPT_NAMES: TensorNames = {
    **LLAMA_NAMES,
    "positions": ("embed_positions",),
    "norm": ("final_layer_norm",),
    "attn.norm": ("self_attn_layer_norm",),
    "attn.o": ("self_attn.out_proj",),
    "mlp.norm": ("final_layer_norm",),
    "mlp.up": ("fc1",),
    "mlp.down": ("fc2",),
}
_KEYS: Mapping[str, str] = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "activation_function": "hidden_act",
    "ffn_dim": "intermediate_size",
}
_OPT_ROWS = 2  # of the table of positions before that of the first token


def spec(config: ConfigJson) -> ModelSpec:
    architecture = architecture_of(config)
    opt = architecture == "OPTForCausalLM"
    config = four_times_hidden(config.renamed(_KEYS))
    config.refuse("scale_attn_weights", "scores must be scaled", unless=(True,))
    config.refuse("scale_attn_by_inverse_layer_idx", "all layers must have the same scale", unless=(False,))
    config.refuse("add_cross_attention", "the model must have one part", unless=(False,))
    one_key = architecture == "GPTBigCodeForCausalLM" and config.flag("multi_query", default=True)
    plain = decoder_spec(
        config.with_value("num_key_value_heads", 1) if one_key else config,
        family="gpt2",
        architecture=architecture,
        layers=(LayerSpec(rope=None),) * layer_count(config),
        ropes=(),
        head_size=head_size(config),
        norm_eps=1e-5,
        default_activation={"GPT2LMHeadModel": "gelu_new", "OPTForCausalLM": "relu"}.get(architecture, "gelu_fast"),
        default_tied=True,
    )
    if opt:
        config.refuse("do_layer_norm_before", "norms must be before the sublayers", unless=(True,))
        config.refuse("_remove_final_layer_norm", "the last norm must be there", unless=(False,))
        config.refuse("layer_norm_elementwise_affine", "norms must have weights", unless=(True,))
        config.refuse("word_embed_proj_dim", "the embedding must not be projected", unless=(plain.hidden_size,))
    bias = config.flag("enable_bias", default=True) if opt else True
    return msgspec.structs.replace(
        plain,
        norm="layer",
        norm_eps=1e-5 if opt else config.positive("layer_norm_epsilon", maximum=1.0, default=1e-5),
        learned_positions=plain.context,
        position_offset=_OPT_ROWS if opt else 0,
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    if spec.architecture.startswith("OPT"):
        prefix = find_prefix(names, ("model.decoder.", "decoder.", ""), "embed_tokens.weight")
        return named_sources(spec, _OPT_NAMES, names, prefix=prefix)
    prefix = find_prefix(names, ("transformer.", ""), "wte.weight")
    found = named_sources(spec, _NAMES, names, prefix=prefix, layer="h")
    if spec.architecture.startswith("GPT2"):
        products = (".qkv", ".o", ".up", ".down")
        return {
            name: (TensorPart(parts[0].name, transposed=True),) if name.endswith(products) else parts
            for name, parts in found.items()
        }
    return grouped_sources(found, spec)
