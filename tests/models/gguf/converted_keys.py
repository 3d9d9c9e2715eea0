"""The keys that llama.cpp's converters write for a model, one function for each kind."""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
import torch

from tests.models.gguf.converted_model import Model
from tests.models.gguf.gguf_models import llama3_factors


def common_keys(model: Model) -> None:
    writer, find = model.writer, model.find
    writer.add_block_count(model.layers + model.further)
    if model.further:
        writer.add_nextn_predict_layers(model.further)
    for add, value in (
        (writer.add_context_length, find("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")),
        (writer.add_embedding_length, model.hidden),
        (writer.add_feed_forward_length, find("intermediate_size", "n_inner")),
        (writer.add_head_count, find("num_attention_heads", "n_head", "n_heads")),
        (writer.add_head_count_kv, find("num_key_value_heads")),
        (writer.add_layer_norm_rms_eps, find("rms_norm_eps", "norm_eps")),
        (writer.add_layer_norm_eps, find("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")),
        (writer.add_expert_count, find("num_local_experts", "num_experts", "n_routed_experts")),
        (writer.add_expert_used_count, find("num_experts_per_tok", "top_k_experts")),
        (writer.add_expert_group_count, find("n_group")),
        (writer.add_expert_group_used_count, find("topk_group")),
        (writer.add_key_length, find("head_dim")),
        (writer.add_value_length, find("head_dim")),
    ):
        if value is not None:
            add(value)
    rope = model.rope.get("full_attention", model.rope)
    local = model.rope.get("sliding_attention")
    if "rope_theta" in rope:
        writer.add_rope_freq_base(rope["rope_theta"])
    if isinstance(local, dict):
        writer.add_rope_freq_base_swa(local["rope_theta"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for key, add in (
            ("attention_factor", writer.add_rope_scaling_yarn_attn_factor),
            ("beta_fast", writer.add_rope_scaling_yarn_beta_fast),
            ("beta_slow", writer.add_rope_scaling_yarn_beta_slow),
        ):
            if rope.get(key) is not None:
                add(rope[key])
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(rope, model.head_size))
    if "mrope_section" in model.rope:
        writer.add_rope_dimension_sections([*model.rope["mrope_section"], 0])


def _turning(model: Model, default: float = 1.0) -> None:
    share = model.rope.get("partial_rotary_factor", model.config.get("partial_rotary_factor", default))
    model.writer.add_rope_dimension_count(int(model.head_size * share))


def _windowed(model: Model) -> None:
    if model.config.get("sliding_window") is not None:
        model.writer.add_sliding_window(model.config["sliding_window"])


def _pattern(model: Model) -> None:
    _windowed(model)
    if model.config.get("sliding_window") is not None:
        model.writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in model.config["layer_types"]])


def _expert_size(model: Model) -> None:
    model.writer.add_expert_feed_forward_length(model.find("moe_intermediate_size", "intermediate_size"))


def _shared_expert(model: Model) -> None:
    _expert_size(model)
    model.writer.add_expert_shared_feed_forward_length(model.config["shared_expert_intermediate_size"])


def _gpt_oss(model: Model) -> None:
    _windowed(model)
    _expert_size(model)


def _granite(model: Model) -> None:
    # The heads of these files have no size of their own.
    for key in ("attention.key_length", "attention.value_length"):
        model.writer.kv_data[0].pop(f"{gguf.MODEL_ARCH_NAMES[model.kind]}.{key}", None)
    model.writer.add_attention_scale(model.config["attention_multiplier"])
    model.writer.add_embedding_scale(model.config["embedding_multiplier"])
    model.writer.add_residual_scale(model.config["residual_multiplier"])
    model.writer.add_logit_scale(model.config["logits_scaling"])


def _cohere(model: Model) -> None:
    model.writer.add_logit_scale(model.config["logit_scale"])
    model.writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def _cohere2(model: Model) -> None:
    _cohere(model)
    _windowed(model)
    _turning(model)


def _ernie_moe(model: Model) -> None:
    writer, config = model.writer, model.config
    writer.add_expert_count(config["moe_num_experts"])
    writer.add_expert_used_count(config["moe_k"])
    writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
    writer.add_leading_dense_block_count(config["moe_layer_start_index"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["moe_num_shared_experts"])
    writer.add_expert_shared_feed_forward_length(config["intermediate_size"] // config["num_key_value_heads"])


def _minimax(model: Model) -> None:
    _expert_size(model)
    model.writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    _turning(model)


def _routed(model: Model) -> None:
    writer, config = model.writer, model.config
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config.get("norm_topk_prob"):
        writer.add_expert_weights_norm(True)


def _glm_moe(model: Model) -> None:
    _routed(model)
    _turning(model, 0.5)
    model.writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _deepseek(model: Model) -> None:
    writer, config = model.writer, model.config
    _routed(model)
    third = "V3" in config["architectures"][0]
    if third:
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    for key in ("attention.head_count_kv", "attention.key_length", "attention.value_length"):
        writer.kv_data[0].pop(f"deepseek2.{key}", None)
    writer.add_head_count_kv(1)
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    rank, turning = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + turning)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + turning)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(turning)
    if model.rope.get("mscale_all_dim") is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * model.rope["mscale_all_dim"])


def _ministral(model: Model) -> None:
    _turning(model)
    model.writer.add_rope_scaling_yarn_log_mul(model.rope["mscale_all_dim"])
    model.writer.add_attn_temperature_scale(model.rope["llama_4_scaling_beta"])


def _llama4(model: Model) -> None:
    writer, config = model.writer, model.config
    _turning(model)
    writer.kv_data[0].pop("llama4.feed_forward_length")
    writer.add_feed_forward_length(config["intermediate_size_mlp"])
    writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])


def _stablelm(model: Model) -> None:
    _turning(model)
    model.writer.add_parallel_residual(model.config["use_parallel_residual"])


def _nemotron(model: Model) -> None:
    _turning(model)
    model.writer.kv_data[0].pop("nemotron.attention.layer_norm_rms_epsilon", None)
    model.writer.add_layer_norm_eps(model.config["norm_eps"])


def _phi2(model: Model) -> None:
    _turning(model)


def _phimoe(model: Model) -> None:
    _turning(model)
    _windowed(model)
    model.writer.add_rope_scaling_orig_ctx_len(model.rope["original_max_position_embeddings"])


def _gemma3n(model: Model) -> None:
    writer, config = model.writer, model.config
    _pattern(model)
    writer.add_altup_active_idx(config["altup_active_idx"])
    writer.add_altup_num_inputs(config["altup_num_inputs"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    shares = torch.tensor(config["activation_sparsity_pattern"], dtype=torch.float32)
    writer.add_activation_sparsity_scale(torch.distributions.Normal(0.0, 1.0).icdf(shares).tolist())


def _gemma4(model: Model) -> None:
    writer, config, layers = model.writer, model.config, model.layers
    own = config.get("per_layer_config") or {}
    full = next((each for each in own.values() if "head_dim" in each), {})
    size = full.get("head_dim", config.get("global_head_dim"))
    for key in ("key_length", "value_length"):
        writer.kv_data[0].pop(f"gemma4.attention.{key}")
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"] or 0)
    _pattern(model)
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config["use_double_wide_mlp"]:
        first = layers - config["num_kv_shared_layers"]
        inner = config["intermediate_size"]
        writer.kv_data[0].pop("gemma4.feed_forward_length")
        writer.add_feed_forward_length([inner if layer < first else 2 * inner for layer in range(layers)])
    heads = config.get("num_global_key_value_heads") or full.get("num_key_value_heads")
    if heads is not None:
        kinds = config["layer_types"]
        writer.kv_data[0].pop("gemma4.attention.head_count_kv")
        each = {"sliding_attention": config["num_key_value_heads"], "full_attention": heads}
        writer.add_head_count_kv([each[kind] for kind in kinds])
    writer.add_rope_dimension_count(size)
    writer.add_rope_dimension_count_swa(config["head_dim"])
    turning = int(size * model.rope["full_attention"]["partial_rotary_factor"] / 2)
    factors = np.array([1.0] * turning + [1e30] * (size // 2 - turning), dtype=np.float32)
    writer.add_tensor("rope_freqs.weight", factors)


def _mamba(model: Model, inner: int, heads: int) -> None:
    writer, find = model.writer, model.find
    writer.add_ssm_conv_kernel(find("conv_kernel", "mamba_d_conv"))
    writer.add_ssm_state_size(find("state_size", "ssm_state_size", "mamba_d_state"))
    writer.add_ssm_group_count(find("n_groups", "mamba_n_groups"))
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_time_step_rank(heads)


def _mamba2(model: Model) -> None:
    config, writer = model.config, model.writer
    for key in ("context_length", "feed_forward_length", "attention.head_count", "attention.layer_norm_epsilon"):
        writer.kv_data[0].pop(f"mamba2.{key}", None)
    for key in ("attention.key_length", "attention.value_length"):
        writer.kv_data[0].pop(f"mamba2.{key}", None)
    writer.add_context_length(1 << 20)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    _mamba(model, config["num_heads"] * config["head_dim"], config["num_heads"])


def _key_heads(model: Model, attends: list[bool]) -> None:
    arch = gguf.MODEL_ARCH_NAMES[model.kind]
    model.writer.kv_data[0].pop(f"{arch}.attention.head_count_kv", None)
    model.writer.add_head_count_kv([model.config["num_key_value_heads"] if each else 0 for each in attends])


def _granite_hybrid(model: Model) -> None:
    config = model.config
    bamba = "Bamba" in config["architectures"][0]
    if not bamba:
        _granite(model)
        model.writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    at = config.get("attn_layer_indices")
    kinds = config.get("layer_types") or []
    attends = [layer in at if at is not None else kinds[layer] == "attention" for layer in range(model.layers)]
    inner = config["mamba_expand"] * model.hidden
    _mamba(model, inner, config["mamba_n_heads"])
    _key_heads(model, attends)
    model.writer.add_rope_scaling_finetuned(bamba)
    if bamba:
        _turning(model, 0.5)


def _falcon_h1(model: Model) -> None:
    config = model.config
    _mamba(model, config["mamba_d_ssm"], config["mamba_n_heads"])


def _nemotron_h(model: Model) -> None:
    writer, config = model.writer, model.config
    kinds = config.get("layers_block_type") or config.get("layer_types")
    arch = gguf.MODEL_ARCH_NAMES[model.kind]
    moe = arch.endswith("moe")
    writer.kv_data[0].pop(f"{arch}.feed_forward_length", None)
    size = config["moe_intermediate_size"] if moe else config["intermediate_size"]
    writer.add_feed_forward_length([size if kind in ("mlp", "moe") else 0 for kind in kinds])
    _key_heads(model, [kind in ("attention", "full_attention") for kind in kinds])
    writer.kv_data[0].pop(f"{arch}.attention.layer_norm_epsilon", None)
    writer.kv_data[0].pop(f"{arch}.attention.layer_norm_rms_epsilon", None)
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    _mamba(model, config["mamba_num_heads"] * config["mamba_head_dim"], config["mamba_num_heads"])
    writer.add_rope_scaling_finetuned(False)
    if moe:
        writer.add_expert_feed_forward_length(size)
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
    else:
        for key in ("expert_count", "expert_used_count", "expert_group_count", "expert_group_used_count"):
            writer.kv_data[0].pop(f"{arch}.{key}", None)


def _delta(model: Model) -> None:
    writer, config = model.writer, model.config
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_full_attention_interval(config.get("full_attention_interval", 4))
    recurs = [kind == "linear_attention" for kind in config["layer_types"]]
    writer.add_array(f"{gguf.MODEL_ARCH_NAMES[model.kind]}.attention.recurrent_layers", recurs)
    _turning(model, 0.25)
    if "moe_intermediate_size" in config:
        _shared_expert(model)


def _lfm2(model: Model) -> None:
    writer, config = model.writer, model.config
    _key_heads(model, [kind != "conv" for kind in config["layer_types"]])
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    inner = next(values for name, values in model.tensors.items() if name.endswith("feed_forward.w1.weight"))
    writer.kv_data[0].pop("lfm2.feed_forward_length", None)
    writer.add_feed_forward_length(inner.shape[0])


def _four_times(model: Model) -> None:
    arch = gguf.MODEL_ARCH_NAMES[model.kind]
    model.writer.kv_data[0].pop(f"{arch}.feed_forward_length", None)
    model.writer.add_feed_forward_length(4 * model.hidden)


def _starcoder(model: Model) -> None:
    _four_times(model)
    model.writer.add_head_count_kv(1)


def _neox(model: Model) -> None:
    model.writer.add_rope_dimension_count(int(model.config["rotary_pct"] * model.head_size))
    model.writer.add_parallel_residual(model.config["use_parallel_residual"])


def _bloom(model: Model) -> None:
    _four_times(model)
    model.writer.add_context_length(2048)


def _mpt(model: Model) -> None:
    _four_times(model)
    model.writer.add_layer_norm_eps(1e-5)
    model.writer.add_max_alibi_bias(float(model.config["attn_config"]["alibi_bias_max"]))


def _falcon(model: Model) -> None:
    _four_times(model)
    model.writer.add_context_length(2048)
    model.writer.add_tensor_data_layout("jploski")
    config = model.config
    model.writer.add_head_count_kv(config["num_kv_heads"] if config["new_decoder_architecture"] else 1)


KEYS: dict[str, Callable[[Model], None]] = {
    "llama": _turning,
    "qwen2moe": _shared_expert,
    "qwen3moe": _expert_size,
    "olmo2": _pattern,
    "gpt-oss": _gpt_oss,
    "granite": _granite,
    "granitemoe": _granite,
    "command-r": _cohere,
    "cohere2": _cohere2,
    "ernie4_5-moe": _ernie_moe,
    "exaone4": _pattern,
    "minimax-m2": _minimax,
    "glm4": lambda model: _turning(model, 0.5),
    "glm4moe": _glm_moe,
    "deepseek2": _deepseek,
    "mistral3": _ministral,
    "llama4": _llama4,
    "stablelm": _stablelm,
    "nemotron": _nemotron,
    "arcee": _turning,
    "phi2": _phi2,
    "phimoe": _phimoe,
    "gemma3n": _gemma3n,
    "gemma4": _gemma4,
    "mamba2": _mamba2,
    "granitehybrid": _granite_hybrid,
    "falcon-h1": _falcon_h1,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    "qwen3next": _delta,
    "qwen35": _delta,
    "qwen35moe": _delta,
    "lfm2": _lfm2,
    "gpt2": _four_times,
    "starcoder": _starcoder,
    "gptneox": _neox,
    "bloom": _bloom,
    "mpt": _mpt,
    "falcon": _falcon,
}
