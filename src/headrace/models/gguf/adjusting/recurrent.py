"""Says what files of models with recurrent layers mean: which layers are recurrent, and the sizes of their states."""

from __future__ import annotations

from typing import Final, cast

from headrace.models.gguf.adjusting.attention import granite_positions
from headrace.models.gguf.adjusting.mixtures import ROUTED, plain, sigmoid_weights
from headrace.models.gguf.gguf_keys import GgufKeys, renamed

_HEADS: Final = "ssm.time_step_rank"  # of values, in spite of its name
_FEED: Final = "feed_forward_length"


def lfm2(keys: GgufKeys) -> None:
    attends = _attention_layers(keys)
    keys.take("conv_L_cache", "shortconv.l_cache")
    keys.values |= {
        "layer_types": ["full_attention" if each else "conv" for each in attends],
        "block_auto_adjust_ff_dim": False,  # files have the adjusted size
        "conv_bias": _has(keys, "shortconv.conv.bias"),
    }


def mamba2(keys: GgufKeys) -> None:
    renamed(
        keys,
        {
            "num_heads": _HEADS,
            "n_groups": "ssm.group_count",
            "state_size": "ssm.state_size",
            "conv_kernel": "ssm.conv_kernel",
            "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
        },
    )
    hidden = keys.integer("embedding_length")
    keys.put("head_dim", _head_size(keys), _HEADS)
    keys.put("expand", (keys.integer("ssm.inner_size") + 0.5) / hidden, "ssm.inner_size")  # the family rounds down
    keys.values |= {"use_conv_bias": _has(keys, "ssm_conv1d.bias"), "use_bias": _has(keys, "ssm_in.bias")}


def granite_hybrid(keys: GgufKeys) -> None:
    """Granite 4 and Bamba, which alone has positions."""
    attends = _attention_layers(keys)
    positions = keys.get("rope.scaling.finetuned", True) is True
    _mamba(keys)
    kinds = ["attention" if each else "mamba" for each in attends]
    if positions and not all(attends):
        keys.values |= {"architectures": ["BambaForCausalLM"], "layer_types": kinds}
        keys.refuse("expert_count", "Bamba has no experts", unless=(0,))
        for key in ("attention.scale", "embedding_scale", "residual_scale", "logit_scale"):
            keys.refuse(key, "Bamba has no factors", unless=(1.0,))
        return
    plain(keys)
    if positions:
        granite_positions(keys)
    shared = "expert_shared_feed_forward_length"
    keys.take("shared_intermediate_size", shared if keys.get(shared) is not None else _FEED)
    keys.values |= {
        "num_local_experts": keys.get("expert_count", 0),
        "num_experts_per_tok": keys.get("expert_used_count", 0),
        "layer_types": kinds,
        "position_embedding_type": "rope" if positions else "nope",
    }


def falcon_h1(keys: GgufKeys) -> None:
    """Its factors are in the weights of files."""
    _mamba(keys)
    keys.take("mamba_d_ssm", "ssm.inner_size")
    keys.values |= {"mamba_rms_norm": _has(keys, "ssm_norm.weight"), "mamba_norm_before_gate": False}


def nemotron_h(keys: GgufKeys) -> None:
    attends = _attention_layers(keys)
    inner = keys.layers(_FEED) or [0]
    mixture = bool(keys.get("expert_count"))
    kinds = ["attention" if each else "mlp" if size else "mamba" for each, size in zip(attends, inner, strict=False)]
    keys.values["layers_block_type"] = ["moe" if mixture and kind == "mlp" else kind for kind in kinds]
    keys.put("intermediate_size", next((size for size in inner if size), None), _FEED)
    renamed(
        keys,
        {
            **ROUTED,
            "mamba_num_heads": _HEADS,
            "ssm_state_size": "ssm.state_size",
            "n_groups": "ssm.group_count",
            "conv_kernel": "ssm.conv_kernel",
            "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        },
    )
    rms, other = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
    keys.take("layer_norm_epsilon", other if keys.get(rms) is None else rms)
    keys.get(other)
    if keys.get("ssm.inner_size") is not None:
        keys.put("mamba_head_dim", _head_size(keys), _HEADS)
    keys.values |= {"use_conv_bias": _has(keys, "ssm_conv1d.bias"), "use_bias": _has(keys, "ssm_in.bias")}
    keys.values["mlp_bias"] = _has(keys, "ffn_down.bias")
    if mixture:
        sigmoid_weights(keys)


def qwen_next(keys: GgufKeys) -> None:
    """Qwen3-Next and Qwen3.5."""
    keys.get("rope.dimension_sections")  # of images; in text all sections have the same positions
    recurs = keys.layers("attention.recurrent_layers")
    keys.take("full_attention_interval", "full_attention_interval")
    if recurs is not None:
        keys.values["layer_types"] = ["linear_attention" if each else "full_attention" for each in recurs]
    renamed(
        keys,
        {
            "linear_conv_kernel_dim": "ssm.conv_kernel",
            "linear_key_head_dim": "ssm.state_size",
            "linear_num_key_heads": "ssm.group_count",
            "linear_num_value_heads": _HEADS,
        },
    )
    keys.put("linear_value_head_dim", _head_size(keys), _HEADS)
    if keys.get("expert_count"):
        plain(keys)


def _mamba(keys: GgufKeys) -> None:
    """Set the sizes of Mamba-2 layers of a hybrid."""
    renamed(
        keys,
        {
            "mamba_n_heads": _HEADS,
            "mamba_n_groups": "ssm.group_count",
            "mamba_d_state": "ssm.state_size",
            "mamba_d_conv": "ssm.conv_kernel",
        },
    )
    size, hidden = _head_size(keys), keys.integer("embedding_length")
    keys.put("mamba_d_head", size, _HEADS)
    keys.put("mamba_expand", max(1, keys.integer("ssm.inner_size") // hidden), "ssm.inner_size")
    keys.values |= {
        "mamba_conv_bias": _has(keys, "ssm_conv1d.bias"),
        "mamba_proj_bias": _has(keys, "ssm_in.bias"),
    }


def _head_size(keys: GgufKeys) -> int:
    inner, heads = keys.integer("ssm.inner_size"), keys.integer(_HEADS)
    if inner % heads:
        raise keys.error(_HEADS, f"Expected a divisor of ssm.inner_size ({inner}), found {heads}.")
    return inner // heads


def _attention_layers(keys: GgufKeys) -> list[bool]:
    """Return which layers have attention: those with key heads. Set the number of them."""
    heads = keys.layers("attention.head_count_kv")
    if heads is None:
        raise keys.error("attention.head_count_kv", "The key is missing.")
    keys.put("num_key_value_heads", next((each for each in heads if each), 1), "attention.head_count_kv")
    return [bool(each) for each in heads]


def _has(keys: GgufKeys, leaf: str) -> bool:
    count = cast("int", keys.values["num_hidden_layers"])
    return any(f"blk.{layer}.{leaf}" in keys.file.tensors for layer in range(count))
