"""Reads GLM-4: a rope that rotates neighbouring dims, over half of each head, and a fused gate. GLM-4-0414 also
normalises what each sublayer adds. GLM-4.5 and 4.6 are mixtures whose rope rotates halves, with an expert that every
token goes to."""

from __future__ import annotations

import msgspec

from headrace.models.config_json import MAX_EXPERTS, MAX_INTERMEDIATE, MAX_LAYERS, ConfigJson
from headrace.models.families.decoder import (
    EXPERT_NAMES,
    LLAMA_NAMES,
    TensorNames,
    decoder_prefix,
    decoder_spec,
    expert_groups,
    fuse_experts,
    head_size,
    layer_count,
    named_sources,
    paired_sources,
)
from headrace.models.families.family import TensorSources, architecture_of
from headrace.models.rope import read_rope
from headrace.models.spec import ExpertSpec, LayerSpec, ModelSpec

architectures: tuple[str, ...] = ("GlmForCausalLM", "Glm4ForCausalLM", "Glm4MoeForCausalLM")
# The layers that predict further tokens are not used.
ignored: tuple[str, ...] = ("num_nextn_predict_layers", "num_mtp_layers")

_NAMES: TensorNames = {
    **LLAMA_NAMES,
    "mlp.gate_up": ("mlp.gate_up_proj",),
    "attn.out_norm": ("post_self_attn_layernorm",),
    "mlp.out_norm": ("post_mlp_layernorm",),
}
_MIXTURE_NAMES: TensorNames = {
    **LLAMA_NAMES,
    **EXPERT_NAMES,
    "mlp.router_bias": ("mlp.gate.e_score_correction_bias",),
    "mlp.shared.gate_up": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "mlp.shared.down": ("mlp.shared_experts.down_proj",),
}


def spec(config: ConfigJson) -> ModelSpec:
    architecture = architecture_of(config)
    mixture = architecture == "Glm4MoeForCausalLM"
    config = config.with_defaults({"partial_rotary_factor": 0.5})
    size = head_size(config, default=None if mixture else 128)
    count = layer_count(config)
    dense = config.size("first_k_dense_replace", minimum=0, maximum=MAX_LAYERS, default=1) if mixture else count
    plain = decoder_spec(
        config,
        family="glm",
        architecture=architecture,
        layers=tuple(LayerSpec(experts=index >= dense) for index in range(count)),
        ropes=(read_rope(config, size, partial=True),),
        head_size=size,
        norm_eps=1e-5 if mixture else 1.5625e-07,
        experts=_experts(config) if mixture else None,
    )
    return msgspec.structs.replace(
        plain,
        out_norm=architecture == "Glm4ForCausalLM",
        qkv_bias=config.flag("attention_bias", default=not mixture),
        qk_norm="head" if mixture and config.flag("use_qk_norm", default=False) else "none",
    )


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    prefix = decoder_prefix(names)
    if spec.experts is None:
        return paired_sources(named_sources(spec, _NAMES, names, prefix=prefix), spec)
    found = named_sources(spec, _MIXTURE_NAMES, names, prefix=prefix)
    return fuse_experts(found, spec, names, ("layers.{layer}.mlp",))


def _experts(config: ConfigJson) -> ExpertSpec:
    count = config.size("n_routed_experts", maximum=MAX_EXPERTS, default=128)
    size = config.size("moe_intermediate_size", maximum=MAX_INTERMEDIATE, default=1408)
    shared = config.size("n_shared_experts", minimum=0, maximum=MAX_EXPERTS, default=1)
    top_k = config.size("num_experts_per_tok", maximum=count, default=8)
    groups, top_groups = expert_groups(config, count, top_k, default=(1, 1))
    return ExpertSpec(
        count=count,
        top_k=top_k,
        intermediate_size=size,
        normalise=config.flag("norm_topk_prob", default=True),
        scoring="sigmoid",
        correction=True,
        scale=config.positive("routed_scaling_factor", default=1.0),
        shared_size=shared * size,
        groups=groups,
        top_groups=top_groups,
        group_best=2,
    )
