"""Fits the values that a weight may take after rounding: whole numbers with a scale for each group, NF4 or FP8.

The grids of GGUF's block types are fitted in block_grids.

Scales are rounded to the type that the file stores before weights are, so that codes belong to the scales that a reader
sees. Knows one matrix at a time, and nothing of its inputs but how much each matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.compress.block_grids import BLOCK_TYPES, BlockScales, fit_blocks
from headrace.compress.fp8_numbers import E4M3, MOST, to_e4m3
from headrace.compress.layer_pass import F32
from headrace.compress.nested_scales import NESTED_BLOCK, nest

ScaleType = Literal["bf16", "f16", "f32"]
NF4: Final = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    dtype=np.float32,
)  # fmt: skip
NF4_BLOCK: Final = 64  # weights that share a magnitude, as bitsandbytes stores them
_CLIPS: Final = np.linspace(1.0, 0.6, 17)  # of the range of a group that are tried
_AT_ONCE: Final = 1 << 18  # weights whose grids are fitted together: they stay in a near cache
_LEAST: Final = 2.0**-14  # least scale: kernels keep scales as f16


class GridSpec(msgspec.Struct, frozen=True):
    """A kind of grid."""

    bits: int
    group: int = 128  # inputs that share a scale; 0: the whole row
    symmetric: bool = True
    kind: Literal["integer", "nf4", "fp8"] = "integer"
    scale_type: ScaleType = "bf16"
    block_type: str = ""  # of a GGUF file; the rest follows from it
    nested: bool = False  # the magnitudes of NF4's blocks are rounded too

    @classmethod
    def of_blocks(cls, name: str) -> GridSpec:
        kind = BLOCK_TYPES[name]
        return cls(bits=kind.bits, group=kind.group, symmetric=not kind.minima, scale_type="f16", block_type=name)

    @property
    def top(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def stored_bits(self) -> float:
        """Bits of a weight on disk, with its share of scales and zeros, for long rows."""
        if self.kind == "nf4":
            return 4 + (8 + 32 / NESTED_BLOCK if self.nested else 32) / NF4_BLOCK
        if self.block_type:
            return BLOCK_TYPES[self.block_type].bytes * 8 / BLOCK_TYPES[self.block_type].block
        return self.bits + ((16 + (0 if self.symmetric else self.bits)) / self.group if self.group else 0)


class Grid(msgspec.Struct, frozen=True):
    """The grid of one matrix."""

    spec: GridSpec
    scales: F32  # [outputs, groups]
    zeros: NDArray[np.int16]  # [outputs, groups]; unused by NF4 and FP8
    minima: F32 | None = None  # [outputs, groups], which are subtracted, in place of zeros
    blocks: BlockScales | None = None  # what blocks of GGUF store
    magnitudes: F32 | None = None  # [outputs, groups], before they were rounded (double quantisation)

    def rows(self, rows: slice | NDArray[np.intp]) -> Grid:
        """Return the grid of some rows."""
        return Grid(
            self.spec,
            self.scales[rows],
            self.zeros[rows],
            None if self.minima is None else self.minima[rows],
            None if self.blocks is None else self.blocks.rows(rows),
            None if self.magnitudes is None else self.magnitudes[rows],
        )

    def codes(self, weights: F32, groups: NDArray[np.intp]) -> NDArray[np.uint8]:
        """Round columns; `groups` has the group of each."""
        if self.minima is not None:
            weights = weights + self.minima[:, groups]
        scales = self.scales
        if self.spec.block_type or self.spec.nested:
            scales = np.where(scales == 0, np.float32(np.inf if self.spec.nested else 1), scales)
        scaled = weights / scales[:, groups]
        if self.spec.kind == "nf4":
            return np.searchsorted((NF4[1:] + NF4[:-1]) / 2, scaled).astype(np.uint8)
        if self.spec.kind == "fp8":
            return to_e4m3(scaled)
        if self.minima is None:
            scaled += self.zeros[:, groups]
        return np.clip(np.rint(scaled), 0, self.spec.top).astype(np.uint8)

    def values(self, codes: NDArray[np.uint8], groups: NDArray[np.intp]) -> F32:
        """Return the weights that codes stand for."""
        if self.spec.kind == "nf4":
            return NF4[codes] * self.scales[:, groups]
        if self.spec.kind == "fp8":
            return E4M3[codes] * self.scales[:, groups]
        if self.minima is not None:
            return codes.astype(np.float32) * self.scales[:, groups] - self.minima[:, groups]
        return (codes.astype(np.int16) - self.zeros[:, groups]).astype(np.float32) * self.scales[:, groups]


def group_of(inputs: int, spec: GridSpec) -> NDArray[np.intp]:
    """Return the group of every input."""
    return np.arange(inputs, dtype=np.intp) // (spec.group or inputs)


def fit(
    weights: F32,
    spec: GridSpec,
    *,
    importance: NDArray[Any] | None = None,
    clip: bool = True,
    parts: Sequence[int] = (),
) -> Grid:
    """Fit a grid to a matrix. `parts` are the rows of each tensor that it becomes in a file; all of them if empty.

    Without `clip` a group's grid covers its range, as plain rounding to nearest has it. With it, the part of the range
    is searched that leaves the least square error, weighted by the `importance` of each input. FP8 is not clipped: its
    steps near 0 hardly depend on the largest weight.
    """
    outputs, inputs = weights.shape
    group = spec.group or inputs
    groups = inputs // group
    if groups * group != inputs:
        raise ValueError(f"{inputs} inputs are no multiple of the group {group}")
    if spec.block_type:
        scales, minima, blocks = fit_blocks(weights, spec.block_type, importance=importance, clip=clip)
        zeros = np.full(scales.shape, spec.middle, dtype=np.int16)
        return Grid(spec, scales, zeros, None if spec.symmetric else minima, blocks)
    scales = np.empty((outputs, groups), dtype=np.float32)
    zeros = np.full((outputs, groups), spec.middle, dtype=np.int16)
    weight_of = None if importance is None else importance.astype(np.float32).reshape(groups, group)
    step = max(1, _AT_ONCE // inputs)
    for start in range(0, outputs, step):
        rows = slice(start, start + step)
        part = weights[rows].reshape(-1, groups, group)
        clips = _CLIPS if clip and spec.kind != "fp8" else _CLIPS[:1]
        scales[rows], zeros[rows] = _fit_groups(part, spec, weight_of, clips)
    if spec.nested:
        magnitudes, begin = scales.copy(), 0
        for rows in parts or (outputs,):
            part = slice(begin, begin + rows)
            scales[part] = nest(scales[part]).values().reshape(rows, groups)
            begin += rows
        # A block that is far below the others may get a negative magnitude. All of its codes are those of 0.
        np.maximum(scales, 0, out=scales)
        return Grid(spec, scales, zeros, magnitudes=magnitudes)
    return Grid(spec, scales, zeros)


def round_to_nearest(weights: F32, grid: Grid) -> NDArray[np.uint8]:
    index = group_of(weights.shape[1], grid.spec)
    step = max(1, _AT_ONCE // weights.shape[1])
    parts = [
        grid.rows(rows).codes(weights[rows], index)
        for rows in (slice(start, start + step) for start in range(0, len(weights), step))
    ]
    return np.concatenate(parts)


def dequantise(codes: NDArray[np.uint8], grid: Grid) -> F32:
    return grid.values(codes, group_of(codes.shape[1], grid.spec))


def rounded(values: F32, kind: ScaleType) -> F32:
    """Round to the values of a type, to nearest even."""
    if kind == "f32":
        return values.astype(np.float32)
    if kind == "f16":
        return values.astype(np.float16).astype(np.float32)
    return (to_bf16(values).astype(np.uint32) << 16).view(np.float32)


def to_bf16(values: F32) -> NDArray[np.uint16]:
    """Return the bits of bf16, rounded to nearest even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _fit_groups(
    part: F32, spec: GridSpec, importance: F32 | None, clips: NDArray[np.float64]
) -> tuple[F32, NDArray[np.int16]]:
    """Return scales and zeros of [rows, groups, inputs]."""
    low, high = part.min(axis=2), part.max(axis=2)
    largest = np.maximum(high, -low)
    best = np.full(low.shape, np.inf, dtype=np.float32)
    scales, zeros = np.ones_like(low), np.full(low.shape, spec.middle, dtype=np.int16)
    low, high = np.minimum(low, 0), np.maximum(high, 0)  # 0 stays exact
    for clip in clips:
        ratio = np.float32(clip)
        zero = np.full(low.shape, spec.middle, dtype=np.int16)
        if spec.kind == "nf4":
            scale = largest * ratio
        elif spec.kind == "fp8":
            scale = largest / MOST
        elif spec.symmetric:
            scale = largest * ratio * np.float32(2 / spec.top)
        else:
            scale = (high - low) * ratio * np.float32(1 / spec.top)
        scale = rounded(np.maximum(scale, np.float32(_LEAST if spec.kind == "integer" else 1e-12)), spec.scale_type)
        if spec.kind == "integer" and not spec.symmetric:
            zero = np.clip(np.rint(-low * ratio / scale), 0, spec.top).astype(np.int16)
        if len(clips) == 1:
            return scale, zero
        error = part - _nearest(part, scale[..., None], zero[..., None], spec)
        np.square(error, out=error)
        if importance is not None:
            error *= importance
        total = error.sum(axis=2)
        better = total < best
        best[better], scales[better], zeros[better] = total[better], scale[better], zero[better]
    return scales, zeros


def _nearest(part: F32, scale: F32, zero: NDArray[np.int16], spec: GridSpec) -> F32:
    if spec.kind == "nf4":
        return NF4[np.searchsorted((NF4[1:] + NF4[:-1]) / 2, part / scale)] * scale
    least, most = (-zero).astype(np.float32), (spec.top - zero).astype(np.float32)
    codes = part / scale
    np.rint(codes, out=codes)
    np.clip(codes, least, most, out=codes)
    codes *= scale
    return codes
