"""Saves pinned prefixes with their KV to a file and restores them at the next start.

The container is that of packed weights (`models/pack_file.py`). Each blob is one block of KV with a sha256, stored once
however many prefixes share it; the description says what computed the KV and which prefixes the blocks form. Reads and
writes blocks through two functions, without an executor.

KV is only valid for exactly what computed it: a file made by something else is refused with the first difference.
Checksums detect damage, not malice: whoever can write the file decides what a prompt means to the model, as with a file
of weights. The file contains prompts, so only its owner can read it.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

import headrace._core as _core
from headrace.engine.memory.block_manager import BlockManager
from headrace.engine.memory.prefix_pins import MOST_PINS, PinnedPrefix
from headrace.errors import HeadraceError, ModelError, RequestError
from headrace.models.formats.pack_file import PackFile, PackWriter
from headrace.models.precision import KvType, WeightPlan
from headrace.models.spec import ModelSpec
from headrace.version import __version__

VERSION: Final = 1
MOST_TOKENS: Final = 1 << 20  # per prefix
_KIND: Final = "pinned prefixes"

Bytes = NDArray[np.uint8]


class PrefixFileError(HeadraceError):
    """A file of pinned prefixes that is missing, damaged, or not such a file."""

    def __init__(self, reason: str, *, path: Path) -> None:
        self.reason = reason
        self.path = path
        super().__init__(f"{path}: {reason}")


class OtherKvError(PrefixFileError):
    """A valid file whose KV was computed by another model, precision, layout or arithmetic."""


class KvIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that must be equal for KV to be the same bytes."""

    model: str  # digest of the weight files and the architecture
    weights: str  # precision plan
    kv: str  # KV precision
    arithmetic: str  # instruction sets of another one round differently
    release: str  # of Headrace; the order of additions may change with it
    layout: str  # versions of the core's layouts
    block_tokens: int
    block_bytes: int
    offsets: str = ""  # digest of what is subtracted from keys


def kv_identity(
    *,
    weights_digest: str,  # models.weights.content_digest
    spec: ModelSpec,
    plan: WeightPlan,
    kv: KvType,
    arithmetic: str,
    block_tokens: int,
    block_bytes: int,
    offsets: str = "",  # of KeyOffsets.digest
) -> KvIdentity:
    """Return the identity of the KV that a CPU executor computes."""
    return KvIdentity(
        model=hashlib.sha256(msgspec.msgpack.encode((weights_digest, spec))).hexdigest(),
        weights=msgspec.json.encode(plan).decode(),
        kv=kv,
        arithmetic=arithmetic,
        release=__version__,
        layout=f"{_core.LAYOUT}.{_core.KV_LAYOUT}",
        block_tokens=block_tokens,
        block_bytes=block_bytes,
        offsets=offsets,
    )


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    sha256: str


class _Prefix(msgspec.Struct, forbid_unknown_fields=True):
    salt: Annotated[str, msgspec.Meta(max_length=1024)]
    variant: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    tokens: Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]], msgspec.Meta(max_length=MOST_TOKENS)]
    blocks: Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(max_length=MOST_TOKENS)]


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    kind: str
    version: int
    identity: KvIdentity
    prefixes: Annotated[list[_Prefix], msgspec.Meta(max_length=MOST_PINS)]


class LoadedPrefixes(msgspec.Struct, frozen=True):
    prefixes: int  # prefixes pinned and fully restored
    tokens: int  # tokens whose KV came from the file
    left_out: tuple[str, ...]  # a reason for each prefix that was not restored


def save_pinned(path: Path, identity: KvIdentity, blocks: BlockManager, read_block: Callable[[int], Bytes]) -> int:
    """Write the computed part of all pinned prefixes, atomically. Return the number of tokens written."""
    entries: dict[int, int] = {}  # block -> entry
    prefixes: list[_Prefix] = []
    for pinned in blocks.pinned():
        numbers = [entries.setdefault(block, len(entries)) for block in pinned.blocks]
        prefixes.append(_Prefix(pinned.salt, pinned.variant, list(pinned.tokens), numbers))
    header = _Header(_KIND, VERSION, identity, prefixes)
    # Use a folder that only its owner may enter, because the file must never be readable by others.
    with tempfile.TemporaryDirectory(prefix=f".{path.name[:100]}.", dir=path.parent) as folder:
        draft = Path(folder) / "draft"
        with PackWriter(draft, msgspec.to_builtins(header)) as writer:
            for block, number in entries.items():
                data = read_block(block)
                if data.size != identity.block_bytes:
                    raise ValueError(f"a block has {data.size} bytes, and {identity.block_bytes} by its identity")
                writer.add(str(number), {"sha256": hashlib.sha256(data.data).hexdigest()}, data)
        draft.chmod(0o600)
        os.replace(draft, path)
    return len(entries) * identity.block_tokens


def load_pinned(
    path: Path, identity: KvIdentity, blocks: BlockManager, write_block: Callable[[int, Bytes], None]
) -> LoadedPrefixes:
    """Pin the file's prefixes and restore their KV. Changes nothing before the whole file has been checked."""
    prefixes, data = _read(path, identity)
    count = tokens = 0
    left_out: list[str] = []
    for prefix in prefixes:
        why, written = _put_back(prefix, data, blocks, write_block)
        tokens += written
        if why:
            left_out.append(why)
        else:
            count += 1
    return LoadedPrefixes(count, tokens, tuple(left_out))


def _put_back(
    prefix: PinnedPrefix, data: list[Bytes], blocks: BlockManager, write_block: Callable[[int, Bytes], None]
) -> tuple[str, int]:
    """Return why a prefix could not be restored (empty if it was), and how many tokens' KV was written."""
    try:
        blocks.pin(prefix.tokens, prefix.salt, variant=prefix.variant)
    except RequestError as error:
        return str(error), 0
    tokens = prefix.tokens[: len(prefix.blocks) * blocks.block_tokens]
    table = blocks.restore(tokens, prefix.salt, variant=prefix.variant)
    if table is None:
        return f"no memory for a prefix of {len(tokens)} tokens", 0
    computed = cached = table.cached_tokens
    try:
        for place in range(cached // blocks.block_tokens, len(prefix.blocks)):
            write_block(table.blocks[place], data[prefix.blocks[place]])
            computed += blocks.block_tokens
    finally:
        blocks.release(table, tokens, computed)
    return "", computed - cached


def _read(path: Path, identity: KvIdentity) -> tuple[list[PinnedPrefix], list[Bytes]]:
    try:
        file = PackFile.open(path)
    except ModelError as error:
        raise PrefixFileError(error.reason, path=path) from None
    header = _header(file, identity)
    data: list[Bytes] = []
    for number, name in enumerate(file.names):
        if name != str(number):
            raise PrefixFileError(f"block {number} is named '{name[:80]}'", path=path)
        data.append(_checked_block(file, name, identity))
    return _checked_prefixes(header, len(data), path), data


def _header(file: PackFile, identity: KvIdentity) -> _Header:
    path = file.path
    if file.meta.get("kind") != _KIND:
        raise PrefixFileError("not a file of pinned prefixes", path=path)
    version = file.meta.get("version")
    if version != VERSION:
        raise PrefixFileError(f"has version {str(version)[:40]}, expected {VERSION}", path=path)
    try:
        header = msgspec.convert(file.meta, _Header)
    except (ValueError, RecursionError) as error:
        raise PrefixFileError(f"has a wrong header: {str(error)[:200]}", path=path) from None
    for field in KvIdentity.__struct_fields__:
        found, expected = getattr(header.identity, field), getattr(identity, field)
        if found != expected:
            raise OtherKvError(f"was saved by another engine: {field} is {str(found)[:80]}, here {expected}", path=path)
    return header


def _checked_block(file: PackFile, name: str, identity: KvIdentity) -> Bytes:
    data = file.data(name)
    if data.size != identity.block_bytes:
        raise PrefixFileError(f"block {name} has {data.size} bytes, expected {identity.block_bytes}", path=file.path)
    meta: dict[str, Any] = file.entry_meta(name)
    try:
        entry = msgspec.convert(meta, _Entry)
    except ValueError as error:
        raise PrefixFileError(f"block {name} has a wrong description: {str(error)[:200]}", path=file.path) from None
    if hashlib.sha256(data.data).hexdigest() != entry.sha256:
        raise PrefixFileError(f"is corrupt: block {name} is not what was written", path=file.path)
    return data


def _checked_prefixes(header: _Header, entries: int, path: Path) -> list[PinnedPrefix]:
    """Check the prefixes. A block may appear in several prefixes only if they are equal up to its end."""
    size = header.identity.block_tokens
    meanings: dict[int, tuple[int, int, tuple[int, ...]]] = {}  # entry -> variant, entry before, tokens
    prefixes: list[PinnedPrefix] = []
    for number, prefix in enumerate(header.prefixes):
        if not prefix.tokens or len(prefix.tokens) % size or len(prefix.blocks) * size > len(prefix.tokens):
            raise PrefixFileError(
                f"prefix {number} has {len(prefix.tokens)} tokens and {len(prefix.blocks)} blocks of {size}", path=path
            )
        before = -1
        for place, entry in enumerate(prefix.blocks):
            meaning = (prefix.variant, before, tuple(prefix.tokens[place * size : (place + 1) * size]))
            if entry >= entries or meanings.setdefault(entry, meaning) != meaning:
                raise PrefixFileError(f"prefix {number} has block {entry} where it cannot be", path=path)
            before = entry
        prefixes.append(PinnedPrefix(tuple(prefix.tokens), prefix.salt, prefix.variant, tuple(prefix.blocks)))
    if len(meanings) != entries:
        raise PrefixFileError("has blocks that belong to no prefix", path=path)
    return prefixes
