"""Decodes the block types of GGUF: how many weights and bytes a block has, and its values as f32.

The arithmetic is that of the reference, in f32 and in its order, so values are equal bit for bit. Does not know files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.models.formats.gguf_grid_blocks import GRID_FORMATS, iq1_m_scale

Bytes = NDArray[np.uint8]  # [blocks, bytes of a block]
F32 = NDArray[np.float32]

_DECODED: Final = 1 << 22  # weights decoded at once, so that the memory in between stays small
_NIBBLES: Final = np.array([0, 4], dtype=np.uint8)[:, None]
_PAIRS: Final = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
_BITS: Final = np.arange(8, dtype=np.uint8)[:, None]
_IQ4: Final = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)
_FLOATS4: Final = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.float32)  # twice each
# What the codes of a type stand for, by the kernels' names of tables.
TABLES: Final[Mapping[str, NDArray[np.int16]]] = {"iq4": _IQ4.astype(np.int16), "mxfp4": _FLOATS4.astype(np.int16)}


class BlockFormat(NamedTuple):
    weights: int
    bytes: int
    decode: Callable[[Bytes], F32]  # [blocks, weights], or with more axes


class Codes(NamedTuple):
    """Weights as scale * (code - zero), or scale * code + offset, in groups of inputs that share these."""

    codes: NDArray[np.uint8]  # [outputs, inputs]
    scales: F32  # [outputs, groups]
    offsets: F32 | None = None  # [outputs, groups]


class Exact(NamedTuple):
    """How a type is kept with its own codes."""

    bits: int
    group: int = 32
    offsets: bool = False
    table: str = ""  # codes stand for the values of this


def decode_rows(rows: Bytes, type_name: str) -> F32:
    """Return the values of rows of whole blocks, decoded a few rows at a time."""
    block = BLOCKS[type_name]
    width = rows.shape[1] // block.bytes * block.weights
    values = np.empty((len(rows), width), dtype=np.float32)
    step = max(1, _DECODED // max(width, 1))
    for start in range(0, len(rows), step):
        part = np.ascontiguousarray(rows[start : start + step])
        with np.errstate(
            invalid="ignore", over="ignore"
        ):  # a hostile scale: packing rejects values that are not finite
            values[start : start + step] = block.decode(part.reshape(-1, block.bytes)).reshape(len(part), width)
    return values


def exact_codes(rows: Bytes, type_name: str) -> Codes:
    """Return the codes of rows of a type in EXACT, with scales and offsets. Without offsets, the zero is in the middle,
    or the codes stand for the values of a table."""
    block = BLOCKS[type_name]
    blocks = np.ascontiguousarray(rows).reshape(-1, block.bytes)
    with np.errstate(invalid="ignore", over="ignore"):  # a hostile scale: the caller rejects what is not finite
        codes, scales, offsets = _exact_blocks(blocks, type_name)
    return Codes(
        codes.reshape(len(rows), -1),
        np.ascontiguousarray(scales.reshape(len(rows), -1)),
        None if offsets is None else np.ascontiguousarray(offsets.reshape(len(rows), -1)),
    )


def _exact_blocks(blocks: Bytes, type_name: str) -> tuple[Bytes, F32, F32 | None]:
    scales = _half(blocks, 0)
    offsets = None
    match type_name:
        case "Q8_0":
            codes = blocks[:, 2:] ^ np.uint8(128)
        case "Q5_0":
            codes = _fives(blocks, 2) + np.uint8(128 - 16)
        case "Q4_0":
            codes = _nibbles(blocks[:, 2:], 16)
        case "Q4_1":
            codes, offsets = _nibbles(blocks[:, 4:], 16), _half(blocks, 2)
        case "Q4_K":
            codes = _nibbles(blocks[:, 16:], 32)
            scales, minima = _scales_and_minima(blocks)
            offsets = -minima
        case "Q2_K":
            codes = _q2_codes(blocks).reshape(len(blocks), -1)
            scales, minima = _q2_scales(blocks)
            offsets = -minima
        case "Q3_K":
            codes, scales = _q3_codes(blocks).reshape(len(blocks), -1), _q3_scales(blocks)
        case "IQ4_NL":
            codes = _nibbles(blocks[:, 2:], 16)
        case "MXFP4":
            codes, scales = _nibbles(blocks[:, 1:], 16), _mxfp4_scales(blocks)
        case "IQ4_XS":
            codes, scales = _nibbles(blocks[:, 8:], 16), _iq4_xs_scales(blocks)
        case _:
            codes, scales, offsets = _grid_codes(blocks, type_name)
    return codes, scales, offsets


def _grid_codes(blocks: Bytes, type_name: str) -> tuple[Bytes, F32, F32 | None]:
    """Return codes for the numbers that a grid's vectors have."""
    numbers, scales = _grid_numbers(blocks, type_name)
    offsets: F32 | None = None
    match type_name:
        case "IQ3_S":  # odd numbers from -15 to 15
            codes = (numbers + np.int8(15)) >> np.int8(1)
            scales, offsets = scales * np.float32(2), scales * np.float32(-15)
        case "IQ1_S":  # -1, 0 and 1 in eighths, and in each group an eighth more or less
            codes = (numbers + np.int8(9)) >> np.int8(3)
            moved = numbers[:, :, 0] - 8 * (codes[:, :, 0] - np.int8(1))
            eighths: F32 = np.subtract(moved, 8, dtype=np.float32)
            scales, offsets = scales * np.float32(8), scales * eighths
        case "IQ1_M":  # the same, for each vector
            codes = (numbers + np.int8(9)) >> np.int8(1)
            scales, offsets = scales * np.float32(2), scales * np.float32(-9)
        case "TQ1_0" | "TQ2_0":  # -1, 0 and 1; hostile blocks have 2, which the other sign of the scale makes room for
            codes, scales = np.int8(2) - numbers, -scales
        case _:
            codes = numbers.view(np.uint8) ^ np.uint8(128)
    return codes.view(np.uint8).reshape(len(blocks), -1), scales, offsets


def _grid_numbers(blocks: Bytes, type_name: str) -> tuple[NDArray[np.int8], F32]:
    """Return whole numbers, in groups, and the scale of each group."""
    grid = GRID_FORMATS[type_name]
    numbers, factors = grid.read(blocks)
    scale = iq1_m_scale(blocks) if grid.scale is None else _half(blocks, grid.scale)
    return numbers, scale * factors


def _grid_values(type_name: str) -> Callable[[Bytes], F32]:
    def decode(blocks: Bytes) -> F32:
        numbers, scales = _grid_numbers(blocks, type_name)
        return scales[:, :, None] * numbers.astype(np.float32)

    return decode


def _half(blocks: Bytes, at: int) -> F32:
    """Return the f16 at a place of every block, as [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(data: Bytes, run: int) -> Bytes:
    """Return the low nibbles of every run of bytes, then its high ones."""
    return ((data.reshape(len(data), -1, 1, run) >> _NIBBLES) & np.uint8(15)).reshape(len(data), -1)


def _minus(values: NDArray[np.uint8], zero: int) -> F32:
    result: F32 = np.subtract(values, zero, dtype=np.float32)
    return result


def _dense(dtype: str) -> Callable[[Bytes], F32]:
    return lambda blocks: blocks.view(dtype).astype(np.float32)


def _bf16(blocks: Bytes) -> F32:
    return (blocks.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def _q4_0(blocks: Bytes) -> F32:
    return _half(blocks, 0) * _minus(_nibbles(blocks[:, 2:], 16), 8)


def _q4_1(blocks: Bytes) -> F32:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:], 16).astype(np.float32) + _half(blocks, 2)


def _fives(blocks: Bytes, at: int) -> Bytes:
    high = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little")
    return _nibbles(blocks[:, at + 4 :], 16) | (high << np.uint8(4))


def _q5_0(blocks: Bytes) -> F32:
    return _half(blocks, 0) * _minus(_fives(blocks, 2), 16)


def _q5_1(blocks: Bytes) -> F32:
    return _half(blocks, 0) * _fives(blocks, 4).astype(np.float32) + _half(blocks, 2)


def _q8_0(blocks: Bytes) -> F32:
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q2_codes(blocks: Bytes) -> Bytes:
    return ((blocks[:, 16:80].reshape(-1, 2, 1, 32) >> _PAIRS) & np.uint8(3)).reshape(-1, 16, 16)


def _q2_scales(blocks: Bytes) -> tuple[F32, F32]:
    """Return the scales and minima of the sixteen groups of each block, four bits each."""
    scales = _half(blocks, 80) * (blocks[:, :16] & np.uint8(15)).astype(np.float32)
    return scales, _half(blocks, 82) * (blocks[:, :16] >> np.uint8(4)).astype(np.float32)


def _q2_k(blocks: Bytes) -> F32:
    scale, minimum = _q2_scales(blocks)
    values: F32 = np.subtract(scale[:, :, None] * _q2_codes(blocks).astype(np.float32), minimum[:, :, None])
    return values


def _q3_scales(blocks: Bytes) -> F32:
    packed = blocks[:, 96:108]
    low_scales = (packed[:, None, :8] >> _NIBBLES).reshape(-1, 16) & np.uint8(15)
    high_scales = (packed[:, None, 8:] >> _PAIRS).reshape(-1, 16) & np.uint8(3)
    return _half(blocks, 108) * _minus(low_scales | (high_scales << np.uint8(4)), 32)


def _q3_codes(blocks: Bytes) -> Bytes:
    low = ((blocks[:, 32:96].reshape(-1, 2, 1, 32) >> _PAIRS) & np.uint8(3)).reshape(-1, 16, 16)
    set_bits = ((blocks[:, None, :32] >> _BITS) & np.uint8(1)).reshape(-1, 16, 16)
    return low | (set_bits << np.uint8(2))


def _q3_k(blocks: Bytes) -> F32:
    return _q3_scales(blocks)[:, :, None] * _minus(_q3_codes(blocks), 4)


def _scales_and_minima(blocks: Bytes) -> tuple[F32, F32]:
    """Return the scales and minima of the eight groups of a Q4_K or Q5_K block, six bits each."""
    packed = blocks[:, 4:16].reshape(-1, 3, 4)
    first, second, rest = packed[:, 0], packed[:, 1], packed[:, 2]
    two = np.uint8(2)
    scales = np.hstack([first & np.uint8(63), (rest & np.uint8(15)) | ((first >> two) & np.uint8(48))])
    minima = np.hstack([second & np.uint8(63), (rest >> np.uint8(4)) | ((second >> two) & np.uint8(48))])
    scale = _half(blocks, 0) * scales.astype(np.float32)
    return scale, _half(blocks, 2) * minima.astype(np.float32)


def _q4_k(blocks: Bytes) -> F32:
    scale, minimum = _scales_and_minima(blocks)
    codes = _nibbles(blocks[:, 16:], 32).reshape(-1, 8, 32)
    return scale[:, :, None] * codes.astype(np.float32) - minimum[:, :, None]


def _q5_k(blocks: Bytes) -> F32:
    scale, minimum = _scales_and_minima(blocks)
    low = _nibbles(blocks[:, 48:], 32).reshape(-1, 8, 32)
    high = (blocks[:, None, 16:48] >> _BITS) & np.uint8(1)
    return scale[:, :, None] * (low | (high << np.uint8(4))).astype(np.float32) - minimum[:, :, None]


def _q6_k(blocks: Bytes) -> F32:
    low = _nibbles(blocks[:, :128], 64)
    high = ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> _PAIRS) & np.uint8(3)).reshape(-1, 256)
    codes = _minus(low | (high << np.uint8(4)), 32)
    scale = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return scale[:, :, None] * codes.reshape(-1, 16, 16)


def _iq4_nl(blocks: Bytes) -> F32:
    return _half(blocks, 0) * _IQ4[_nibbles(blocks[:, 2:], 16)]


def _iq4_xs_scales(blocks: Bytes) -> F32:
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16)
    low = ((blocks[:, 4:8, None] >> np.array([0, 4], dtype=np.uint8)) & np.uint8(15)).reshape(-1, 8)
    scales = _minus(low | ((high.astype(np.uint8) & np.uint8(3)) << np.uint8(4)), 32)
    return _half(blocks, 0) * scales


def _iq4_xs(blocks: Bytes) -> F32:
    return _iq4_xs_scales(blocks)[:, :, None] * _IQ4[_nibbles(blocks[:, 8:], 16)].reshape(-1, 8, 32)


def _mxfp4_scales(blocks: Bytes) -> F32:
    """Return half the power of two of every block: the table has twice the values."""
    scales: F32 = np.ldexp(np.float32(0.5), blocks[:, :1].astype(np.int32) - 127).astype(np.float32)
    return scales


def _mxfp4(blocks: Bytes) -> F32:
    return _mxfp4_scales(blocks) * _FLOATS4[_nibbles(blocks[:, 1:], 16)]


BLOCKS: Final[Mapping[str, BlockFormat]] = {
    "F32": BlockFormat(1, 4, _dense("<f4")),
    "F16": BlockFormat(1, 2, _dense("<f2")),
    "BF16": BlockFormat(1, 2, _bf16),
    "Q8_0": BlockFormat(32, 34, _q8_0),
    "Q4_0": BlockFormat(32, 18, _q4_0),
    "Q4_1": BlockFormat(32, 20, _q4_1),
    "Q5_0": BlockFormat(32, 22, _q5_0),
    "Q5_1": BlockFormat(32, 24, _q5_1),
    "Q2_K": BlockFormat(256, 84, _q2_k),
    "Q3_K": BlockFormat(256, 110, _q3_k),
    "Q4_K": BlockFormat(256, 144, _q4_k),
    "Q5_K": BlockFormat(256, 176, _q5_k),
    "Q6_K": BlockFormat(256, 210, _q6_k),
    "IQ4_NL": BlockFormat(32, 18, _iq4_nl),
    "IQ4_XS": BlockFormat(256, 136, _iq4_xs),
    "MXFP4": BlockFormat(32, 17, _mxfp4),
    **{name: BlockFormat(256, each.bytes, _grid_values(name)) for name, each in GRID_FORMATS.items()},
}
# Types that the kernels have a layout for. Those of 5 and 6 bits with minima or closer groups are not among them: their
# codes would take 8 bits of memory, as weights that are rounded to int8 do.
EXACT: Final[Mapping[str, Exact]] = {
    "Q8_0": Exact(8),
    "Q5_0": Exact(8),
    "Q4_0": Exact(4),
    "Q4_1": Exact(4, offsets=True),
    "Q4_K": Exact(4, offsets=True),
    "Q3_K": Exact(3, group=16),
    "Q2_K": Exact(2, group=16, offsets=True),
    "IQ4_NL": Exact(4, table="iq4"),
    "IQ4_XS": Exact(4, table="iq4"),
    "MXFP4": Exact(4, table="mxfp4"),
    "IQ3_XXS": Exact(8),
    "IQ2_XXS": Exact(8),
    "IQ3_S": Exact(4, offsets=True),
    "IQ1_S": Exact(2, offsets=True),
    "IQ1_M": Exact(4, group=16, offsets=True),
    "TQ1_0": Exact(2, group=256),
    "TQ2_0": Exact(2, group=256),
}
# The types' numbers in files; those that BLOCKS lacks are refused by name.
TYPE_NAMES: Final[Mapping[int, str]] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
