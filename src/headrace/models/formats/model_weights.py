"""The weights of a model folder, whichever files hold them.

Owns DenseTensor (the canonical unquantised tensor), the choice of files in a folder, the agreement between an index and
its shards, and the digest of the files' contents. Knows nothing of the inside of a format, nor of what a tensor is for.
Pickle files are refused by name and never opened.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import msgspec

from headrace.errors import ModelError
from headrace.models.formats.atomic_file import new_file
from headrace.models.formats.json_file import read_json
from headrace.models.formats.tensors import DenseTensor

if TYPE_CHECKING:
    from headrace.models.formats.safetensors_file import SafetensorsFile

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
INDEX_LIMIT: Final = 128 * 1024 * 1024  # 128 MiB; the index of a large mixture of experts is about 10 MiB
PICKLE_SUFFIXES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_CHUNK: Final = 4 * 1024 * 1024  # 4 MiB
_SETTLED: Final = 2.0  # seconds; a file younger than this may still change without a change of its mtime


class ModelWeights:
    """Every tensor of a model folder by its name on disk."""

    def __init__(self, files: Iterable[SafetensorsFile]) -> None:
        self._homes: dict[str, SafetensorsFile] = {}
        opened = tuple(files)
        for file in opened:
            for name in file.tensors:
                other = self._homes.setdefault(name, file)
                if other is not file:
                    raise ModelError(f"tensor is in '{other.path.name}' too", path=file.path, tensor=name)
        self.files = tuple(file.path for file in opened)
        self.names = frozenset(self._homes)
        self.total_bytes = sum(entry.stop - entry.start for file in opened for entry in file.tensors.values())

    @classmethod
    def open(cls, folder: Path) -> ModelWeights:
        """The weights of a folder: model.safetensors, or the shards of its index, or the only *.safetensors there."""
        # Format modules build on DenseTensor, so this one meets them only when it is called.
        from headrace.models.formats.safetensors_file import SafetensorsFile

        if (folder / SINGLE_FILE).exists():
            return cls([SafetensorsFile.open(folder / SINGLE_FILE)])
        if (folder / INDEX_FILE).exists():
            return _open_shards(folder / INDEX_FILE)
        return cls([SafetensorsFile.open(_only_file(folder))])

    def dense(self, name: str) -> DenseTensor:
        file = self._homes.get(name)
        if file is None:
            where = self.files[0] if len(self.files) == 1 else self.files[0].parent
            raise ModelError("no such tensor in the model's files", path=where, tensor=name)
        return file.dense(name)


def _open_shards(index: Path) -> ModelWeights:
    from headrace.models.formats.safetensors_file import SafetensorsFile

    found = read_json(index, limit=INDEX_LIMIT).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise ModelError("weight_map must be an object that names a shard for every tensor", path=index)
    weight_map = cast("dict[str, object]", found)
    shards: dict[str, SafetensorsFile] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str):
            raise ModelError("weight_map must name a file", path=index, tensor=tensor)
        if shard in shards:
            continue
        if not _plain_name(shard):
            raise ModelError(
                f"shard {shard[:200]!r} is not the plain name of a .safetensors file", path=index, tensor=tensor
            )
        path = index.parent / shard
        if not path.exists():
            raise ModelError(f"shard is missing; '{index.name}' names it", path=path, tensor=tensor)
        shards[shard] = SafetensorsFile.open(path)
    weights = ModelWeights(shards[name] for name in sorted(shards))
    for tensor, shard in weight_map.items():
        if tensor not in shards[cast(str, shard)].tensors:
            raise ModelError(f"'{index.name}' says '{shard}' holds it, which it does not", path=index, tensor=tensor)
    return weights


def _plain_name(name: str) -> bool:
    """True for a name that stays in its folder; where a symlink of that name points is the folder's owner's choice."""
    return name.endswith(".safetensors") and len(name) <= 255 and not any(c in "/\\" or ord(c) < 32 for c in name)


def _only_file(folder: Path) -> Path:
    try:
        names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise ModelError(f"model folder cannot be read: {error.strerror or error}", path=folder) from None
    candidates = [name for name in names if name.endswith(".safetensors")]
    if len(candidates) == 1:
        return folder / candidates[0]
    if candidates:
        raise ModelError(
            f"The folder has {len(candidates)} .safetensors files, but neither {SINGLE_FILE} nor {INDEX_FILE}. Add the "
            "index that lists the shards.",
            path=folder,
        )
    pickles = [name for name in names if name.removesuffix(".index.json").endswith(PICKLE_SUFFIXES)]
    if pickles:
        raise ModelError(
            "Pickle files can execute code when they are loaded, so Headrace does not open them. If you trust it, "
            "convert it to safetensors with transformers: save_pretrained(..., safe_serialization=True).",
            path=folder / pickles[0],
        )
    raise ModelError(f"no weights: expected {SINGLE_FILE}, or shards with {INDEX_FILE}", path=folder)


class _DigestRecord(msgspec.Struct, forbid_unknown_fields=True):
    path: str
    size: int
    mtime_ns: int
    inode: int
    sha256: str


def content_digest(files: Iterable[Path], *, index_dir: Path | None = None) -> str:
    """sha256, as hex, over the files' sha256 in the order of their names: it does not change when the folder is moved.

    A file whose path, size, mtime and inode are as `index_dir` remembers them is not read again.
    """
    total = hashlib.sha256()
    for path in sorted(files, key=lambda file: (file.name, str(file))):
        try:
            total.update(bytes.fromhex(_file_digest(path, index_dir)))
        except OSError as error:
            raise ModelError(f"cannot be read: {error.strerror or error}", path=path) from None
    return total.hexdigest()


def _file_digest(path: Path, index_dir: Path | None) -> str:
    resolved = path.resolve(strict=True)
    before = _identity(resolved)
    record = None if index_dir is None else _record_path(index_dir, before)
    if record is not None and (known := _recall(record, before)) is not None:
        return known
    digest = hashlib.sha256()
    with resolved.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    if _identity(resolved) != before:
        raise ModelError("file changed while it was read", path=path)
    if record is not None and time.time() - before.mtime_ns / 1e9 > _SETTLED:
        _remember(record, msgspec.structs.replace(before, sha256=digest.hexdigest()))
    return digest.hexdigest()


def _identity(resolved: Path) -> _DigestRecord:
    status = os.stat(resolved)
    return _DigestRecord(
        path=os.fsencode(resolved).hex(),  # a file's name need not be text
        size=status.st_size,
        mtime_ns=status.st_mtime_ns,
        inode=status.st_ino,
        sha256="",
    )


def _record_path(index_dir: Path, identity: _DigestRecord) -> Path:
    # One record a file, so that a changed file overwrites its old record and the folder does not grow.
    return index_dir / f"{hashlib.sha256(identity.path.encode()).hexdigest()[:32]}.json"


def _recall(record: Path, identity: _DigestRecord) -> str | None:
    try:
        found = msgspec.json.decode(record.read_bytes(), type=_DigestRecord)
        valid = len(bytes.fromhex(found.sha256)) == hashlib.sha256().digest_size
    except (OSError, ValueError, RecursionError):  # missing or corrupt: the file is read again
        return None
    return found.sha256 if valid and msgspec.structs.replace(found, sha256="") == identity else None


def _remember(record: Path, value: _DigestRecord) -> None:
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        with new_file(record, durable=False) as file:
            file.write(msgspec.json.encode(value))
    except OSError:
        return  # a cache folder that cannot be written costs time at the next start, nothing else
