"""Reads Granite 3 and its mixtures: a Llama with factors on the embeddings, sublayers, scores and logits.

Each sublayer adds `residual_multiplier` times its output. A norm does not see the size of its input, so the same
numbers come from embeddings divided by that factor, sublayers without it, and a smaller epsilon.
"""

from __future__ import annotations

import msgspec

from headrace.models.config_json import ConfigJson
from headrace.models.families.decoder import (
    LLAMA_NAMES,
    TensorNames,
    decoder_prefix,
    decoder_spec,
    expert_spec,
    head_size,
    layer_count,
    named_sources,
)
from headrace.models.families.family import TensorPart, TensorSources, architecture_of
from headrace.models.rope import read_rope
from headrace.models.spec import LayerSpec, ModelSpec

architectures: tuple[str, ...] = ("GraniteForCausalLM", "GraniteMoeForCausalLM")
ignored: tuple[str, ...] = ()

GRANITE_NAMES: TensorNames = {
    **LLAMA_NAMES,
    "mlp.router": ("block_sparse_moe.router.layer",),
    "mlp.experts.gate_up": ("block_sparse_moe.input_linear",),
    "mlp.experts.down": ("block_sparse_moe.output_linear",),
}


def spec(config: ConfigJson) -> ModelSpec:
    architecture = architecture_of(config)
    mixture = architecture == "GraniteMoeForCausalLM"
    size = head_size(config)
    plain = decoder_spec(
        config,
        family="granite",
        architecture=architecture,
        layers=(LayerSpec(experts=mixture),) * layer_count(config),
        ropes=(read_rope(config, size),),
        head_size=size,
        norm_eps=1e-6,
        experts=expert_spec(config, size_key="intermediate_size", normalise=True) if mixture else None,
    )
    mlp_bias = False if mixture else config.flag("mlp_bias", default=False)
    return msgspec.structs.replace(with_factors(plain, config), mlp_bias=mlp_bias)


def with_factors(plain: ModelSpec, config: ConfigJson) -> ModelSpec:
    """Return a spec with Granite's factors and the biases of its attention."""
    bias = config.flag("attention_bias", default=False)
    residual = config.positive("residual_multiplier", default=1.0)
    return msgspec.structs.replace(
        plain,
        qkv_bias=bias,
        o_bias=bias,
        norm_eps=plain.norm_eps / residual**2,
        embedding_scale=config.positive("embedding_multiplier", default=1.0) / residual,
        attention_scale=config.positive("attention_multiplier", default=1.0),
        logit_scale=1.0 / config.positive("logits_scaling", default=1.0),
    )


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    found = named_sources(spec, GRANITE_NAMES, names, prefix=decoder_prefix(names))
    return {name: tuple(expert_part(part, name) for part in parts) for name, parts in found.items()}


def expert_part(part: TensorPart, name: str) -> TensorPart:
    """The files hold all experts of a layer in one tensor."""
    return TensorPart(part.name, index=int(name.split(".")[4])) if ".experts." in name else part
