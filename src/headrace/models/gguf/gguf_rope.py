"""Turns the rope keys and rope tensors of a GGUF file into the rope of a config, and into divided frequencies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from headrace.errors import ModelError
from headrace.models.config_json import shorten
from headrace.models.formats.gguf_file import GgufFile
from headrace.models.gguf.gguf_keys import GgufKeys
from headrace.models.spec import ModelSpec, RopeSpec

ROPE_DIVISORS: Final = "rope_freqs.weight"
LONG_ROPE: Final = ("rope_factors_short.weight", "rope_factors_long.weight")
# Keys of config.json by which layers with a window have a rope of their own.
_LOCAL: Final = ("rope_local_base_freq", "local_rope_theta", "rope_parameters")
_STILL: Final = 1e29  # a frequency divided by this or more does not turn
_FACTOR: Final = "rope.scaling.factor"
_YARN: Final[Mapping[str, str]] = {
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
    "attention_factor": "rope.scaling.yarn_attn_factor",
}


def add_rope(keys: GgufKeys) -> None:
    """Set the rope of the config."""
    dims, size = keys.get("rope.dimension_count"), keys.values.get("head_dim")
    if isinstance(dims, int) and isinstance(size, int) and size > 0:
        # The families round down.
        share = (dims + 0.5) / size if 0 < dims < size else 1.0
        keys.put("partial_rotary_factor", share, "rope.dimension_count")
    elif isinstance(size, int):
        keys.values["partial_rotary_factor"] = 1.0
    if keys.values.keys().isdisjoint(_LOCAL):
        keys.refuse("rope.freq_base_swa", "All layers must have one base", unless=(keys.get("rope.freq_base"),))
    rope = _scaling(keys)
    if rope is None:
        return
    grown = keys.get("rope.scaling.yarn_log_multiplier")
    if rope["rope_type"] == "yarn" and grown:
        rope["mscale"] = rope["mscale_all_dim"] = grown
    keys.values["rope_scaling"] = {**rope, **keys.rope}


def _scaling(keys: GgufKeys) -> dict[str, object] | None:
    kind = keys.get("rope.scaling.type", "none")
    factor = keys.get(_FACTOR, keys.get("rope.scale_linear", 1.0))
    scale = keys.get("rope.scaling.attn_factor", 1.0)
    rope: dict[str, object] = {"factor": factor}
    keys.spell("rope_scaling.factor", f"{keys.name}.{_FACTOR}")
    if any(tensor in keys.file.tensors for tensor in LONG_ROPE):
        short, long = ([float(value) for value in _vector(keys.file, tensor)] for tensor in LONG_ROPE)
        rope = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        for ours, tensor in zip(("short_factor", "long_factor"), LONG_ROPE, strict=True):
            keys.spell(f"rope_scaling.{ours}", tensor)
        if keys.get("rope.scaling.attn_factor") is not None:
            rope["attention_factor"] = scale
            keys.spell("rope_scaling.attention_factor", f"{keys.name}.rope.scaling.attn_factor")
        return rope
    if scale != 1.0:
        raise keys.error("rope.scaling.attn_factor", "Headrace supports it only beside tables of factors.")
    if kind == "yarn":
        for ours, theirs in _YARN.items():
            if (value := keys.get(theirs)) is not None:
                rope[ours] = value
                keys.spell(f"rope_scaling.{ours}", f"{keys.name}.{theirs}")
        keys.refuse("rope.scaling.yarn_ext_factor", "Expected 1", unless=(1.0,))
        return {**rope, "rope_type": "yarn"}
    if kind == "linear" or (kind == "none" and keys.get("rope.scale_linear") is not None):
        return None if factor in (0, 1) else {**rope, "rope_type": "linear"}
    if kind in ("none", "longrope"):
        return None
    raise keys.error("rope.scaling.type", f"Rope {shorten(kind)} is not supported.")


def check_rope_dims(keys: GgufKeys, spec: ModelSpec) -> None:
    """Raise ModelError if the first rope turns another number of dims than the file says."""
    dims = keys.get("rope.dimension_count")
    if dims is None or not spec.ropes:
        return
    expected = 2 * len(spec.ropes[0].inv_freq)
    if dims != expected:
        raise keys.error(
            "rope.dimension_count", f"Expected an even number up to {spec.head_size}, found {shorten(dims)}."
        )


def divided_ropes(file: GgufFile, spec: ModelSpec) -> tuple[RopeSpec, ...]:
    """Return the ropes with every frequency of the first divided by the file's factor for it, which is how files store
    a llama3 rope."""
    if ROPE_DIVISORS not in file.tensors:
        return spec.ropes
    factors = _vector(file, ROPE_DIVISORS)
    if not spec.ropes or spec.ropes[0].long_inv_freq is not None:
        raise ModelError("The architecture has no such factors.", path=file.path, tensor=ROPE_DIVISORS)
    first, *others = spec.ropes
    inv_freq = np.array(first.inv_freq, dtype=np.float32)
    if len(factors) != len(inv_freq):
        raise ModelError(f"Has {len(factors)} factors. Expected {len(inv_freq)}.", path=file.path, tensor=ROPE_DIVISORS)
    divided: NDArray[np.float32] = np.where(factors < _STILL, inv_freq / factors, np.float32(0))
    if not np.isfinite(divided).all():
        raise ModelError("A frequency is not finite.", path=file.path, tensor=ROPE_DIVISORS)
    return (replace(first, inv_freq=tuple(float(value) for value in divided)), *others)


def _vector(file: GgufFile, name: str) -> NDArray[np.float32]:
    entry = file.tensors.get(name)
    if entry is None:
        raise ModelError("The file has no such tensor.", path=file.path, tensor=name)
    if entry.type != "F32" or len(entry.shape) != 1:
        raise ModelError("Expected a vector of F32.", path=file.path, tensor=name)
    values: NDArray[np.float32] = file.rows(name).view("<f4").reshape(-1)
    if not np.isfinite(values).all() or (values <= 0).any():
        raise ModelError("Expected numbers above zero.", path=file.path, tensor=name)
    return values
