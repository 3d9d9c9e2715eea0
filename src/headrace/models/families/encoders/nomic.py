"""Reads Nomic BERT encoders, such as nomic-embed-text-v1.5: BERTs with a rope and a gated MLP.

Configs come in two forms: that of the model's own code, which is never loaded (`n_embd`), and that of transformers
(`hidden_size`). So do names of tensors.
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
from headrace.models.families.decoder import ACTIVATIONS, LLAMA_NAMES, TensorNames, head_size, named_sources
from headrace.models.families.encoders.encoder import refuse_decoder
from headrace.models.families.family import TensorSources, architecture_of
from headrace.models.rope import read_rope, rope_of
from headrace.models.spec import Activation, LayerSpec, ModelSpec, RopeSpec

architectures: tuple[str, ...] = ("NomicBertModel", "NomicBertForPreTraining", "NomicBertForMaskedLM")
# Of the head, which is not used, of training, and of kernels that compute the same.
ignored: tuple[str, ...] = (
    "dense_seq_output",
    "fused_bias_fc",
    "fused_dropout_add_ln",
    "max_trained_positions",  # without a scaled rope
    "pad_vocab_size_multiple",  # of `vocab_size`, which is padded already
    "parallel_block_tied_norm",  # without `parallel_block`
    "reorder_and_upcast_attn",
    "summary_first_dropout",
    "tie_word_embeddings",
    "use_flash_attn",
    "use_xentropy",
)

_ACTIVATIONS: Final[dict[str, Activation]] = {"swiglu": "silu", "geglu": "gelu"}
_OWN_NAMES: Final[TensorNames] = {
    "embed": ("embeddings.word_embeddings",),
    "token_types": ("embeddings.token_type_embeddings",),
    "embed_norm": ("emb_ln",),
    "attn.qkv": ("attn.Wqkv",),
    "attn.o": ("attn.out_proj",),
    "attn.residual_norm": ("norm1",),
    "mlp.gate_up": ("mlp.fc12", "mlp.fc11"),
    "mlp.down": ("mlp.fc2",),
    "mlp.residual_norm": ("norm2",),
}
_NAMES: Final[TensorNames] = {
    **LLAMA_NAMES,
    "embed": ("embeddings.word_embeddings",),
    "token_types": ("embeddings.token_type_embeddings",),
    "embed_norm": ("embeddings.LayerNorm",),
    "attn.residual_norm": ("post_attention_layernorm",),
    "mlp.residual_norm": ("post_mlp_layernorm",),
}


def spec(config: ConfigJson) -> ModelSpec:
    refuse_decoder(config)
    own = config.has("n_embd")
    hidden = config.size("n_embd" if own else "hidden_size", maximum=MAX_HIDDEN)
    heads = config.size("n_head" if own else "num_attention_heads", maximum=MAX_HEADS)
    size = _own_head_size(config, hidden, heads) if own else head_size(config)
    context = config.size("n_positions" if own else "max_position_embeddings", maximum=MAX_CONTEXT, default=2048)
    if own:
        _refuse_variants(config)
        activation = config.choice("activation_function", _ACTIVATIONS)
        if config.has("rotary_scaling_factor"):
            # Beyond, the rope's angles depend on the length of the longest sequence in the batch.
            context = min(context, config.size("max_trained_positions", maximum=MAX_CONTEXT, default=2048))
            config.positive("rotary_scaling_factor")
    else:
        activation = config.choice("hidden_act", ACTIVATIONS, default="silu")
    return ModelSpec(
        family="nomic",
        architecture=architecture_of(config),
        kind="encoder",
        causal=False,
        vocab_size=config.size("vocab_size", maximum=MAX_VOCAB),
        hidden_size=hidden,
        intermediate_size=config.size("n_inner" if own else "intermediate_size", maximum=MAX_INTERMEDIATE),
        heads=heads,
        kv_heads=heads,
        head_size=size,
        layers=(LayerSpec(),) * config.size("n_layer" if own else "num_hidden_layers", maximum=MAX_LAYERS),
        context=context,
        norm="layer",
        norm_eps=config.positive("layer_norm_epsilon" if own else "layer_norm_eps", maximum=1.0, default=1e-12),
        pre_norm=False,
        residual_norm=True,
        final_norm=False,
        activation=activation,
        qkv_bias=own and config.flag("qkv_proj_bias", default=False),
        o_bias=own and config.flag("qkv_proj_bias", default=False),
        ropes=(_own_rope(config, size, context) if own else read_rope(config, size, default_theta=1000.0),),
        attention_scale=size**-0.5,
        token_types=config.size("type_vocab_size", minimum=0, maximum=1 << 16, default=2),
        embedding_norm=True,
        pooling="mean",
    )


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    prefixes = ("", "bert.", "nomic_bert.")
    prefix = next((prefix for prefix in prefixes if f"{prefix}embeddings.word_embeddings.weight" in names), "")
    if f"{prefix}embeddings.LayerNorm.weight" in names:
        return named_sources(spec, _NAMES, names, prefix=prefix)
    return named_sources(spec, _OWN_NAMES, names, prefix=prefix, layer="encoder.layers")


def _own_head_size(config: ConfigJson, hidden: int, heads: int) -> int:
    if hidden % heads:
        raise config.mismatch("n_head", f"a divisor of n_embd ({hidden})")
    return hidden // heads


def _own_rope(config: ConfigJson, size: int, context: int) -> RopeSpec:
    none = ConfigJson({}, path=config.path, prefix="rope_parameters.")
    theta = config.positive("rotary_emb_base", default=10_000.0)
    return rope_of(config, none, size, theta=theta, default_original=context)


def _refuse_variants(config: ConfigJson) -> None:
    """Raise ModelError for what the code of these models can do and the published encoders do not."""
    for key in ("causal", "prenorm", "parallel_block", "use_rms_norm", "scale_attn_by_inverse_layer_idx"):
        config.refuse(key, "Headrace supports it switched off only", unless=(False,))
    for key in ("mlp_fc1_bias", "mlp_fc2_bias", "rotary_emb_interleaved"):
        config.refuse(key, "Headrace supports it switched off only", unless=(False,))
    config.refuse("scale_attn_weights", "Headrace supports it switched on only", unless=(True,))
    config.refuse("rotary_emb_fraction", "the rope must cover the whole head", unless=(1, 1.0))
    config.refuse("rotary_emb_scale_base", "Headrace does not support xPos")
    config.refuse("num_experts", "Headrace does not support a mixture of experts here", unless=(0, 1))
