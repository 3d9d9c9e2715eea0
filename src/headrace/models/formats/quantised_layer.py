"""Defines what every scheme of quantised checkpoints is made of: the stored tensors of one linear layer, the codes of
whole numbers that most schemes hold, and the contract between a scheme and the weights. Knows no scheme.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.errors import ModelError
from headrace.models.formats.safetensors_file import TensorEntry
from headrace.models.formats.tensors import StoredTensor

FLOATS: Final = ("F32", "BF16", "F16")
_AT_ONCE: Final = 1 << 22  # weights that are widened at a time


class StoredTensors(Protocol):
    """The tensors of a model folder as they are on disk."""

    def entry(self, name: str) -> TensorEntry | None: ...

    def stored(self, name: str) -> StoredTensor: ...

    def path_of(self, name: str) -> Path: ...


class QuantisedLayer:
    """The stored tensors of one linear layer. A part is the end of a tensor's name, such as `qweight`."""

    def __init__(self, name: str, tensors: StoredTensors) -> None:
        self.name = name
        self._tensors = tensors

    def has(self, part: str) -> bool:
        return self._tensors.entry(f"{self.name}.{part}") is not None

    def dtype(self, part: str) -> str | None:
        entry = self._tensors.entry(f"{self.name}.{part}")
        return None if entry is None else entry.dtype

    def check(self, part: str, dtypes: Sequence[str], *shapes: tuple[int, ...]) -> None:
        """Raise unless the part has one of these types and shapes; any shape if none is given. Reads no tensor."""
        shape = self.shape(part)
        found = self.dtype(part)
        if found not in dtypes:
            raise self.error(part, f"Has dtype {found}. Expected {' or '.join(dtypes)}.")
        if shapes and shape not in shapes:
            raise self.error(part, f"Has shape {_spelled(shape)}. Expected {' or '.join(map(_spelled, shapes))}.")

    def shape(self, part: str) -> tuple[int, ...]:
        entry = self._tensors.entry(f"{self.name}.{part}")
        if entry is None:
            raise self.error(part, "The tensor is missing, but others of this quantised layer are there.")
        return entry.shape

    def matrix(self, part: str, *dtypes: str) -> tuple[int, int]:
        """Return the shape of a part that has two dimensions, none of them 0."""
        self.check(part, dtypes)
        shape = self.shape(part)
        if len(shape) != 2 or 0 in shape:
            raise self.error(part, f"Has shape {_spelled(shape)}. Expected two dimensions.")
        return shape[0], shape[1]

    def data(self, part: str) -> NDArray[Any]:
        return self._tensors.stored(f"{self.name}.{part}").data

    def words(self, part: str) -> NDArray[np.uint32]:
        return self.data(part).view(np.uint32)

    def floats(self, part: str) -> NDArray[np.float32]:
        """Return the part as f32; raise for NaN and infinity."""
        values = self._tensors.stored(f"{self.name}.{part}").to_f32()
        if not np.isfinite(values).all():
            raise self.error(part, "Contains NaN or infinity. Download the model again.")
        return values

    def error(self, part: str, reason: str) -> ModelError:
        name = f"{self.name}.{part}"
        return ModelError(reason, path=self._tensors.path_of(name), tensor=name[:200])


class AffineCodes(msgspec.Struct, frozen=True):
    """Weights as codes: scale * (code - zero), with a scale and a zero for each group of inputs."""

    bits: int
    group: int  # inputs that share a scale; a whole row: all inputs
    codes: NDArray[np.uint8]  # [outputs, inputs]
    scales: NDArray[np.float32]  # [outputs, groups]
    zeros: NDArray[np.int16]  # [outputs, groups]
    group_of: NDArray[np.int64] | None = None  # the group of every input, if groups are not runs of inputs (act order)
    # What each code stands for, if not for itself: whole numbers, or of FP8 numbers. The zeros are 0 then.
    table: NDArray[np.int16] | NDArray[np.float32] | None = None
    offsets: NDArray[np.float32] | None = None  # [outputs, groups], added to scale * code; the zeros are 0 then

    def dense(self) -> NDArray[np.float32]:
        """Return the weights in f32: whole numbers are subtracted, and their product with the scale is rounded once."""
        outputs, inputs = self.codes.shape
        index = runs(inputs, self.group) if self.group_of is None else self.group_of
        values = np.empty((outputs, inputs), dtype=np.float32)
        step = max(1, _AT_ONCE // inputs)
        for start in range(0, outputs, step):
            rows = slice(start, start + step)
            codes = self.codes[rows].astype(np.int16) if self.table is None else self.table[self.codes[rows]]
            centred = codes - self.zeros[rows][:, index]
            np.multiply(self.scales[rows][:, index], centred, out=values[rows])
            if self.offsets is not None:
                values[rows] += self.offsets[rows][:, index]
        return values


def runs(inputs: int, group: int) -> NDArray[np.int64]:
    """Return the group of every input, if groups are runs of inputs."""
    return np.arange(inputs, dtype=np.int64) // group


class StoredLayout(msgspec.Struct, frozen=True):
    """How a layer is kept in its file, as far as it decides the precision in memory."""

    # "codes" (whole numbers in runs of a group), "shuffled" (act order), "table" (codes for 16 values), "blocks" (of
    # GGUF, for which the kernels have no layout) or "float" (FP8 with a table's name; 16 bits)
    kind: str
    bits: int
    group: int = 0  # of codes; 0: a scale per row
    symmetric: bool = False  # the zero is in the middle for every group
    table: str = (
        ""  # the kernels' name of a table or of FP8: nf4, fp4, mxfp4, iq4, fp8; empty if they have none like it
    )
    offsets: bool = False  # codes have no zero, and every group an offset


class Scheme(Protocol):
    """One way of storing quantised linear layers, as a `quantization_config` describes it."""

    @property
    def label(self) -> str:
        """The scheme for messages: "GPTQ, 4 bits"."""
        ...

    @property
    def marker(self) -> str:
        """The part that every quantised layer has."""
        ...

    @property
    def parts(self) -> tuple[str, ...]:
        """All parts that stand for a layer's `weight`."""
        ...

    def owns(self, layer: QuantisedLayer) -> bool:
        """Return whether a layer that has the marker is quantised."""
        ...

    def shape(self, layer: QuantisedLayer) -> tuple[int, int]:
        """Return [outputs, inputs] and check dtype and shape of every part. Reads no large tensor."""
        ...

    def layout(self, layer: QuantisedLayer) -> StoredLayout: ...

    def codes(self, layer: QuantisedLayer) -> AffineCodes | None:
        """Return the layer's whole numbers; None if the scheme has none."""
        ...

    def dense(self, layer: QuantisedLayer) -> NDArray[np.float32]:
        """Return the layer's weights as the format defines them, computed in f32."""
        ...


def unpack_bits(words: NDArray[np.uint32], bits: int, count: int) -> NDArray[np.uint8]:
    """Return `count` numbers of each row from a stream of bits, lowest first, that ignores the borders of words."""
    rows = len(words)
    words = np.ascontiguousarray(words)
    if 8 % bits == 0:
        stream = words.view(np.uint8).reshape(rows, -1)
        codes = np.empty((*stream.shape, 8 // bits), dtype=np.uint8)
        for index in range(8 // bits):
            np.right_shift(stream, index * bits, out=codes[:, :, index])
        codes &= np.uint8((1 << bits) - 1)
        return np.ascontiguousarray(codes.reshape(rows, -1)[:, :count])
    blocks = -(-words.shape[1] // bits)
    padded = np.zeros((rows, blocks * bits), dtype=np.uint64)
    padded[:, : words.shape[1]] = words
    padded = padded.reshape(rows, blocks, bits)
    found = np.empty((rows, blocks, 32), dtype=np.uint8)
    for index in range(32):
        word, shift = divmod(index * bits, 32)
        value = padded[:, :, word] >> np.uint64(shift)
        if shift + bits > 32:
            value = value | padded[:, :, word + 1] << np.uint64(32 - shift)
        found[:, :, index] = value & np.uint64((1 << bits) - 1)
    return np.ascontiguousarray(found.reshape(rows, -1)[:, :count])


def pack_bits(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """Return each row as a stream of bits in whole words: what `unpack_bits` reads."""
    rows, count = codes.shape
    words = words_for(count, bits)
    stream = np.zeros((rows, words * 4), dtype=np.uint8)
    step = max(1, _AT_ONCE // max(count, 1))
    for start in range(0, rows, step):
        each = np.unpackbits(codes[start : start + step, :, None], axis=2, count=bits, bitorder="little")
        packed = np.packbits(each.reshape(len(each), -1), axis=1, bitorder="little")
        stream[start : start + step, : packed.shape[1]] = packed
    return stream.view(np.uint32)


def words_for(count: int, bits: int) -> int:
    """Return how many words of 32 bits hold `count` numbers."""
    return -(-count * bits // 32)


def _spelled(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "a scalar"
