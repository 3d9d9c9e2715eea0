"""Defines the canonical tensors that every on-disk format becomes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray


class DenseTensor(msgspec.Struct, frozen=True):
    """A read-only view in C order of a tensor on disk; it keeps the file mapped."""

    name: str
    dtype: Literal["f32", "bf16", "f16"]
    shape: tuple[int, ...]
    data: NDArray[Any]  # float32, or uint16 bits for bf16 and f16
    path: Path  # of the file that holds it, for messages

    def to_f32(self) -> NDArray[np.float32]:
        """Convert exactly: a view for f32, a copy for other types."""
        if self.dtype == "f32":
            return self.data
        if self.dtype == "f16":
            return self.data.view(np.float16).astype(np.float32)
        wide = self.data.astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
