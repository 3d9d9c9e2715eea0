"""Keys of a config that Headrace does not know."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ModelError
from headrace.models.synthetic.public_shapes import SHAPE_NAMES, find_shape
from tests.models.tiny_models import TINY, Reference, saved_config, spec_of

Tiny = Callable[[str], Reference]

# As transformers writes them for public checkpoints, beside the sizes.
ORIGIN: dict[str, Any] = {
    "_name_or_path": "x/y",
    "attention_dropout": 0.1,
    "auto_map": {"AutoModel": "modeling_x.X"},
    "bos_token_id": 1,
    "do_sample": True,
    "id2label": {"0": "LABEL_0"},
    "initializer_range": 0.02,
    "pretraining_tp": 1,
    "temperature": 0.6,
    "transformers.js_config": {"dtype": "q4"},
    "transformers_version": "4.40.0",
    "use_cache": True,
}


@pytest.mark.parametrize("name", TINY)
def test_what_never_changes_numbers_is_let_through(name: str, tiny: Tiny) -> None:
    reference = tiny(name)
    values = saved_config(reference)
    assert spec_of({**values, **ORIGIN}, reference.folder) == spec_of(values, reference.folder)


@pytest.mark.parametrize("name", TINY)
def test_an_unknown_key_is_refused_by_name_unless_it_is_off(name: str, tiny: Tiny) -> None:
    reference = tiny(name)
    values = saved_config(reference)
    plain = spec_of(values, reference.folder)
    for found in (0.5, 1, 0, True, "x", [1], {"a": 1}):
        with pytest.raises(ModelError, match=r"'activation_multiplier': Headrace does not know this key.*Found"):
            spec_of({**values, "activation_multiplier": found}, reference.folder)
    for off in (None, False, "", [], {}):
        assert spec_of({**values, "activation_multiplier": off}, reference.folder) == plain


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama", {"rope_interleaved": True}, "rope_interleaved.*halves"),
        ("llama", {"sliding_window": 64}, "sliding_window.*does not know"),
        ("llama-linear-tied", {"num_experts": 4}, "num_experts.*does not know"),
        ("mistral", {"attention_bias": True}, "attention_bias.*does not know"),
        ("qwen3", {"mlp_bias": True}, "mlp_bias.*does not know"),
        ("olmo2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("phi3", {"full_attn_mod": 2}, "full_attn_mod"),
        ("gemma2", {"layer_scale": 2.0}, "layer_scale.*does not know"),
        ("bert", {"embedding_size": 32}, "embedding_size.*does not know"),
        ("bert", {"is_causal": True}, "is_causal.*encoder"),
        ("qwen2", {"is_causal": False}, "is_causal.*sliding window"),
        ("qwen2-yarn", {"is_causal": "no"}, "is_causal.*true or false"),
        ("llama", {"is_encoder_decoder": True}, "is_encoder_decoder"),
        ("llama4", {"attention_bias": True}, "attention_bias"),
        ("llama4", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope.*size of queries"),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method.*greedy"),
        ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek-v3", {"n_group": 3}, "n_group.*divisor"),
        ("deepseek-v3", {"topk_group": 1}, "topk_group.*enough groups"),
        ("deepseek-v3", {"v_head_dim": 25}, "v_head_dim.*at most"),
        ("deepseek-v3", {"rope_interleave": False}, "rope_interleave"),
        ("minimax-m2", {"scoring_func": "softmax"}, "scoring_func"),
        ("ernie-moe", {"use_bias": True}, "use_bias"),
        ("gpt-oss", {"experts_per_token": 2}, "experts_per_token.*num_experts_per_tok"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"n_embd": 0}, "'n_embd'.*integer from 1"),
        ("opt", {"word_embed_proj_dim": 32}, "word_embed_proj_dim"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before"),
        ("falcon", {"alibi": True}, "alibi.*rope"),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection"),
        ("bloom", {"seq_length": 1 << 20}, "'seq_length'"),
        ("mpt", {"attn_config": {"clip_qkv": 6}}, "attn_config.clip_qkv"),
        ("mpt", {"attn_config": {"alibi": False}}, "attn_config.alibi"),
        ("phi", {"qk_layernorm": True}, "qk_layernorm"),
        ("lfm2", {"conv_L_cache": 9}, "conv_L_cache.*integer from 1 to 8"),
        ("lfm2", {"layer_types": ["conv"] * 3 + ["mamba"]}, "layer_types.*full_attention or conv"),
        ("mamba2", {"hidden_act": "gelu"}, "hidden_act"),
        ("mamba2", {"n_groups": 3}, "n_groups.*divisor"),
        ("mamba2", {"expand": 2}, "expand.*num_heads"),
        ("mamba2", {"time_step_limit": [1.0, 0.5]}, "time_step_limit.*in order"),
        ("mamba2", {"time_step_limit": [0.0, float("nan")]}, "time_step_limit"),
        ("qwen3-next", {"linear_num_key_heads": 4}, "linear_num_key_heads.*divisor"),
        ("qwen3-next", {"use_sliding_window": True}, "use_sliding_window"),
        ("bamba", {"mamba_d_head": 7}, "mamba_d_head.*expected 24"),
        ("granite-4", {"position_embedding_type": "alibi"}, "position_embedding_type"),
        ("falcon-h1", {"mamba_proj_bias": True}, "mamba_proj_bias.*no biases"),
        ("falcon-h1", {"ssm_multipliers": [1.0]}, "ssm_multipliers.*list of 5"),
        ("falcon-h1", {"mamba_d_ssm": 100}, "mamba_n_heads.*divisor"),
        ("nemotron-h", {"moe_latent_size": 16}, "moe_latent_size"),
        ("nemotron-h", {"num_hidden_layers": 4}, "num_hidden_layers.*listed"),
        ("nemotron-h", {"layers_block_type": ["mlp", "conv"]}, "layers_block_type.*linear_attention"),
        ("nemotron-h", {"layers_block_type": None, "hybrid_override_pattern": "M-X"}, "letters"),
        ("nemotron-h", {"layers_block_type": None}, "layers_block_type.*missing"),
        ("ministral3", {"rope_parameters": {"rope_type": "default"}}, "llama_4_scaling_beta"),
        ("gemma3n", {"altup_active_idx": 1}, "altup_active_idx"),
        ("gemma3n", {"altup_correct_scale": False}, "altup_correct_scale"),
        ("gemma3n", {"intermediate_size": [96, 96, 96, 96, 64]}, "intermediate_size.*equal"),
        ("gemma3n", {"activation_sparsity_pattern": [0.5, 1.0, 0, 0, 0]}, "activation_sparsity_pattern"),
        ("gemma3n", {"num_kv_shared_layers": 4}, "num_kv_shared_layers.*kind of layer"),
        ("gemma4", {"per_layer_config": {"1": {"head_dim": 40}, "3": {"head_dim": 48}}}, "per_layer_config.*one kind"),
        ("gemma4", {"per_layer_config": {"9": {"head_dim": 40}}}, "per_layer_config.9"),
        ("gemma4", {"per_layer_config": {str(at): {"head_dim": 40, "experts": 3} for at in (1, 3, 5)}}, "1.experts"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ("gemma4", {"num_kv_shared_layers": 5}, "num_kv_shared_layers.*kind of layer"),
        ("gemma4", {"attention_bias": True}, "attention_bias"),
        ("gemma4-experts", {"num_global_key_value_heads": 3}, "num_global_key_value_heads.*divisor"),
        ("gemma4-experts", {"top_k_experts": 6}, "top_k_experts"),
        ("gemma4-experts", {"global_head_dim": 0}, "global_head_dim"),
        ("ministral3-vision", {"text_config": {"model_type": "llama"}}, "must be a Mistral"),
    ],
)
def test_what_would_change_the_numbers_is_refused(name: str, change: dict[str, Any], message: str, tiny: Tiny) -> None:
    reference = tiny(name)
    with pytest.raises(ModelError, match=message):
        spec_of({**saved_config(reference), **change}, reference.folder)


def test_an_unknown_key_of_a_rope_or_a_nested_config_is_refused(tiny: Tiny) -> None:
    values = saved_config(tiny("llama"))
    values["rope_parameters"]["wobble"] = 2.0
    with pytest.raises(ModelError, match=r"'rope_parameters.wobble'"):
        spec_of(values)
    values = saved_config(tiny("gemma3-vision"))
    values["text_config"]["wobble"] = 2.0
    with pytest.raises(ModelError, match=r"'text_config.wobble'"):
        spec_of(values)


@pytest.mark.parametrize("name", SHAPE_NAMES)
def test_configs_of_public_models_are_known(name: str) -> None:
    assert spec_of(dict(find_shape(name).config), Path("model")).vocab_size > 0
