"""Counts the memory that encoding an image takes beside the weights, from the tower's spec alone.

A tower computes the patches of a tile, or of a whole image where images have any size, in one step. Decoding the file
takes more, by `images.pixels`, before the step begins.
"""

from __future__ import annotations

from typing import Final

from headrace.models.families.vision.vision_tower import TowerSpec
from headrace.models.vision.image_layout import ImageLayout

_FLOAT: Final = 4  # bytes
_PADDED: Final = 128  # floats; the core's rows are multiples of this
_PIXELS: Final = 6  # floats of one pixel's channel: in double, in float and in the order of patches
_ROWS: Final = 6  # vectors of one patch outside the core: before and after the layers, and for the connector


def most_patches(tower: TowerSpec, layout: ImageLayout) -> int:
    """Return the patches of the largest step: those of a tile, or of the largest image that the layout makes."""
    if tower.image_size:
        return tower.side**2
    return layout.most_pixels // tower.patch_size**2


def encoding_bytes(tower: TowerSpec, patches: int) -> int:
    """Return an upper bound of the memory of a step over so many patches, in bytes: the keys and values of one layer at
    a time, the core's rows, the pixels, and what lies before and after the layers."""
    spec = tower.encoder
    hidden, inner = spec.hidden_size, spec.intermediate_size
    keys, attended = spec.kv_heads * spec.head_size, spec.heads * spec.head_size
    core = sum(_padded(each) for each in (*(hidden,) * 3, attended + 2 * keys, attended, inner))
    core += _padded(max(hidden, attended, inner))  # activations in the products' precision
    core += len(spec.ropes) * _padded(spec.head_size)
    kept = sum(layer.kept for layer in spec.layers)
    outside = _PIXELS * tower.channels * tower.patch_size**2 + (_ROWS + kept) * hidden
    features = 2 * tower.width // tower.scale**2 + 1
    rows = patches + _PADDED  # blocks of keys and values are whole
    return _FLOAT * rows * (2 * keys + core + outside + features)


def _padded(width: int) -> int:
    return -(-width // _PADDED) * _PADDED
