"""Reads RoBERTa, XLM-RoBERTa and CamemBERT encoders, and the embedders built on them: BGE-M3, multilingual E5.

They are BERTs whose first token has the position after that of padding.
"""

from __future__ import annotations

from headrace.models.config_json import MAX_VOCAB, ConfigJson
from headrace.models.families.encoders.encoder import BERT_NAMES, bert_sources, bert_spec
from headrace.models.families.family import TensorSources
from headrace.models.spec import ModelSpec

architectures: tuple[str, ...] = (
    "RobertaModel",
    "RobertaForMaskedLM",
    "XLMRobertaModel",
    "XLMRobertaForMaskedLM",
    "CamembertModel",
    "CamembertForMaskedLM",
)
ignored: tuple[str, ...] = ("tie_word_embeddings", "output_past")  # of the head, which is not used, and of decoders


def spec(config: ConfigJson) -> ModelSpec:
    padding = config.size("pad_token_id", minimum=0, maximum=MAX_VOCAB, default=1)
    return bert_spec(config, family="roberta", position_offset=padding + 1)


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    return bert_sources(spec, BERT_NAMES, names, "roberta")
