"""Reads Bamba: Mamba-2 layers, a few layers of attention among them, and an MLP after each."""

from __future__ import annotations

import msgspec

from headrace.models.config_json import ConfigJson
from headrace.models.families.decoder import (
    LLAMA_NAMES,
    TensorNames,
    decoder_prefix,
    decoder_spec,
    head_size,
    layer_count,
    named_sources,
)
from headrace.models.families.family import TensorSources, architecture_of
from headrace.models.families.recurrent.recurrent_layers import (
    MAMBA_IGNORED,
    MAMBA_NAMES,
    flat_convolutions,
    hybrid_mamba_layers,
    listed_mixers,
    named_mixers,
)
from headrace.models.rope import read_rope
from headrace.models.spec import LayerSpec, ModelSpec

architectures: tuple[str, ...] = ("BambaForCausalLM",)
ignored: tuple[str, ...] = MAMBA_IGNORED

BAMBA_NAMES: TensorNames = {
    **LLAMA_NAMES,
    **{name: (f"mamba.{stem}",) for name, stem in MAMBA_NAMES.items()},
    "norm": ("final_layernorm",),
    "mlp.norm": ("pre_ff_layernorm",),
    "mlp.gate_up": ("feed_forward.gate_proj", "feed_forward.up_proj"),
    "mlp.down": ("feed_forward.down_proj",),
}


def spec(config: ConfigJson) -> ModelSpec:
    config = config.with_defaults({"partial_rotary_factor": 0.5})
    size = head_size(config)
    count = layer_count(config)
    listed = listed_mixers(config, count)
    mixers = named_mixers(config, count) or listed
    plain = decoder_spec(
        config,
        family="bamba",
        architecture=architecture_of(config),
        layers=tuple(LayerSpec(mixer=mixer) for mixer in mixers),
        ropes=(read_rope(config, size, partial=True),),
        head_size=size,
        norm_eps=1e-5,
    )
    bias = config.flag("attention_bias", default=False)
    return msgspec.structs.replace(
        plain,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.flag("mlp_bias", default=False),
        recurrent=hybrid_mamba_layers(config, plain.hidden_size, plain.norm_eps),
    )


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    return flat_convolutions(named_sources(spec, BAMBA_NAMES, names, prefix=decoder_prefix(names)))
