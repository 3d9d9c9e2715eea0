"""Says what files of DeepSeek-V2, V3 and their like mean: sizes of latents and heads, groups of experts, the rope."""

from __future__ import annotations

from typing import Final

from headrace.models.gguf.adjusting.mixtures import ROUTED, SIGMOID
from headrace.models.gguf.gguf_keys import GgufKeys, renamed

# DeepSeek-V3's experts and their groups, which its first files do not name.
_THIRD: Final = {"experts": 256, "groups": 8, "chosen": 4}


def deepseek(keys: GgufKeys) -> None:
    third = keys.get("expert_gating_func") == SIGMOID or _is_corrected(keys)
    keys.values["architectures"] = ["DeepseekV3ForCausalLM" if third else "DeepseekV2ForCausalLM"]
    keys.refuse("expert_gating_func", "Experts must be weighed by a softmax or sigmoids", unless=(0, 1, SIGMOID))
    keys.values |= {"q_lora_rank": None, "norm_topk_prob": False, "first_k_dense_replace": 0}
    keys.values |= {"n_shared_experts": 0, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1}
    if third and keys.get("expert_count") == _THIRD["experts"]:
        keys.values |= {"n_group": _THIRD["groups"], "topk_group": _THIRD["chosen"]}
    renamed(
        keys,
        {
            **ROUTED,
            "q_lora_rank": "attention.q_lora_rank",
            "kv_lora_rank": "attention.kv_lora_rank",
            "qk_rope_head_dim": "rope.dimension_count",
        },
    )
    if not third:
        keys.values["topk_method"] = "greedy" if keys.values["n_group"] == 1 else "group_limited_greedy"
    # Files of the first converters have no sizes for heads that are computed from the latent: all sizes are those.
    key, value = (_own_or_of_head(keys, kind) for kind in ("key_length", "value_length"))
    turning = keys.integer("rope.dimension_count")
    if key <= turning:
        raise keys.error("attention.key_length_mla", f"Expected more than {turning}, found {key}.")
    keys.put("qk_nope_head_dim", key - turning, "attention.key_length_mla")
    keys.put("v_head_dim", value, "attention.value_length_mla")
    keys.values["head_dim"] = turning
    keys.values["num_key_value_heads"] = keys.values.get("num_attention_heads")
    grown = keys.get("rope.scaling.yarn_log_multiplier")
    if isinstance(grown, float) and grown:
        keys.rope |= {"mscale": grown / 0.1, "mscale_all_dim": grown / 0.1}


def _is_corrected(keys: GgufKeys) -> bool:
    """Return whether a bias is added when experts are chosen, as among experts that are weighed by sigmoids."""
    return any(f"blk.{layer}.exp_probs_b.bias" in keys.file.tensors for layer in range(keys.block_count()))


def _own_or_of_head(keys: GgufKeys, kind: str) -> int:
    own = f"attention.{kind}_mla"
    return keys.integer(own if keys.get(own) is not None else f"attention.{kind}")
