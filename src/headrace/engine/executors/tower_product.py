"""TowerProduct: a product of an image part that is not within its encoder, with its bias. Does not know towers."""

from __future__ import annotations

from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

import headrace._core as _core
from headrace.models.packing import pack_matrix
from headrace.models.precision import Precision

Floats = NDArray[np.float32]
TowerActivation = Literal["", "gelu", "gelu_tanh", "silu"]

F32: Final = Precision("f32")


class TowerProduct:
    def __init__(
        self, matrix: Floats, bias: Floats | None, pool: _core.Pool, isa: str, precision: Precision = F32
    ) -> None:
        self.outputs, self.inputs = matrix.shape
        self._weights = pack_matrix(matrix, precision, pool)
        self._bias = bias
        self._pool = pool
        self._isa = isa

    def multiply(self, rows: Floats, activation: TowerActivation = "") -> Floats:
        """Return the product of rows, [rows, inputs], and its weights, opened: [rows, outputs]."""
        out = np.empty((len(rows), self.outputs), dtype=np.float32)
        _core.multiply(self._weights, np.ascontiguousarray(rows), out, self._pool, self._isa, self._bias, activation)
        return out
