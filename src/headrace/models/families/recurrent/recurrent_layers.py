"""Shares what families with recurrent layers have in common. Knows no family."""

from __future__ import annotations

import math
from typing import Final

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


def step_bounds(config: ConfigJson) -> tuple[float, float]:
    """Return the bounds of a step (dt) of a state space."""
    return config.bounds("time_step_limit") or (0.0, math.inf)


# Of hybrids whose recurrent layers are Mamba-2: how weights began, and how the reference cuts its work.
MAMBA_IGNORED: Final[tuple[str, ...]] = ("mamba_chunk_size", "z_loss_coefficient", "use_mamba_kernels")
_MIXERS: Final[dict[str, Mixer]] = {
    "mamba": "recurrent",
    "linear_attention": "recurrent",
    "attention": "attention",
    "full_attention": "attention",
}


def mamba_spec(config: ConfigJson, hidden: int, eps: float, *, inner: int | None = None) -> RecurrentSpec:
    """Return the Mamba-2 layers of a hybrid, from the keys that most of them have. `inner` is the size of a row's
    values, if `mamba_expand` does not say it."""
    config.refuse("hidden_act", "recurrent layers have no other activation", unless=("silu", "swish"))
    heads = config.size("mamba_n_heads", maximum=MAX_HEADS, default=128)
    expanded = config.size("mamba_expand", maximum=64, default=2) * hidden
    inner = inner or expanded
    if inner % heads:
        raise config.mismatch("mamba_n_heads", f"a divisor of mamba_expand * hidden_size ({inner})")
    config.refuse("mamba_d_head", f"expected {inner // heads}", unless=(None, "auto", inner // heads))
    groups = config.size("mamba_n_groups", maximum=heads, default=1)
    if heads % groups:
        raise config.mismatch("mamba_n_groups", f"a divisor of mamba_n_heads ({heads})")
    least, most = step_bounds(config)
    return RecurrentSpec(
        kind="scan",
        taps=config.size("mamba_d_conv", maximum=MOST_TAPS, default=4),
        heads=heads,
        groups=groups,
        head_size=inner // heads,
        state_size=config.size("mamba_d_state", maximum=MAX_HEAD_SIZE, default=256),
        conv_bias=config.flag("mamba_conv_bias", default=True),
        bias=config.flag("mamba_proj_bias", default=False),
        norm_groups=groups,
        eps=eps,
        step_least=least,
        step_most=most,
    )


def named_mixers(config: ConfigJson, count: int, *, key: str = "layer_types") -> tuple[Mixer, ...] | None:
    """Return the mixers that a list of layer types names, if there is one."""
    names = config.optional_names(key, tuple(_MIXERS), count)
    return None if names is None else tuple(_MIXERS[name] for name in names)


def listed_mixers(config: ConfigJson, count: int) -> tuple[Mixer, ...]:
    """Return the mixers of a config that lists its layers of attention."""
    at = config.optional_sizes("attn_layer_indices", minimum=0, maximum=MAX_LAYERS, max_items=MAX_LAYERS) or ()
    return tuple("attention" if index in at else "recurrent" for index in range(count))
