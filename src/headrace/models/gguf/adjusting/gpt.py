"""Says what files of the models before Llama mean."""

from __future__ import annotations

from headrace.models.gguf.gguf_keys import GgufKeys


def falcon(keys: GgufKeys) -> None:
    """Models with several key heads, or a norm of their own for attention, are of the second kind."""
    two = "blk.0.attn_norm_2.weight" in keys.file.tensors
    heads = keys.get("attention.head_count_kv", 1)
    keys.values |= {
        "num_kv_heads": heads,
        "new_decoder_architecture": two or heads != 1,
        "num_ln_in_parallel_attn": 2 if two else 1,
    }


def mpt(keys: GgufKeys) -> None:
    most = keys.get("attention.max_alibi_bias", 0.0)
    whole = int(most) if isinstance(most, float) and most.is_integer() else most
    keys.values["attn_config"] = {"alibi": bool(most), "alibi_bias_max": whole}
