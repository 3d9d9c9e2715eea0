"""Reads LFM2: layers of short gated convolutions among layers of grouped attention."""

from __future__ import annotations

import msgspec

from headrace.models.config_json import MAX_INTERMEDIATE, MAX_LAYERS, MAX_NUMBER, ConfigJson
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
from headrace.models.families.recurrent.recurrent_layers import MOST_TAPS, flat_convolutions
from headrace.models.rope import read_rope
from headrace.models.spec import LayerSpec, ModelSpec, RecurrentSpec

architectures: tuple[str, ...] = ("Lfm2ForCausalLM",)
# Of the reference's own kernels, and sizes that layers without attention do not use.
ignored: tuple[str, ...] = (
    "conv_dim",
    "conv_dim_out",
    "conv_use_xavier_init",
    "block_dim",
    "block_use_swiglu",
    "block_use_xavier_init",
    "block_mlp_init_scale",
    "block_out_init_scale",
    "block_norm_eps",
    "num_heads",
    "use_pos_enc",
    "theta",
)

_NAMES: TensorNames = {
    **LLAMA_NAMES,
    "norm": ("embedding_norm",),
    "attn.norm": ("operator_norm",),
    "attn.q_norm": ("self_attn.q_layernorm",),
    "attn.k_norm": ("self_attn.k_layernorm",),
    "attn.o": ("self_attn.out_proj",),
    "recurrent.in": ("conv.in_proj",),
    "recurrent.conv": ("conv.conv",),
    "recurrent.out": ("conv.out_proj",),
    "mlp.norm": ("ffn_norm",),
    "mlp.gate_up": ("feed_forward.w1", "feed_forward.w3"),
    "mlp.down": ("feed_forward.w2",),
}


def spec(config: ConfigJson) -> ModelSpec:
    config = config.renamed({"norm_eps": "rms_norm_eps", "block_ff_dim": "intermediate_size"})
    config = config.renamed({"tie_embedding": "tie_word_embeddings"})
    size = head_size(config)
    bias = config.flag("conv_bias", default=False)
    plain = decoder_spec(
        config,
        family="lfm2",
        architecture=architecture_of(config),
        layers=tuple(LayerSpec(mixer="attention" if attends else "recurrent") for attends in _attends(config)),
        ropes=(read_rope(config, size, default_theta=1e6),),
        head_size=size,
        norm_eps=1e-5,
        default_tied=True,
    )
    return msgspec.structs.replace(
        plain,
        intermediate_size=_inner(config, plain.intermediate_size),
        qk_norm="head",
        recurrent=RecurrentSpec(
            kind="short_conv",
            taps=config.size("conv_L_cache", maximum=MOST_TAPS, default=3),
            head_size=plain.hidden_size,
            conv_bias=bias,
            bias=bias,
        ),
    )


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    return flat_convolutions(named_sources(spec, _NAMES, names, prefix=decoder_prefix(names)))


def _attends(config: ConfigJson) -> tuple[bool, ...]:
    count = layer_count(config)
    types = config.optional_names("layer_types", ("full_attention", "conv"), count)
    at = config.optional_sizes("full_attn_idxs", minimum=0, maximum=MAX_LAYERS, max_items=MAX_LAYERS)
    if types is not None:
        return tuple(kind == "full_attention" for kind in types)
    return tuple(at is None or index in at for index in range(count))


def _inner(config: ConfigJson, given: int) -> int:
    """Return the inner size of the MLP, which the config gives before it is adjusted."""
    multiple = config.size("block_multiple_of", maximum=MAX_INTERMEDIATE, default=256)
    factor = config.optional_positive("block_ffn_dim_multiplier", maximum=MAX_NUMBER, default=1.0)
    if not config.flag("block_auto_adjust_ff_dim", default=True):
        return given
    inner = int((1.0 if factor is None else factor) * int(2 * given / 3))
    inner = -(-inner // multiple) * multiple if factor is not None else inner
    if not 1 <= inner <= MAX_INTERMEDIATE:
        raise config.error("block_ffn_dim_multiplier", f"The MLP would be {inner} wide.")
    return inner
