"""Reads StableLM 2 and StableLM Zephyr: layer norms, and a rope over a quarter of each head. In the 12B model attention
and MLP are parallel, and each head has a norm of its own."""

from __future__ import annotations

import msgspec

from headrace.models.config_json import ConfigJson
from headrace.models.families.decoder import (
    LLAMA_NAMES,
    decoder_prefix,
    decoder_spec,
    head_size,
    layer_count,
    named_sources,
)
from headrace.models.families.family import TensorPart, TensorSources, architecture_of
from headrace.models.rope import read_rope
from headrace.models.spec import LayerSpec, ModelSpec

architectures: tuple[str, ...] = ("StableLmForCausalLM",)
ignored: tuple[str, ...] = ()


def spec(config: ConfigJson) -> ModelSpec:
    config = config.with_defaults({"partial_rotary_factor": 0.25})
    size = head_size(config)
    plain = decoder_spec(
        config,
        family="stablelm",
        architecture=architecture_of(config),
        layers=(LayerSpec(),) * layer_count(config),
        ropes=(read_rope(config, size, partial=True),),
        head_size=size,
        norm_eps=1e-5,
    )
    parallel = config.flag("use_parallel_residual", default=False)
    return msgspec.structs.replace(
        plain,
        norm="layer",
        norm_eps=config.positive("layer_norm_eps", maximum=1.0, default=1e-5),
        parallel=parallel,
        shared_norm=parallel,
        qk_norm="each_head" if config.flag("qk_layernorm", default=False) else "none",
        qkv_bias=config.flag("use_qkv_bias", default=False),
    )


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    prefix = decoder_prefix(names)
    found = named_sources(spec, LLAMA_NAMES, names, prefix=prefix)
    if spec.qk_norm == "none":
        return found
    norms: dict[str, tuple[TensorPart, ...]] = {}
    for index in range(len(spec.layers)):
        for kind, heads in (("q", spec.heads), ("k", spec.kv_heads)):
            stem = f"{prefix}layers.{index}.self_attn.{kind}_layernorm.norms"
            norms[f"layers.{index}.attn.{kind}_norm"] = tuple(TensorPart(f"{stem}.{h}.weight") for h in range(heads))
    return {**found, **norms}
