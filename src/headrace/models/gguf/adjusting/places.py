"""Says how the ropes of Qwen-VL turn by places in images, and how many layers add parts of features."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from headrace.models.families.vision.qwen_vl import rope_axes
from headrace.models.gguf.gguf_keys import GgufKeys
from headrace.models.spec import ModelSpec

_SECTIONS: Final = "rope.dimension_sections"
_STACKED: Final = "n_deepstack_layers"


def following(keys: GgufKeys, spec: ModelSpec) -> ModelSpec:
    """Pairs of the same axis follow each other (Qwen2-VL and 2.5-VL)."""
    return _placed(keys, spec, interleaved=False)


def in_turns(keys: GgufKeys, spec: ModelSpec) -> ModelSpec:
    """Pairs take turns, and the first layers add parts of features (Qwen3-VL)."""
    stacked = keys.get(_STACKED, 0)
    if not isinstance(stacked, int) or isinstance(stacked, bool) or not 0 <= stacked < len(spec.layers):
        raise keys.error(_STACKED, f"Expected an integer from 0 to {len(spec.layers) - 1}.")
    return replace(_placed(keys, spec, interleaved=True), feature_layers=stacked)


def _placed(keys: GgufKeys, spec: ModelSpec, *, interleaved: bool) -> ModelSpec:
    keys.require(_SECTIONS)
    items = keys.items(_SECTIONS)
    sections = tuple(each for each in items if isinstance(each, int) and each >= 0)
    pairs = len(spec.ropes[0].inv_freq)
    if len(sections) != len(items) or len(sections) < 3 or sum(sections[:3]) != pairs or any(sections[3:]):
        raise keys.error(_SECTIONS, f"Expected three numbers with the sum {pairs}, half of a head's dims, and zeros.")
    rope = replace(spec.ropes[0], axes=rope_axes(sections[:3], interleaved=interleaved))
    return replace(spec, family="qwen_vl", ropes=(rope,))
