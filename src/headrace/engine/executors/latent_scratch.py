"""The scratch memory of latent attention: what a step's rows take in the core beside weights and KV memory.

Follows the buffers of `core/model.cpp`. Other scratch memory is small: only latents make rows as wide as all heads
times the latent.
"""

from __future__ import annotations

from typing import Final

from headrace.models.spec import LayerSpec, ModelSpec

_ROW: Final = 128  # numbers to which the core pads rows
_GROUP: Final = 32  # the smallest group of a row's codes


def latent_scratch(spec: ModelSpec, rows: int) -> int:
    """Return the bytes for steps of at most so many rows; 0 for a model without latents."""
    latent = spec.latent
    if latent is None:
        return 0
    kv_heads, size, value_size = spec.kv_shape(LayerSpec())
    still = spec.head_size - latent.turning
    queries = latent.query_rank or spec.heads * spec.head_size
    widths = [
        (spec.heads + kv_heads) * size + kv_heads * value_size,  # queries, keys and values
        spec.heads * size,  # what heads have attended to
        queries + latent.turning + latent.rank,
        max(latent.rank, latent.query_rank),
    ]
    if not latent.kept:
        widths.append(spec.heads * (still + latent.value_size))
        return 4 * rows * sum(map(_padded, widths))
    widths.append(spec.heads * max(spec.head_size, latent.value_size))
    each = _padded(max(latent.rank, still))  # of each head, in f32 and as codes
    by_head = 4 * each + 2 * each + 8 * (each // _GROUP)
    return rows * (4 * sum(map(_padded, widths)) + spec.heads * by_head)


def _padded(width: int) -> int:
    return -(-width // _ROW) * _ROW
