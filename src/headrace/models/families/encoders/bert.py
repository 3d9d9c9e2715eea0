"""Reads BERT encoders and the sentence embedders built on them: MiniLM, BGE, E5 and others."""

from __future__ import annotations

from headrace.models.config_json import ConfigJson
from headrace.models.families.encoders.encoder import BERT_NAMES, bert_sources, bert_spec
from headrace.models.families.family import TensorSources
from headrace.models.spec import ModelSpec

architectures: tuple[str, ...] = ("BertModel", "BertForMaskedLM", "BertForPreTraining")
ignored: tuple[str, ...] = ("directionality", "tie_word_embeddings")  # of the head, which is not used


def spec(config: ConfigJson) -> ModelSpec:
    return bert_spec(config, family="bert")


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    return bert_sources(spec, BERT_NAMES, names, "bert")
