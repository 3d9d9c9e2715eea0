"""Reads gpt-oss: a sink beside the tokens of each head, windows in every other layer, and experts with biases whose
gates and values are clamped and lie by turns in the files, in MXFP4 or as [inputs, outputs]."""

from __future__ import annotations

import msgspec

from headrace.models.config_json import MAX_EXPERTS, ConfigJson
from headrace.models.families.decoder import (
    LLAMA_NAMES,
    TensorNames,
    decoder_prefix,
    decoder_spec,
    expert_spec,
    head_size,
    layer_count,
    layer_windows,
    named_sources,
    sliding_window,
)
from headrace.models.families.family import TensorPart, TensorSources, architecture_of
from headrace.models.rope import read_rope
from headrace.models.spec import LayerSpec, ModelSpec

architectures: tuple[str, ...] = ("GptOssForCausalLM",)
ignored: tuple[str, ...] = ("initial_context_length",)  # the rope's original context again

_NAMES: TensorNames = {
    **LLAMA_NAMES,
    "mlp.router": ("mlp.router",),
    "mlp.experts.gate_up": ("mlp.experts.{expert}.gate_up_proj",),
    "mlp.experts.down": ("mlp.experts.{expert}.down_proj",),
}
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def spec(config: ConfigJson) -> ModelSpec:
    if not config.has("rope_scaling") and not config.has("rope_parameters"):
        config = config.with_value("rope_parameters", _ROPE)
    size, count = head_size(config, default=64), layer_count(config)
    windows = layer_windows(
        config, sliding_window(config, default=128), tuple(index % 2 == 0 for index in range(count))
    )
    experts = expert_spec(config, size_key="intermediate_size", normalise=True)
    chosen = config.optional_size("experts_per_token", maximum=MAX_EXPERTS)
    if chosen not in (None, experts.top_k):
        raise config.mismatch("experts_per_token", f"num_experts_per_tok ({experts.top_k})")
    config.refuse("hidden_act", "gates must be SiLU", unless=("silu",))
    plain = decoder_spec(
        config,
        family="gpt-oss",
        architecture=architecture_of(config),
        layers=tuple(LayerSpec(window=window, experts=True) for window in windows),
        ropes=(read_rope(config, size, default_theta=150_000.0),),
        head_size=size,
        norm_eps=1e-5,
        experts=msgspec.structs.replace(experts, bias=True),
    )
    bias = config.flag("attention_bias", default=True)
    return msgspec.structs.replace(
        plain,
        activation="clamped_silu",
        gate_slope=config.positive("swiglu_alpha", default=1.702),
        gate_limit=config.positive("swiglu_limit", default=7.0),
        qkv_bias=bias,
        o_bias=bias,
        sinks=True,
    )


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    prefix = decoder_prefix(names)
    found = named_sources(spec, _NAMES, names, prefix=prefix)
    return {
        name: (_expert_part(spec, prefix, name, parts[0], names),) if ".experts." in name else parts
        for name, parts in found.items()
    }


def _expert_part(spec: ModelSpec, prefix: str, name: str, part: TensorPart, names: frozenset[str]) -> TensorPart:
    """Return where an expert's tensor is. Gates and values are rows by turns."""
    assert spec.experts is not None
    _, layer, _, _, expert, leaf = name.removesuffix(".bias").split(".")
    rows = 2 * spec.experts.intermediate_size
    turns = (rows, rows) if leaf == "gate_up" else None
    if part.name in names:  # one of MXFP4
        return TensorPart(part.name, pairs=turns)
    whole = f"{prefix}layers.{layer}.mlp.experts.{leaf}_proj"
    if name.endswith(".bias"):
        return TensorPart(f"{whole}_bias", int(expert), pairs=turns)
    return TensorPart(whole, int(expert), pairs=turns, transposed=True)
