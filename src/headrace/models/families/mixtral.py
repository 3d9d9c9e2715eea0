"""Reads Mixtral: a mixture of experts in every layer."""

from __future__ import annotations

from headrace.models.config_json import ConfigJson
from headrace.models.families.decoder import (
    LLAMA_NAMES,
    TensorNames,
    decoder_prefix,
    decoder_spec,
    expert_spec,
    fuse_experts,
    head_size,
    layer_count,
    named_sources,
    sliding_window,
)
from headrace.models.families.family import TensorSources, architecture_of
from headrace.models.rope import read_rope
from headrace.models.spec import LayerSpec, ModelSpec

architectures: tuple[str, ...] = ("MixtralForCausalLM",)
ignored: tuple[str, ...] = ()

_BLOCKS = ("layers.{layer}.block_sparse_moe", "layers.{layer}.mlp")


def spec(config: ConfigJson) -> ModelSpec:
    size = head_size(config)
    layer = LayerSpec(window=sliding_window(config) or 0, experts=True)
    return decoder_spec(
        config,
        family="mixtral",
        architecture=architecture_of(config),
        layers=(layer,) * layer_count(config),
        ropes=(read_rope(config, size, default_theta=1_000_000.0),),
        head_size=size,
        norm_eps=1e-5,
        experts=expert_spec(config, size_key="intermediate_size", normalise=True),
    )


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    block = "mlp" if f"{decoder_prefix(names)}layers.0.mlp.gate.weight" in names else "block_sparse_moe"
    table: TensorNames = {
        **LLAMA_NAMES,
        "mlp.router": (f"{block}.gate",),
        "mlp.experts.gate_up": (f"{block}.experts.{{expert}}.w1", f"{block}.experts.{{expert}}.w3"),
        "mlp.experts.down": (f"{block}.experts.{{expert}}.w2",),
    }
    return fuse_experts(named_sources(spec, table, names, prefix=decoder_prefix(names)), spec, names, _BLOCKS)
