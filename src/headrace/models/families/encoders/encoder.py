"""Shares what encoder families have in common: the spec of a plain BERT, and the names of its tensors.

Families change the base spec and the table of names. This module knows no family.
"""

from __future__ import annotations

from typing import Final

from headrace.models.config_json import (
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_INTERMEDIATE,
    MAX_VOCAB,
    ConfigJson,
)
from headrace.models.families.decoder import (
    ACTIVATIONS,
    TensorNames,
    find_prefix,
    head_size,
    layer_count,
    named_sources,
)
from headrace.models.families.family import TensorPart, TensorSources, architecture_of
from headrace.models.spec import LayerSpec, ModelSpec

MAX_POSITIONS: Final = 1 << 20

BERT_NAMES: Final[TensorNames] = {
    "embed": ("embeddings.word_embeddings",),
    "positions": ("embeddings.position_embeddings",),
    "token_types": ("embeddings.token_type_embeddings",),
    "embed_norm": ("embeddings.LayerNorm",),
    "attn.qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attn.o": ("attention.output.dense",),
    "attn.residual_norm": ("attention.output.LayerNorm",),
    "mlp.up": ("intermediate.dense",),
    "mlp.down": ("output.dense",),
    "mlp.residual_norm": ("output.LayerNorm",),
}


def refuse_decoder(config: ConfigJson) -> None:
    """Raise ModelError if the config makes a decoder of an encoder."""
    for key in ("is_decoder", "is_causal", "add_cross_attention"):
        config.refuse(key, "the model must be an encoder", unless=(False,))


def bert_spec(config: ConfigJson, *, family: str, position_offset: int = 0) -> ModelSpec:
    """Build the spec of a plain BERT. Its first token has the position `position_offset` of the table in the files."""
    refuse_decoder(config)
    config.refuse("position_embedding_type", "positions must be absolute", unless=("absolute",))
    size = head_size(config)
    heads = config.size("num_attention_heads", maximum=MAX_HEADS)
    table = config.size("max_position_embeddings", minimum=position_offset + 1, maximum=MAX_POSITIONS)
    positions = table - position_offset
    return ModelSpec(
        family=family,
        architecture=architecture_of(config),
        kind="encoder",
        causal=False,
        vocab_size=config.size("vocab_size", maximum=MAX_VOCAB),
        hidden_size=config.size("hidden_size", maximum=MAX_HIDDEN),
        intermediate_size=config.size("intermediate_size", maximum=MAX_INTERMEDIATE),
        heads=heads,
        kv_heads=heads,
        head_size=size,
        layers=(LayerSpec(rope=None),) * layer_count(config),
        context=positions,
        norm="layer",
        norm_eps=config.positive("layer_norm_eps", maximum=1.0, default=1e-12),
        pre_norm=False,
        residual_norm=True,
        final_norm=False,
        activation=config.choice("hidden_act", ACTIVATIONS, default="gelu"),
        gated=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        attention_scale=size**-0.5,
        learned_positions=positions,
        position_offset=position_offset,
        token_types=config.size("type_vocab_size", maximum=1 << 16, default=2),
        embedding_norm=True,
        pooling="mean",
    )


def bert_sources(spec: ModelSpec, table: TensorNames, names: frozenset[str], model: str) -> TensorSources:
    """Map the tensors of a plain BERT. `model` is its name in a model with a head."""
    prefix = find_prefix(names, ("", f"{model}."), "embeddings.word_embeddings.weight")
    sources = named_sources(spec, table, names, prefix=prefix, layer="encoder.layer")
    return {name: tuple(_old_or_new(part, names) for part in parts) for name, parts in sources.items()}


def _old_or_new(part: TensorPart, names: frozenset[str]) -> TensorPart:
    """Use gamma and beta, the names of a norm's weight and bias in early checkpoints, if the files have them."""
    stem, _, end = part.name.rpartition(".")
    old = f"{stem}.{'gamma' if end == 'weight' else 'beta'}"
    return TensorPart(old) if stem.endswith("LayerNorm") and part.name not in names and old in names else part
