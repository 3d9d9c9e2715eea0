"""Shares what families with recurrent layers have in common. Knows no family."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from headrace.models.config_json import MAX_HEAD_SIZE, MAX_HEADS, MAX_LAYERS, ConfigJson
from headrace.models.families.family import TensorPart, TensorSources
from headrace.models.spec import Mixer, RecurrentSpec

MOST_TAPS: Final = 8  # of a convolution, as the core computes it

# Canonical names of a Mamba-2 layer -> names within its mixer.
MAMBA_NAMES: Final[dict[str, str]] = {
    "recurrent.in": "in_proj",
    "recurrent.conv": "conv1d",
    "recurrent.step_bias": "dt_bias",
    "recurrent.decay": "A_log",
    "recurrent.skip": "D",
    "recurrent.norm": "norm",
    "recurrent.out": "out_proj",
}


def flat_convolutions(sources: TensorSources) -> TensorSources:
    """Return the sources with convolutions, which the files have as [channels, 1, taps], as vectors."""
    return {
        name: tuple(TensorPart(part.name, flat=True) for part in parts) if name.endswith("recurrent.conv") else parts
        for name, parts in sources.items()
    }


# Of hybrids whose recurrent layers are Mamba-2: how weights began, and how the reference cuts its work.
MAMBA_IGNORED: Final[tuple[str, ...]] = ("mamba_chunk_size", "z_loss_coefficient", "use_mamba_kernels")
_MIXERS: Final[dict[str, Mixer]] = {
    "mamba": "recurrent",
    "linear_attention": "recurrent",
    "attention": "attention",
    "full_attention": "attention",
}


class MambaKeys(NamedTuple):
    """The keys of a config that describe Mamba-2 layers, and what a missing one means."""

    heads: str
    groups: str
    taps: str
    state_size: str
    conv_bias: str
    bias: str
    default_groups: int
    default_state_size: int


MAMBA_KEYS: Final = MambaKeys(
    heads="num_heads",
    groups="n_groups",
    taps="conv_kernel",
    state_size="state_size",
    conv_bias="use_conv_bias",
    bias="use_bias",
    default_groups=8,
    default_state_size=128,
)
_HYBRID_KEYS: Final = MambaKeys(
    heads="mamba_n_heads",
    groups="mamba_n_groups",
    taps="mamba_d_conv",
    state_size="mamba_d_state",
    conv_bias="mamba_conv_bias",
    bias="mamba_proj_bias",
    default_groups=1,
    default_state_size=256,
)


def mamba_layers(config: ConfigJson, keys: MambaKeys, head_size: int, eps: float) -> RecurrentSpec:
    heads = mamba_heads(config, keys)
    groups = config.size(keys.groups, maximum=heads, default=keys.default_groups)
    if heads % groups:
        raise config.mismatch(keys.groups, f"a divisor of {keys.heads} ({heads})")
    least, most = config.bounds("time_step_limit") or (0.0, math.inf)
    return RecurrentSpec(
        kind="scan",
        taps=config.size(keys.taps, maximum=MOST_TAPS, default=4),
        heads=heads,
        groups=groups,
        head_size=head_size,
        state_size=config.size(keys.state_size, maximum=MAX_HEAD_SIZE, default=keys.default_state_size),
        conv_bias=config.flag(keys.conv_bias, default=True),
        bias=config.flag(keys.bias, default=False),
        norm_groups=groups,
        eps=eps,
        step_least=least,
        step_most=most,
    )


def mamba_heads(config: ConfigJson, keys: MambaKeys) -> int:
    return config.size(keys.heads, maximum=MAX_HEADS, default=128)


def hybrid_mamba_layers(config: ConfigJson, hidden: int, eps: float, *, inner: int | None = None) -> RecurrentSpec:
    """Return the Mamba-2 layers of a hybrid, from the keys that most hybrids have. `inner` is the size of a row's
    values, if `mamba_expand` does not say it."""
    config.refuse("hidden_act", "recurrent layers have no other activation", unless=("silu", "swish"))
    heads = mamba_heads(config, _HYBRID_KEYS)
    expanded = config.size("mamba_expand", maximum=64, default=2) * hidden
    inner = inner or expanded
    if inner % heads:
        raise config.mismatch("mamba_n_heads", f"a divisor of mamba_expand * hidden_size ({inner})")
    config.refuse("mamba_d_head", f"expected {inner // heads}", unless=(None, "auto", inner // heads))
    return mamba_layers(config, _HYBRID_KEYS, inner // heads, eps)


def named_mixers(config: ConfigJson, count: int, *, key: str = "layer_types") -> tuple[Mixer, ...] | None:
    """Return the mixers that a list of layer types names, if there is one."""
    names = config.optional_names(key, tuple(_MIXERS), count)
    return None if names is None else tuple(_MIXERS[name] for name in names)


def listed_mixers(config: ConfigJson, count: int) -> tuple[Mixer, ...]:
    """Return the mixers of a config that lists its layers of attention."""
    at = config.optional_sizes("attn_layer_indices", minimum=0, maximum=MAX_LAYERS, max_items=MAX_LAYERS) or ()
    return tuple("attention" if index in at else "recurrent" for index in range(count))
