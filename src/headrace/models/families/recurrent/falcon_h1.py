"""Reads Falcon-H1: in every layer, attention and Mamba-2 read the same rows and are added together, with factors on the
embeddings, on what each part reads and adds, and on the logits.

Factors of what the attention reads are moved: into its scores for queries and keys, into its output for values.
"""

from __future__ import annotations

import msgspec

from headrace.models.config_json import MAX_INTERMEDIATE, ConfigJson
from headrace.models.families.decoder import decoder_prefix, decoder_spec, head_size, layer_count, named_sources
from headrace.models.families.family import TensorSources, architecture_of
from headrace.models.families.recurrent.bamba import BAMBA_NAMES
from headrace.models.families.recurrent.recurrent_layers import MAMBA_IGNORED, flat_convolutions, hybrid_mamba_layers
from headrace.models.rope import read_rope
from headrace.models.spec import LayerSpec, ModelSpec, RecurrentSpec

architectures: tuple[str, ...] = ("FalconH1ForCausalLM",)
# The expansion says again how wide the MLP is.
ignored: tuple[str, ...] = (*MAMBA_IGNORED, "mlp_expansion_factor")


def spec(config: ConfigJson) -> ModelSpec:
    for key in ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"):
        config.refuse(key, "projections must have no biases", unless=(False,))
    config.refuse("mamba_use_mlp", "every layer has an MLP", unless=(True,))
    count = layer_count(config)
    for key in ("layers_block_type", "layer_types"):
        config.optional_names(key, ("hybrid",), count)
    size = head_size(config)
    plain = decoder_spec(
        config,
        family="falcon_h1",
        architecture=architecture_of(config),
        layers=(LayerSpec(mixer="both"),) * count,
        ropes=(read_rope(config, size),),
        head_size=size,
        norm_eps=1e-5,
    )
    gate, down = _factors(config, "mlp_multipliers", 2)
    read = config.positive("attention_in_multiplier", default=1.0)
    return msgspec.structs.replace(
        plain,
        embedding_scale=config.positive("embedding_multiplier", default=1.0),
        attention_scale=plain.attention_scale * read**2 * config.positive("key_multiplier", default=1.0),
        attention_factor=read * config.positive("attention_out_multiplier", default=1.0),
        recurrent_factor=config.positive("ssm_out_multiplier", default=1.0),
        gate_slope=gate,
        mlp_factor=down,
        logit_scale=config.positive("lm_head_multiplier", default=1.0),
        recurrent=_recurrent(config, plain),
    )


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    return flat_convolutions(named_sources(spec, BAMBA_NAMES, names, prefix=decoder_prefix(names)))


def _recurrent(config: ConfigJson, plain: ModelSpec) -> RecurrentSpec:
    inner = config.optional_size("mamba_d_ssm", maximum=MAX_INTERMEDIATE, default=1024)
    mamba = hybrid_mamba_layers(config, plain.hidden_size, plain.norm_eps, inner=inner)
    read = config.positive("ssm_in_multiplier", default=1.0)
    return msgspec.structs.replace(
        mamba,
        in_factors=tuple(read * factor for factor in _factors(config, "ssm_multipliers", len(mamba.in_parts))),
        norm_groups=mamba.groups if config.flag("mamba_rms_norm", default=False) else 0,
        norm_first=config.flag("mamba_norm_before_gate", default=True),
    )


def _factors(config: ConfigJson, key: str, count: int) -> tuple[float, ...]:
    return config.positives(key, count) if config.has(key) else (1.0,) * count
