"""Writes models of transformers as GGUF files with the package gguf, whose table has the tensors' names.

What converters do to weights is written here from their definition: rows of q and k in pairs (llama), one added to
norms (gemma), a table of factors for a llama3 or longrope rope.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type

ARCHITECTURES = {
    "LlamaForCausalLM": ("llama", gguf.MODEL_ARCH.LLAMA),
    "MistralForCausalLM": ("llama", gguf.MODEL_ARCH.LLAMA),
    "SmolLM3ForCausalLM": ("smollm3", gguf.MODEL_ARCH.SMOLLM3),
    "Qwen2ForCausalLM": ("qwen2", gguf.MODEL_ARCH.QWEN2),
    "Qwen3ForCausalLM": ("qwen3", gguf.MODEL_ARCH.QWEN3),
    "Gemma2ForCausalLM": ("gemma2", gguf.MODEL_ARCH.GEMMA2),
    "Gemma3ForCausalLM": ("gemma3", gguf.MODEL_ARCH.GEMMA3),
    "Phi3ForCausalLM": ("phi3", gguf.MODEL_ARCH.PHI3),
    "Olmo2ForCausalLM": ("olmo2", gguf.MODEL_ARCH.OLMO2),
}
TYPE = {"F32": Type.F32, "F16": Type.F16, "BF16": Type.BF16, "Q8_0": Type.Q8_0, "Q4_0": Type.Q4_0, "Q4_1": Type.Q4_1}


def write_gguf(
    path: Path, model: Any, tokenizer: Path, *, types: dict[str, str] | None = None, change: Any = None, split: int = 0
) -> None:
    """Write a model. `types` has the type of tensors by the end of their names; others are F32. `change` may change
    what the writer holds before it is written. `split`: tensors in each of several files."""
    config = model.config
    name, kind = ARCHITECTURES[type(model).__name__]
    writer = gguf.GGUFWriter(str(path), name, split_max_tensors=split)
    _write_shape(writer, config, name)
    _write_rope(writer, config, name)
    write_vocabulary(writer, json.loads(tokenizer.read_text()))
    table = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for source, tensor in model.state_dict().items():
        if source == "lm_head.weight" and config.tie_word_embeddings:
            continue
        target = table.get_name(source, try_suffixes=(".weight", ".bias"))
        assert target is not None, source
        values = _converted(source, tensor, config, name).float().numpy()
        chosen = next((each for end, each in (types or {}).items() if target.endswith(end)), "F32")
        if tensor.dim() == 1:
            chosen = "F32"
        data = gguf.quantize(values, TYPE[chosen])
        writer.add_tensor(target, data, raw_dtype=TYPE[chosen])
    if change is not None:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_shape(writer: gguf.GGUFWriter, config: Any, name: str) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if name == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _head_size(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _write_rope(writer: gguf.GGUFWriter, config: Any, name: str) -> None:
    rope = config.rope_parameters
    if name == "gemma3":
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    size = _head_size(config)
    dims = int(size * rope.get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(dims)
    kind = rope["rope_type"]
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(rope, size))
    elif kind == "longrope":
        original = config.original_max_position_embeddings
        stretch = config.max_position_embeddings / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(stretch) / math.log(original)))
        for which in ("short", "long"):
            writer.add_tensor(f"rope_factors_{which}.weight", np.array(rope[f"{which}_factor"], dtype=np.float32))
    elif kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])


def llama3_factors(rope: dict[str, Any], size: int) -> np.ndarray:
    wavelengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, size, 2) / size)
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    blend = (original / wavelengths - low) / max(high - low, 1e-9)
    with np.errstate(invalid="ignore"):  # where both bounds are one, nothing lies between
        between = 1 / ((1 - blend) / factor + blend)
    factors = np.where(wavelengths < original / high, 1.0, np.where(wavelengths > original / low, factor, between))
    return factors.astype(np.float32)


def _converted(source: str, tensor: torch.Tensor, config: Any, name: str) -> torch.Tensor:
    if name in ("llama", "smollm3"):
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if f".{part}." in source:
                halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
                return halves.swapaxes(1, 2).reshape(tensor.shape)
    if name.startswith("gemma") and source.endswith("norm.weight"):
        return tensor + 1
    return tensor


def write_vocabulary(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], *, pre: str = "gpt-2") -> None:
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    ids = {**tokenizer["model"]["vocab"], **special}
    tokens = [token for token, _ in sorted(ids.items(), key=lambda entry: entry[1])]
    kinds = [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens]
    merges = tokenizer["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
