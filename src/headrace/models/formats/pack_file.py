"""Stores packed weights in one file that the next start maps. Does not know what the blobs mean.

The file holds named blobs of bytes, each with a small JSON description, and one description of the whole. The layout,
with little-endian numbers:

    magic, zeros to 64 | blob, zeros to 64 | ... | footer (JSON) | sha256 of the footer, its length, end magic

The footer is last so that files can be streamed and a half-written file is detected. Blobs follow one another in the
footer's order at the next multiple of 64; the reader accepts nothing else, so two names cannot share bytes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.errors import ModelError
from headrace.models.formats.atomic_file import NewFile
from headrace.models.formats.mapped_file import map_file

ALIGNMENT: Final = 64  # bytes: a cache line, and the widest vector register
FOOTER_LIMIT: Final = 64 * 1024 * 1024  # 64 MiB
_START: Final = b"HEADPACK" + b"\0" * (ALIGNMENT - 8)
_END: Final = b"HEADDONE"
_TRAILER: Final = struct.Struct("<32sQ8s")  # sha256 of the footer, its length in bytes, end magic
_VERSION: Final = 1

_Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    offset: _Size  # bytes from the beginning of the file
    size: _Size  # bytes
    meta: dict[str, Any]


class _Footer(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    meta: dict[str, Any]
    entries: list[_Entry]


_DECODER: Final = msgspec.json.Decoder(_Footer)


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


class PackWriter:
    """Streams blobs to a temporary file that `close` renames. As a context manager it aborts on error."""

    def __init__(self, path: Path, meta: Mapping[str, object]) -> None:
        self._meta = dict(meta)
        self._entries: dict[str, _Entry] = {}
        self._open = True
        self._target = NewFile(path)
        self._position = 0
        self._write(_START)

    def add(self, name: str, meta: Mapping[str, object], data: NDArray[np.uint8]) -> None:
        if not self._open:
            raise ValueError("The pack file is closed.")
        if name in self._entries:
            raise ValueError(f"'{name}' was added before.")
        if data.dtype != np.uint8 or not data.flags.c_contiguous:
            raise ValueError(f"'{name}': Expected contiguous bytes, found {data.dtype}.")
        self._pad()
        self._entries[name] = _Entry(name=name, offset=self._position, size=data.size, meta=dict(meta))
        if data.size:
            self._write(data.reshape(-1).data)

    def close(self) -> None:
        """Write the footer, wait for the disk, and rename the file."""
        if not self._open:
            return
        try:
            self._pad()
            footer = msgspec.json.encode(
                _Footer(version=_VERSION, meta=self._meta, entries=list(self._entries.values()))
            )
            if len(footer) > FOOTER_LIMIT:
                raise ValueError(f"The footer of {len(footer)} bytes is larger than {FOOTER_LIMIT}.")
            self._write(footer)
            self._write(_TRAILER.pack(hashlib.sha256(footer).digest(), len(footer), _END))
        except BaseException:
            self.abort()
            raise
        self._open = False
        self._target.finish()

    def abort(self) -> None:
        """Remove the temporary file; an existing file of that name stays unchanged."""
        if self._open:
            self._open = False
            self._target.abandon()

    def __enter__(self) -> PackWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _pad(self) -> None:
        self._write(bytes(_aligned(self._position) - self._position))

    def _write(self, data: bytes | memoryview) -> None:
        self._target.file.write(data)
        self._position += len(data)


class PackFile:
    """An open pack file. Its arrays are read-only views of the map, aligned to 64 bytes."""

    def __init__(self, path: Path, data: NDArray[np.uint8], meta: dict[str, Any], entries: dict[str, _Entry]) -> None:
        self.path = path
        self.meta = meta
        self.names = tuple(entries)  # in the order of addition
        self._data = data
        self._entries = entries

    @classmethod
    def open(cls, path: Path) -> PackFile:
        data = map_file(path, minimum_bytes=len(_START) + _TRAILER.size)
        if data[: len(_START)].tobytes() != _START:
            raise ModelError("This is not a pack file.", path=path)
        trailer_start = len(data) - _TRAILER.size
        digest, length, end = _TRAILER.unpack(data[trailer_start:].tobytes())
        if end != _END:
            raise ModelError("The pack file is truncated.", path=path)
        if length > FOOTER_LIMIT or length > trailer_start - len(_START):
            raise ModelError(f"The pack file has an impossible footer length of {length} bytes.", path=path)
        footer_start = trailer_start - length
        encoded = data[footer_start:trailer_start].tobytes()
        if hashlib.sha256(encoded).digest() != digest:
            raise ModelError("The pack file is corrupt: its footer does not match its checksum.", path=path)
        try:
            footer = _DECODER.decode(encoded)
        except (ValueError, RecursionError) as error:
            raise ModelError(f"The pack file has an invalid footer: {str(error)[:200]}.", path=path) from None
        if footer.version != _VERSION:
            raise ModelError(f"The pack file has version {footer.version}, expected {_VERSION}.", path=path)
        return cls(path, data, footer.meta, _check_entries(footer.entries, footer_start, path))

    def entry_meta(self, name: str) -> dict[str, Any]:
        return self._entry(name).meta

    def data(self, name: str) -> NDArray[np.uint8]:
        entry = self._entry(name)
        return self._data[entry.offset : entry.offset + entry.size]

    def _entry(self, name: str) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            raise ModelError("The pack file has no such tensor.", path=self.path, tensor=name)
        return entry


def _check_entries(entries: list[_Entry], footer_start: int, path: Path) -> dict[str, _Entry]:
    checked: dict[str, _Entry] = {}
    position = len(_START)
    for entry in entries:
        shown = entry.name[:200]
        if entry.name in checked:
            raise ModelError("The pack file lists it twice.", path=path, tensor=shown)
        if entry.offset != _aligned(position):
            raise ModelError(
                f"The pack file places it at byte {entry.offset}, expected {_aligned(position)}.",
                path=path,
                tensor=shown,
            )
        position = entry.offset + entry.size
        if position > footer_start:
            raise ModelError(
                f"The pack file gives it {entry.size} bytes, which is past the end of the data.",
                path=path,
                tensor=shown,
            )
        checked[entry.name] = entry
    if _aligned(position) != footer_start:
        raise ModelError(f"The pack file has bytes after {position} that belong to no tensor.", path=path)
    return checked
