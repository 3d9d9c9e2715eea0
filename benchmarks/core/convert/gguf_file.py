"""A model folder's weights as a GGUF file in bf16, from which llama.cpp makes its quantised ones.

    gguf_file.py MODEL OUT.gguf

Runs in the transformers environment (torch, safetensors, gguf). Knows the two families that the benchmark's shapes are
of; the vocabulary is carried over, though nothing is tokenised.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
from safetensors import safe_open

NAMES: Final = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def main(source: Path, target: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(str(target), config["model_type"])
    _write_shape(writer, config)
    _write_vocabulary(writer, config, json.loads((source / "tokenizer.json").read_text()))
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(str(file), "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (a safetensors file is no dictionary)
                _write_tensor(writer, config, name, tensors.get_tensor(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    if config["model_type"] == "llama":
        writer.add_vocab_size(config["vocab_size"])
        writer.add_rope_dimension_count(_head_size(config))
    scaling = config.get("rope_scaling")
    if scaling and scaling.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(config, scaling))


def _head_size(config: dict[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _llama3_factors(config: dict[str, Any], scaling: dict[str, Any]) -> np.ndarray:
    """By how much each frequency is divided; between the two wavelengths, a blend of the two."""
    size = _head_size(config)
    wavelengths = 2 * np.pi * config["rope_theta"] ** (np.arange(0, size, 2) / size)
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    blend = (original / wavelengths - low) / (high - low)
    between = 1 / ((1 - blend) / factor + blend)
    factors = np.where(wavelengths < original / high, 1.0, np.where(wavelengths > original / low, factor, between))
    return factors.astype(np.float32)


def _write_vocabulary(writer: gguf.GGUFWriter, config: dict[str, Any], tokenizer: dict[str, Any]) -> None:
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    ids = {**tokenizer["model"]["vocab"], **special}
    tokens = [token for token, _ in sorted(ids.items(), key=lambda entry: entry[1])]
    if len(tokens) != config["vocab_size"]:
        raise SystemExit(f"the tokenizer has {len(tokens)} tokens, the model {config['vocab_size']}")
    kinds = [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens]
    merges = tokenizer["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    end = config["eos_token_id"]
    writer.add_eos_token_id(end if isinstance(end, int) else end[0])
    writer.add_add_bos_token(False)


def _write_tensor(writer: gguf.GGUFWriter, config: dict[str, Any], name: str, tensor: torch.Tensor) -> None:
    if name == "model.embed_tokens.weight":
        target = "token_embd.weight"
    elif name == "model.norm.weight":
        target = "output_norm.weight"
    elif name == "lm_head.weight":
        target = "output.weight"
    else:
        _, _, layer, rest = name.split(".", 3)
        base, kind = rest.rsplit(".", 1)
        target = f"blk.{layer}.{NAMES[base]}.{kind}"
        heads = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}.get(base)
        if config["model_type"] == "llama" and heads:
            tensor = _rotated_pairs(tensor, config[heads])
    if tensor.dim() == 1:
        writer.add_tensor(target, tensor.float().numpy())
        return
    raw = tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy().reshape(tensor.shape[0], -1)
    writer.add_tensor(target, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)


def _rotated_pairs(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp rotates neighbours of a head where transformers rotates halves."""
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
