"""Samples of stored tensors, from which digests of a model's parts are made at a start.

Weights are sampled: to read gigabytes would double the time of a start. Each tensor's name, type and shape count, and
of its bytes pieces of 8 KiB: one from its middle at least, and in large tensors more, evenly spread. That finds every
new training and every conversion, which change tensors as a whole. A few numbers that somebody changed by hand in the
midst of a tensor it may miss. Names and places of files do not count.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from typing import Final

import msgspec

from headrace.errors import ModelError
from headrace.models.formats.safetensors_file import SafetensorsFile
from headrace.models.gguf.gguf_weights import GgufWeights
from headrace.models.model_folder import Weights

_PIECE: Final = 8 * 1024  # bytes
_SPREAD: Final = 128  # pieces of the whole model beyond each tensor's own, so about 3 MB of a model of 1 GB


def samples(weights: Weights, names: Collection[str]) -> Iterator[bytes]:
    """Yield what a digest of tensors is made of, given the names that model code uses. ModelError for files that cannot
    be read. Of a GGUF file, the metadata comes first."""
    used = {stored for name in names for stored in weights.stored_names(name)}
    tensors = {name: place for name, place in _places(weights).items() if name in used}
    with ExitStack() as stack:
        # Read and not mapped: to map a page here and there takes many times as long.
        opened = {path: stack.enter_context(_opened(path)) for path in weights.files}
        if isinstance(weights, GgufWeights):
            # Metadata and the table of tensors: what other models have in JSON files beside the weights. The first file
            # of a split model has all metadata.
            path = weights.files[0]
            yield from named("metadata", _read(opened[path], 0, weights.file.header_bytes))
        for name in sorted(tensors):
            path, dtype, shape, first, last = tensors[name]
            yield from named(name, msgspec.msgpack.encode((dtype, shape)))
            for start, size in _pieces(first, last, weights.total_bytes):
                yield _read(opened[path], start, size)


def named(name: str, content: bytes) -> tuple[bytes, bytes]:
    """Return what a digest gets of named content. No other name and content have the same bytes, whatever follows."""
    return msgspec.msgpack.encode((name, len(content))), content


def unreadable(path: Path, error: OSError) -> ModelError:
    return ModelError(f"cannot be read: {error.strerror or error}", path=path)


def _places(weights: Weights) -> dict[str, tuple[Path, str, tuple[int, ...], int, int]]:
    """Return file, type, shape, start and end of every stored tensor."""
    if isinstance(weights, GgufWeights):
        paths = weights.files
        return {
            name: (paths[each.file], each.type, each.shape, each.start, each.stop)
            for name, each in weights.file.tensors.items()
        }
    return {
        name: (path, each.dtype, each.shape, each.start, each.stop)
        for path in weights.files
        for name, each in SafetensorsFile.open(path).tensors.items()
    }


def _opened(path: Path) -> FileIO:
    try:
        return FileIO(path)
    except OSError as error:
        raise unreadable(path, error) from None


def _read(file: FileIO, start: int, size: int) -> bytes:
    try:
        return os.pread(file.fileno(), size, start)
    except OSError as error:
        raise unreadable(Path(str(file.name)), error) from None


def _pieces(start: int, stop: int, all_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the start in the file and the length of each sampled piece of a tensor. `all_bytes`: of the whole model."""
    size = stop - start
    count = 1 + size * _SPREAD // max(all_bytes, 1)
    if size <= count * _PIECE:
        yield start, size
        return
    for place in range(1, count + 1):
        yield start + (size - _PIECE) * place // (count + 1), _PIECE
