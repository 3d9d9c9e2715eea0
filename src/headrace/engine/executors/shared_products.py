"""Products on an executor's threads with its embedding and head, between its steps: what draft heads need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np
from numpy.typing import NDArray

import headrace._core as _core
from headrace.models.packing import CoreTensor, LoadedTensors, pack_layers, pack_matrix
from headrace.models.precision import Precision
from headrace.models.spec import ModelSpec

Floats = NDArray[np.float32]


class SharedProducts:
    def __init__(self, spec: ModelSpec, tensors: Mapping[str, CoreTensor], pool: _core.Pool, isa: str) -> None:
        self.spec = spec
        self._embed = cast("_core.Packed", tensors["embed"])
        self._head = self._embed if spec.tied else cast("_core.Packed", tensors["head"])
        self._norm = tensors.get("norm")
        self._pool = pool
        self._isa = isa

    def embeddings(self, tokens: NDArray[np.int32]) -> Floats:
        """Return what the model's first layer reads for these tokens, [tokens, hidden]."""
        return self._embed.unpack_rows(tokens) * np.float32(self.spec.embedding_scale)

    def head_rows(self, tokens: NDArray[np.int32]) -> Floats:
        """Return the head's rows for these tokens, [tokens, hidden]."""
        return self._head.unpack_rows(tokens)

    def head_norm(self) -> Floats:
        """Return the factors of the norm before the head, [hidden]: ones if it is no RMS norm."""
        known = self.spec.final_norm and self.spec.norm == "rms" and isinstance(self._norm, np.ndarray)
        return np.array(self._norm, np.float32) if known else np.ones(self.spec.hidden_size, np.float32)

    def head(self, tokens: NDArray[np.int32] | None, precision: Precision) -> _core.Packed:
        """Return the head for some tokens, in a precision; for all tokens it is the model's own."""
        return self._head if tokens is None else self.pack(self.head_rows(tokens), precision)

    def pack(self, weights: Floats, precision: Precision) -> _core.Packed:
        return pack_matrix(weights, precision, self._pool)

    def pack_layers(self, spec: ModelSpec, tensors: Mapping[str, Floats], precision: Precision) -> LoadedTensors:
        return pack_layers(spec, tensors, precision, self._pool)

    def multiply(self, weights: _core.Packed, rows: Floats, outputs: int) -> Floats:
        """Return the product of each row with a matrix of so many outputs."""
        out = np.empty((len(rows), outputs), dtype=np.float32)
        _core.multiply(weights, np.ascontiguousarray(rows), out, self._pool, self._isa)
        return out
