"""Reads Granite 4: Mamba-2 layers, a few layers of attention among them, and after each an MLP or a mixture of experts
with one that every token goes to. Factors are those of Granite 3 (granite.py)."""

from __future__ import annotations

import msgspec

from headrace.models.config_json import MAX_EXPERTS, MAX_INTERMEDIATE, ConfigJson
from headrace.models.families.decoder import (
    TensorNames,
    decoder_prefix,
    decoder_spec,
    head_size,
    layer_count,
    named_sources,
)
from headrace.models.families.family import TensorSources, architecture_of
from headrace.models.families.granite import GRANITE_NAMES, expert_part, with_factors
from headrace.models.families.recurrent.recurrent_layers import (
    MAMBA_IGNORED,
    MAMBA_NAMES,
    flat_convolutions,
    hybrid_mamba_layers,
    named_mixers,
)
from headrace.models.rope import read_rope
from headrace.models.spec import ExpertSpec, LayerSpec, ModelSpec

architectures: tuple[str, ...] = ("GraniteMoeHybridForCausalLM",)
# Without positions the rope is not used, and without experts neither are their sizes.
ignored: tuple[str, ...] = (
    *MAMBA_IGNORED,
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "init_method",
    "intermediate_size",
    "num_experts_per_tok",
)

_NAMES: TensorNames = {
    **GRANITE_NAMES,
    **{name: (f"mamba.{stem}",) for name, stem in MAMBA_NAMES.items()},
    "mlp.shared.gate_up": ("shared_mlp.input_linear",),
    "mlp.shared.down": ("shared_mlp.output_linear",),
    "mlp.gate_up": ("shared_mlp.input_linear",),
    "mlp.down": ("shared_mlp.output_linear",),
}


def spec(config: ConfigJson) -> ModelSpec:
    config.refuse("normalization_function", "norms are RMS norms", unless=("rmsnorm",))
    positions = config.text("position_embedding_type", default="nope") if config.has("position_embedding_type") else ""
    if positions not in ("", "nope", "rope"):
        raise config.mismatch("position_embedding_type", "'rope' or 'nope'")
    size = head_size(config)
    count = layer_count(config)
    mixers = named_mixers(config, count) or named_mixers(config, count, key="layers_block_type")
    shared = config.size("shared_intermediate_size", maximum=MAX_INTERMEDIATE, default=1024)
    experts = config.size("num_local_experts", minimum=0, maximum=MAX_EXPERTS, default=8)
    rope = 0 if positions == "rope" else None
    plain = decoder_spec(
        config.with_value("intermediate_size", shared) if not experts else config,
        family="granite",
        architecture=architecture_of(config),
        layers=tuple(
            LayerSpec(mixer=mixer, rope=rope, experts=experts > 0) for mixer in mixers or ("recurrent",) * count
        ),
        ropes=() if rope is None else (read_rope(config, size),),
        head_size=size,
        norm_eps=1e-6,
        experts=_experts(config, experts, shared) if experts else None,
    )
    return with_factors(
        msgspec.structs.replace(plain, recurrent=hybrid_mamba_layers(config, plain.hidden_size, plain.norm_eps)), config
    )


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    found = flat_convolutions(named_sources(spec, _NAMES, names, prefix=decoder_prefix(names)))
    return {name: tuple(expert_part(part, name) for part in parts) for name, parts in found.items()}


def _experts(config: ConfigJson, count: int, shared: int) -> ExpertSpec:
    return ExpertSpec(
        count=count,
        top_k=config.size("num_experts_per_tok", maximum=count, default=2),
        intermediate_size=config.size("intermediate_size", maximum=MAX_INTERMEDIATE),
        normalise=True,
        shared_size=shared,
    )
