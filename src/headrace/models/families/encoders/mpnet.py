"""Reads MPNet encoders, such as all-mpnet-base: BERTs whose attention scores have a bias by distance."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from headrace.models.config_json import ConfigJson
from headrace.models.families.decoder import TensorNames
from headrace.models.families.encoders.encoder import BERT_NAMES, bert_sources, bert_spec
from headrace.models.families.family import TensorSources
from headrace.models.spec import ModelSpec

architectures: tuple[str, ...] = ("MPNetModel", "MPNetForMaskedLM")
ignored: tuple[str, ...] = ("tie_word_embeddings",)  # of the head, which is not used

_PADDING: Final = 1  # transformers ignores `pad_token_id`
_BUCKETS: Final = 32
_MAX_DISTANCE: Final = 128
_NAMES: Final[TensorNames] = {
    **BERT_NAMES,
    "distances": ("encoder.relative_attention_bias",),
    "attn.qkv": ("attention.attn.q", "attention.attn.k", "attention.attn.v"),
    "attn.o": ("attention.attn.o",),
    "attn.residual_norm": ("attention.LayerNorm",),
}


def spec(config: ConfigJson) -> ModelSpec:
    config.refuse("relative_attention_num_buckets", "MPNet has 32 buckets of distances", unless=(_BUCKETS,))
    plain = bert_spec(config, family="mpnet", position_offset=_PADDING + 1)
    return replace(plain, token_types=0, distance_buckets=_BUCKETS, max_distance=_MAX_DISTANCE)


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    return bert_sources(spec, _NAMES, names, "mpnet")
