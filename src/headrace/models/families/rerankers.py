"""Reads rerankers: encoders and decoders with a head that gives a pair of texts one score.

A reranker is another architecture with layers after pooling. Classifiers with several labels are refused.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec.structs import replace

from headrace.models.config_json import ConfigJson
from headrace.models.families.decoder import ACTIVATIONS, find_prefix
from headrace.models.families.family import TensorPart, TensorSources
from headrace.models.spec import ModelSpec, PooledLayer, RankingSpec, ScoreActivation
from headrace.models.text.token_table import read_token_ids


class _Head(msgspec.Struct, frozen=True):
    base: str  # the architecture without the head
    layers: tuple[str, ...]  # names of its products in the files
    norm: str = ""  # after the first


_ROBERTA: Final = ("classifier.dense", "classifier.out_proj")
_HEADS: Final[dict[str, _Head]] = {
    "BertForSequenceClassification": _Head("BertModel", ("bert.pooler.dense", "classifier")),
    "RobertaForSequenceClassification": _Head("RobertaModel", _ROBERTA),
    "XLMRobertaForSequenceClassification": _Head("XLMRobertaModel", _ROBERTA),
    "CamembertForSequenceClassification": _Head("CamembertModel", _ROBERTA),
    "MPNetForSequenceClassification": _Head("MPNetModel", _ROBERTA),
    "ModernBertForSequenceClassification": _Head("ModernBertModel", ("head.dense", "classifier"), "head.norm"),
    "Qwen3ForSequenceClassification": _Head("Qwen3ForCausalLM", ("score",)),
}
RERANKERS: Final[dict[str, str]] = {name: head.base for name, head in _HEADS.items()}

# The key of a Qwen3 reranker in its original form: its score is the log-odds of the second word against the first.
TOKENS_KEY: Final = "classifier_from_token"
_ACTIVATIONS: Final[dict[str, ScoreActivation]] = {"Sigmoid": "sigmoid", "Identity": "identity"}


def base_of(config: ConfigJson, architecture: str) -> str | None:
    """Return the architecture that a reranker is built on; None for a model that is no reranker."""
    if architecture == "Qwen3ForCausalLM" and config.has(TOKENS_KEY):
        return architecture
    return RERANKERS.get(architecture)


def reranker_spec(spec: ModelSpec, config: ConfigJson, architecture: str) -> ModelSpec:
    """Return the spec of a reranker from that of its base."""
    layers: tuple[PooledLayer, ...]
    score_tokens: tuple[int, ...] = ()
    hidden = spec.hidden_size
    if config.has(TOKENS_KEY):
        score_tokens = _score_tokens(config)
        layers = (PooledLayer(inputs=hidden, outputs=2, bias=False),)
    else:
        _check_labels(config)
        if architecture == "Qwen3ForSequenceClassification":
            layers = (PooledLayer(inputs=hidden, outputs=1, bias=False),)
        elif architecture == "ModernBertForSequenceClassification":
            activation = config.choice("classifier_activation", ACTIVATIONS, default="gelu")
            bias = config.flag("classifier_bias", default=False)
            layers = (
                PooledLayer(inputs=hidden, outputs=hidden, bias=bias, activation=activation, norm=True),
                PooledLayer(inputs=hidden, outputs=1),
            )
        else:
            layers = (
                PooledLayer(inputs=hidden, outputs=hidden, activation="tanh"),
                PooledLayer(inputs=hidden, outputs=1),
            )
    pooling = "last" if spec.causal else "cls"
    if architecture == "ModernBertForSequenceClassification":
        pooling = config.choice("classifier_pooling", {"cls": "cls", "mean": "mean"}, default="cls")
    return replace(
        spec,
        architecture=architecture,
        kind="reranker",
        tied=False,
        pooling=pooling,
        normalise_embedding=False,
        pooled_layers=layers,
        score_tokens=score_tokens,
        ranking=RankingSpec(
            template="qwen3" if spec.causal else "pair",
            activation=_activation(config),
            typed=spec.token_types > 1,
        ),
    )


def head_sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    """Map the tensors after pooling to their parts in the files."""
    if spec.score_tokens:
        heads = ("lm_head.weight", "model.embed_tokens.weight", "embed_tokens.weight")
        head = find_prefix(names, heads, "")
        return {"pooled.0": tuple(TensorPart(head, row=token) for token in spec.score_tokens)}
    head = _HEADS.get(spec.architecture) if spec.kind == "reranker" else None
    sources: TensorSources = {}
    for index, layer in enumerate(spec.pooled_layers):
        stem = f"dense.{index}.linear" if head is None else head.layers[index]
        sources[f"pooled.{index}"] = (TensorPart(f"{stem}.weight"),)
        if layer.bias:
            sources[f"pooled.{index}.bias"] = (TensorPart(f"{stem}.bias"),)
        if layer.norm and head is not None:
            sources[f"pooled.{index}.norm"] = (TensorPart(f"{head.norm}.weight"),)
            if spec.norm_bias:
                sources[f"pooled.{index}.norm.bias"] = (TensorPart(f"{head.norm}.bias"),)
    return sources


def _check_labels(config: ConfigJson) -> None:
    labels = config.optional_sub("id2label")
    count = 2  # transformers writes the labels unless there are two
    if labels is not None:
        count = sum(labels.has(name) for name in labels.names())
    key = "id2label"
    if config.has("num_labels"):
        key, count = "num_labels", config.size("num_labels", maximum=1 << 20)
    if count != 1:
        raise config.error(
            key, f"The model is a classifier with {count} labels. Headrace serves rerankers, which have one label."
        )


def _score_tokens(config: ConfigJson) -> tuple[int, int]:
    """Return the ids of the words for "not relevant" and "relevant"."""
    words = config.strings(TOKENS_KEY)
    if len(words) != 2:
        raise config.mismatch(TOKENS_KEY, 'two words: for "not relevant" and "relevant", such as ["no", "yes"]')
    config.flag("is_original_qwen3_reranker", default=True)
    ids = read_token_ids(config.folder / "tokenizer.json", words)
    return ids[words[0]], ids[words[1]]


def _activation(config: ConfigJson) -> ScoreActivation:
    """Return what turns a logit into a score: a sigmoid, unless sentence-transformers' files say otherwise."""
    section, key = config, "sbert_ce_default_activation_function"
    named = config.optional_sub("sentence_transformers")
    if named is not None:
        named.has("version")
        section, key = named, "activation_fn"
    if not section.has(key):
        return "sigmoid"
    name = section.text(key).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise section.mismatch(key, f"one of {', '.join(_ACTIVATIONS)} of torch.nn")
    return _ACTIVATIONS[name]
