"""Says what files of the Gemmas mean by their keys."""

from __future__ import annotations

import math
import statistics
from typing import Final

from headrace.errors import ModelError
from headrace.models.config_json import shorten
from headrace.models.gguf.gguf_keys import GgufKeys, renamed

_LAYER_EMBEDDING: Final = "per_layer_token_embd.weight"

# Layers of the 27B models, which scale their scores by other numbers than their head size.
_LARGE: Final = {"gemma2": 46, "gemma3": 62}


def scores(keys: GgufKeys) -> None:
    """Say by what the scores of Gemma 2 and 3 are scaled."""
    heads, hidden = keys.values.get("num_attention_heads"), keys.values.get("hidden_size")
    scale = keys.values.get("head_dim")
    if keys.block_count() == _LARGE.get(keys.name) and isinstance(heads, int) and isinstance(hidden, int):
        scale = hidden / max(heads, 1)
    keys.values["query_pre_attn_scalar"] = scale


def third_n(keys: GgufKeys) -> None:
    """Say what is of Gemma 3n alone."""
    keys.refuse("altup.active_idx", "Layers must compute the first stream", unless=(0,))
    renamed(
        keys,
        {
            "altup_num_inputs": "altup.num_inputs",
            "hidden_size_per_layer_input": "embedding_length_per_layer_input",
            "num_kv_shared_layers": "attention.shared_kv_layers",
            "final_logit_softcapping": "final_logit_softcapping",
        },
    )
    cutoffs = keys.layers("activation_sparsity_scale")
    if cutoffs is not None:
        keys.put("activation_sparsity_pattern", [_closed_share(each) for each in cutoffs], "activation_sparsity_scale")
    keys.values["laurel_rank"] = _rows(keys, "blk.0.laurel_l.weight")
    keys.values["vocab_size_per_layer_input"] = _rows(keys, _LAYER_EMBEDDING)


def fourth(keys: GgufKeys) -> None:
    """Say what is of Gemma 4 alone: full layers have heads and ropes of their own."""
    sliding = keys.layers("attention.sliding_window_pattern") or []
    if len(sliding) != keys.block_count():
        raise keys.error("attention.sliding_window_pattern", "The key is missing.")
    heads = keys.layers("attention.head_count_kv") or []
    for kind, ours in ((True, "num_key_value_heads"), (False, "num_global_key_value_heads")):
        found = next((count for count, slides in zip(heads, sliding, strict=False) if bool(slides) is kind), None)
        keys.put(ours, found if found is not None else keys.get("attention.head_count_kv"), "attention.head_count_kv")
    keys.put("global_head_dim", keys.get("attention.key_length"), "attention.key_length")
    keys.put("head_dim", keys.get("attention.key_length_swa"), "attention.key_length_swa")
    keys.refuse("attention.value_length_swa", "Expected the size of keys", unless=(keys.values["head_dim"],))
    keys.refuse("rope.dimension_count_swa", "All dims must turn", unless=(keys.values["head_dim"],))
    full = next((index for index, slides in enumerate(sliding) if not slides), 0)
    keys.values["attention_k_eq_v"] = f"blk.{full}.attn_v.weight" not in keys.file.tensors
    own = max(0, keys.block_count() - _count(keys, "attention.shared_kv_layers"))
    keys.take("num_kv_shared_layers", "attention.shared_kv_layers")
    _widths(keys, own)
    inputs = _count(keys, "embedding_length_per_layer_input")
    keys.put("hidden_size_per_layer_input", inputs, "embedding_length_per_layer_input")
    if inputs:
        keys.values["vocab_size_per_layer_input"] = _rows(keys, _LAYER_EMBEDDING)
    keys.values["enable_moe_block"] = bool(keys.get("expert_count"))
    renamed(
        keys,
        {
            "num_experts": "expert_count",
            "top_k_experts": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "final_logit_softcapping": "final_logit_softcapping",
        },
    )
    local = keys.get("rope.freq_base_swa", keys.get("rope.freq_base"))
    keys.values["rope_parameters"] = {
        "full_attention": {"rope_type": "default", "rope_theta": keys.get("rope.freq_base", 1_000_000.0)},
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }


def _widths(keys: GgufKeys, own: int) -> None:
    """Set the size of MLPs: one, or twice of it in layers without keys of their own."""
    sizes = keys.layers("feed_forward_length") or []
    first = sizes[0] if sizes else None
    wide = isinstance(first, int) and own < len(sizes) and sizes[own] == 2 * first
    expected = [first] * own + [2 * first if wide and isinstance(first, int) else first] * (len(sizes) - own)
    if sizes != expected:
        raise keys.error("feed_forward_length", "Expected one size, or twice that in the last layers.")
    keys.put("intermediate_size", first, "feed_forward_length")
    keys.values["use_double_wide_mlp"] = wide


def _count(keys: GgufKeys, key: str) -> int:
    value = keys.get(key, 0)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 20:
        raise keys.error(key, f"Expected an integer of at least 0, found {shorten(value)}.")
    return value


def _closed_share(cutoff: object) -> float:
    """Return the share of gates that a cutoff in deviations closes."""
    number = cutoff if isinstance(cutoff, (int, float)) else math.nan
    return 0.0 if number == -math.inf else statistics.NormalDist().cdf(number)


def _rows(keys: GgufKeys, tensor: str) -> int:
    entry = keys.file.tensors.get(tensor)
    if entry is None:
        raise ModelError("The file has no such tensor.", path=keys.file.path, tensor=tensor)
    return entry.shape[0]
