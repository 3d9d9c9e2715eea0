"""Refuses keys of a config.json that Headrace does not know, because they may change what the model computes.

A key is known if the family looked it up, if it is in the tables below, which hold what never changes a model's
numbers, or if the family names it as `ignored`. An unknown key that says null, false or nothing switches nothing on,
and is let through.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from headrace.errors import ModelError
from headrace.models.config_json import ConfigJson, shorten

# Where a file comes from, and how it was saved or trained.
_ORIGIN: Final = frozenset(
    """
    architectures model_type torch_dtype dtype transformers_version tokenizer_class auto_map language license name
    finetuning_task task_specific_params gradient_checkpointing initializer_range initializer_factor use_bfloat16
    torchscript return_dict output_attentions output_hidden_states attn_implementation transformers.js_config
    cache_implementation use_cache chunk_size_feed_forward pretraining_tp unsloth_fixed unsloth_version
    is_llama_config model_max_length ignore_index num_logits_to_keep logits_to_keep tf_legacy_loss
    """.split()
)
# Of heads for classification, of training losses, and of generation, which generation_config.json and requests decide.
_ELSEWHERE: Final = frozenset(
    """
    id2label label2id num_labels problem_type summary_type router_aux_loss_coef output_router_logits
    router_jitter_noise max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores return_dict_in_generate
    forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens
    """.split()
)
_PATTERNS: Final = re.compile(
    r"_.*|.*_token_ids?|.*_token_index|.*dropout|.*_pdrop|.*_dropout_prob|pooler_.*|summary_.*|.*_loss_coef"
)
_PARTS: Final = ("", "text_config.", "vision_config.", "attn_config.")
# Of the rope's table: kinds share them, and each reads what it needs.
_ROPES: Final = ("rope_scaling", "rope_parameters", "full_attention", "sliding_attention")
_ROPE: Final = frozenset({"type", "rope_type", "rope_theta", "original_max_position_embeddings", "finetuned", "factor"})


def check_keys(config: ConfigJson, ignored: Iterable[str] = ()) -> None:
    """Raise ModelError for the first unknown key. Call it when the family has read the config."""
    known = _ORIGIN | _ELSEWHERE | frozenset(ignored)
    for prefix, key, value in config.unread():
        if value is None or value is False or value in ({}, [], ""):
            continue
        if prefix in _PARTS and (key in known or _PATTERNS.fullmatch(key)):
            continue
        if key in _ROPE and prefix.removesuffix(".").rpartition(".")[2] in _ROPES:
            continue
        raise ModelError(
            f"Key {(prefix + key)[:120]!r}: Headrace does not know this key, and it may change what the model computes."
            f" Found {shorten(value)}. If you know that it does not, remove it from config.json.",
            path=config.path,
        )
