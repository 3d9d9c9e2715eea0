"""Reads DeepSeek-V2 and V3, and models of the same blocks (Moonlight, Kimi K2): keys and values from a narrow latent,
experts in groups, and experts that every token goes to. KV memory holds the latent.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from headrace.models.config_json import (
    MAX_EXPERTS,
    MAX_HEAD_SIZE,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_INTERMEDIATE,
    MAX_LAYERS,
    ConfigJson,
)
from headrace.models.families.decoder import (
    EXPERT_NAMES,
    LLAMA_NAMES,
    TensorNames,
    decoder_prefix,
    decoder_spec,
    expert_groups,
    fuse_experts,
    layer_count,
    named_sources,
)
from headrace.models.families.family import TensorPart, TensorSources, architecture_of, products_by_head
from headrace.models.rope import read_rope
from headrace.models.spec import ExpertSpec, LatentSpec, LayerSpec, ModelSpec

architectures: tuple[str, ...] = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
ignored: tuple[str, ...] = (
    # The layers that predict further tokens are not used.
    "num_nextn_predict_layers",
    "num_mtp_layers",
    # Of training, and the sizes of a head again.
    "aux_loss_alpha",
    "seq_aux",
    "ep_size",
    "head_dim",
    "qk_head_dim",
)

_WIDEST_KEY: Final = 1024  # dims, in the core's KV memory; wider latents are expanded before they are kept

_NAMES: TensorNames = {
    **LLAMA_NAMES,
    **EXPERT_NAMES,
    "attn.q_latent_norm": ("self_attn.q_a_layernorm",),
    "attn.q_up": ("self_attn.q_b_proj",),
    "attn.kv_latent_norm": ("self_attn.kv_a_layernorm",),
    "attn.kv_up": ("self_attn.kv_b_proj",),
    "attn.q_to_latent": ("self_attn.kv_b_proj",),
    "attn.v_from_latent": ("self_attn.kv_b_proj",),
    "mlp.router_bias": ("mlp.gate.e_score_correction_bias",),
    "mlp.shared.gate_up": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "mlp.shared.down": ("mlp.shared_experts.down_proj",),
}


def spec(config: ConfigJson) -> ModelSpec:
    architecture = architecture_of(config)
    third = architecture == "DeepseekV3ForCausalLM"
    config.refuse("rope_interleave", "the rope must rotate neighbouring dims", unless=(True,))
    config.refuse("attention_bias", "projections must have no biases", unless=(False,))
    config.refuse("mlp_bias", "projections must have no biases", unless=(False,))
    config.refuse("moe_layer_freq", "all layers after the dense ones must be mixtures", unless=(1,))
    rank = config.size("kv_lora_rank", maximum=MAX_HIDDEN, default=512)
    turning = config.size("qk_rope_head_dim", maximum=MAX_HEAD_SIZE, default=64)
    latent = LatentSpec(
        rank=rank,
        query_rank=_query_rank(config),
        turning=turning,
        value_size=config.size("v_head_dim", maximum=MAX_HEAD_SIZE, default=128),
        kept=turning + rank <= _WIDEST_KEY,
    )
    size = latent.turning + config.size("qk_nope_head_dim", maximum=MAX_HEAD_SIZE, default=128)
    if latent.value_size > size:
        raise config.mismatch("v_head_dim", f"at most the dims of a key ({size})")
    count = layer_count(config)
    dense = config.size("first_k_dense_replace", minimum=0, maximum=MAX_LAYERS, default=3 if third else 0)
    heads = config.size("num_attention_heads", maximum=MAX_HEADS)
    config.refuse("num_key_value_heads", "every head must have its own keys", unless=(heads,))
    plain = decoder_spec(
        config.with_value("num_key_value_heads", heads),
        family="deepseek",
        architecture=architecture,
        layers=tuple(LayerSpec(experts=index >= dense) for index in range(count)),
        ropes=(read_rope(config, latent.turning),),
        head_size=size,
        norm_eps=1e-6,
        experts=_experts(config, third=third) if dense < count else None,
    )
    return msgspec.structs.replace(plain, latent=latent, attention_scale=size**-0.5 * _stretch(config) ** 2)


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    assert spec.latent is not None
    prefix = decoder_prefix(names)
    found = dict(named_sources(spec, _NAMES, names, prefix=prefix))
    rank, turning = spec.latent.rank, spec.latent.turning
    for index in range(len(spec.layers)):
        stem, attn = f"{prefix}layers.{index}.self_attn", f"layers.{index}.attn"
        latent = TensorPart(f"{stem}.kv_a_proj_with_mqa.weight", pairs=(turning + rank, turning), pairs_last=True)
        name = f"{stem}.{'q_b_proj' if spec.latent.query_rank else 'q_proj'}.weight"
        heads = TensorPart(name, pairs=(spec.head_size, turning), pairs_last=True)
        if spec.latent.query_rank:
            found[f"{attn}.qkv"] = (TensorPart(f"{stem}.q_a_proj.weight"), latent)
            found[f"{attn}.q_up"] = (heads,)
        else:
            found[f"{attn}.qkv"] = (heads, latent)
        if spec.latent.kept:
            by_head = products_by_head(spec, f"{stem}.kv_b_proj.weight")
            found |= {f"{attn}.{leaf}": parts for leaf, parts in by_head.items()}
    return fuse_experts(found, spec, names, ("layers.{layer}.mlp",))


def _query_rank(config: ConfigJson) -> int:
    if "q_lora_rank" in config.names() and not config.has("q_lora_rank"):
        return 0
    return config.size("q_lora_rank", maximum=MAX_HIDDEN, default=1536)


def _stretch(config: ConfigJson) -> float:
    """Return what a stretched rope multiplies queries and keys by, beside its own scale."""
    parameters = config.optional_sub("rope_scaling") or config.optional_sub("rope_parameters")
    if parameters is None:
        return 1.0
    kind = parameters.text("rope_type", default=parameters.text("type", default="default"))
    if kind == "default":
        return 1.0
    over_all = parameters.number("mscale_all_dim", default=0.0) if parameters.has("mscale_all_dim") else 0.0
    factor = parameters.positive("factor", default=1.0)
    return 0.1 * over_all * math.log(factor) + 1.0 if over_all and factor > 1 else 1.0


def _experts(config: ConfigJson, *, third: bool) -> ExpertSpec:
    scoring = "sigmoid" if third else "softmax"
    config.refuse("scoring_func", f"scores must be turned into weights by {scoring}", unless=(scoring,))
    grouped = third or config.text("topk_method", default="greedy") == "group_limited_greedy"
    methods = ("noaux_tc",) if third else ("greedy", "group_limited_greedy")
    config.refuse("topk_method", f"it must be {' or '.join(methods)}", unless=methods)
    if not third:
        config.refuse("norm_topk_prob", "weights must not be rescaled", unless=(False,))
    count = config.size("n_routed_experts", maximum=MAX_EXPERTS, default=256 if third else 64)
    size = config.size("moe_intermediate_size", maximum=MAX_INTERMEDIATE, default=2048 if third else 1407)
    shared = config.optional_size("n_shared_experts", minimum=0, maximum=MAX_EXPERTS, default=1 if third else 2) or 0
    top_k = config.size("num_experts_per_tok", maximum=count, default=8 if third else None)
    groups, top_groups = expert_groups(config, count, top_k, default=(8, 4) if third else (1, 1))
    return ExpertSpec(
        count=count,
        top_k=top_k,
        intermediate_size=size,
        normalise=third and config.flag("norm_topk_prob", default=True),
        scoring=scoring,
        correction=third,
        scale=config.positive("routed_scaling_factor", default=2.5 if third else 1.0),
        shared_size=shared * size,
        groups=groups if grouped else 1,
        top_groups=top_groups if grouped else 1,
        group_best=2 if third else 1,
    )
