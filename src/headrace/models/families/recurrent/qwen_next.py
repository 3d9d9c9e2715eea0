"""Reads Qwen3-Next and the text part of Qwen3.5: three layers of gated delta net to one of attention with gated
outputs, and an MLP or a mixture of experts after each."""

from __future__ import annotations

import msgspec

from headrace.models.config_json import MAX_HEAD_SIZE, MAX_HEADS, MAX_LAYERS, ConfigJson
from headrace.models.families.decoder import (
    TensorNames,
    decoder_prefix,
    decoder_spec,
    fuse_experts,
    head_size,
    layer_count,
    named_sources,
)
from headrace.models.families.family import TensorPart, TensorSources, architecture_of
from headrace.models.families.qwen import QWEN_NAMES, expert_layers, shared_experts
from headrace.models.families.recurrent.recurrent_layers import MOST_TAPS, flat_convolutions
from headrace.models.rope import read_rope
from headrace.models.spec import LayerSpec, ModelSpec, RecurrentSpec

architectures: tuple[str, ...] = ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
ignored: tuple[str, ...] = (
    "intermediate_size",  # a mixture may have no dense layer
    # The layers that predict further tokens are not used.
    "num_nextn_predict_layers",
    "num_mtp_layers",
    "mtp_num_hidden_layers",
    "mtp_use_dedicated_embeddings",
)

_NAMES: TensorNames = {
    **QWEN_NAMES,
    "recurrent.conv": ("linear_attn.conv1d",),
    "recurrent.step_bias": ("linear_attn.dt_bias",),
    "recurrent.decay": ("linear_attn.A_log",),
    "recurrent.norm": ("linear_attn.norm",),
    "recurrent.out": ("linear_attn.out_proj",),
}
_NEXT_NAMES: TensorNames = {**_NAMES, "recurrent.in": ("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba")}
_SPLIT_NAMES: TensorNames = {
    **_NAMES,
    "recurrent.in": tuple(f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a")),
}


def spec(config: ConfigJson) -> ModelSpec:
    architecture = architecture_of(config)
    config = config.with_defaults({"partial_rotary_factor": 0.25})
    config.refuse("use_sliding_window", "all layers of attention must see the whole context", unless=(False,))
    if (rope := config.optional_sub("rope_parameters") or config.optional_sub("rope_scaling")) is not None:
        # A rope for images is in sections, and in text all of them have the same positions.
        rope.optional_sizes("mrope_section", minimum=0, maximum=MAX_HEAD_SIZE, max_items=3)
        rope.flag("mrope_interleaved", default=True)
    size = head_size(config, default=256)
    attends = _attends(config)
    mixture = architecture != "Qwen3_5ForCausalLM"
    mixed = expert_layers(config) if mixture else (LayerSpec(),) * len(attends)
    layers = tuple(
        msgspec.structs.replace(layer, mixer="attention" if each else "recurrent")
        for layer, each in zip(mixed, attends, strict=True)
    )
    plain = decoder_spec(
        config,
        family="qwen",
        architecture=architecture,
        layers=layers,
        ropes=(read_rope(config, size, partial=True),),
        head_size=size,
        norm_eps=1e-6,
        experts=shared_experts(config) if any(layer.experts for layer in layers) else None,
    )
    bias = config.flag("attention_bias", default=False)
    return msgspec.structs.replace(
        plain,
        norm_offset=1.0,
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        attention_gate=True,
        recurrent=_delta_net(config, plain.norm_eps),
    )


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    table = _NEXT_NAMES if spec.architecture == "Qwen3NextForCausalLM" else _SPLIT_NAMES
    found = flat_convolutions(named_sources(spec, table, names, prefix=decoder_prefix(names)))
    found = {name: _parts(spec, name, parts) for name, parts in found.items()}
    return fuse_experts(found, spec, names, ("layers.{layer}.mlp",))


def _parts(spec: ModelSpec, name: str, parts: tuple[TensorPart, ...]) -> tuple[TensorPart, ...]:
    """Take queries and gates, which the files have head by head, apart; and so what a delta net reads."""
    if ".attn.qkv" in name:
        queries, keys, values = parts
        sizes = (spec.head_size, spec.head_size)
        return (
            TensorPart(queries.name, split=(sizes, 0)),
            keys,
            values,
            TensorPart(queries.name, split=(sizes, 1)),
        )
    delta = spec.recurrent
    if not name.endswith(".recurrent.in") or len(parts) != 2 or delta is None:
        return parts
    mixed, steps = parts
    each = delta.heads // delta.groups
    sizes = (delta.state_size, delta.state_size, each * delta.head_size, each * delta.head_size)
    return (
        *(TensorPart(mixed.name, split=(sizes, place)) for place in range(4)),
        *(TensorPart(steps.name, split=((each, each), place)) for place in range(2)),
    )


def _attends(config: ConfigJson) -> tuple[bool, ...]:
    count = layer_count(config)
    interval = config.size("full_attention_interval", maximum=MAX_LAYERS, default=4)
    types = config.optional_names("layer_types", ("full_attention", "linear_attention"), count)
    if types is None:
        return tuple((index + 1) % interval == 0 for index in range(count))
    return tuple(kind == "full_attention" for kind in types)


def _delta_net(config: ConfigJson, eps: float) -> RecurrentSpec:
    heads = config.size("linear_num_value_heads", maximum=MAX_HEADS, default=32)
    groups = config.size("linear_num_key_heads", maximum=heads, default=16)
    if heads % groups:
        raise config.mismatch("linear_num_key_heads", f"a divisor of linear_num_value_heads ({heads})")
    config.refuse("hidden_act", "a delta net has no other activation", unless=("silu", "swish"))
    return RecurrentSpec(
        kind="delta",
        taps=config.size("linear_conv_kernel_dim", maximum=MOST_TAPS, default=4),
        heads=heads,
        groups=groups,
        head_size=config.size("linear_value_head_dim", maximum=MAX_HEAD_SIZE, default=128),
        state_size=config.size("linear_key_head_dim", maximum=MAX_HEAD_SIZE, default=128),
        norm_groups=heads,
        shared_norm=True,
        norm_first=True,
        eps=eps,
    )
