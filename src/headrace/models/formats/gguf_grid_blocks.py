"""Decodes the block types of GGUF below 4 bits whose codes stand for whole vectors (IQ1 to IQ3) or for three values
(TQ): as whole numbers, and factors for groups of them.

A weight is the block's scale times the factor of its group times its number. The factors are fractions that f32 holds
exactly, so values are equal to the reference's bit for bit. Does not know where a block's scale is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.models.formats.gguf_grids import grid

Bytes = NDArray[np.uint8]  # [blocks, bytes of a block]
F32 = NDArray[np.float32]

_EIGHT: Final = np.arange(8, dtype=np.uint8)
_NIBBLES: Final = np.array([0, 4], dtype=np.uint8)
_PAIRS: Final = np.array([0, 2, 4, 6], dtype=np.uint8)
_THREES: Final = np.array([0, 3, 6, 9], dtype=np.uint16)
_SEVENS: Final = np.array([0, 7, 14, 21], dtype=np.uint32)
_POWERS: Final = np.array([1, 3, 9, 27, 81], dtype=np.uint8)[:, None]


class Numbers(NamedTuple):
    numbers: NDArray[np.int8]  # [blocks, groups, weights of a group]
    factors: F32  # [blocks, groups]


def _words(blocks: Bytes, start: int, stop: int, dtype: str) -> NDArray[Any]:
    return np.ascontiguousarray(blocks[:, start:stop]).view(dtype)


def _spread(values: NDArray[Any], shifts: NDArray[Any], mask: int) -> NDArray[Any]:
    """Return the fields of each value, one after the other."""
    fields = (values[:, :, None] >> shifts) & values.dtype.type(mask)
    return fields.reshape(len(values), -1)


def _signed(vectors: NDArray[np.int8], signs: NDArray[Any], size: int) -> NDArray[np.int8]:
    """Return vectors as groups of a size, each number with its sign: a byte has the signs of eight."""
    negative = ((signs.astype(np.uint8)[:, :, None] >> _EIGHT) & np.uint8(1)).reshape(len(signs), -1)
    numbers = vectors.reshape(len(signs), -1) * (1 - 2 * negative.astype(np.int8))
    return numbers.reshape(len(signs), -1, size)


def _even(signs: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the signs of eight numbers, of which seven are stored: an even number is negative."""
    seven = signs.astype(np.uint8)
    odd = np.bitwise_count(seven) & np.uint8(1)
    return seven | (odd << np.uint8(7))


def _halves(scales: NDArray[Any]) -> F32:
    return scales.astype(np.float32) + np.float32(0.5)


def _iq2_xxs(blocks: Bytes) -> Numbers:
    words = _words(blocks, 2, 66, "<u4").reshape(len(blocks), 8, 2)
    codes = np.ascontiguousarray(words[:, :, 0]).view(np.uint8)
    signs = _even(_spread(words[:, :, 1], _SEVENS, 127))
    factors = _halves(words[:, :, 1] >> np.uint32(28)) * np.float32(0.25)
    return Numbers(_signed(grid("IQ2_XXS")[codes], signs, 32), factors)


def _iq2_xs(blocks: Bytes) -> Numbers:
    words = _words(blocks, 2, 66, "<u2")
    factors = _halves(_spread(blocks[:, 66:], _NIBBLES, 15)) * np.float32(0.25)
    return Numbers(_signed(grid("IQ2_XS")[words & np.uint16(511)], _even(words >> np.uint16(9)), 16), factors)


def _iq2_s(blocks: Bytes) -> Numbers:
    high = _spread(blocks[:, 66:74], _PAIRS, 3).astype(np.uint16)
    codes = blocks[:, 2:34] | (high << np.uint16(8))
    factors = _halves(_spread(blocks[:, 74:], _NIBBLES, 15)) * np.float32(0.25)
    return Numbers(_signed(grid("IQ2_S")[codes], blocks[:, 34:66], 16), factors)


def _iq3_xxs(blocks: Bytes) -> Numbers:
    words = _words(blocks, 66, 98, "<u4")
    factors = _halves(words >> np.uint32(28)) * np.float32(0.5)
    return Numbers(_signed(grid("IQ3_XXS")[blocks[:, 2:66]], _even(_spread(words, _SEVENS, 127)), 32), factors)


def _iq3_s(blocks: Bytes) -> Numbers:
    high = _spread(blocks[:, 66:74], _EIGHT, 1).astype(np.uint16)
    codes = blocks[:, 2:66] | (high << np.uint16(8))
    factors = _spread(blocks[:, 106:], _NIBBLES, 15).astype(np.float32) * 2 + 1
    return Numbers(_signed(grid("IQ3_S")[codes], blocks[:, 74:106], 32), factors)


def _eighths(vectors: NDArray[np.int8], less: NDArray[np.bool_], size: int) -> NDArray[np.int8]:
    """Return vectors of -1, 0 and 1 in eighths, with an eighth more, or less where it says so, as groups of a size."""
    moved = vectors.reshape(*less.shape, -1) * np.int8(8) + np.where(less, np.int8(-1), np.int8(1))[..., None]
    return moved.reshape(len(vectors), -1, size)


def _odd_eighths(scales: NDArray[Any]) -> F32:
    return (scales.astype(np.float32) * np.float32(2) + np.float32(1)) * np.float32(0.125)


def _iq1_s(blocks: Bytes) -> Numbers:
    words = _words(blocks, 34, 50, "<u2")
    codes = blocks[:, 2:34] | (_spread(words, _THREES, 7) << np.uint16(8))
    numbers = _eighths(grid("IQ1_S")[codes], (words & np.uint16(0x8000)) != 0, 32)
    return Numbers(numbers, _odd_eighths((words >> np.uint16(12)) & np.uint16(7)))


def _iq1_m(blocks: Bytes) -> Numbers:
    high = _spread(blocks[:, 32:48], _NIBBLES, 15)
    codes = blocks[:, :32] | ((high & np.uint8(7)).astype(np.uint16) << np.uint16(8))
    scales = _spread(_words(blocks, 48, 56, "<u2"), _THREES, 7)
    return Numbers(_eighths(grid("IQ1_S")[codes], (high & np.uint8(8)) != 0, 16), _odd_eighths(scales))


def iq1_m_scale(blocks: Bytes) -> F32:
    """Return the f16 that IQ1_M has in four parts, as [blocks, 1]."""
    parts = (_words(blocks, 48, 56, "<u2") >> np.uint16(12)) << np.array([0, 4, 8, 12], dtype=np.uint16)
    return np.bitwise_or.reduce(parts, axis=1, keepdims=True).view(np.float16).astype(np.float32)


def _ternary(digits: NDArray[np.uint8]) -> Numbers:
    numbers = (digits.astype(np.int8) - np.int8(1)).reshape(len(digits), 1, -1)
    return Numbers(numbers, np.ones((len(digits), 1), dtype=np.float32))


def _tq1_0(blocks: Bytes) -> Numbers:
    runs = ((0, 32, 5), (32, 48, 5), (48, 52, 4))  # bytes from, to, and digits of each byte
    powers = [(blocks[:, None, start:stop] * _POWERS[:digits]).reshape(len(blocks), -1) for start, stop, digits in runs]
    digits = (np.hstack(powers).astype(np.uint16) * np.uint16(3)) >> np.uint16(8)
    return _ternary(digits.astype(np.uint8))


def _tq2_0(blocks: Bytes) -> Numbers:
    digits = (blocks[:, :64].reshape(-1, 2, 1, 32) >> _PAIRS[:, None]) & np.uint8(3)
    return _ternary(digits.reshape(len(blocks), -1))


class GridFormat(NamedTuple):
    bytes: int  # of a block of 256 weights
    read: Callable[[Bytes], Numbers]
    scale: int | None  # the place of a block's f16 scale; None: it is in parts


GRID_FORMATS: Final[Mapping[str, GridFormat]] = {
    "IQ2_XXS": GridFormat(66, _iq2_xxs, 0),
    "IQ2_XS": GridFormat(74, _iq2_xs, 0),
    "IQ2_S": GridFormat(82, _iq2_s, 0),
    "IQ3_XXS": GridFormat(98, _iq3_xxs, 0),
    "IQ3_S": GridFormat(110, _iq3_s, 0),
    "IQ1_S": GridFormat(50, _iq1_s, 0),
    "IQ1_M": GridFormat(56, _iq1_m, None),
    "TQ1_0": GridFormat(54, _tq1_0, 52),
    "TQ2_0": GridFormat(66, _tq2_0, 64),
}
