"""Reads the text part of Llama 4: attention in chunks, every fourth layer without positions and with queries that grow,
and experts whose weight multiplies what they read."""

from __future__ import annotations

import msgspec

from headrace.models.config_json import MAX_CONTEXT, MAX_INTERMEDIATE, MAX_LAYERS, ConfigJson
from headrace.models.families.decoder import (
    LLAMA_NAMES,
    TensorNames,
    decoder_spec,
    expert_spec,
    find_prefix,
    head_size,
    layer_count,
    named_sources,
    paired_sources,
    rope_layers,
)
from headrace.models.families.family import TensorPart, TensorSources, architecture_of
from headrace.models.rope import read_rope
from headrace.models.spec import LayerSpec, ModelSpec

architectures: tuple[str, ...] = ("Llama4ForCausalLM", "Llama4ForConditionalGeneration")
ignored: tuple[str, ...] = (
    "vision_config",  # the image part is not loaded
    "no_rope_layer_interval",
    "for_llm_compressor",
)

_NAMES: TensorNames = {
    **LLAMA_NAMES,
    "mlp.gate_up": ("feed_forward.gate_proj", "feed_forward.up_proj"),
    "mlp.down": ("feed_forward.down_proj",),
    "mlp.router": ("feed_forward.router",),
    "mlp.experts.gate_up": ("feed_forward.experts.{expert}.gate_up_proj",),
    "mlp.experts.down": ("feed_forward.experts.{expert}.down_proj",),
    "mlp.shared.gate_up": ("feed_forward.shared_expert.gate_proj", "feed_forward.shared_expert.up_proj"),
    "mlp.shared.down": ("feed_forward.shared_expert.down_proj",),
}
_PREFIXES = ("model.", "", "language_model.model.", "model.language_model.")


def spec(config: ConfigJson) -> ModelSpec:
    architecture = architecture_of(config)
    if architecture == "Llama4ForConditionalGeneration":
        config = config.sub("text_config")
        config.refuse("quantization_config", "it belongs beside text_config, not into it")
    config.refuse("attention_bias", "projections must have no biases", unless=(False,))
    layers = _layers(config)
    dense = any(not layer.experts for layer in layers)
    size = head_size(config, default=128)
    inner = config.size("intermediate_size_mlp", maximum=MAX_INTERMEDIATE, default=16384) if dense else 0
    config = config.with_defaults({"num_experts_per_tok": 1})
    experts = expert_spec(config, size_key="intermediate_size", normalise=False)
    rope = read_rope(config, size, default_theta=500_000.0)
    if rope.scale != 1.0:
        raise config.error("rope_scaling", "The rope must not change the size of queries and keys.")
    plain = decoder_spec(
        config.with_value("intermediate_size", inner or 1),
        family="llama4",
        architecture=architecture,
        layers=layers,
        ropes=(rope,),
        head_size=size,
        norm_eps=1e-5,
        experts=msgspec.structs.replace(
            experts, scoring="sigmoid", scales_inputs=True, shared_size=experts.intermediate_size
        ),
    )
    return msgspec.structs.replace(
        plain,
        # After the rope in the reference, which does not change the size of a head's vector.
        qk_norm="unit" if config.flag("use_qk_norm", default=True) else "none",
        query_growth=config.number("attn_scale", default=0.1),
        growth_tokens=config.size("floor_scale", maximum=MAX_CONTEXT, default=8192),
    )


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    prefix = find_prefix(names, _PREFIXES, "embed_tokens.weight")
    head = find_prefix(names, ("", "language_model."), "lm_head.weight")
    found = dict(paired_sources(named_sources(spec, _NAMES, names, prefix=prefix, head=f"{head}lm_head"), spec))
    for name, parts in found.items():
        if ".experts." not in name or parts[0].name in names:
            continue
        _, layer, _, _, expert, leaf = name.split(".")
        whole = f"{prefix}layers.{layer}.feed_forward.experts.{leaf}_proj"
        found[name] = (TensorPart(whole, int(expert), transposed=True),)
    return found


def _layers(config: ConfigJson) -> tuple[LayerSpec, ...]:
    count = layer_count(config)
    has_rope = rope_layers(config, count)
    chunk = config.optional_size("attention_chunk_size", maximum=MAX_CONTEXT, default=8192)
    types = config.optional_names("layer_types", ("chunked_attention", "full_attention"), count)
    chunked = has_rope if types is None else tuple(kind == "chunked_attention" for kind in types)
    step = config.size("interleave_moe_layer_step", maximum=MAX_LAYERS, default=1)
    mixtures = config.optional_sizes("moe_layers", minimum=0, maximum=MAX_LAYERS, max_items=MAX_LAYERS)
    if mixtures is None:
        mixtures = tuple(range(step - 1, count, step))
    grows = config.flag("attn_temperature_tuning", default=True)
    return tuple(
        LayerSpec(
            chunk=chunk or 0 if chunked[index] else 0,
            rope=0 if has_rope[index] else None,
            qk_norm=has_rope[index],
            grows=grows and not has_rope[index],
            experts=index in mixtures,
        )
        for index in range(count)
    )
