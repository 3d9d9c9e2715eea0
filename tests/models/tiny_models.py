"""Builds tiny models with random weights in transformers, one or more per family.

Each uses its family's special features. Windows and trained contexts are short enough that 300 tokens exceed them, and
weights are large enough to keep logits apart.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import transformers.utils.logging
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from headrace.models.config_json import ConfigJson
from headrace.models.families import model_spec
from headrace.models.spec import ModelSpec
from tests.models.tiny_recurrent import RECURRENT

transformers.utils.logging.disable_progress_bar()

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


@dataclass(frozen=True)
class Tiny:
    """How to make one tiny model."""

    architecture: str
    config: Callable[[], Any]
    # Of save_pretrained: `save_original_format=False` keeps experts fused, `max_shard_size` splits the file.
    save: dict[str, Any] = field(default_factory=dict[str, Any])
    encoder: bool = False
    pooling: dict[str, Any] | None = None
    normalise: bool = False
    reranker: bool = False
    brief: bool = False  # another form of an architecture that is there: only its logits are compared
    dense: tuple[tuple[int, str], ...] = ()  # outputs and activation of the Dense modules
    saved: Callable[[dict[str, Any]], dict[str, Any]] | None = None  # changes config.json after it is saved


def _llama() -> Any:
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


def _llama_linear() -> Any:
    sizes = {**SIZES, "num_key_value_heads": 4}
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}
    return transformers.LlamaConfig(**sizes, rope_parameters=rope, tie_word_embeddings=True)


def _mistral() -> Any:
    return transformers.MistralConfig(**SIZES, sliding_window=WINDOW, head_dim=24, tie_word_embeddings=False)


def _smollm3() -> Any:
    return transformers.SmolLM3Config(
        **{**SIZES, "num_hidden_layers": 4},
        use_sliding_window=True,
        sliding_window=WINDOW,
        no_rope_layer_interval=2,
        tie_word_embeddings=True,
    )


def _qwen2() -> Any:
    return transformers.Qwen2Config(
        **SIZES,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=1,
        tie_word_embeddings=True,
    )


def _qwen2_yarn() -> Any:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "beta_slow": 1.0,
    }
    return transformers.Qwen2Config(**SIZES, rope_parameters=rope, tie_word_embeddings=False)


def _qwen3() -> Any:
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


def _qwen3_moe() -> Any:
    return transformers.Qwen3MoeConfig(
        **SIZES,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    )


def _qwen3_moe_sparse_step() -> Any:
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


def _gemma2() -> Any:
    return transformers.Gemma2Config(
        **{**SIZES, "num_hidden_layers": 2},
        head_dim=24,
        query_pre_attn_scalar=20,
        sliding_window=WINDOW,
        attn_logit_softcapping=4.0,
        final_logit_softcapping=9.0,
        rms_norm_eps=1e-3,
    )


def _gemma3_text() -> Any:
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


def _gemma3_vision() -> Any:
    vision = transformers.SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
    )
    return transformers.Gemma3Config(
        text_config=_gemma3_text(), vision_config=vision, mm_tokens_per_image=4, image_token_index=VOCAB - 1
    )


def _phi3() -> Any:
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


def _phi3_window() -> Any:
    return transformers.Phi3Config(**SIZES, sliding_window=WINDOW, tie_word_embeddings=True)


def _olmo2() -> Any:
    return transformers.Olmo2Config(**SIZES, tie_word_embeddings=False)


def _mixtral() -> Any:
    return transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)


def _mixtral_window() -> Any:
    return transformers.MixtralConfig(**SIZES, num_local_experts=6, num_experts_per_tok=3, sliding_window=WINDOW)


def _bert() -> Any:
    return transformers.BertConfig(**ENCODER_SIZES, layer_norm_eps=1e-2)


def _bert_tanh() -> Any:
    return transformers.BertConfig(**ENCODER_SIZES, hidden_act="gelu_new", layer_norm_eps=1e-3)


def _roberta() -> Any:
    return transformers.RobertaConfig(**OFFSET_SIZES, type_vocab_size=1)


def _xlm_roberta() -> Any:
    return transformers.XLMRobertaConfig(**OFFSET_SIZES | {"pad_token_id": 1}, type_vocab_size=1, layer_norm_eps=1e-5)


def _mpnet() -> Any:
    return transformers.MPNetConfig(**OFFSET_SIZES, layer_norm_eps=1e-5)


def _modernbert() -> Any:
    sizes = {**ENCODER_SIZES, "num_hidden_layers": 5}
    return transformers.ModernBertConfig(**sizes, local_attention=WINDOW, global_attn_every_n_layers=3)


def _modernbert_biased() -> Any:
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


def _nomic() -> Any:
    return transformers.NomicBertConfig(**ENCODER_SIZES, layer_norm_eps=1e-5)


def _own_nomic_config(saved: dict[str, Any]) -> dict[str, Any]:
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


def _embedding_gemma() -> Any:
    return transformers.Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 4},
        head_dim=24,
        query_pre_attn_scalar=24,
        sliding_window=WINDOW,
        sliding_window_pattern=2,
        use_bidirectional_attention=True,
    )


def _qwen2_both_ways() -> Any:
    return transformers.Qwen2Config(**SIZES, is_causal=False, tie_word_embeddings=False)


def _modernbert_mean() -> Any:
    return transformers.ModernBertConfig(
        **ENCODER_SIZES, classifier_pooling="mean", classifier_bias=True, classifier_activation="silu", norm_bias=True
    )


def _qwen3_plain() -> Any:
    return transformers.Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True)


def _mistral_plain() -> Any:
    return transformers.MistralConfig(**SIZES, sliding_window=None, tie_word_embeddings=False)


def _ministral() -> Any:
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    return transformers.MinistralConfig(
        **SIZES, head_dim=24, sliding_window=WINDOW, layer_types=types, tie_word_embeddings=False
    )


def _mistral3() -> Any:
    vision = transformers.PixtralVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
    )
    return transformers.Mistral3Config(
        text_config=_mistral_plain(), vision_config=vision, image_token_index=VOCAB - 1, tie_word_embeddings=False
    )


def _seed_oss() -> Any:
    return transformers.SeedOssConfig(**SIZES, head_dim=24, attention_out_bias=True, tie_word_embeddings=False)


def _gemma() -> Any:
    return transformers.GemmaConfig(**SIZES, head_dim=24, rms_norm_eps=1e-3)


def _olmo3() -> Any:
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


def _olmoe() -> Any:
    return transformers.OlmoeConfig(**SIZES, num_experts=6, num_experts_per_tok=3, tie_word_embeddings=False)


def _exaone4() -> Any:
    return transformers.Exaone4Config(
        **{**SIZES, "num_hidden_layers": 4}, sliding_window=WINDOW, sliding_window_pattern=2, tie_word_embeddings=False
    )


def _exaone4_without_window() -> Any:
    types = ["full_attention"] * SIZES["num_hidden_layers"]
    return transformers.Exaone4Config(**SIZES, sliding_window=None, layer_types=types, tie_word_embeddings=True)


def _granite() -> Any:
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


def _granite_moe() -> Any:
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


def _glm() -> Any:
    return transformers.GlmConfig(**SIZES, head_dim=24, attention_bias=True, tie_word_embeddings=False)


def _glm4() -> Any:
    return transformers.Glm4Config(**SIZES, head_dim=16, attention_bias=False, tie_word_embeddings=False)


def _glm4_moe() -> Any:
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


def _qwen2_moe() -> Any:
    return transformers.Qwen2MoeConfig(
        **SIZES,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=80,
        mlp_only_layers=[1],
        tie_word_embeddings=False,
    )


def _cohere() -> Any:
    return transformers.CohereConfig(**SIZES, logit_scale=0.25, attention_bias=True)


def _cohere2() -> Any:
    return transformers.Cohere2Config(
        **{**SIZES, "num_hidden_layers": 4}, sliding_window=WINDOW, sliding_window_pattern=2, logit_scale=0.5
    )


def _ernie() -> Any:
    return transformers.Ernie4_5Config(**SIZES, head_dim=24, use_bias=True, tie_word_embeddings=True)


def _stablelm() -> Any:
    return transformers.StableLmConfig(**SIZES, use_qkv_bias=True, tie_word_embeddings=False)


def _starcoder2() -> Any:
    return transformers.Starcoder2Config(**SIZES, sliding_window=WINDOW, norm_epsilon=1e-3)


def _nemotron() -> Any:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    return transformers.NemotronConfig(**SIZES, rope_parameters=rope, attention_bias=True, mlp_bias=True)


def _arcee() -> Any:
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    return transformers.ArceeConfig(**SIZES, rope_parameters=rope, mlp_bias=True, tie_word_embeddings=False)


def _gpt_oss() -> Any:
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


def _gpt2() -> Any:
    return transformers.GPT2Config(**GPT2_SIZES, n_inner=96)


def _gpt_bigcode() -> Any:
    return transformers.GPTBigCodeConfig(**GPT2_SIZES)


def _gpt_bigcode_heads() -> Any:
    return transformers.GPTBigCodeConfig(**GPT2_SIZES, multi_query=False, activation_function="gelu")


def _opt() -> Any:
    sizes = {key: SIZES[key] for key in SIZES if key not in ("intermediate_size", "num_key_value_heads")}
    return transformers.OPTConfig(**sizes, ffn_dim=96, word_embed_proj_dim=64)


def _gpt_neox() -> Any:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    return transformers.GPTNeoXConfig(**ENCODER_SIZES, rope_parameters=rope)


def _gpt_neox_in_turn() -> Any:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 20000.0, "partial_rotary_factor": 0.5}
    return transformers.GPTNeoXConfig(
        **ENCODER_SIZES, rope_parameters=rope, use_parallel_residual=False, attention_bias=False, hidden_act="gelu_fast"
    )


def _own_neox_config(saved: dict[str, Any]) -> dict[str, Any]:
    """As Pythia is published."""
    rope = saved.pop("rope_parameters")
    return {**saved, "rotary_pct": rope["partial_rotary_factor"], "rotary_emb_base": rope["rope_theta"]}


def _gptj() -> Any:
    return transformers.GPTJConfig(**GPT2_SIZES, rotary_dim=8, tie_word_embeddings=False)


FALCON_SIZES = {key: SIZES[key] for key in SIZES if key not in ("intermediate_size", "num_key_value_heads")}


def _falcon() -> Any:
    return transformers.FalconConfig(**FALCON_SIZES)


def _falcon_groups() -> Any:
    return transformers.FalconConfig(
        **FALCON_SIZES, num_kv_heads=2, new_decoder_architecture=True, ffn_hidden_size=96, bias=True
    )


def _falcon2() -> Any:
    return transformers.FalconConfig(
        **FALCON_SIZES,
        num_kv_heads=2,
        new_decoder_architecture=True,
        num_ln_in_parallel_attn=1,
        tie_word_embeddings=False,
    )


def _falcon_in_turn() -> Any:
    return transformers.FalconConfig(**FALCON_SIZES, multi_query=False, parallel_attn=False, bias=True)


def _bloom() -> Any:
    return transformers.BloomConfig(**OWN_SIZES, hidden_size=72, n_layer=3, n_head=6)


def _mpt() -> Any:
    return transformers.MptConfig(**OWN_SIZES, d_model=72, n_layers=3, n_heads=6, max_seq_len=CONTEXT)


def _phi() -> Any:
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


def _deepseek_v2_lite() -> Any:
    return transformers.DeepseekV2Config(**DEEPSEEK_SIZES, q_lora_rank=None, n_routed_experts=5, n_shared_experts=2)


def _deepseek_v2() -> Any:
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


def _deepseek_v3() -> Any:
    return transformers.DeepseekV3Config(
        **DEEPSEEK_SIZES, q_lora_rank=48, n_routed_experts=8, n_group=4, topk_group=2, num_nextn_predict_layers=0
    )


def _llama_dynamic() -> Any:
    rope = {"rope_type": "dynamic", "rope_theta": 20000.0, "factor": 4.0}
    return transformers.LlamaConfig(**SIZES, rope_parameters=rope)


def _minimax_m2() -> Any:
    rope = {"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.5}
    return transformers.MiniMaxM2Config(
        **SIZES, head_dim=24, num_local_experts=6, num_experts_per_tok=2, rope_parameters=rope
    )


def _ernie_moe() -> Any:
    return transformers.Ernie4_5_MoeConfig(
        **SIZES,
        moe_num_experts=6,
        moe_k=2,
        moe_intermediate_size=48,
        moe_num_shared_experts=2,
        tie_word_embeddings=False,
    )


def _command_r_plus() -> Any:
    return transformers.CohereConfig(**SIZES, logit_scale=0.25, use_qk_norm=True)


def _stablelm_12b() -> Any:
    return transformers.StableLmConfig(
        **SIZES, use_parallel_residual=True, qk_layernorm=True, layer_norm_eps=1e-3, tie_word_embeddings=False
    )


def _llama4() -> Any:
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


def _phimoe() -> Any:
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


def _eurobert() -> Any:
    sizes = {key: SIZES[key] for key in SIZES if key not in ("bos_token_id", "eos_token_id")}
    return transformers.EuroBertConfig(**sizes, head_dim=24)


TINY: dict[str, Tiny] = {
    "llama": Tiny("LlamaForCausalLM", _llama),
    "llama-linear-tied": Tiny("LlamaForCausalLM", _llama_linear, save={"max_shard_size": "100KB"}),
    "mistral": Tiny("MistralForCausalLM", _mistral),
    "ministral": Tiny("MinistralForCausalLM", _ministral),
    "mistral3": Tiny("Mistral3ForConditionalGeneration", _mistral3),
    "seed-oss": Tiny("SeedOssForCausalLM", _seed_oss),
    "smollm3": Tiny("SmolLM3ForCausalLM", _smollm3),
    "qwen2": Tiny("Qwen2ForCausalLM", _qwen2),
    "qwen2-yarn": Tiny("Qwen2ForCausalLM", _qwen2_yarn),
    "qwen2-moe": Tiny("Qwen2MoeForCausalLM", _qwen2_moe),
    "qwen3": Tiny("Qwen3ForCausalLM", _qwen3),
    "qwen3-moe": Tiny("Qwen3MoeForCausalLM", _qwen3_moe),
    "qwen3-moe-fused": Tiny("Qwen3MoeForCausalLM", _qwen3_moe_sparse_step, save={"save_original_format": False}),
    "gemma": Tiny("GemmaForCausalLM", _gemma),
    "gemma2": Tiny("Gemma2ForCausalLM", _gemma2),
    "gemma3": Tiny("Gemma3ForCausalLM", _gemma3_text),
    "gemma3-vision": Tiny("Gemma3ForConditionalGeneration", _gemma3_vision),
    "phi3": Tiny("Phi3ForCausalLM", _phi3),
    "phi3-window-tied": Tiny("Phi3ForCausalLM", _phi3_window),
    "olmo2": Tiny("Olmo2ForCausalLM", _olmo2),
    "olmo3": Tiny("Olmo3ForCausalLM", _olmo3),
    "olmoe": Tiny("OlmoeForCausalLM", _olmoe),
    "exaone4": Tiny("Exaone4ForCausalLM", _exaone4),
    "exaone4-tied": Tiny("Exaone4ForCausalLM", _exaone4_without_window),
    "granite": Tiny("GraniteForCausalLM", _granite),
    "granite-moe": Tiny("GraniteMoeForCausalLM", _granite_moe),
    "glm": Tiny("GlmForCausalLM", _glm),
    "glm4": Tiny("Glm4ForCausalLM", _glm4),
    "glm4-moe": Tiny("Glm4MoeForCausalLM", _glm4_moe),
    "cohere": Tiny("CohereForCausalLM", _cohere),
    "cohere2": Tiny("Cohere2ForCausalLM", _cohere2),
    "ernie": Tiny("Ernie4_5ForCausalLM", _ernie),
    "stablelm": Tiny("StableLmForCausalLM", _stablelm),
    "starcoder2": Tiny("Starcoder2ForCausalLM", _starcoder2),
    "nemotron": Tiny("NemotronForCausalLM", _nemotron),
    "arcee": Tiny("ArceeForCausalLM", _arcee),
    "gpt-oss": Tiny("GptOssForCausalLM", _gpt_oss),
    "deepseek-v2-lite": Tiny("DeepseekV2ForCausalLM", _deepseek_v2_lite, brief=True),
    "deepseek-v2": Tiny("DeepseekV2ForCausalLM", _deepseek_v2),
    "deepseek-v3": Tiny("DeepseekV3ForCausalLM", _deepseek_v3),
    "llama-dynamic": Tiny("LlamaForCausalLM", _llama_dynamic, brief=True),
    "minimax-m2": Tiny("MiniMaxM2ForCausalLM", _minimax_m2),
    "ernie-moe": Tiny("Ernie4_5_MoeForCausalLM", _ernie_moe),
    "command-r-plus": Tiny("CohereForCausalLM", _command_r_plus, brief=True),
    "stablelm-12b": Tiny("StableLmForCausalLM", _stablelm_12b, brief=True),
    "llama4": Tiny("Llama4ForCausalLM", _llama4),
    "phimoe": Tiny("PhimoeForCausalLM", _phimoe),
    "gpt2": Tiny("GPT2LMHeadModel", _gpt2),
    "gpt-bigcode": Tiny("GPTBigCodeForCausalLM", _gpt_bigcode),
    "gpt-bigcode-heads": Tiny("GPTBigCodeForCausalLM", _gpt_bigcode_heads, brief=True),
    "opt": Tiny("OPTForCausalLM", _opt),
    "pythia": Tiny("GPTNeoXForCausalLM", _gpt_neox, saved=_own_neox_config),
    "gpt-neox-in-turn": Tiny("GPTNeoXForCausalLM", _gpt_neox_in_turn, brief=True),
    "gptj": Tiny("GPTJForCausalLM", _gptj),
    "falcon": Tiny("FalconForCausalLM", _falcon),
    "falcon-groups": Tiny("FalconForCausalLM", _falcon_groups, brief=True),
    "falcon2": Tiny("FalconForCausalLM", _falcon2, brief=True),
    "falcon-in-turn": Tiny("FalconForCausalLM", _falcon_in_turn, brief=True),
    "bloom": Tiny("BloomForCausalLM", _bloom),
    "mpt": Tiny("MptForCausalLM", _mpt),
    "phi": Tiny("PhiForCausalLM", _phi),
    "mixtral": Tiny("MixtralForCausalLM", _mixtral),
    "mixtral-fused": Tiny("MixtralForCausalLM", _mixtral_window, save={"save_original_format": False}),
    "bert": Tiny("BertModel", _bert, encoder=True),
    "bert-cls": Tiny("BertModel", _bert, encoder=True, pooling={"pooling_mode_cls_token": True}, normalise=True),
    "bert-mlm-last": Tiny("BertForMaskedLM", _bert_tanh, encoder=True, pooling={"pooling_mode": "lasttoken"}),
    "bert-minilm": Tiny("BertModel", _bert, encoder=True, pooling={"pooling_mode_mean_tokens": True}, normalise=True),
    "roberta": Tiny("RobertaModel", _roberta, encoder=True, pooling={"pooling_mode_mean_tokens": True}),
    "roberta-mlm": Tiny("RobertaForMaskedLM", _roberta, encoder=True),
    "bge-m3": Tiny(
        "XLMRobertaModel", _xlm_roberta, encoder=True, pooling={"pooling_mode_cls_token": True}, normalise=True
    ),
    "mpnet": Tiny("MPNetModel", _mpnet, encoder=True, pooling={"pooling_mode_mean_tokens": True}, normalise=True),
    "modernbert": Tiny("ModernBertModel", _modernbert, encoder=True, pooling={"pooling_mode_cls_token": True}),
    "modernbert-mlm": Tiny("ModernBertForMaskedLM", _modernbert_biased, encoder=True),
    "nomic": Tiny("NomicBertModel", _nomic, encoder=True, saved=_own_nomic_config, normalise=True, pooling={}),
    "nomic-transformers": Tiny("NomicBertModel", _nomic, encoder=True, save={"save_original_format": False}),
    "embedding-gemma": Tiny(
        "Gemma3TextModel",
        _embedding_gemma,
        encoder=True,
        normalise=True,
        pooling={},
        dense=((200, "Identity"), (40, "Tanh"), (24, "GELU")),
    ),
    "eurobert": Tiny("EuroBertModel", _eurobert, encoder=True, pooling={"pooling_mode_mean_tokens": True}),
    "bert-max": Tiny("BertModel", _bert, encoder=True, pooling={"pooling_mode": "max"}),
    "bert-weighted": Tiny("BertModel", _bert, encoder=True, pooling={"pooling_mode": "weightedmean"}),
    "bert-sqrt": Tiny("BertModel", _bert, encoder=True, pooling={"pooling_mode_mean_sqrt_len_tokens": True}),
    # Decoders without a head, as embedders are saved.
    "qwen3-embedder": Tiny("Qwen3Model", _qwen3, encoder=True, pooling={"pooling_mode": "lasttoken"}, normalise=True),
    "mistral-embedder": Tiny("MistralModel", _mistral_plain, encoder=True, pooling={"pooling_mode_mean_tokens": True}),
    "qwen2-both-ways": Tiny("Qwen2Model", _qwen2_both_ways, encoder=True, pooling={"pooling_mode": "lasttoken"}),
    "gemma3-embedder": Tiny("Gemma3TextModel", _gemma3_text, encoder=True),
}
TINY |= {
    "bert-reranker": Tiny("BertForSequenceClassification", _bert, reranker=True),
    "roberta-reranker": Tiny("RobertaForSequenceClassification", _roberta, reranker=True),
    "bge-reranker": Tiny("XLMRobertaForSequenceClassification", _xlm_roberta, reranker=True),
    "mpnet-reranker": Tiny("MPNetForSequenceClassification", _mpnet, reranker=True),
    "modernbert-reranker": Tiny("ModernBertForSequenceClassification", _modernbert, reranker=True),
    "modernbert-reranker-mean": Tiny("ModernBertForSequenceClassification", _modernbert_mean, reranker=True),
    "qwen3-reranker": Tiny("Qwen3ForSequenceClassification", _qwen3_plain, reranker=True),
}
TINY |= {
    name: Tiny(architecture, partial(config, SIZES), brief=name.endswith("-plain"))
    for name, (architecture, config) in RECURRENT.items()
}
DECODERS = tuple(name for name, tiny in TINY.items() if not tiny.encoder and not tiny.reranker)
WHOLE = tuple(name for name in DECODERS if not TINY[name].brief)
# Those whose layers `headrace compress` computes.
UNCOMPRESSED = tuple(
    """
    phimoe llama4 minimax-m2 ernie-moe command-r-plus stablelm-12b deepseek-v2-lite deepseek-v2 deepseek-v3
    gpt-oss gpt2 gpt-bigcode gpt-bigcode-heads opt pythia gpt-neox-in-turn gptj falcon falcon-groups falcon2
    falcon-in-turn bloom mpt phi qwen2-moe glm4-moe cohere cohere2 glm glm4 ernie granite-moe
    """.split()
)
COMPRESSIBLE = tuple(name for name in DECODERS if name not in UNCOMPRESSED and name not in RECURRENT)
ENCODERS = tuple(name for name, tiny in TINY.items() if tiny.encoder)
RERANKERS = tuple(name for name, tiny in TINY.items() if tiny.reranker)


def build(name: str, folder: Path) -> Any:
    """Write the model, its weights in f32, to the folder; returns it, ready to compare with."""
    tiny = TINY[name]
    torch.manual_seed(_seed_of(name))
    config = tiny.config()
    config._attn_implementation = "eager"
    if tiny.reranker:
        config.num_labels = 1
    model = getattr(transformers, tiny.architecture)(config).to(torch.float32).eval()
    randomise(model)
    model.save_pretrained(folder, **tiny.save)
    write_tokenizer(folder)
    if tiny.saved is not None:
        path = folder / "config.json"
        path.write_text(json.dumps(tiny.saved(json.loads(path.read_text()))))
    if tiny.pooling is not None:
        _write_sentence_files(folder, tiny)
    return model


@dataclass(frozen=True)
class Reference:
    """A tiny model as transformers computes it: eager attention, f32."""

    name: str
    tiny: Tiny
    folder: Path
    model: Any

    def logits(self, tokens: list[int]) -> NDArray[np.float32]:
        """Of every position."""
        with torch.no_grad():
            return self.model(input_ids=torch.tensor([tokens])).logits[0].numpy()

    def rank(self, tokens: list[int], second_text: int = -1) -> float:
        """The logit of a reranker. `second_text`: where its token type begins, if it has another."""
        types = [int(0 <= second_text <= place) for place in range(len(tokens))]
        given = {"token_type_ids": torch.tensor([types])} if second_text >= 0 else {}
        with torch.no_grad():
            return float(self.model(input_ids=torch.tensor([tokens]), **given).logits[0, 0])

    def embedding(self, tokens: list[int]) -> NDArray[np.float32]:
        """As sentence-transformers pools the hidden states: the mean where nothing says otherwise."""
        with torch.no_grad():
            states = self.model(input_ids=torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0]
        pooling = self.tiny.pooling or {}
        if pooling.get("pooling_mode_cls_token"):
            pooled = states[0]
        elif pooling.get("pooling_mode") == "lasttoken":
            pooled = states[-1]
        elif pooling.get("pooling_mode") == "max":
            pooled = states.max(0).values
        elif pooling.get("pooling_mode") == "weightedmean":
            places = torch.arange(1, len(states) + 1, dtype=torch.float32)[:, None]
            pooled = (states * places).sum(0) / places.sum()
        elif pooling.get("pooling_mode_mean_sqrt_len_tokens"):
            pooled = states.sum(0) / len(states) ** 0.5
        else:
            pooled = states.mean(0)
        for index, (_, kind) in enumerate(self.tiny.dense):
            weights = load_file(self.folder / f"{2 + index}_Dense" / "model.safetensors")
            pooled = weights["linear.weight"] @ pooled + weights["linear.bias"]
            pooled = getattr(torch.nn, kind)()(pooled)
        return (torch.nn.functional.normalize(pooled, dim=0) if self.tiny.normalise else pooled).numpy()


def saved_config(reference: Reference) -> dict[str, Any]:
    return json.loads((reference.folder / "config.json").read_text())


def spec_of(values: dict[str, Any], folder: Path = Path("model")) -> ModelSpec:
    return model_spec(ConfigJson(values, path=folder / "config.json"))


def _seed_of(name: str) -> int:
    """Return the seed of a model's weights. A new model gets one of its own here, so that no other changes."""
    if name in RECURRENT:
        return 2000 + sorted(RECURRENT).index(name)
    later = ("nemotron", "arcee")
    if name in later:
        return 3000 + later.index(name)
    return 1000 + sorted(TINY.keys() - RECURRENT.keys() - set(later)).index(name)


def prompt(length: int, seed: int = 7) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 1000 + length)
    return torch.randint(3, VOCAB - 1, (length,), generator=generator).tolist()


def randomise(model: Any) -> None:
    """Every weight random, so that none can be left out unnoticed; norms stay near what they are made as."""
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "norm" in name.lower() and parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif parameter.dim() == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
            else:
                parameter.copy_(torch.randn_like(parameter) * 0.2)


def write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<s>", "</s>", "<pad>"],
        show_progress=False,
    )
    text = "the mill turns the wheel and the water runs down the race past the stones where the grain becomes flour"
    tokenizer.train_from_iterator([text] * 8, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


def _write_sentence_files(folder: Path, tiny: Tiny) -> None:
    kinds = ["Transformer", "Pooling", *["Dense"] * len(tiny.dense), *["Normalize"] * tiny.normalise]
    paths = ["", *(f"{index}_{kind}" for index, kind in enumerate(kinds) if index)]
    modules = [
        {"idx": index, "name": str(index), "path": paths[index], "type": f"sentence_transformers.models.{kind}"}
        for index, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": SIZES["hidden_size"], **(tiny.pooling or {})}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    inputs = SIZES["hidden_size"]
    for index, (outputs, kind) in enumerate(tiny.dense):
        path = folder / f"{2 + index}_Dense"
        path.mkdir()
        config = {"in_features": inputs, "out_features": outputs, "bias": True}
        (path / "config.json").write_text(
            json.dumps({**config, "activation_function": f"torch.nn.modules.activation.{kind}"})
        )
        tensors = {"linear.weight": torch.randn(outputs, inputs) * 0.3, "linear.bias": torch.randn(outputs)}
        save_file(tensors, path / "model.safetensors")
        inputs = outputs
