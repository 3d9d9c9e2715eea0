"""Turns the rope keys of a config into a RopeSpec: default, linear, dynamic, llama3, yarn, longrope and proportional.

The arithmetic follows transformers step by step: in f32, with a division by a tensor as a product with its reciprocal.
The exception is powers, which are correctly rounded here so that tables are the same on every machine; the reference's
vector library is at most two units in the last place away. A config writes its rope in one of two forms:

    "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", ...}         or "type" for "rope_type"
    "rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", ...}
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ModelError
from headrace.models.config_json import MAX_CONTEXT, ConfigJson
from headrace.models.spec import RopeSpec

F32 = NDArray[np.float32]

# Names of ropes in a config -> our names.
KINDS: Mapping[str, str] = {kind: kind for kind in ("default", "linear", "dynamic", "llama3", "yarn", "longrope")}
# Of heads of which a share turns, at the frequencies that it has when all of it turns (Gemma 4).
PROPORTIONAL: Mapping[str, str] = {**KINDS, "proportional": "proportional"}
_REASONS = {
    "ntk": "its angles depend on the length of the longest sequence in the batch",
    "mrope": "it needs image positions",
}


def read_rope(
    config: ConfigJson,
    head_size: int,
    *,
    default_theta: float = 10_000.0,
    default_original: int | None = None,
    partial: bool = False,
    kinds: Mapping[str, str] = KINDS,
) -> RopeSpec:
    """Read the rope of a config whose layers are all of one kind.

    `default_original` is the trained context of a family whose config may omit it. `partial` allows a rope over only
    the leading dims of a head.
    """
    parameters = config.optional_sub("rope_scaling") or config.optional_sub("rope_parameters")
    theta = config.positive("rope_theta", default=default_theta)
    if parameters is None:
        parameters = ConfigJson({}, path=config.path, prefix="rope_parameters.")
    elif nested := parameters.objects():
        raise parameters.error(nested[0], "This architecture does not support a rope per kind of layer.")
    return rope_of(
        config, parameters, head_size, theta=theta, default_original=default_original, partial=partial, kinds=kinds
    )


def read_ropes_by_kind(
    config: ConfigJson,
    head_size: int,
    *,
    theta: float,
    local_theta: float,
    local_size: int | None = None,
    kinds: Mapping[str, str] = KINDS,
) -> tuple[RopeSpec, RopeSpec]:
    """Return the rope of full-attention layers, then that of sliding layers. A `rope_scaling` stretches the first.

    `local_size` is the head size of sliding layers, where it is another; `kinds` are those of full-attention layers.
    """
    scaling, both = config.optional_sub("rope_scaling"), config.optional_sub("rope_parameters")
    if both is not None and scaling is not None:
        raise config.error("rope_scaling", "Set either rope_scaling or rope_parameters, not both.")
    if both is not None and not both.objects():
        raise config.mismatch("rope_parameters", "a rope for full_attention and one for sliding_attention")
    none = ConfigJson({}, path=config.path, prefix="rope_parameters.")
    full = scaling or (both and both.optional_sub("full_attention")) or none
    local = (both and both.optional_sub("sliding_attention")) or none
    return (
        rope_of(config, full, head_size, theta=theta, kinds=kinds),
        rope_of(config, local, local_size or head_size, theta=local_theta),
    )


def rope_of(
    config: ConfigJson,
    parameters: ConfigJson,
    head_size: int,
    *,
    theta: float,
    default_original: int | None = None,
    partial: bool = False,
    kinds: Mapping[str, str] = KINDS,
) -> RopeSpec:
    """Read the rope in `parameters`; `theta` is the default base."""
    name = parameters.text("rope_type", default=parameters.text("type", default="default"))
    if name not in kinds:
        reason = _REASONS.get(name, f"supported are {', '.join(kinds)}")
        raise ModelError(f"Unsupported rope {name[:60]!r}: {reason}.", path=config.path)
    kind = kinds[name]
    whole = kind == "proportional"
    rotated = head_size if whole else _rotated_dims(config, parameters, head_size, partial=partial)
    theta = parameters.positive("rope_theta", default=theta)
    if theta <= 1.0:
        raise ModelError(f"Key 'rope_theta': Expected a number above 1, found {theta}.", path=config.path)
    powers = _powers(theta, rotated)
    original = _original_context(config, parameters, default_original)
    try:
        if whole:
            return RopeSpec(inv_freq=_exact(_proportional(_inverse(powers), parameters)))
        if kind == "linear":
            return RopeSpec(inv_freq=_exact(_inverse(powers) / np.float32(parameters.positive("factor"))))
        if kind == "llama3":
            return RopeSpec(inv_freq=_exact(_llama3(_inverse(powers), parameters, original)))
        if kind == "yarn":
            return _yarn(config, parameters, powers, theta, original)
        if kind == "longrope":
            return _longrope(config, parameters, powers, original)
        if kind == "dynamic":
            parameters.positive("factor")  # of texts beyond the context, which are rejected
        return RopeSpec(inv_freq=_exact(_inverse(powers)))
    except (ArithmeticError, ValueError) as error:
        raise ModelError(f"The rope {kind!r} has no finite table: {error}.", path=config.path) from None


def _rotated_dims(config: ConfigJson, parameters: ConfigJson, head_size: int, *, partial: bool) -> int:
    factor = config.positive("partial_rotary_factor", maximum=1.0, default=1.0)
    factor = parameters.positive("partial_rotary_factor", maximum=1.0, default=factor)
    if factor != 1.0 and not partial:
        raise config.error("partial_rotary_factor", "This architecture does not support it.")
    rotated = int(head_size * factor)
    if rotated < 2 or rotated % 2:
        raise config.error("head_dim", f"The rope covers {rotated} of {head_size} dims. Expected an even number.")
    return rotated


def _proportional(inv_freq: F32, parameters: ConfigJson) -> F32:
    share = parameters.positive("partial_rotary_factor", maximum=1.0, default=1.0)
    turning = int(share * (2 * len(inv_freq)) // 2)
    table = inv_freq.copy()
    table[turning:] = 0.0
    return table / np.float32(parameters.positive("factor", default=1.0))


def _original_context(config: ConfigJson, parameters: ConfigJson, default: int | None) -> int:
    """Return the trained context in tokens, before the rope was stretched."""
    key = "original_max_position_embeddings"
    if config.has(key):
        return config.size(key, minimum=2, maximum=MAX_CONTEXT)
    if default is not None:
        return default
    if parameters.has(key):
        return parameters.size(key, minimum=2, maximum=MAX_CONTEXT)
    return config.size("max_position_embeddings", minimum=2, maximum=MAX_CONTEXT)


def _llama3(inv_freq: F32, parameters: ConfigJson, original: int) -> F32:
    factor = np.float32(parameters.positive("factor"))
    low, high = parameters.positive("low_freq_factor"), parameters.positive("high_freq_factor")
    if high < low:
        raise parameters.mismatch("high_freq_factor", f"a number not below low_freq_factor ({low:g})")
    longest, shortest = np.float32(original / low), np.float32(original / high)
    wavelength = _inverse(inv_freq) * np.float32(2 * math.pi)
    slowed = np.where(wavelength > longest, inv_freq / factor, inv_freq)
    if high == low:
        return slowed
    share = (_inverse(wavelength) * np.float32(original) - np.float32(low)) / np.float32(high - low)
    between = (np.float32(1) - share) * slowed / factor + share * slowed
    return np.where((wavelength < shortest) | (wavelength > longest), slowed, between)


def _yarn(config: ConfigJson, parameters: ConfigJson, powers: F32, theta: float, original: int) -> RopeSpec:
    context = config.size("max_position_embeddings", maximum=MAX_CONTEXT)
    factor = parameters.optional_positive("factor") or context / original
    fast = parameters.optional_positive("beta_fast") or 32.0
    slow = parameters.optional_positive("beta_slow") or 1.0
    pairs = len(powers)

    def pair_that_turns(times: float) -> float:
        """Return the (fractional) pair that turns this often over the trained context."""
        return 2 * pairs * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_that_turns(fast), pair_that_turns(slow)
    if parameters.flag("truncate", default=True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    if first == last:
        last += 0.001
    one = np.ones_like(powers)
    ramp: F32 = (np.arange(pairs, dtype=np.float32) - np.float32(first)) / np.float32(last - first)
    slowed: F32 = np.minimum(np.maximum(ramp, np.zeros_like(powers)), one)
    kept: F32 = one - slowed
    stretched, plain = _inverse(powers * np.float32(factor)), _inverse(powers)
    inv_freq: F32 = np.add(stretched * (one - kept), plain * kept)
    return RopeSpec(inv_freq=_exact(inv_freq), scale=_scale(_yarn_scale(parameters, factor)))


def _yarn_scale(parameters: ConfigJson, factor: float) -> float:
    given = parameters.optional_positive("attention_factor")
    if given is not None:
        return given

    def magnitude(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    mscale = parameters.number("mscale", default=0.0) if parameters.has("mscale") else 0.0
    over_all = parameters.number("mscale_all_dim", default=0.0) if parameters.has("mscale_all_dim") else 0.0
    if mscale and over_all:
        return magnitude(mscale) / magnitude(over_all)
    return magnitude(1.0)


def _longrope(config: ConfigJson, parameters: ConfigJson, powers: F32, original: int) -> RopeSpec:
    context = config.size("max_position_embeddings", maximum=MAX_CONTEXT)
    factor = parameters.optional_positive("factor") or context / original
    scale = parameters.optional_positive("attention_factor")
    if scale is None:
        scale = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    short = np.array(parameters.positives("short_factor", len(powers)), dtype=np.float32)
    long = np.array(parameters.positives("long_factor", len(powers)), dtype=np.float32)
    return RopeSpec(
        inv_freq=_exact(_inverse(short * powers)),
        scale=_scale(parameters.optional_positive("short_mscale") or scale),
        long_inv_freq=_exact(_inverse(long * powers)),
        long_scale=_scale(parameters.optional_positive("long_mscale") or scale),
        original_context=original,
    )


def inverse_powers(theta: float, rotated: int) -> tuple[float, ...]:
    """Return the frequencies of a plain rope over so many dims."""
    return _exact(_inverse(_powers(theta, rotated)))


def _powers(theta: float, rotated: int) -> F32:
    """Return theta ** (2i / rotated), each correctly rounded to f32."""
    base = float(np.float32(theta))
    exponents = np.arange(0, rotated, 2, dtype=np.float32) / np.float32(rotated)
    return np.array([math.pow(base, float(exponent)) for exponent in exponents], dtype=np.float32)


def _inverse(values: F32) -> F32:
    return np.float32(1) / values


def _exact(table: F32) -> tuple[float, ...]:
    if not bool(np.isfinite(table).all()):
        raise ArithmeticError("a frequency is not finite")
    return tuple(float(value) for value in table)


def _scale(value: float) -> float:
    return float(np.float32(value))
