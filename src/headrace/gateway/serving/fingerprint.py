"""Fingerprints of variants: the `system_fingerprint` of responses, and a part of cache keys.

A fingerprint covers everything that determines answers. Names and times of files do not count: the same model in
another folder, or in other shards, has the same fingerprint.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from io import FileIO
from itertools import chain
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from headrace.config.upstream_section import UpstreamConfig, features_of
from headrace.errors import ModelError
from headrace.models.formats.safetensors_file import SafetensorsFile
from headrace.models.gguf.gguf_weights import GgufWeights
from headrace.models.model_folder import ModelFolder, Weights
from headrace.models.precision import AUTO
from headrace.variant import Variant

_DIGITS: Final = 10  # hexadecimal
# Files that loading a model reads beside its weights.
_FILES: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "additional_chat_templates/tool_use.jinja",
)
# Weights are sampled: to read gigabytes would double the time of a start. Each tensor's name, type and shape count, and
# of its bytes pieces of this size: one from its middle at least, and in large tensors more, evenly spread. That finds
# every new training and every conversion, which change tensors as a whole. A few numbers that somebody changed by hand
# in the midst of a tensor it may miss.
_PIECE: Final = 8 * 1024  # bytes
_SPREAD: Final = 128  # pieces of the whole model beyond each tensor's own, so about 3 MB of a model of 1 GB


def of_model(folder: ModelFolder, variant: Variant, *, special_tokens: str = "none") -> str:
    """Return the fingerprint of weights at a precision. ModelError for files that cannot be read.

    `special_tokens`: the model's setting of this name.
    """
    parts = _of_model(folder, variant)
    return _fingerprint(parts if special_tokens == "none" else chain(parts, _named("special", special_tokens.encode())))


def _of_model(folder: ModelFolder, variant: Variant) -> Iterator[bytes]:
    # What the other small files say (how an encoder pools) is in the spec.
    yield from _named("variant", msgspec.msgpack.encode((variant.name, folder.spec)))
    if variant.image_weights != AUTO:
        yield from _named("image_weights", variant.image_weights.encode())
    for name in _FILES:
        yield from _named(name, _content(folder.path / name))
    parts = (part for parts in folder.sources.values() for part in parts)
    used = {name for part in parts for name in folder.weights.stored_names(part.name)}
    tensors = {name: place for name, place in _places(folder.weights).items() if name in used}
    with ExitStack() as stack:
        # Read and not mapped: to map a page here and there takes many times as long.
        opened = {path: stack.enter_context(_opened(path)) for path in folder.weights.files}
        if isinstance(folder.weights, GgufWeights):
            # Metadata and the table of tensors: what other models have in the files above.
            path = folder.weights.files[0]
            yield from _named("metadata", _read(opened[path], 0, folder.weights.file.header_bytes))
        for name in sorted(tensors):
            path, dtype, shape, first, last = tensors[name]
            yield from _named(name, msgspec.msgpack.encode((dtype, shape)))
            for start, size in _pieces(first, last, folder.weights.total_bytes):
                yield _read(opened[path], start, size)


def _places(weights: Weights) -> dict[str, tuple[Path, str, tuple[int, ...], int, int]]:
    """Return file, type, shape, start and end of every stored tensor."""
    if isinstance(weights, GgufWeights):
        path = weights.file.path
        return {
            name: (path, each.type, each.shape, each.start, each.stop) for name, each in weights.file.tensors.items()
        }
    return {
        name: (path, each.dtype, each.shape, each.start, each.stop)
        for path in weights.files
        for name, each in SafetensorsFile.open(path).tensors.items()
    }


def of_upstream(config: UpstreamConfig) -> str:
    """Return the fingerprint of an upstream as configured: its URL, the model name, and the fields it is sent.

    It leaves out the key and the values of headers, because clients see the fingerprint. Changes that the upstream's
    operators make do not change it. Of a managed engine, what determines its answers stands for the URL.
    """
    managed = config.managed
    if managed is not None:
        given = (managed.model, managed.quantisation, managed.kv_dtype, managed.adapters, managed.arguments)
        sent = (config.kind, "managed", msgspec.json.encode(given).decode(), config.model, features_of(config))
    else:
        address = urlsplit(config.url or "")
        sent = (config.kind, address.netloc.lower(), address.path.rstrip("/"), config.model, features_of(config))
    return _fingerprint(_named("upstream", msgspec.msgpack.encode((sent, sorted(config.headers)))))


def _fingerprint(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return f"fp_{digest.hexdigest()[:_DIGITS]}"


def _named(name: str, content: bytes) -> tuple[bytes, bytes]:
    """Told apart from what stands beside it, whatever is in it."""
    return msgspec.msgpack.encode((name, len(content))), content


def _content(path: Path) -> bytes:
    """Empty where there is no such file. The loading has found each small enough."""
    try:
        return path.read_bytes() if path.is_file() else b""
    except OSError as error:
        raise _unreadable(path, error) from None


def _opened(path: Path) -> FileIO:
    try:
        return FileIO(path)
    except OSError as error:
        raise _unreadable(path, error) from None


def _read(file: FileIO, start: int, size: int) -> bytes:
    try:
        return os.pread(file.fileno(), size, start)
    except OSError as error:
        raise _unreadable(Path(str(file.name)), error) from None


def _unreadable(path: Path, error: OSError) -> ModelError:
    return ModelError(f"cannot be read: {error.strerror or error}", path=path)


def _pieces(start: int, stop: int, all_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the start in the file and the length of each sampled piece of a tensor. `all_bytes`: of the whole model."""
    size = stop - start
    count = 1 + size * _SPREAD // max(all_bytes, 1)
    if size <= count * _PIECE:
        yield start, size
        return
    for place in range(1, count + 1):
        yield start + (size - _PIECE) * place // (count + 1), _PIECE
