"""Finds the weight files of a model folder, checks that an index and its shards agree, and computes their digest.

Never opens pickle files. Does not know the inside of a format or what a tensor is for.
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
from headrace.models.formats.tensors import DenseTensor, StoredTensor

if TYPE_CHECKING:
    from headrace.models.formats.quantised_layer import AffineCodes, StoredLayout
    from headrace.models.formats.safetensors_file import SafetensorsFile, TensorEntry

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
INDEX_LIMIT: Final = 128 * 1024 * 1024  # 128 MiB; the index of a large mixture of experts is about 10 MiB
PICKLE_SUFFIXES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_CHUNK: Final = 4 * 1024 * 1024  # 4 MiB
_SETTLED_S: Final = 2.0  # a younger file may change without a change of its mtime


class ModelWeights:
    """The tensors of a model folder by their names on disk."""

    def __init__(self, files: Iterable[SafetensorsFile]) -> None:
        self._homes: dict[str, SafetensorsFile] = {}
        self._renamed: dict[str, str] = {}  # names of modules' tensors in their own files
        opened = tuple(files)
        for file in opened:
            for name in file.tensors:
                other = self._homes.setdefault(name, file)
                if other is not file:
                    raise ModelError(
                        f"The tensor is also in '{other.path.name}'. Each tensor must be in one file.",
                        path=file.path,
                        tensor=name,
                    )
        self.files = tuple(file.path for file in opened)
        self.names = frozenset(self._homes)
        self.total_bytes = sum(entry.stop - entry.start for file in opened for entry in file.tensors.values())

    @classmethod
    def open(cls, folder: Path) -> ModelWeights:
        """Open model.safetensors, or the shards of the index, or the only *.safetensors file in a folder."""
        # Imported here to keep this module cheap to import.
        from headrace.models.formats.safetensors_file import SafetensorsFile

        if (folder / SINGLE_FILE).exists():
            return cls([SafetensorsFile.open(folder / SINGLE_FILE)])
        if (folder / INDEX_FILE).exists():
            return _open_shards(folder / INDEX_FILE)
        return cls([SafetensorsFile.open(_only_file(folder))])

    def add_modules(self, prefix: str, folders: Iterable[Path]) -> None:
        """Add the tensors of model.safetensors in other folders, named PREFIX.NUMBER.NAME."""
        from headrace.models.formats.safetensors_file import SafetensorsFile

        for number, folder in enumerate(folders):
            file = SafetensorsFile.open(_only_file(folder))
            self.files += (file.path,)
            for name, entry in file.tensors.items():
                self._homes[f"{prefix}.{number}.{name}"] = file
                self._renamed[f"{prefix}.{number}.{name}"] = name
                self.total_bytes += entry.stop - entry.start
        self.names = frozenset(self._homes)

    def dense(self, name: str) -> DenseTensor:
        return self._home(name).dense(self._renamed.get(name, name))

    def stored(self, name: str) -> StoredTensor:
        """Return a tensor of any type that quantised files use."""
        return self._home(name).stored(self._renamed.get(name, name))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a dense tensor's shape."""
        return self.dense(name).shape

    def entry(self, name: str) -> TensorEntry | None:
        """Return type, shape and place of a tensor; None if there is no such tensor."""
        file = self._homes.get(name)
        return None if file is None else file.tensors[self._renamed.get(name, name)]

    def path_of(self, name: str) -> Path:
        """Return the file of a tensor; of a tensor that does not exist, the place where it is missing."""
        file = self._homes.get(name)
        return self._place() if file is None else file.path

    def drop_pages(self) -> None:
        """Give back the memory of what was read of the files."""
        for file in set(self._homes.values()):
            file.drop_pages()

    def stored_names(self, name: str) -> tuple[str, ...]:
        """Return the names of the tensors on disk that a tensor is made from."""
        return (name,)

    def layout(self, name: str) -> StoredLayout | None:
        """Return how a tensor is quantised on disk: not at all."""
        return None

    def codes(self, name: str) -> AffineCodes | None:
        return None

    def _home(self, name: str) -> SafetensorsFile:
        file = self._homes.get(name)
        if file is None:
            raise ModelError("The model's files have no such tensor.", path=self._place(), tensor=name)
        return file

    def _place(self) -> Path:
        return self.files[0] if len(self.files) == 1 else self.files[0].parent


def _open_shards(index: Path) -> ModelWeights:
    from headrace.models.formats.safetensors_file import SafetensorsFile

    value = read_json(index, limit=INDEX_LIMIT).get("weight_map")
    if not isinstance(value, dict) or not value:
        raise ModelError("Key 'weight_map' must be an object that names a shard for every tensor.", path=index)
    weight_map = cast("dict[str, object]", value)
    shards: dict[str, SafetensorsFile] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str):
            raise ModelError("Key 'weight_map' must name a file.", path=index, tensor=tensor)
        if shard in shards:
            continue
        if not _is_plain_name(shard):
            raise ModelError(
                f"Shard {shard[:200]!r} is not the plain name of a .safetensors file.", path=index, tensor=tensor
            )
        path = index.parent / shard
        if not path.exists():
            raise ModelError(
                f"The shard is missing, but '{index.name}' names it. Download the model again.",
                path=path,
                tensor=tensor,
            )
        shards[shard] = SafetensorsFile.open(path)
    weights = ModelWeights(shards[name] for name in sorted(shards))
    for tensor, shard in weight_map.items():
        if tensor not in shards[cast(str, shard)].tensors:
            raise ModelError(
                f"'{index.name}' places it in '{shard}', which does not hold it.", path=index, tensor=tensor
            )
    return weights


def _is_plain_name(name: str) -> bool:
    """Return whether a name stays in its folder. Symlinks are allowed: the owner of the folder made them."""
    return name.endswith(".safetensors") and len(name) <= 255 and not any(c in "/\\" or ord(c) < 32 for c in name)


def _only_file(folder: Path) -> Path:
    try:
        names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise ModelError(f"Cannot read the model folder: {error.strerror or error}.", path=folder) from None
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
    raise ModelError(f"The folder has no weights. Expected {SINGLE_FILE}, or shards with {INDEX_FILE}.", path=folder)


class _DigestRecord(msgspec.Struct, forbid_unknown_fields=True):
    path: str
    size: int
    mtime_ns: int
    inode: int
    sha256: str


def content_digest(files: Iterable[Path], *, index_dir: Path | None = None) -> str:
    """Return the hex sha256 over the files' sha256 in order of their names. Moving the folder does not change it.

    A file is not read again if its path, size, mtime and inode match the record in `index_dir`.
    """
    total = hashlib.sha256()
    for path in sorted(files, key=lambda file: (file.name, str(file))):
        try:
            total.update(bytes.fromhex(_file_digest(path, index_dir)))
        except OSError as error:
            raise ModelError(f"Cannot read the file: {error.strerror or error}.", path=path) from None
    return total.hexdigest()


def _file_digest(path: Path, index_dir: Path | None) -> str:
    resolved = path.resolve(strict=True)
    before = _identity(resolved)
    record = None if index_dir is None else _record_path(index_dir, before)
    if record is not None and (known := _read_record(record, before)) is not None:
        return known
    digest = hashlib.sha256()
    with resolved.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    if _identity(resolved) != before:
        raise ModelError("The file changed during the read.", path=path)
    if record is not None and time.time() - before.mtime_ns / 1e9 > _SETTLED_S:
        _write_record(record, msgspec.structs.replace(before, sha256=digest.hexdigest()))
    return digest.hexdigest()


def _identity(resolved: Path) -> _DigestRecord:
    status = os.stat(resolved)
    return _DigestRecord(
        path=os.fsencode(resolved).hex(),  # file names may not be valid text
        size=status.st_size,
        mtime_ns=status.st_mtime_ns,
        inode=status.st_ino,
        sha256="",
    )


def _record_path(index_dir: Path, identity: _DigestRecord) -> Path:
    # One record per path: a changed file overwrites its record, so the folder does not grow.
    return index_dir / f"{hashlib.sha256(identity.path.encode()).hexdigest()[:32]}.json"


def _read_record(record: Path, identity: _DigestRecord) -> str | None:
    try:
        known = msgspec.json.decode(record.read_bytes(), type=_DigestRecord)
        valid = len(bytes.fromhex(known.sha256)) == hashlib.sha256().digest_size
    except (OSError, ValueError, RecursionError):  # missing or corrupt: read the file again
        return None
    return known.sha256 if valid and msgspec.structs.replace(known, sha256="") == identity else None


def _write_record(record: Path, value: _DigestRecord) -> None:
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        with new_file(record, durable=False) as file:
            file.write(msgspec.json.encode(value))
    except OSError:
        return  # an unwritable cache folder only costs time at the next start
