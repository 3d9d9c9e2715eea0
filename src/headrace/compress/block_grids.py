"""Fits the grids of GGUF's block types, and packs codes into their blocks.

A block of 32 weights has a scale, and in Q4_1 a minimum, in f16. A block of 256 (Q4_K, Q6_K) has f16 factors for the
whole block and small whole numbers for each of its groups. Fits round those first, so that codes belong to the numbers
that a reader sees. Knows one matrix at a time, and no files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.compress.layer_pass import F32

Bytes = NDArray[np.uint8]

_CLIPS: Final = np.linspace(1.05, 0.6, 19)  # of the range of a group that are tried
_NARROW: Final = np.ones(1)
_LARGEST_HALF: Final = 65504.0


class BlockType(NamedTuple):
    bits: int
    group: int  # weights that share a scale
    block: int  # weights of a block
    bytes: int  # of a block
    minima: bool  # groups have a minimum; without one the middle code is 0
    whole: int = 0  # the largest of the whole numbers that are scales; 0: scales are f16

    @property
    def top(self) -> int:
        return (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        return 0 if self.minima else 1 << (self.bits - 1)


BLOCK_TYPES: Final[Mapping[str, BlockType]] = {
    "Q8_0": BlockType(8, 32, 32, 34, False),
    "Q6_K": BlockType(6, 16, 256, 210, False, 127),
    "Q4_K": BlockType(4, 32, 256, 144, True, 63),
    "Q4_1": BlockType(4, 32, 32, 20, True),
    "Q4_0": BlockType(4, 32, 32, 18, False),
}


class BlockScales(NamedTuple):
    """What blocks store beside their codes. The whole numbers are those of groups; without any, factors are scales."""

    factors: F32  # [rows, blocks]
    minima: F32  # [rows, blocks]
    whole: NDArray[np.int16]  # [rows, groups]
    whole_minima: NDArray[np.int16]  # [rows, groups]

    def rows(self, rows: slice | NDArray[np.intp]) -> BlockScales:
        return BlockScales(self.factors[rows], self.minima[rows], self.whole[rows], self.whole_minima[rows])


def block_type(bits: int, inputs: int, *, symmetric: bool) -> str:
    """Return the type for products of these bits: K-quants where rows fill their blocks, else blocks of 32."""
    fills = inputs % 256 == 0
    if bits == 8 or (bits == 6 and not fills):
        return "Q8_0"
    if bits == 6:
        return "Q6_K"
    return "Q4_0" if symmetric else "Q4_K" if fills else "Q4_1"


def fit_blocks(
    weights: F32, name: str, *, importance: NDArray[Any] | None = None, clip: bool = True
) -> tuple[F32, F32, BlockScales]:
    """Return scales and minima of groups [rows, groups] as readers compute them, and what blocks store of them.

    A weight is scale * (code - middle) - minimum.
    """
    kind = BLOCK_TYPES[name]
    groups = weights.shape[1] // kind.group
    shares = None if importance is None else importance.astype(np.float32).reshape(groups, kind.group)
    step = max(1, (1 << 18) // weights.shape[1])
    parts = [
        _fit_rows(weights[start : start + step], kind, shares, _CLIPS if clip else _NARROW)
        for start in range(0, len(weights), step)
    ]
    scales, minima, stored = zip(*parts, strict=True)
    joined = BlockScales(*(np.concatenate(each) for each in zip(*stored, strict=True)))
    return np.concatenate(scales), np.concatenate(minima), joined


def pack_blocks(codes: NDArray[np.uint8], name: str, stored: BlockScales) -> Bytes:
    """Return the rows' blocks: [rows, bytes of a row]."""
    kind = BLOCK_TYPES[name]
    rows = len(codes)
    blocks = codes.reshape(-1, kind.block)
    factors = _half(stored.factors)
    match name:
        case "Q8_0":
            parts = [factors, blocks ^ np.uint8(128)]
        case "Q4_0":
            parts = [factors, _nibbles(blocks, 16)]
        case "Q4_1":
            parts = [factors, _half(-stored.minima), _nibbles(blocks, 16)]
        case "Q4_K":
            parts = [factors, _half(stored.minima), _six_bits(stored), _nibbles(blocks, 32)]
        case _:
            scales = stored.whole.astype(np.int8).view(np.uint8).reshape(len(blocks), -1)
            parts = [_nibbles(blocks & np.uint8(15), 64), _pairs(blocks >> np.uint8(4)), scales, factors]
    return np.hstack(parts).reshape(rows, -1)


def _fit_rows(
    weights: F32, kind: BlockType, shares: F32 | None, clips: NDArray[np.float64]
) -> tuple[F32, F32, BlockScales]:
    part = weights.reshape(len(weights), -1, kind.group)
    scales, minima = (_fit_range if kind.minima else _fit_middle)(part, kind, shares, clips)
    if not kind.whole:
        scales, minima = _as_half(scales), _as_half(minima)
        none = np.zeros(scales.shape, dtype=np.int16)
        return scales, minima, BlockScales(scales, minima, none, none)
    factors, whole = _whole(scales, kind)
    least, whole_minima = _whole(minima, kind)
    repeat = kind.block // kind.group
    scales = np.repeat(factors, repeat, axis=1) * whole.astype(np.float32)
    minima = np.repeat(least, repeat, axis=1) * whole_minima.astype(np.float32)
    return scales, minima, BlockScales(factors, least, whole, whole_minima)


def _fit_middle(part: F32, kind: BlockType, shares: F32 | None, clips: NDArray[np.float64]) -> tuple[F32, F32]:
    """Return scales around 0. The weight farthest from 0 may take the lowest code, which has no opposite."""
    at = np.abs(part).argmax(axis=2)
    far = np.take_along_axis(part, at[..., None], axis=2)[..., 0]
    minima = np.zeros_like(far)
    plain: F32 = (np.abs(far) / np.float32(kind.middle - 1)).astype(np.float32)
    if len(clips) == 1 or kind.bits == 8:
        return plain, minima
    best = np.full(far.shape, np.inf, dtype=np.float32)
    scales: F32 = plain.copy()
    for scale in (*(far * np.float32(-clip / kind.middle) for clip in clips), plain):
        total = _error(part, scale, minima, kind, shares)
        better = total < best
        best[better], scales[better] = total[better], scale[better]
    return scales, minima


def _fit_range(part: F32, kind: BlockType, shares: F32 | None, clips: NDArray[np.float64]) -> tuple[F32, F32]:
    """Return scales and minima of groups: weights are scale * code - minimum, and no minimum is below 0 in K-quants."""
    low, high = part.min(axis=2), part.max(axis=2)
    if kind.whole:
        low = np.minimum(low, 0)
    best = np.full(low.shape, np.inf, dtype=np.float32)
    scales, minima = np.zeros_like(low), np.zeros_like(low)
    centre = (low + high) / 2
    for clip in clips:
        reach = (high - low) * np.float32(clip / 2)
        scale, minimum = reach * np.float32(2 / kind.top), reach - centre
        if kind.whole:
            minimum = np.maximum(minimum, 0)
        if len(clips) == 1:
            return scale, minimum
        total = _error(part, scale, minimum, kind, shares)
        better = total < best
        best[better], scales[better], minima[better] = total[better], scale[better], minimum[better]
    return scales, minima


def _error(part: F32, scale: F32, minimum: F32, kind: BlockType, shares: F32 | None) -> F32:
    """Return each group's square error, weighted by the importance of inputs."""
    divisor = np.where(scale == 0, 1, scale)[..., None]
    values = (part + minimum[..., None]) / divisor
    values += kind.middle
    np.rint(values, out=values)
    np.clip(values, 0, kind.top, out=values)
    values -= kind.middle
    values *= scale[..., None]
    values -= minimum[..., None]
    values -= part
    np.square(values, out=values)
    if shares is not None:
        values *= shares
    return values.sum(axis=2)


def _whole(values: F32, kind: BlockType) -> tuple[F32, NDArray[np.int16]]:
    """Return factors of blocks in f16, and the whole numbers of groups by which they are multiplied."""
    each = values.reshape(len(values), -1, kind.block // kind.group)
    factors = _as_half(np.abs(each).max(axis=2) / np.float32(kind.whole))
    divisor = np.where(factors == 0, 1, factors)[..., None]
    least = 0 if kind.minima else -kind.whole
    whole = np.clip(np.rint(each / divisor), least, kind.whole)
    return factors, whole.reshape(values.shape).astype(np.int16)


def _as_half(values: F32) -> F32:
    return np.clip(values, -_LARGEST_HALF, _LARGEST_HALF).astype(np.float16).astype(np.float32)


def _half(values: F32) -> Bytes:
    """Return f16 as [blocks, 2 bytes]."""
    return np.ascontiguousarray(values.reshape(-1, 1).astype("<f2")).view(np.uint8)


def _nibbles(blocks: Bytes, run: int) -> Bytes:
    """Put two codes into a byte: of every 2 * `run` codes the first half is low, the second high."""
    pairs = blocks.reshape(len(blocks), -1, 2, run)
    return (pairs[:, :, 0] | (pairs[:, :, 1] << np.uint8(4))).reshape(len(blocks), -1)


def _pairs(high: Bytes) -> Bytes:
    """Put four codes of 2 bits into a byte: of every 128 codes, one of each quarter."""
    quarters = high.reshape(len(high), 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    return np.bitwise_or.reduce(quarters << shifts, axis=2).reshape(len(high), -1)


def _six_bits(stored: BlockScales) -> Bytes:
    """Pack eight scales and eight minima of six bits into twelve bytes."""
    scales, minima = (each.astype(np.uint8).reshape(-1, 2, 4) for each in (stored.whole, stored.whole_minima))
    four, low = np.uint8(4), np.uint8(15)
    first = scales[:, 0] | ((scales[:, 1] >> four) << np.uint8(6))
    second = minima[:, 0] | ((minima[:, 1] >> four) << np.uint8(6))
    rest = (scales[:, 1] & low) | ((minima[:, 1] & low) << four)
    return np.hstack([first, second, rest])
