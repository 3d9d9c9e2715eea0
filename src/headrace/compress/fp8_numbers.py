"""Rounds numbers to FP8 in E4M3, and says what its bytes stand for. Knows no scales."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from headrace.models.quantised.fp8 import TABLES

E4M3: Final[NDArray[np.float32]] = TABLES["F8_E4M3"]  # of each byte; NaN for two of them
MOST: Final = np.float32(448)
_MOST_BITS: Final = MOST.view(np.uint32)
_LEAST_NORMAL: Final = np.float32(2.0**-6).view(np.uint32)
_RAISE: Final = np.float32(2.0**14)  # the last bit of a sum with it is 2^-9, the step below the least normal number


def to_e4m3(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Round to nearest even. What is beyond 448 becomes 448."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    size = np.minimum(bits & np.uint32(0x7FFFFFFF), _MOST_BITS)
    odd = (size >> np.uint32(20)) & np.uint32(1)
    # Wraps below the least normal number, where the other term is taken.
    normal = (size + np.uint32(0x7FFFF) + odd - np.uint32(0x3C000000)) >> np.uint32(20)
    small = (size.view(np.float32) + _RAISE).view(np.uint32) - _RAISE.view(np.uint32)
    sign = (bits >> np.uint32(24)) & np.uint32(0x80)
    return (np.where(size < _LEAST_NORMAL, small, normal) | sign).astype(np.uint8)
