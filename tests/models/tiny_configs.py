"""Configurations of transformers for tiny models: every architecture that is tested, in a few layers."""

from __future__ import annotations

from typing import Any

import transformers
import transformers.utils.logging

VOCAB = 320
CONTEXT = 512
WINDOW = 32
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
ENCODER_SIZES: dict[str, Any] = {key: SIZES[key] for key in SIZES if key not in ("num_key_value_heads", "bos_token_id")}
# Tables of positions whose first rows are not used: those up to padding's.
OFFSET_SIZES = {**ENCODER_SIZES, "max_position_embeddings": CONTEXT + 3}


def llama() -> Any:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    return transformers.LlamaConfig(
        **SIZES, rope_parameters=rope, attention_bias=True, mlp_bias=True, head_dim=24, tie_word_embeddings=False
    )


def llama_linear() -> Any:
    sizes = {**SIZES, "num_key_value_heads": 4}
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}
    return transformers.LlamaConfig(**sizes, rope_parameters=rope, tie_word_embeddings=True)


def mistral() -> Any:
    return transformers.MistralConfig(**SIZES, sliding_window=WINDOW, head_dim=24, tie_word_embeddings=False)


def smollm3() -> Any:
    return transformers.SmolLM3Config(
        **{**SIZES, "num_hidden_layers": 4},
        use_sliding_window=True,
        sliding_window=WINDOW,
        no_rope_layer_interval=2,
        tie_word_embeddings=True,
    )


def qwen2() -> Any:
    return transformers.Qwen2Config(
        **SIZES,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=1,
        tie_word_embeddings=True,
    )


def qwen2_yarn() -> Any:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "beta_slow": 1.0,
    }
    return transformers.Qwen2Config(**SIZES, rope_parameters=rope, tie_word_embeddings=False)


def qwen3() -> Any:
    types = ["full_attention", "sliding_attention", "full_attention"]
    return transformers.Qwen3Config(
        **SIZES,
        head_dim=32,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=types,
        attention_bias=True,
        tie_word_embeddings=True,
    )


def qwen3_moe() -> Any:
    return transformers.Qwen3MoeConfig(
        **SIZES,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    )


def qwen3_moe_sparse_step() -> Any:
    return transformers.Qwen3MoeConfig(
        **SIZES,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=False,
        decoder_sparse_step=2,
        use_sliding_window=True,
        sliding_window=WINDOW,
    )


def gemma2() -> Any:
    return transformers.Gemma2Config(
        **{**SIZES, "num_hidden_layers": 2},
        head_dim=24,
        query_pre_attn_scalar=20,
        sliding_window=WINDOW,
        attn_logit_softcapping=4.0,
        final_logit_softcapping=9.0,
        rms_norm_eps=1e-3,
    )


def gemma3_text() -> Any:
    rope = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return transformers.Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 4},
        head_dim=24,
        query_pre_attn_scalar=20,
        sliding_window=WINDOW,
        sliding_window_pattern=3,
        rope_parameters=rope,
        rms_norm_eps=1e-3,
    )


def gemma3n() -> Any:
    return transformers.Gemma3nTextConfig(
        **{**SIZES, "num_hidden_layers": 5},
        head_dim=24,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention"],
        num_kv_shared_layers=2,
        activation_sparsity_pattern=[0.8, 0.6, 0.0, 0.0, 0.3],
        vocab_size_per_layer_input=VOCAB - 40,
        hidden_size_per_layer_input=20,
        laurel_rank=12,
        altup_num_inputs=3,
        final_logit_softcapping=20.0,
    )


def gemma3n_plain() -> Any:
    return transformers.Gemma3nTextConfig(
        **SIZES,
        head_dim=16,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        num_kv_shared_layers=0,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=32,
        laurel_rank=64,
        altup_num_inputs=4,
        tie_word_embeddings=False,
    )


def gemma4() -> Any:
    # The last two layers read the keys and values of layers 2 and 3, and have wider MLPs.
    return transformers.Gemma4TextConfig(
        **{**SIZES, "num_hidden_layers": 6},
        head_dim=24,
        global_head_dim=40,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 3,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=20,
        final_logit_softcapping=20.0,
    )


def gemma4_experts() -> Any:
    # Values of the full layer are its keys, of a head of which four queries share one.
    return transformers.Gemma4TextConfig(
        **SIZES,
        head_dim=32,
        global_head_dim=48,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=5,
        top_k_experts=2,
        moe_intermediate_size=48,
        tie_word_embeddings=False,
    )


def gemma4_unified() -> Any:
    return transformers.Gemma4UnifiedTextConfig(
        **SIZES,
        head_dim=24,
        global_head_dim=32,
        num_global_key_value_heads=4,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        attention_k_eq_v=True,
    )


def gemma4_vision() -> Any:
    vision = transformers.Gemma4VisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8
    )
    return transformers.Gemma4Config(text_config=gemma4(), vision_config=vision)


def published_gemma4_config(saved: dict[str, Any]) -> dict[str, Any]:
    """Return a config that has the sizes of full layers as published files have them."""
    full = list(saved.pop("per_layer_config").values())[-1]
    return saved | {
        "global_head_dim": full["head_dim"],
        "num_global_key_value_heads": full.get("num_key_value_heads"),
    }


def gemma3_vision() -> Any:
    vision = transformers.SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
    )
    return transformers.Gemma3Config(
        text_config=gemma3_text(), vision_config=vision, mm_tokens_per_image=4, image_token_index=VOCAB - 1
    )


def phi3() -> Any:
    # Heads of 32 dims of which 24 turn, in 12 pairs.
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0 + 0.02 * pair for pair in range(12)],
        "long_factor": [1.5 + 0.9 * pair for pair in range(12)],
    }
    return transformers.Phi3Config(
        **{**SIZES, "num_attention_heads": 2, "num_key_value_heads": 1},
        original_max_position_embeddings=128,
        rope_parameters=rope,
        tie_word_embeddings=False,
    )


def phi3_window() -> Any:
    return transformers.Phi3Config(**SIZES, sliding_window=WINDOW, tie_word_embeddings=True)


def olmo2() -> Any:
    return transformers.Olmo2Config(**SIZES, tie_word_embeddings=False)


def mixtral() -> Any:
    return transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)


def mixtral_window() -> Any:
    return transformers.MixtralConfig(**SIZES, num_local_experts=6, num_experts_per_tok=3, sliding_window=WINDOW)


def bert() -> Any:
    return transformers.BertConfig(**ENCODER_SIZES, layer_norm_eps=1e-2)


def bert_tanh() -> Any:
    return transformers.BertConfig(**ENCODER_SIZES, hidden_act="gelu_new", layer_norm_eps=1e-3)


def roberta() -> Any:
    return transformers.RobertaConfig(**OFFSET_SIZES, type_vocab_size=1)


def xlm_roberta() -> Any:
    return transformers.XLMRobertaConfig(**OFFSET_SIZES | {"pad_token_id": 1}, type_vocab_size=1, layer_norm_eps=1e-5)


def mpnet() -> Any:
    return transformers.MPNetConfig(**OFFSET_SIZES, layer_norm_eps=1e-5)


def modernbert() -> Any:
    sizes = {**ENCODER_SIZES, "num_hidden_layers": 5}
    return transformers.ModernBertConfig(**sizes, local_attention=WINDOW, global_attn_every_n_layers=3)


def modernbert_biased() -> Any:
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    return transformers.ModernBertConfig(
        **ENCODER_SIZES,
        local_attention=WINDOW - 1,
        layer_types=types,
        norm_bias=True,
        attention_bias=True,
        mlp_bias=True,
        hidden_activation="gelu_pytorch_tanh",
    )


def nomic() -> Any:
    return transformers.NomicBertConfig(**ENCODER_SIZES, layer_norm_eps=1e-5)


def own_nomic_config(saved: dict[str, Any]) -> dict[str, Any]:
    """As models with code of their own are published."""
    names = {
        "vocab_size": "vocab_size",
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "layer_norm_eps": "layer_norm_epsilon",
        "type_vocab_size": "type_vocab_size",
    }
    return {
        "architectures": ["NomicBertModel"],
        "auto_map": {"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"},
        **{own: saved[name] for name, own in names.items() if name in saved},
        "activation_function": "swiglu",
        "attn_pdrop": 0.0,
        "causal": False,
        "dense_seq_output": True,
        "fused_bias_fc": True,
        "fused_dropout_add_ln": True,
        "max_trained_positions": 2048,
        "mlp_fc1_bias": False,
        "mlp_fc2_bias": False,
        "model_type": "nomic_bert",
        "pad_vocab_size_multiple": 64,
        "parallel_block": False,
        "parallel_block_tied_norm": False,
        "prenorm": False,
        "qkv_proj_bias": False,
        "reorder_and_upcast_attn": False,
        "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "rotary_scaling_factor": None,
        "scale_attn_by_inverse_layer_idx": False,
        "scale_attn_weights": True,
        "summary_first_dropout": 0.0,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "use_cache": True,
        "use_flash_attn": True,
        "use_rms_norm": False,
        "use_xentropy": True,
    }


def embedding_gemma() -> Any:
    return transformers.Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 4},
        head_dim=24,
        query_pre_attn_scalar=24,
        sliding_window=WINDOW,
        sliding_window_pattern=2,
        use_bidirectional_attention=True,
    )


def qwen2_both_ways() -> Any:
    return transformers.Qwen2Config(**SIZES, is_causal=False, tie_word_embeddings=False)


def modernbert_mean() -> Any:
    return transformers.ModernBertConfig(
        **ENCODER_SIZES, classifier_pooling="mean", classifier_bias=True, classifier_activation="silu", norm_bias=True
    )


def qwen3_plain() -> Any:
    return transformers.Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True)


def mistral_plain() -> Any:
    return transformers.MistralConfig(**SIZES, sliding_window=None, tie_word_embeddings=False)


def ministral() -> Any:
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    return transformers.MinistralConfig(
        **SIZES, head_dim=24, sliding_window=WINDOW, layer_types=types, tie_word_embeddings=False
    )


def mistral3() -> Any:
    vision = transformers.PixtralVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
    )
    return transformers.Mistral3Config(
        text_config=mistral_plain(), vision_config=vision, image_token_index=VOCAB - 1, tie_word_embeddings=False
    )


def ministral3() -> Any:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 32,
        "max_position_embeddings": CONTEXT,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.3,
    }
    return transformers.Ministral3Config(**SIZES, head_dim=24, rope_parameters=rope, tie_word_embeddings=False)


def ministral3_vision() -> Any:
    config = mistral3()
    config.text_config = ministral3()
    return config


def seed_oss() -> Any:
    return transformers.SeedOssConfig(**SIZES, head_dim=24, attention_out_bias=True, tie_word_embeddings=False)


def gemma() -> Any:
    return transformers.GemmaConfig(**SIZES, head_dim=24, rms_norm_eps=1e-3)


def olmo3() -> Any:
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.2,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }
    rope = {"full_attention": yarn, "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0}}
    return transformers.Olmo3Config(
        **{**SIZES, "num_hidden_layers": 4}, sliding_window=WINDOW, rope_parameters=rope, tie_word_embeddings=False
    )


def olmoe() -> Any:
    return transformers.OlmoeConfig(**SIZES, num_experts=6, num_experts_per_tok=3, tie_word_embeddings=False)


def exaone4() -> Any:
    return transformers.Exaone4Config(
        **{**SIZES, "num_hidden_layers": 4}, sliding_window=WINDOW, sliding_window_pattern=2, tie_word_embeddings=False
    )


def exaone4_without_window() -> Any:
    types = ["full_attention"] * SIZES["num_hidden_layers"]
    return transformers.Exaone4Config(**SIZES, sliding_window=None, layer_types=types, tie_word_embeddings=True)


def granite() -> Any:
    return transformers.GraniteConfig(
        **SIZES,
        embedding_multiplier=12.0,
        attention_multiplier=0.125,
        residual_multiplier=0.22,
        logits_scaling=8.0,
        rms_norm_eps=1e-3,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    )


def granite_moe() -> Any:
    return transformers.GraniteMoeConfig(
        **SIZES,
        embedding_multiplier=6.0,
        attention_multiplier=0.2,
        residual_multiplier=0.5,
        logits_scaling=4.0,
        num_local_experts=5,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
    )


def glm() -> Any:
    return transformers.GlmConfig(**SIZES, head_dim=24, attention_bias=True, tie_word_embeddings=False)


def glm4() -> Any:
    return transformers.Glm4Config(**SIZES, head_dim=16, attention_bias=False, tie_word_embeddings=False)


def glm4_moe() -> Any:
    return transformers.Glm4MoeConfig(
        **SIZES,
        head_dim=24,
        use_qk_norm=True,
        attention_bias=True,
        n_routed_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        n_shared_experts=2,
        routed_scaling_factor=1.5,
        tie_word_embeddings=False,
    )


def qwen2_moe() -> Any:
    return transformers.Qwen2MoeConfig(
        **SIZES,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=80,
        mlp_only_layers=[1],
        tie_word_embeddings=False,
    )


def cohere() -> Any:
    return transformers.CohereConfig(**SIZES, logit_scale=0.25, attention_bias=True)


def cohere2() -> Any:
    return transformers.Cohere2Config(
        **{**SIZES, "num_hidden_layers": 4}, sliding_window=WINDOW, sliding_window_pattern=2, logit_scale=0.5
    )


def ernie() -> Any:
    return transformers.Ernie4_5Config(**SIZES, head_dim=24, use_bias=True, tie_word_embeddings=True)


def stablelm() -> Any:
    return transformers.StableLmConfig(**SIZES, use_qkv_bias=True, tie_word_embeddings=False)


def starcoder2() -> Any:
    return transformers.Starcoder2Config(**SIZES, sliding_window=WINDOW, norm_epsilon=1e-3)


def nemotron() -> Any:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    return transformers.NemotronConfig(**SIZES, rope_parameters=rope, attention_bias=True, mlp_bias=True)


def arcee() -> Any:
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    return transformers.ArceeConfig(**SIZES, rope_parameters=rope, mlp_bias=True, tie_word_embeddings=False)


def gpt_oss() -> Any:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    }
    return transformers.GptOssConfig(
        **SIZES,
        head_dim=24,
        num_local_experts=6,
        num_experts_per_tok=3,
        sliding_window=WINDOW,
        swiglu_limit=1.5,
        rope_parameters=rope,
    )


OWN_SIZES = {key: SIZES[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
GPT2_SIZES: dict[str, Any] = {**OWN_SIZES, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": CONTEXT}


def gpt2() -> Any:
    return transformers.GPT2Config(**GPT2_SIZES, n_inner=96)


def gpt_bigcode() -> Any:
    return transformers.GPTBigCodeConfig(**GPT2_SIZES)


def gpt_bigcode_heads() -> Any:
    return transformers.GPTBigCodeConfig(**GPT2_SIZES, multi_query=False, activation_function="gelu")


def opt() -> Any:
    sizes = {key: SIZES[key] for key in SIZES if key not in ("intermediate_size", "num_key_value_heads")}
    return transformers.OPTConfig(**sizes, ffn_dim=96, word_embed_proj_dim=64)


def gpt_neox() -> Any:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    return transformers.GPTNeoXConfig(**ENCODER_SIZES, rope_parameters=rope)


def gpt_neox_in_turn() -> Any:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 20000.0, "partial_rotary_factor": 0.5}
    return transformers.GPTNeoXConfig(
        **ENCODER_SIZES, rope_parameters=rope, use_parallel_residual=False, attention_bias=False, hidden_act="gelu_fast"
    )


def own_neox_config(saved: dict[str, Any]) -> dict[str, Any]:
    """As Pythia is published."""
    rope = saved.pop("rope_parameters")
    return {**saved, "rotary_pct": rope["partial_rotary_factor"], "rotary_emb_base": rope["rope_theta"]}


def gptj() -> Any:
    return transformers.GPTJConfig(**GPT2_SIZES, rotary_dim=8, tie_word_embeddings=False)


FALCON_SIZES = {key: SIZES[key] for key in SIZES if key not in ("intermediate_size", "num_key_value_heads")}


def falcon() -> Any:
    return transformers.FalconConfig(**FALCON_SIZES)


def falcon_groups() -> Any:
    return transformers.FalconConfig(
        **FALCON_SIZES, num_kv_heads=2, new_decoder_architecture=True, ffn_hidden_size=96, bias=True
    )


def falcon2() -> Any:
    return transformers.FalconConfig(
        **FALCON_SIZES,
        num_kv_heads=2,
        new_decoder_architecture=True,
        num_ln_in_parallel_attn=1,
        tie_word_embeddings=False,
    )


def falcon_in_turn() -> Any:
    return transformers.FalconConfig(**FALCON_SIZES, multi_query=False, parallel_attn=False, bias=True)


def bloom() -> Any:
    return transformers.BloomConfig(**OWN_SIZES, hidden_size=72, n_layer=3, n_head=6)


def mpt() -> Any:
    return transformers.MptConfig(**OWN_SIZES, d_model=72, n_layers=3, n_heads=6, max_seq_len=CONTEXT)


def phi() -> Any:
    return transformers.PhiConfig(**SIZES, tie_word_embeddings=False)


DEEPSEEK_SIZES: dict[str, Any] = {
    **SIZES,
    "num_key_value_heads": 4,
    "kv_lora_rank": 40,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
}


def deepseek_v2_lite() -> Any:
    return transformers.DeepseekV2Config(**DEEPSEEK_SIZES, q_lora_rank=None, n_routed_experts=5, n_shared_experts=2)


def deepseek_v2() -> Any:
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 0.707,
        "mscale_all_dim": 0.9,
        "original_max_position_embeddings": 64,
    }
    return transformers.DeepseekV2Config(
        **DEEPSEEK_SIZES,
        q_lora_rank=48,
        n_routed_experts=8,
        n_shared_experts=1,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
        rope_parameters=yarn,
    )


def deepseek_v3() -> Any:
    return transformers.DeepseekV3Config(
        **DEEPSEEK_SIZES, q_lora_rank=48, n_routed_experts=8, n_group=4, topk_group=2, num_nextn_predict_layers=0
    )


def llama_dynamic() -> Any:
    rope = {"rope_type": "dynamic", "rope_theta": 20000.0, "factor": 4.0}
    return transformers.LlamaConfig(**SIZES, rope_parameters=rope)


def minimax_m2() -> Any:
    rope = {"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.5}
    return transformers.MiniMaxM2Config(
        **SIZES, head_dim=24, num_local_experts=6, num_experts_per_tok=2, rope_parameters=rope
    )


def ernie_moe() -> Any:
    return transformers.Ernie4_5_MoeConfig(
        **SIZES,
        moe_num_experts=6,
        moe_k=2,
        moe_intermediate_size=48,
        moe_num_shared_experts=2,
        tie_word_embeddings=False,
    )


def command_r_plus() -> Any:
    return transformers.CohereConfig(**SIZES, logit_scale=0.25, use_qk_norm=True)


def stablelm_12b() -> Any:
    return transformers.StableLmConfig(
        **SIZES, use_parallel_residual=True, qk_layernorm=True, layer_norm_eps=1e-3, tie_word_embeddings=False
    )


def llama4() -> Any:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 64,
    }
    return transformers.Llama4TextConfig(
        **{**SIZES, "num_hidden_layers": 4},
        intermediate_size_mlp=80,
        head_dim=24,
        num_local_experts=4,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        attention_chunk_size=WINDOW,
        floor_scale=24,
        attn_scale=0.3,
        rope_parameters=rope,
        tie_word_embeddings=False,
    )


def phimoe() -> Any:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.02 * pair for pair in range(8)],
        "long_factor": [1.5 + 0.9 * pair for pair in range(8)],
        "short_mscale": 1.1,
        "long_mscale": 1.25,
        "original_max_position_embeddings": CONTEXT,  # beyond it, transformers 5.24 keeps the short table
    }
    return transformers.PhimoeConfig(
        **SIZES,
        num_local_experts=6,
        num_experts_per_tok=2,
        router_jitter_noise=0.2,
        rope_parameters=rope,
        attention_bias=True,
        lm_head_bias=True,
        tie_word_embeddings=False,
    )


def eurobert() -> Any:
    sizes = {key: SIZES[key] for key in SIZES if key not in ("bos_token_id", "eos_token_id")}
    return transformers.EuroBertConfig(**sizes, head_dim=24)
