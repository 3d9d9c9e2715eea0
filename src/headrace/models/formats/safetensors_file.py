"""Reads and writes safetensors files; tensors are mapped, not read. Does not know models or tensor names.

A file is eight bytes of header length, a JSON header, then the tensors' bytes without gaps. The reader rejects an
inconsistent header, with path, tensor and reason, before it makes any array.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.errors import ModelError
from headrace.models.formats.atomic_file import new_file
from headrace.models.formats.mapped_file import drop_pages, map_file
from headrace.models.formats.tensors import DenseTensor, StoredTensor

HEADER_LIMIT: Final = 100_000_000  # bytes; the reference implementation has the same bound
MAX_TENSORS: Final = 1 << 20
MAX_DIMENSIONS: Final = 16
_LARGEST: Final = (1 << 63) - 1
_PREFIX: Final = 8  # bytes of header length, little-endian

# Bits per element of every type in the format; Headrace loads few of them.
DTYPE_BITS: Final[dict[str, int]] = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
_DENSE: Final[dict[str, tuple[Literal["f32", "bf16", "f16"], str]]] = {
    "F32": ("f32", "<f4"),
    "BF16": ("bf16", "<u2"),
    "F16": ("f16", "<u2"),
}
# Types that quantised checkpoints store, beside the dense ones.
_STORED: Final[dict[str, str]] = {
    **{dtype: stored for dtype, (_, stored) in _DENSE.items()},
    "I8": "i1", "U8": "u1", "I32": "<i4", "I64": "<i8", "F8_E4M3": "u1", "F8_E5M2": "u1",
}  # fmt: skip

_Size = Annotated[int, msgspec.Meta(ge=0, le=_LARGEST)]
Buffer = bytes | bytearray | memoryview | NDArray[Any]


class _HeaderEntry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[list[_Size], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    data_offsets: tuple[_Size, _Size]


_ENTRY_DECODER: Final = msgspec.json.Decoder(_HeaderEntry)
_HEADER_DECODER: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_METADATA_DECODER: Final = msgspec.json.Decoder(dict[str, str])


class TensorEntry(NamedTuple):
    dtype: str  # as on disk: "F32", "BF16", "I64", ...
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file
    stop: int


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor on disk; raise ValueError for an unknown type or an impossible shape."""
    bits = DTYPE_BITS.get(dtype)
    if bits is None:
        raise ValueError(f"Unknown dtype {dtype[:40]!r}.")
    # Ignore zeros: no library accepts the shape [0, 2**62, 2**62].
    if math.prod(size for size in shape if size) * bits > _LARGEST:
        raise ValueError(f"Shape {list(shape)} is too large.")
    total = math.prod(shape) * bits
    if total % 8:
        raise ValueError(f"Shape {list(shape)} of {dtype} does not fill whole bytes.")
    return total // 8


class SafetensorsFile:
    """An open file. Its tensors are views that stay valid as long as they are referenced."""

    def __init__(
        self, path: Path, data: NDArray[np.uint8], tensors: dict[str, TensorEntry], metadata: dict[str, str]
    ) -> None:
        self.path = path
        self.tensors = tensors  # in the order of the file's bytes
        self.metadata = metadata
        self._data = data

    def drop_pages(self) -> None:
        """Give back the memory of what was read of the file."""
        drop_pages(self._data)

    @classmethod
    def open(cls, path: Path) -> SafetensorsFile:
        data = map_file(path, minimum_bytes=_PREFIX)
        length = int.from_bytes(data[:_PREFIX].tobytes(), "little")
        if length > HEADER_LIMIT:
            raise ModelError(
                f"The header length {length} is larger than {HEADER_LIMIT}. The file is corrupt.", path=path
            )
        if length > len(data) - _PREFIX:
            raise ModelError(
                f"The header length {length} reaches past the end of the file ({len(data)} bytes).", path=path
            )
        values, metadata = _parse_header(data[_PREFIX : _PREFIX + length].tobytes(), path)
        tensors = _place(values, base=_PREFIX + length, size=len(data), path=path)
        return cls(path, data, tensors, metadata)

    def dense(self, name: str) -> DenseTensor:
        """Return a view of the mapped bytes, or a copy if an old writer left the tensor unaligned."""
        entry = self._entry(name, _DENSE)
        dtype, stored = _DENSE[entry.dtype]
        return DenseTensor(name=name, dtype=dtype, shape=entry.shape, data=self._view(entry, stored), path=self.path)

    def stored(self, name: str) -> StoredTensor:
        """Return a view like that of `dense`, of a type that quantised files use."""
        entry = self._entry(name, _STORED)
        return StoredTensor(name=name, dtype=entry.dtype, data=self._view(entry, _STORED[entry.dtype]), path=self.path)

    def _entry(self, name: str, dtypes: Iterable[str]) -> TensorEntry:
        entry = self.tensors.get(name)
        if entry is None:
            raise ModelError("The file has no such tensor.", path=self.path, tensor=name)
        if entry.dtype not in dtypes:
            expected = ", ".join(dtypes)
            raise ModelError(f"Cannot load dtype {entry.dtype}. Expected {expected}.", path=self.path, tensor=name)
        return entry

    def _view(self, entry: TensorEntry, stored: str) -> NDArray[Any]:
        array = self._data[entry.start : entry.stop].view(stored).reshape(entry.shape)
        if not array.flags.aligned:
            array = array.copy()
            array.flags.writeable = False
        return array


def _parse_header(header: bytes, path: Path) -> tuple[dict[str, _HeaderEntry], dict[str, str]]:
    if not header.startswith(b"{"):
        raise ModelError("The header does not start with '{'. This is not a safetensors file.", path=path)
    metadata: dict[str, str] = {}
    values: dict[str, _HeaderEntry] = {}
    name: str | None = None
    try:
        raw = _HEADER_DECODER.decode(header)
        if len(raw) > MAX_TENSORS:
            raise ModelError(f"The header lists more than {MAX_TENSORS} tensors.", path=path)
        for name, value in raw.items():
            if name == "__metadata__":
                metadata = _METADATA_DECODER.decode(value)
            else:
                values[name] = _ENTRY_DECODER.decode(value)
        name = None
        _reject_duplicates(header)
    except (ValueError, RecursionError) as error:  # msgspec's errors and UnicodeDecodeError are ValueErrors
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)[:200]
        raise ModelError(f"The header is invalid: {reason}.", path=path, tensor=_shorten(name)) from None
    return values, metadata


def _reject_duplicates(header: bytes) -> None:
    # msgspec keeps the last of two equal keys and other readers keep the first, so two programs could read different
    # files. msgspec has already checked every type, so this second pass meets no hostile nesting.
    def check(pairs: list[tuple[str, object]]) -> None:
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"duplicate key {key[:80]!r}")
            seen.add(key)

    json.loads(header.decode("utf-8"), object_pairs_hook=check)


def _place(values: Mapping[str, _HeaderEntry], *, base: int, size: int, path: Path) -> dict[str, TensorEntry]:
    """Return absolute byte ranges; every byte after the header must belong to exactly one tensor."""
    tensors: dict[str, TensorEntry] = {}
    position = 0  # bytes from `base` that belong to a tensor
    for name, value in sorted(values.items(), key=lambda item: item[1].data_offsets):
        begin, end = value.data_offsets
        shape = tuple(value.shape)

        def invalid(reason: str, name: str = name) -> ModelError:
            return ModelError(reason, path=path, tensor=_shorten(name))

        if end < begin:
            raise invalid(f"Byte range [{begin}, {end}] ends before it begins.")
        if end > size - base:
            raise invalid(f"Byte range [{begin}, {end}] reaches past the {size - base} bytes of data in the file.")
        try:
            expected = tensor_bytes(value.dtype, shape)
        except ValueError as error:
            raise invalid(str(error)) from None
        if expected != end - begin:
            claimed = f"{value.dtype} {list(shape)}"
            raise invalid(f"Byte range [{begin}, {end}] holds {end - begin} bytes, but {claimed} takes {expected}.")
        if begin < position:
            raise invalid(f"Byte range [{begin}, {end}] overlaps the tensor before it.")
        if begin > position:
            raise invalid(f"Bytes {position} to {begin} before it belong to no tensor.")
        position = end
        tensors[name] = TensorEntry(value.dtype, shape, base + begin, base + end)
    if position != size - base:
        raise ModelError(f"The last {size - base - position} bytes of the file belong to no tensor.", path=path)
    return tensors


def _shorten(name: str | None) -> str | None:
    return name if name is None or len(name) <= 200 else f"{name[:200]}..."


def write_safetensors(
    path: Path,
    tensors: Mapping[str, tuple[str, tuple[int, ...], Callable[[], Iterable[Buffer]]]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write `name -> (dtype, shape, pieces)` in the mapping's order, calling `pieces` one tensor at a time.

    The file appears complete or not at all. Raises ValueError if the pieces do not fill dtype and shape exactly.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, (dtype, shape, _) in tensors.items():
        if name == "__metadata__":
            raise ValueError("A tensor cannot be named __metadata__.")
        end = position + tensor_bytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % 8)  # align the tensors' bytes
    if len(encoded) > HEADER_LIMIT:
        raise ValueError(f"The header of {len(encoded)} bytes is larger than {HEADER_LIMIT}.")
    with new_file(path) as file:
        file.write(len(encoded).to_bytes(_PREFIX, "little"))
        file.write(encoded)
        for name, (dtype, shape, pieces) in tensors.items():
            left = tensor_bytes(dtype, shape)
            for piece in pieces():
                view = _bytes_of(piece)
                left -= len(view)
                if left < 0:
                    raise ValueError(f"tensor '{name}': Got more bytes than {dtype} {list(shape)} takes.")
                file.write(view)
            if left:
                raise ValueError(f"tensor '{name}': Got {left} bytes fewer than {dtype} {list(shape)} takes.")


def _bytes_of(piece: Buffer) -> memoryview:
    view = piece.data if isinstance(piece, np.ndarray) else memoryview(piece)
    # An empty view cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")
