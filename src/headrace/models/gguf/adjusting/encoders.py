"""Says what files of BERT and its like mean by their keys."""

from __future__ import annotations

from typing import Final

from headrace.models.gguf.gguf_keys import GgufKeys

_TYPES: Final = "token_types.weight"


def bert(keys: GgufKeys) -> None:
    """BERT, and RoBERTa, whose table of positions begins in files with that of the first token."""
    keys.values["type_vocab_size"] = _token_types(keys)
    keys.refuse("attention.causal", "The model must be an encoder", unless=(False,))


def nomic(keys: GgufKeys) -> None:
    bert(keys)
    keys.values.pop("num_key_value_heads", None)


def modern(keys: GgufKeys) -> None:
    """ModernBERT, whose first layer of each period sees the whole text."""
    keys.refuse("attention.causal", "The model must be an encoder", unless=(False,))
    period = keys.values.pop("sliding_window_pattern", None)
    if period is not None:
        keys.put("global_attn_every_n_layers", period, "attention.sliding_window_pattern")
    keys.values |= {"global_rope_theta": keys.get("rope.freq_base", 160_000.0)}
    keys.values |= {"local_rope_theta": keys.get("rope.freq_base_swa", 10_000.0)}
    keys.take("hidden_activation", "hidden_act")


def _token_types(keys: GgufKeys) -> int:
    entry = keys.file.tensors.get(_TYPES)
    return 0 if entry is None else entry.shape[0]
