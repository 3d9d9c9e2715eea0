"""Configs of the tiny models with recurrent layers: see tiny_models.py, which builds them."""

from __future__ import annotations

from typing import Any

import transformers


def _lfm2(sizes: dict[str, Any]) -> Any:
    return transformers.Lfm2Config(
        **{**sizes, "num_hidden_layers": 4},
        layer_types=["conv", "full_attention", "conv", "conv"],
        conv_bias=True,
        conv_L_cache=4,
        block_multiple_of=16,
        block_ffn_dim_multiplier=1.25,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=True,
    )


def _lfm2_plain(sizes: dict[str, Any]) -> Any:
    return transformers.Lfm2Config(
        **sizes, full_attn_idxs=[2], block_auto_adjust_ff_dim=False, tie_word_embeddings=False
    )


def _mamba2(sizes: dict[str, Any]) -> Any:
    kept = ("vocab_size", "hidden_size", "num_hidden_layers", "bos_token_id", "eos_token_id", "pad_token_id")
    return transformers.Mamba2Config(
        **{key: sizes[key] for key in kept},
        num_heads=8,
        head_dim=24,
        expand=3,
        n_groups=2,
        state_size=20,
        conv_kernel=4,
        chunk_size=64,
        time_step_limit=(0.05, float("inf")),
        tie_word_embeddings=False,
    )


def _mamba2_plain(sizes: dict[str, Any]) -> Any:
    kept = ("vocab_size", "hidden_size", "num_hidden_layers", "bos_token_id", "eos_token_id", "pad_token_id")
    return transformers.Mamba2Config(
        **{key: sizes[key] for key in kept},
        num_heads=4,
        head_dim=32,
        n_groups=1,
        state_size=16,
        use_bias=True,
        use_conv_bias=False,
        time_step_limit=(0.0, 0.5),
        tie_word_embeddings=True,
    )


_DELTA: dict[str, Any] = {
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 20,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 48,
}


def _qwen3_next(sizes: dict[str, Any]) -> Any:
    return transformers.Qwen3NextConfig(
        **{**sizes, "num_hidden_layers": 4},
        **_DELTA,
        **_EXPERTS,
        head_dim=32,
        full_attention_interval=2,
        mlp_only_layers=[1],
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )


def _qwen3_5(sizes: dict[str, Any]) -> Any:
    rope = {
        "rope_type": "default",
        "rope_theta": 500000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    }
    return transformers.Qwen3_5TextConfig(
        **{**sizes, "num_hidden_layers": 4},
        **_DELTA,
        head_dim=32,
        layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        rope_parameters=rope,
        attention_bias=True,
        tie_word_embeddings=True,
    )


def _qwen3_5_moe(sizes: dict[str, Any]) -> Any:
    return transformers.Qwen3_5MoeTextConfig(
        **{**{key: sizes[key] for key in sizes if key != "intermediate_size"}, "num_hidden_layers": 4},
        **_DELTA,
        **_EXPERTS,
        head_dim=32,
        tie_word_embeddings=False,
    )


_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "mamba_expand": 3,
    "mamba_chunk_size": 64,
}


def _bamba(sizes: dict[str, Any]) -> Any:
    return transformers.BambaConfig(
        **sizes, **_MAMBA, attn_layer_indices=[1], mamba_d_conv=3, attention_bias=True, tie_word_embeddings=False
    )


_FACTORS: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 4.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
}


def _granite_hybrid(sizes: dict[str, Any]) -> Any:
    return transformers.GraniteMoeHybridConfig(
        **{**sizes, "intermediate_size": 40},
        **_MAMBA,
        **_FACTORS,
        num_local_experts=6,
        num_experts_per_tok=2,
        shared_intermediate_size=48,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        mamba_proj_bias=True,
        tie_word_embeddings=True,
    )


def _granite_hybrid_dense(sizes: dict[str, Any]) -> Any:
    return transformers.GraniteMoeHybridConfig(
        **sizes,
        **_MAMBA,
        **_FACTORS,
        num_local_experts=0,
        shared_intermediate_size=112,
        position_embedding_type="rope",
        layer_types=["full_attention", "linear_attention", "linear_attention"],
        mamba_conv_bias=False,
        tie_word_embeddings=False,
    )


def _falcon_h1(sizes: dict[str, Any]) -> Any:
    return transformers.FalconH1Config(
        **sizes,
        **{**_MAMBA, "mamba_expand": 2},
        mamba_d_ssm=96,
        mamba_d_head=12,
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
        head_dim=24,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        embedding_multiplier=3.0,
        lm_head_multiplier=0.3,
        key_multiplier=0.4,
        attention_in_multiplier=1.5,
        attention_out_multiplier=0.7,
        ssm_in_multiplier=1.25,
        ssm_out_multiplier=0.6,
        ssm_multipliers=[0.35, 0.25, 0.45, 0.5, 0.75],
        mlp_multipliers=[0.88, 0.58],
        tie_word_embeddings=False,
    )


def _falcon_h1_plain(sizes: dict[str, Any]) -> Any:
    return transformers.FalconH1Config(**sizes, **_MAMBA, mamba_d_ssm=None, tie_word_embeddings=True)


def _nemotron_h(sizes: dict[str, Any]) -> Any:
    kinds = ["linear_attention", "mlp", "full_attention", "moe", "linear_attention", "moe"]
    return transformers.NemotronHConfig(
        **{key: sizes[key] for key in sizes if key != "num_hidden_layers"},
        layers_block_type=kinds,
        head_dim=24,
        ssm_state_size=20,
        mamba_num_heads=8,
        mamba_head_dim=12,
        n_groups=2,
        time_step_min=1e-6,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        moe_intermediate_size=40,
        moe_shared_expert_intermediate_size=48,
        routed_scaling_factor=1.5,
    )


def _nemotron_h_plain(sizes: dict[str, Any]) -> Any:
    """Without experts, with a pattern as older releases have it."""
    return transformers.NemotronHConfig(
        **{key: sizes[key] for key in sizes if key != "num_hidden_layers"},
        hybrid_override_pattern="M-M*-",
        head_dim=16,
        ssm_state_size=16,
        mamba_num_heads=4,
        mamba_head_dim=16,
        n_groups=1,
        time_step_min=1e-6,
        use_bias=True,
        use_conv_bias=False,
        mlp_bias=True,
    )


RECURRENT: dict[str, tuple[str, Any]] = {  # architecture, and a function from the sizes of all tiny models to a config
    "lfm2": ("Lfm2ForCausalLM", _lfm2),
    "lfm2-plain": ("Lfm2ForCausalLM", _lfm2_plain),
    "mamba2": ("Mamba2ForCausalLM", _mamba2),
    "mamba2-plain": ("Mamba2ForCausalLM", _mamba2_plain),
    "qwen3-next": ("Qwen3NextForCausalLM", _qwen3_next),
    "qwen3.5": ("Qwen3_5ForCausalLM", _qwen3_5),
    "bamba": ("BambaForCausalLM", _bamba),
    "granite-4": ("GraniteMoeHybridForCausalLM", _granite_hybrid),
    "granite-4-dense-plain": ("GraniteMoeHybridForCausalLM", _granite_hybrid_dense),
    "qwen3.5-moe": ("Qwen3_5MoeForCausalLM", _qwen3_5_moe),
    "falcon-h1": ("FalconH1ForCausalLM", _falcon_h1),
    "falcon-h1-plain": ("FalconH1ForCausalLM", _falcon_h1_plain),
    "nemotron-h": ("NemotronHForCausalLM", _nemotron_h),
    "nemotron-h-plain": ("NemotronHForCausalLM", _nemotron_h_plain),
}
