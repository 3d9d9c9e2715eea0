"""Defines the canonical tensors that every on-disk format becomes, and the views of a file that they are made from."""

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


class StoredTensor(msgspec.Struct, frozen=True):
    """A read-only view of a tensor on disk, of any type that quantised files use."""

    name: str
    dtype: str  # as on disk: "F32", "I32", "F8_E4M3", ...
    data: NDArray[Any]  # of the type; bits in whole numbers for bf16, f16 and FP8
    path: Path

    def to_f32(self) -> NDArray[np.float32]:
        """Convert a tensor of F32, BF16 or F16 exactly."""
        dtypes: dict[str, Literal["f32", "bf16", "f16"]] = {"F32": "f32", "BF16": "bf16", "F16": "f16"}
        return DenseTensor(self.name, dtypes[self.dtype], self.data.shape, self.data, self.path).to_f32()
