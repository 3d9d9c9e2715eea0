"""Reads Mamba-2: every layer is a selective state space, and there is neither attention nor an MLP."""

from __future__ import annotations

from headrace.models.config_json import MAX_CONTEXT, MAX_HEAD_SIZE, MAX_HIDDEN, MAX_VOCAB, ConfigJson
from headrace.models.families.decoder import TensorNames, find_prefix, layer_count, named_sources
from headrace.models.families.family import TensorSources, architecture_of
from headrace.models.families.recurrent.recurrent_layers import (
    MAMBA_KEYS,
    MAMBA_NAMES,
    flat_convolutions,
    mamba_heads,
    mamba_layers,
)
from headrace.models.spec import LayerSpec, ModelSpec

architectures: tuple[str, ...] = ("Mamba2ForCausalLM",)
# How weights began, how the reference cuts its work, and how it rounds between layers.
ignored: tuple[str, ...] = (
    "time_step_rank",
    "time_step_min",
    "time_step_max",
    "time_step_floor",
    "rescale_prenorm_residual",
    "residual_in_fp32",
    "chunk_size",
    "layer_types",
)

_NAMES: TensorNames = {
    "embed": ("embeddings",),
    "norm": ("norm_f",),
    "attn.norm": ("norm",),
    **{name: (f"mixer.{stem}",) for name, stem in MAMBA_NAMES.items()},
}


def spec(config: ConfigJson) -> ModelSpec:
    config.refuse("hidden_act", "the layers have no other activation", unless=("silu", "swish"))
    config.refuse("rms_norm", "every layer has a norm", unless=(True,))
    config.refuse("norm_before_gate", "values are gated before they are normalised", unless=(False,))
    hidden = config.size("hidden_size", maximum=MAX_HIDDEN)
    heads = mamba_heads(config, MAMBA_KEYS)
    size = config.size("head_dim", maximum=MAX_HEAD_SIZE, default=64)
    expand = config.positive("expand", maximum=64.0, default=2.0)
    if int(expand * hidden) != heads * size:
        raise config.mismatch("expand", f"num_heads * head_dim / hidden_size ({heads * size} / {hidden})")
    eps = config.positive("layer_norm_epsilon", maximum=1.0, default=1e-5)
    return ModelSpec(
        family="mamba2",
        architecture=architecture_of(config),
        vocab_size=config.size("vocab_size", maximum=MAX_VOCAB),
        hidden_size=hidden,
        intermediate_size=0,
        heads=1,
        kv_heads=1,
        head_size=1,
        layers=(LayerSpec(mixer="recurrent", mlp=False, rope=None),) * layer_count(config),
        context=MAX_CONTEXT,
        norm_eps=eps,
        attention_scale=1.0,
        tied=config.flag("tie_word_embeddings", default=False),
        recurrent=mamba_layers(config, MAMBA_KEYS, size, eps),
    )


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    prefix = find_prefix(names, ("backbone.", "model.", ""), "embeddings.weight")
    return flat_convolutions(named_sources(spec, _NAMES, names, prefix=prefix))
