"""Says what files of mixtures of experts mean: how many experts, which layers, and how experts are weighed."""

from __future__ import annotations

from typing import Final

from headrace.models.gguf.adjusting.attention import granite_positions, has_head_norms
from headrace.models.gguf.gguf_keys import GgufKeys, renamed

SOFTMAX: Final = 1  # values of expert_gating_func
SIGMOID: Final = 2
_OF_CHOSEN: Final = 3  # a softmax over the chosen experts only
_LLAMA4_CHUNK: Final = 8192

# Of GLM-4.5, DeepSeek and their like.
ROUTED: Final = {
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}


def plain(keys: GgufKeys) -> None:
    """Experts are weighed by a softmax, and their weights are as they are."""
    _weighed_by(keys, SOFTMAX, _OF_CHOSEN)
    keys.refuse("expert_weights_scale", "Weights of experts must not be scaled", unless=(0.0, 1.0))


def gpt_oss(keys: GgufKeys) -> None:
    plain(keys)
    keys.rope["truncate"] = False


def sigmoid(keys: GgufKeys) -> None:
    sigmoid_weights(keys)
    keys.refuse("expert_weights_scale", "Weights of experts must not be scaled", unless=(0.0, 1.0))


def sigmoid_weights(keys: GgufKeys) -> None:
    _weighed_by(keys, SIGMOID)


def llama(keys: GgufKeys) -> None:
    """Mistral and Mixtral have Llama's name in files."""
    if keys.values.get("num_local_experts"):
        plain(keys)
        keys.values["architectures"] = ["MixtralForCausalLM"]
        keys.take("intermediate_size", "expert_feed_forward_length")
        return
    if keys.values.get("sliding_window") is None:
        keys.values.pop("sliding_window", None)
    else:
        keys.values["architectures"] = ["MistralForCausalLM"]


def head_bias(keys: GgufKeys) -> None:
    plain(keys)
    keys.values["lm_head_bias"] = "output.bias" in keys.file.tensors


def glm(keys: GgufKeys) -> None:
    sigmoid_weights(keys)
    renamed(keys, ROUTED)
    keys.values["use_qk_norm"] = has_head_norms(keys)


def ernie(keys: GgufKeys) -> None:
    plain(keys)
    renamed(
        keys,
        {
            "moe_num_experts": "expert_count",
            "moe_k": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "moe_num_shared_experts": "expert_shared_count",
            "moe_layer_interval": "interleave_moe_layer_step",
            "moe_layer_start_index": "leading_dense_block_count",
        },
    )
    keys.get("expert_shared_feed_forward_length")  # converters write another size there, and llama.cpp reads none


def granite(keys: GgufKeys) -> None:
    """A mixture with an expert that every token goes to is a Granite 4 without recurrent layers."""
    plain(keys)
    granite_positions(keys)
    shared = "expert_shared_feed_forward_length"
    if keys.get(shared):
        keys.take("shared_intermediate_size", shared)
        keys.values |= {
            "architectures": ["GraniteMoeHybridForCausalLM"],
            "layer_types": ["attention"] * keys.block_count(),
            "position_embedding_type": "rope",
        }


def llama4(keys: GgufKeys) -> None:
    keys.take("intermediate_size_mlp", "feed_forward_length")
    renamed(
        keys,
        {
            "intermediate_size": "expert_feed_forward_length",
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
    )
    count = keys.block_count()
    chunked = keys.get("attention.sliding_window") != 0
    kinds = keys.layers("attention.sliding_window_pattern")
    if kinds is not None and chunked:
        keys.values["layer_types"] = ["chunked_attention" if each else "full_attention" for each in kinds]
    else:
        keys.values.pop("layer_types", None)
    keys.values |= {
        "attention_chunk_size": _LLAMA4_CHUNK if chunked else None,
        "attn_temperature_tuning": chunked,
        "floor_scale": _LLAMA4_CHUNK,
        "attn_scale": 0.1,
        # Of the files with 128 experts alone, queries and keys are not normalised.
        "use_qk_norm": keys.get("expert_count") != 128,
    }
    if not chunked:
        keys.values["no_rope_layers"] = [1] * count


def _weighed_by(keys: GgufKeys, *kinds: int) -> None:
    keys.refuse("expert_gating_func", f"Experts must be weighed by function {kinds[0]}", unless=(0, *kinds))
