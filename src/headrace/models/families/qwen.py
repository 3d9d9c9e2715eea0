"""Reads Qwen2 and Qwen2.5 (biases on q, k and v), Qwen3 (normalised heads), Qwen2-MoE (an expert that every token goes
to, beside those that are chosen) and Qwen3-MoE."""

from __future__ import annotations

import msgspec

from headrace.models.config_json import MAX_INTERMEDIATE, MAX_LAYERS, ConfigJson
from headrace.models.families.decoder import (
    EXPERT_NAMES,
    LLAMA_NAMES,
    TensorNames,
    decoder_prefix,
    decoder_spec,
    expert_spec,
    fuse_experts,
    gated_sliding_window,
    head_size,
    layer_count,
    layer_windows,
    named_sources,
)
from headrace.models.families.family import TensorSources, architecture_of
from headrace.models.rope import read_rope
from headrace.models.spec import ExpertSpec, LayerSpec, ModelSpec

architectures: tuple[str, ...] = (
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
# Windows are off unless `use_sliding_window` is on; a Qwen2 always has biases; a mixture may have no dense layer.
ignored: tuple[str, ...] = ("sliding_window", "max_window_layers", "attention_bias", "intermediate_size")

QWEN_NAMES: TensorNames = {
    **LLAMA_NAMES,
    **EXPERT_NAMES,
    "mlp.shared.gate_up": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "mlp.shared.down": ("mlp.shared_expert.down_proj",),
    "mlp.shared_gate": ("mlp.shared_expert_gate",),
}


def spec(config: ConfigJson) -> ModelSpec:
    architecture = architecture_of(config)
    size = head_size(config, default=128 if architecture == "Qwen3ForCausalLM" else None)
    layers = expert_layers(config) if "Moe" in architecture else dense_layers(config)
    mixed = any(layer.experts for layer in layers)
    plain = decoder_spec(
        config,
        family="qwen",
        architecture=architecture,
        layers=layers,
        ropes=(read_rope(config, size),),
        head_size=size,
        norm_eps=1e-6,
        experts=_experts(config) if mixed else None,
    )
    if architecture == "Qwen2ForCausalLM":
        return msgspec.structs.replace(plain, qkv_bias=True)
    if architecture == "Qwen2MoeForCausalLM":
        config.refuse("use_sliding_window", "all layers must see the whole context", unless=(False,))
        layer_windows(config, None, (False,) * len(layers))  # checks layer_types
        return msgspec.structs.replace(plain, qkv_bias=config.flag("qkv_bias", default=True))
    bias = config.flag("attention_bias", default=False)
    return msgspec.structs.replace(plain, qk_norm="head", qkv_bias=bias, o_bias=bias)


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    table = named_sources(spec, QWEN_NAMES, names, prefix=decoder_prefix(names))
    return fuse_experts(table, spec, names, ("layers.{layer}.mlp",))


def dense_layers(config: ConfigJson) -> tuple[LayerSpec, ...]:
    """Return the layers of a model without a mixture."""
    count = layer_count(config)
    window = gated_sliding_window(config, default=4096)
    full = config.size("max_window_layers", minimum=0, maximum=MAX_LAYERS, default=28)
    default = tuple(window is not None and index >= full for index in range(count))
    return tuple(LayerSpec(window=window) for window in layer_windows(config, window, default))


def expert_layers(config: ConfigJson) -> tuple[LayerSpec, ...]:
    """Return the layers of a mixture, some of which may be dense."""
    count = layer_count(config)
    window = gated_sliding_window(config, default=4096) or 0  # of every layer
    dense = frozenset(
        config.optional_sizes("mlp_only_layers", minimum=0, maximum=MAX_LAYERS, max_items=MAX_LAYERS) or ()
    )
    step = config.size("decoder_sparse_step", maximum=MAX_LAYERS, default=1)
    return tuple(
        LayerSpec(window=window, experts=index not in dense and (index + 1) % step == 0) for index in range(count)
    )


def _experts(config: ConfigJson) -> ExpertSpec:
    if architecture_of(config) == "Qwen2MoeForCausalLM":
        return shared_experts(config, normalise=False, shared=5632)
    return _chosen(config, normalise=False)


def shared_experts(config: ConfigJson, *, normalise: bool = True, shared: int = 512) -> ExpertSpec:
    """Return a mixture with an expert that every token goes to; `normalise` and `shared` are defaults."""
    size = config.size("shared_expert_intermediate_size", maximum=MAX_INTERMEDIATE, default=shared)
    return msgspec.structs.replace(_chosen(config, normalise=normalise), shared_size=size, shared_gate=True)


def _chosen(config: ConfigJson, *, normalise: bool) -> ExpertSpec:
    return expert_spec(
        config, size_key="moe_intermediate_size", normalise=config.flag("norm_topk_prob", default=normalise)
    )
