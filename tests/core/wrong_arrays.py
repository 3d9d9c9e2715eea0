"""Arrays that are wrong in one way, for tests of what the core refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Floats = NDArray[np.float32]

REFUSED = (ValueError, TypeError)


def int32(*values: Any) -> Array:
    return np.array(values, dtype=np.int32)


def floats(*shape: int) -> Floats:
    return np.zeros(shape, np.float32)


def off_by_one_byte(array: Array) -> Array:
    """The same values at an address that is no multiple of their size."""
    raw = np.zeros(array.nbytes + 1, np.uint8)
    moved = raw[1:].view(array.dtype).reshape(array.shape)
    moved[...] = array
    return moved


def frozen(array: Array) -> Array:
    array = array.copy()
    array.flags.writeable = False
    return array
