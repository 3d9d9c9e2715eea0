"""Reads the container of a GGUF file: its metadata, its tensors' names, shapes and types, and their mapped bytes.

A file is a magic, a version, counts, typed key-value pairs, a table of tensors, padding, and the tensors' bytes one
after the other. The reader rejects an inconsistent table, with path, tensor and reason, before it makes any array. It
does not know what a key or a tensor is for, or how blocks are decoded: see gguf_blocks.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ModelError
from headrace.models.formats.gguf_blocks import BLOCKS, TYPE_NAMES
from headrace.models.formats.mapped_file import drop_pages, map_file

MAGIC: Final = b"GGUF"
MAX_KEYS: Final = 1 << 16
MAX_TENSORS: Final = 1 << 18
MAX_NAME: Final = 1024  # bytes; names in use have fewer than 64
MAX_KEY: Final = 1024
MAX_TEXT: Final = 16 << 20  # bytes of one string
MAX_DIMENSIONS: Final = 4
MAX_ITEMS: Final = 1 << 24  # of one array
_LARGEST: Final = 1 << 62
_SMALLEST: Final = 24  # bytes before the first key

_SCALARS: Final[dict[int, struct.Struct]] = {
    number: struct.Struct(f"<{code}")
    for number, code in {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}.items()
}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_DEFAULT_ALIGNMENT: Final = 32

# A number, a flag, a text, or an array: of numbers as a numpy array, of texts as a list. Flags in arrays are numbers.
GgufValue = int | float | bool | str | list[str] | NDArray[Any]


class GgufTensor(NamedTuple):
    type: str  # such as "Q4_K"
    shape: tuple[int, ...]  # outputs first, as in other formats
    start: int  # bytes from the beginning of its file
    stop: int
    file: int = 0  # of a model that is split into several


class GgufFile:
    """An open file, or all files of a split model. Its arrays are read-only views that stay valid as long as they are
    referenced."""

    def __init__(
        self,
        paths: tuple[Path, ...],
        data: tuple[NDArray[np.uint8], ...],
        metadata: dict[str, GgufValue],
        tensors: dict[str, GgufTensor],
        header_bytes: int,
    ) -> None:
        self.path = paths[0]
        self.paths = paths
        self.metadata = metadata  # of the first file
        self.tensors = tensors  # in the order of the files
        self.header_bytes = header_bytes  # of the first file's metadata and table, before padding
        self._data = data

    @classmethod
    def joined(cls, files: Sequence[GgufFile]) -> GgufFile:
        """Return the files of a split model as one. ModelError for a tensor that is in two of them."""
        tensors: dict[str, GgufTensor] = {}
        for number, file in enumerate(files):
            for name, entry in file.tensors.items():
                if name in tensors:
                    other = files[tensors[name].file].path.name
                    raise ModelError(
                        f"The tensor is also in {other}. Each tensor must be in one file.", path=file.path, tensor=name
                    )
                tensors[name] = entry._replace(file=number)
        paths, data = tuple(file.path for file in files), tuple(each for file in files for each in file._data)
        return cls(paths, data, files[0].metadata, tensors, files[0].header_bytes)

    def path_of(self, name: str) -> Path:
        """Return the file of a tensor; of a tensor that does not exist, the first file."""
        entry = self.tensors.get(name)
        return self.path if entry is None else self.paths[entry.file]

    def drop_pages(self) -> None:
        """Give back the memory of what was read of the files."""
        for data in self._data:
            drop_pages(data)

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        data = map_file(path, minimum_bytes=_SMALLEST)
        reader = _Reader(data, path)
        if reader.take(4) != MAGIC:
            raise ModelError("The file does not start with 'GGUF'. This is not a GGUF file.", path=path)
        version = reader.u32()
        if version not in (2, 3):
            hint = " The file may be big-endian." if version & 0xFFFF == 0 else ""
            raise ModelError(f"GGUF version {version} is not supported. Expected 2 or 3.{hint}", path=path)
        tensor_count, key_count = reader.u64(), reader.u64()
        if tensor_count > MAX_TENSORS:
            raise ModelError(f"The file lists {tensor_count} tensors. At most {MAX_TENSORS} are allowed.", path=path)
        if key_count > MAX_KEYS:
            raise ModelError(f"The file lists {key_count} keys. At most {MAX_KEYS} are allowed.", path=path)
        metadata: dict[str, GgufValue] = {}
        for _ in range(key_count):
            key = reader.text(MAX_KEY, "key name")
            if key in metadata:
                raise ModelError(f"Key {key[:120]!r} is in the file twice.", path=path)
            metadata[key] = reader.value(key)
        tensors = _read_tensors(reader, tensor_count, _alignment(metadata, path))
        return cls((path,), (data,), metadata, tensors, reader.position)

    def rows(self, name: str) -> NDArray[np.uint8]:
        """Return the bytes of a tensor as [rows, bytes of a row]; a tensor of one dimension is one row."""
        entry = self.tensors.get(name)
        if entry is None:
            raise ModelError("The file has no such tensor.", path=self.path, tensor=name)
        rows = math.prod(entry.shape[:-1])
        return self._data[entry.file][entry.start : entry.stop].reshape(rows, -1 if rows else 0)


def has_magic(path: Path) -> bool:
    """Return whether a file starts as GGUF files do."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise ModelError(f"Cannot read the file: {error.strerror or error}.", path=path) from None


class _Reader:
    """Reads little-endian values one after the other, and never past the end."""

    def __init__(self, data: NDArray[np.uint8], path: Path) -> None:
        self._view = data.data
        self._data = data
        self.path = path
        self.position = 0
        self.size = len(data)

    def _advance(self, count: int) -> int:
        start = self.position
        if count > self.size - start:
            raise ModelError(
                f"The file is truncated: its header needs {count} bytes at byte {start}, but the file has {self.size}.",
                path=self.path,
            )
        self.position = start + count
        return start

    def take(self, count: int) -> bytes:
        start = self._advance(count)
        return bytes(self._view[start : start + count])

    def u32(self) -> int:
        return int(_U32.unpack_from(self._view, self._advance(4))[0])

    def u64(self) -> int:
        return int(_U64.unpack_from(self._view, self._advance(8))[0])

    def text(self, limit: int, what: str) -> str:
        length = self.u64()
        if length > limit:
            raise ModelError(f"A {what} of {length} bytes is longer than {limit}.", path=self.path)
        content = self.take(length)
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise ModelError(f"A {what} is not UTF-8: {error.reason} at byte {error.start}.", path=self.path) from None

    def value(self, key: str) -> GgufValue:
        kind = self.u32()
        if kind == _STRING:
            return self.text(MAX_TEXT, f"text of key {key[:120]!r}")
        if kind == _BOOL:
            return self.take(1) != b"\0"
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise ModelError(f"Key {key[:120]!r} has the unknown type {kind}.", path=self.path)
        scalar = _SCALARS[kind]
        number: int | float = scalar.unpack_from(self._view, self._advance(scalar.size))[0]
        return number

    def _array(self, key: str) -> GgufValue:
        kind, count = self.u32(), self.u64()
        if count > MAX_ITEMS:
            raise ModelError(f"Key {key[:120]!r} has {count} items. At most {MAX_ITEMS} are allowed.", path=self.path)
        if kind == _STRING:
            what = f"text of key {key[:120]!r}"
            return [self.text(MAX_TEXT, what) for _ in range(count)]
        if kind != _BOOL and kind not in _SCALARS:
            raise ModelError(f"Key {key[:120]!r} is an array of the unsupported type {kind}.", path=self.path)
        dtype = np.dtype("u1") if kind == _BOOL else np.dtype(_SCALARS[kind].format)
        start = self._advance(count * dtype.itemsize)
        return self._data[start : self.position].view(dtype)


def _alignment(metadata: dict[str, GgufValue], path: Path) -> int:
    value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(value, int) or isinstance(value, bool) or not 8 <= value <= 1 << 16 or value & (value - 1):
        raise ModelError("Key 'general.alignment': Expected a power of two from 8 to 65536.", path=path)
    return value


def _read_tensors(reader: _Reader, count: int, alignment: int) -> dict[str, GgufTensor]:
    """Return the tensors' places; each must follow the one before it, after padding."""
    path = reader.path
    listed: list[tuple[str, str, tuple[int, ...], int, int]] = []  # name, type, shape, offset, bytes
    for _ in range(count):
        name = reader.text(MAX_NAME, "tensor name")
        dimensions = reader.u32()
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise ModelError(f"Has {dimensions} dimensions. Expected 1 to {MAX_DIMENSIONS}.", path=path, tensor=name)
        shape = tuple(reversed([reader.u64() for _ in range(dimensions)]))
        kind, offset = reader.u32(), reader.u64()
        type_name = TYPE_NAMES.get(kind)
        if type_name is None:
            supported = ", ".join(BLOCKS)
            raise ModelError(f"Has the unsupported type {kind}. Supported are {supported}.", path=path, tensor=name)
        if type_name not in BLOCKS:
            supported = ", ".join(BLOCKS)
            raise ModelError(f"Type {type_name} is not supported. Supported are {supported}.", path=path, tensor=name)
        listed.append((name, type_name, shape, offset, _bytes_of(type_name, shape, path, name)))
    base = -(-reader.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    expected = 0
    for name, type_name, shape, offset, size in listed:
        if name in tensors:
            raise ModelError("The file lists the tensor twice.", path=path, tensor=name)
        if offset != expected:
            raise ModelError(f"Starts at byte {offset} of the data. Expected {expected}.", path=path, tensor=name)
        start = base + offset
        if start + size > reader.size:
            raise ModelError(
                f"Bytes {start} to {start + size} reach past the end of the file ({reader.size} bytes). The file is "
                "truncated: download it again.",
                path=path,
                tensor=name,
            )
        tensors[name] = GgufTensor(type_name, shape, start, start + size)
        expected = -(-(offset + size) // alignment) * alignment
    return tensors


def _bytes_of(type_name: str, shape: tuple[int, ...], path: Path, name: str) -> int:
    block = BLOCKS[type_name]
    if any(size == 0 for size in shape):
        raise ModelError(f"Shape {list(shape)} is empty.", path=path, tensor=name)
    if math.prod(shape) > _LARGEST:
        raise ModelError(f"Shape {list(shape)} is too large.", path=path, tensor=name)
    if shape[-1] % block.weights:
        raise ModelError(
            f"Rows of {shape[-1]} weights do not fill {type_name} blocks of {block.weights}.", path=path, tensor=name
        )
    return math.prod(shape) // block.weights * block.bytes
