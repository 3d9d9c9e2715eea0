"""Downloads a model from a hub with the extra `hub`: resumes, verifies every file, and keeps it in the hub's cache.

huggingface_hub transfers the files and reads HF_ENDPOINT, HF_TOKEN, HF_HUB_CACHE and HF_HUB_OFFLINE. Chooses the files
that Headrace reads; files that can hold code (pickles, Python) are never among them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any, Final

import msgspec

from headrace.errors import DownloadError, HeadraceError, RequestError
from headrace.models.sources.downloaded_models import HubName, downloaded_model, hub_cache, match_files

_FILES: Final = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja")  # of the model's folder
_BELOW: Final = ("*/config.json",)  # sentence-transformers keep one for each of their modules
_READ_AT_ONCE: Final = 4 * 1024 * 1024


class HubFile(msgspec.Struct, frozen=True):
    name: str  # its path in the repository
    size: int
    sha256: str = ""  # of a large file
    git_sha1: str = ""  # of any other


def pull_from_hub(
    name: HubName, *, report: Callable[[str], None] = lambda line: None, bars: bool = False, offline: bool = False
) -> Path:
    """Download what is missing of a model, verify all of it and return its folder or GGUF file.

    `bars`: let the hub's client draw progress bars. RequestError where the name or the files are not what is needed,
    DownloadError where the hub fails.
    """
    hub = _client()
    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or hub.constants.ENDPOINT
    if offline or hub.constants.HF_HUB_OFFLINE:
        path = downloaded_model(str(name))
        if path is None:
            raise DownloadError(f"'{name}' is not on this machine, and downloads are off (offline).")
        return path
    (hub.utils.enable_progress_bars if bars else hub.utils.disable_progress_bars)()
    try:
        info = hub.HfApi(endpoint=endpoint).model_info(name.repository, files_metadata=True)
        files = _chosen([_file(each) for each in info.siblings or ()], name)
        report(f"{name}: {len(files)} files, {sum(file.size for file in files) / 1e6:,.1f} MB")
        paths: dict[str, Path] = {}
        for file in files:
            path = Path(hub.hf_hub_download(name.repository, file.name, endpoint=endpoint, cache_dir=hub_cache()))
            if info.sha not in path.parts:
                raise DownloadError(f"'{name.repository}' changed during the download. Run the command again.")
            _verify(path, file)
            paths[file.name] = path
    except HeadraceError:
        raise
    except hub.errors.RepositoryNotFoundError:
        raise DownloadError(
            f"The hub at {endpoint} has no model '{name.repository}' that you may read. Check the name; "
            "for a private model, set HF_TOKEN."
        ) from None
    except Exception as error:  # the client raises its own errors, those of its HTTP library and those of the system
        reason = " ".join(str(error).strip().splitlines()[:1]) or type(error).__name__
        raise DownloadError(f"Cannot download '{name}' from the hub at {endpoint}: {reason}") from error
    report(f"verified {len(files)} files")
    if files[-1].name.endswith(".gguf"):
        return paths[files[-1].name]
    return paths["config.json"].parent


def _client() -> Any:
    try:
        import huggingface_hub  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise RequestError(
            "Downloads from the hub need the extra 'hub'. Run: pip install 'headrace[hub]'", parameter="model"
        ) from None
    return huggingface_hub


def _file(sibling: Any) -> HubFile:
    lfs = sibling.lfs
    if lfs is not None:
        return HubFile(sibling.rfilename, int(lfs.size), sha256=str(lfs.sha256))
    return HubFile(sibling.rfilename, int(sibling.size or 0), git_sha1=str(sibling.blob_id or ""))


def _chosen(files: Sequence[HubFile], name: HubName) -> list[HubFile]:
    """Return the files of a model. config.json, or the first file of a split GGUF model, is the last one: what was
    interrupted does not look complete."""
    ggufs = {file.name: file for file in files if file.name.endswith(".gguf")}
    if name.file:
        return [ggufs[each] for each in match_files(ggufs, name.file, name.repository)]
    folder = [file for file in files if _is_read(file.name)]
    names = {file.name for file in folder}
    if "config.json" in names and any(each.endswith(".safetensors") for each in names):
        return sorted(folder, key=lambda file: (file.name == "config.json", file.name))
    if ggufs:
        return [ggufs[each] for each in match_files(ggufs, name.file, name.repository)]
    raise RequestError(
        f"'{name.repository}' has neither safetensors with a config.json nor a GGUF file. Other formats can hold code "
        "and are not loaded.",
        parameter="model",
    )


def _is_read(path: str) -> bool:
    depth = len(PurePosixPath(path).parts)
    return any(fnmatch(path, each) for each in (_FILES if depth == 1 else _BELOW)) and depth <= 2


def _verify(path: Path, file: HubFile) -> None:
    """Compare a file with the hub's hash of it. A wrong one is deleted, so that the next try begins anew."""
    expected = file.sha256 or file.git_sha1
    if not expected:
        raise DownloadError(f"The hub has no hash of '{file.name}', so it cannot be verified.")
    digest = hashlib.sha256() if file.sha256 else hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as opened:
        while piece := opened.read(_READ_AT_ONCE):
            digest.update(piece)
    if digest.hexdigest() != expected:
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise DownloadError(
            f"'{file.name}' is not what the hub promises: its hash is {digest.hexdigest()}, expected {expected}. "
            "It was deleted. Run the command again."
        )
