"""Presents the tensors of a GGUF file as other weights are presented: dense, or with their codes where the kernels can
take them. Reads one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ModelError
from headrace.models.formats.gguf_blocks import EXACT, IQ4_VALUES, decode_rows, exact_codes
from headrace.models.formats.gguf_file import GgufFile, GgufTensor
from headrace.models.formats.quantised_layer import AffineCodes, StoredLayout
from headrace.models.formats.tensors import DenseTensor

_DENSE: Final[Mapping[str, tuple[Literal["f32", "bf16", "f16"], str]]] = {
    "F32": ("f32", "<f4"),
    "BF16": ("bf16", "<u2"),
    "F16": ("f16", "<u2"),
}
_IQ4: Final = frozenset({"IQ4_NL", "IQ4_XS"})


class GgufWeights:
    """The tensors of a file by their names in it."""

    def __init__(self, file: GgufFile, interleaved: Mapping[str, int]) -> None:
        """`interleaved`: tensors whose rows are put in our order, with their number of heads."""
        self.file = file
        self._interleaved = interleaved
        self.files = (file.path,)
        self.names = frozenset(file.tensors)
        self.total_bytes = sum(entry.stop - entry.start for entry in file.tensors.values())

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def dense(self, name: str) -> DenseTensor:
        entry = self._entry(name)
        rows = self._rows(name, entry)
        data: NDArray[Any]
        if entry.type in _DENSE:
            dtype, view = _DENSE[entry.type]
            data = rows.view(view)
        else:
            dtype, data = "f32", decode_rows(rows, entry.type)
        return DenseTensor(
            name=name, dtype=dtype, shape=entry.shape, data=data.reshape(entry.shape), path=self.file.path
        )

    def drop_pages(self) -> None:
        """Give back the memory of what was read of the file."""
        self.file.drop_pages()

    def stored_names(self, name: str) -> tuple[str, ...]:
        return (name,)

    def layout(self, name: str) -> StoredLayout | None:
        """Return how a tensor is quantised; None if it is not."""
        kind = self._entry(name).type
        if kind in _DENSE:
            return None
        exact = EXACT.get(kind)
        if exact is None:
            return StoredLayout("blocks", 0)
        table = "iq4" if kind in _IQ4 else ""
        return StoredLayout(
            kind="table" if table else "codes",
            bits=exact.bits,
            group=exact.group,
            symmetric=not exact.offsets,
            table=table,
            offsets=exact.offsets,
        )

    def codes(self, name: str) -> AffineCodes | None:
        entry = self._entry(name)
        exact = EXACT.get(entry.type)
        if exact is None:
            return None
        codes, scales, offsets = exact_codes(self._rows(name, entry), entry.type)
        if not (np.isfinite(scales).all() and (offsets is None or np.isfinite(offsets).all())):
            raise ModelError(
                "Contains NaN or infinity. Download the model again.", path=self.file.path, tensor=name[:200]
            )
        table = IQ4_VALUES if entry.type in _IQ4 else None
        middle = 1 << (exact.bits - 1) if table is None and offsets is None else 0
        return AffineCodes(
            bits=exact.bits,
            group=exact.group,
            codes=codes,
            scales=scales,
            zeros=np.full(scales.shape, middle, dtype=np.int16),
            table=table,
            offsets=offsets,
        )

    def block_type(self, name: str) -> str:
        """Return the name of a tensor's type, such as Q4_K."""
        return self._entry(name).type

    def _rows(self, name: str, entry: GgufTensor) -> NDArray[np.uint8]:
        rows = self.file.rows(name)
        heads = self._interleaved.get(name)
        if heads is None:
            return rows
        if len(entry.shape) == 1:  # a bias
            rows = rows.reshape(entry.shape[0], -1)
        if len(rows) % (2 * heads):
            raise ModelError(f"Has {len(rows)} rows. Expected {heads} heads.", path=self.file.path, tensor=name[:200])
        # Files have the rows of a head in pairs that are rotated together; we have the first of all pairs, then the
        # second.
        pairs = rows.reshape(heads, -1, 2, rows.shape[1])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)

    def _entry(self, name: str) -> GgufTensor:
        entry = self.file.tensors.get(name)
        if entry is None:
            raise ModelError("The model's files have no such tensor.", path=self.file.path, tensor=name[:200])
        return entry
