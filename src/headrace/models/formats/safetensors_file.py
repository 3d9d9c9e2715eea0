"""safetensors files: our own parser and writer; tensors are mapped, not read.

Owns the format: eight bytes of header length, a JSON header, then the tensors' bytes without gaps. A header that lies
is refused with its path, tensor and reason, before any array is made of it. Knows nothing of models or tensor names.
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
from headrace.models.formats.mapped_file import map_file
from headrace.models.formats.tensors import DenseTensor

HEADER_LIMIT: Final = 100_000_000  # bytes; the reference implementation has the same bound
MAX_TENSORS: Final = 1 << 20
MAX_DIMENSIONS: Final = 16
_LARGEST: Final = (1 << 63) - 1
_PREFIX: Final = 8  # bytes of header length, little-endian

# Bits of one element, for every type that the format knows; most of them we never load.
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
    """Bytes that a tensor takes on disk; ValueError for a type the format does not know or a shape past all bounds."""
    bits = DTYPE_BITS.get(dtype)
    if bits is None:
        raise ValueError(f"unknown dtype {dtype[:40]!r}")
    # Zeros do not excuse the other dimensions: [0, 2**62, 2**62] is no array in any library.
    if math.prod(size for size in shape if size) * bits > _LARGEST:
        raise ValueError(f"shape {list(shape)} is too large")
    total = math.prod(shape) * bits
    if total % 8:
        raise ValueError(f"shape {list(shape)} of {dtype} does not end on a whole byte")
    return total // 8


class SafetensorsFile:
    """An open file: what it holds, and views of its tensors that live as long as they are referenced."""

    def __init__(
        self, path: Path, data: NDArray[np.uint8], tensors: dict[str, TensorEntry], metadata: dict[str, str]
    ) -> None:
        self.path = path
        self.tensors = tensors  # in the order of the file's bytes
        self.metadata = metadata
        self._data = data

    @classmethod
    def open(cls, path: Path) -> SafetensorsFile:
        data = map_file(path, minimum_bytes=_PREFIX)
        length = int.from_bytes(data[:_PREFIX].tobytes(), "little")
        if length > HEADER_LIMIT:
            raise ModelError(f"header length {length} is larger than {HEADER_LIMIT}", path=path)
        if length > len(data) - _PREFIX:
            raise ModelError(f"header length {length} reaches past the end of the file ({len(data)} bytes)", path=path)
        values, metadata = _parse_header(data[_PREFIX : _PREFIX + length].tobytes(), path)
        tensors = _place(values, base=_PREFIX + length, size=len(data), path=path)
        return cls(path, data, tensors, metadata)

    def dense(self, name: str) -> DenseTensor:
        """A view of the mapped bytes; a copy only where an old writer left the tensor unaligned."""
        entry = self.tensors.get(name)
        if entry is None:
            raise ModelError("no such tensor in this file", path=self.path, tensor=name)
        if entry.dtype not in _DENSE:
            expected = ", ".join(_DENSE)
            raise ModelError(f"dtype {entry.dtype} cannot be loaded; expected {expected}", path=self.path, tensor=name)
        dtype, stored = _DENSE[entry.dtype]
        array = self._data[entry.start : entry.stop].view(stored).reshape(entry.shape)
        if not array.flags.aligned:
            array = array.copy()
            array.flags.writeable = False
        return DenseTensor(name=name, dtype=dtype, shape=entry.shape, data=array, path=self.path)


def _parse_header(header: bytes, path: Path) -> tuple[dict[str, _HeaderEntry], dict[str, str]]:
    if not header.startswith(b"{"):
        raise ModelError("header does not start with '{'", path=path)
    metadata: dict[str, str] = {}
    values: dict[str, _HeaderEntry] = {}
    name: str | None = None
    try:
        raw = _HEADER_DECODER.decode(header)
        if len(raw) > MAX_TENSORS:
            raise ModelError(f"header names more than {MAX_TENSORS} tensors", path=path)
        for name, value in raw.items():
            if name == "__metadata__":
                metadata = _METADATA_DECODER.decode(value)
            else:
                values[name] = _ENTRY_DECODER.decode(value)
        name = None
        _refuse_duplicates(header)
    except (ValueError, RecursionError) as error:  # msgspec's errors and UnicodeDecodeError are ValueErrors
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)[:200]
        raise ModelError(f"header is wrong: {reason}", path=path, tensor=_shown(name)) from None
    return values, metadata


def _refuse_duplicates(header: bytes) -> None:
    # msgspec keeps the last of two equal keys and other readers the first: two programs would see two different files.
    # It has checked every type by now, so this second look meets no hostile nesting, and it keeps nothing.
    def look(pairs: list[tuple[str, object]]) -> None:
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"duplicate key {key[:80]!r}")
            seen.add(key)

    json.loads(header.decode("utf-8"), object_pairs_hook=look)


def _place(values: Mapping[str, _HeaderEntry], *, base: int, size: int, path: Path) -> dict[str, TensorEntry]:
    """Absolute byte ranges; every byte after the header must belong to exactly one tensor."""
    tensors: dict[str, TensorEntry] = {}
    position = 0  # bytes from `base` that have an owner
    for name, value in sorted(values.items(), key=lambda item: item[1].data_offsets):
        begin, end = value.data_offsets
        shape = tuple(value.shape)

        def refused(reason: str, name: str = name) -> ModelError:
            return ModelError(reason, path=path, tensor=_shown(name))

        if end < begin:
            raise refused(f"byte range [{begin}, {end}] ends before it begins")
        if end > size - base:
            raise refused(f"byte range [{begin}, {end}] reaches past the {size - base} bytes of data in the file")
        try:
            expected = tensor_bytes(value.dtype, shape)
        except ValueError as error:
            raise refused(str(error)) from None
        if expected != end - begin:
            claimed = f"{value.dtype} {list(shape)}"
            raise refused(f"byte range [{begin}, {end}] holds {end - begin} bytes, but {claimed} takes {expected}")
        if begin < position:
            raise refused(f"byte range [{begin}, {end}] overlaps the tensor before it")
        if begin > position:
            raise refused(f"bytes {position} to {begin} before it belong to no tensor")
        position = end
        tensors[name] = TensorEntry(value.dtype, shape, base + begin, base + end)
    if position != size - base:
        raise ModelError(f"the last {size - base - position} bytes of the file belong to no tensor", path=path)
    return tensors


def _shown(name: str | None) -> str | None:
    return name if name is None or len(name) <= 200 else f"{name[:200]}..."


def write_safetensors(
    path: Path,
    tensors: Mapping[str, tuple[str, tuple[int, ...], Callable[[], Iterable[Buffer]]]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write `name -> (dtype, shape, pieces)` in the mapping's order; pieces are asked for when they are written.

    The file appears whole or not at all. ValueError where the pieces do not add up to what dtype and shape say.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, (dtype, shape, _) in tensors.items():
        if name == "__metadata__":
            raise ValueError("a tensor cannot be named __metadata__")
        end = position + tensor_bytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % 8)  # the tensors' bytes start aligned
    if len(encoded) > HEADER_LIMIT:
        raise ValueError(f"header of {len(encoded)} bytes is larger than {HEADER_LIMIT}")
    with new_file(path) as file:
        file.write(len(encoded).to_bytes(_PREFIX, "little"))
        file.write(encoded)
        for name, (dtype, shape, pieces) in tensors.items():
            left = tensor_bytes(dtype, shape)
            for piece in pieces():
                view = _bytes_of(piece)
                left -= len(view)
                if left < 0:
                    raise ValueError(f"tensor '{name}': more bytes than {dtype} {list(shape)} takes")
                file.write(view)
            if left:
                raise ValueError(f"tensor '{name}': {left} bytes fewer than {dtype} {list(shape)} takes")


def _bytes_of(piece: Buffer) -> memoryview:
    view = piece.data if isinstance(piece, np.ndarray) else memoryview(piece)
    # An empty view cannot be cast, and has nothing to write.
    return view.cast("B") if view.nbytes else memoryview(b"")
