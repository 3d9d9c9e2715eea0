"""Reads a package index (the simple API: PEP 503 HTML, PEP 691 JSON) and downloads one of its files.

A download resumes where an earlier one stopped and is verified by the hash that the index gives. Installs and runs
nothing.
"""

from __future__ import annotations

import base64
import hashlib
import re
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.errors import DownloadError
from headrace.models.sources.pip_settings import PipSettings

Progress = Callable[[int, int], None]  # bytes so far, bytes in all

_ACCEPT: Final = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
_PAGE_BYTES: Final = 64 * 1024 * 1024
_READ_AT_ONCE: Final = 1024 * 1024
_TRIES: Final = 3  # of a download that breaks off


class IndexFile(msgspec.Struct, frozen=True):
    filename: str
    url: str
    sha256: str = ""
    size: int | None = None
    yanked: bool = False

    @property
    def version(self) -> str:
        """The version in a wheel's name."""
        return self.filename.split("-")[1] if self.filename.count("-") >= 4 else ""


def list_files(package: str, settings: PipSettings) -> list[IndexFile]:
    """Return the files of a package. DownloadError if the index cannot be read or does not have it."""
    url = f"{settings.index_url}/{package}/"
    try:
        with _open(url, settings, {"accept": _ACCEPT}) as answer:
            kind, final = answer.headers.get_content_type(), answer.url
            page = answer.read(_PAGE_BYTES + 1)
    except urllib.error.HTTPError as error:
        if error.code == 404:
            raise DownloadError(f"The package index {shown(url)} does not have '{package}'.") from None
        raise DownloadError(f"The package index {shown(url)} answered {error.code}.") from None
    except (OSError, ValueError) as error:
        raise DownloadError(f"Cannot read the package index {shown(url)}: {_reason(error)}") from None
    if len(page) > _PAGE_BYTES:
        raise DownloadError(f"The page {shown(url)} is longer than {_PAGE_BYTES} bytes.")
    try:
        return _from_json(page, final) if kind.endswith("+json") else _from_html(page.decode(), final)
    except (ValueError, KeyError, TypeError, msgspec.MsgspecError):
        raise DownloadError(f"The page {shown(url)} is not that of a package index.") from None


def newest_wheel(package: str, files: list[IndexFile], version: str = "") -> IndexFile:
    """Return the newest wheel, or that of a version. Yanked files and pre-releases count only if they are asked for."""
    wheels = [each for each in files if each.filename.endswith(".whl") and each.version]
    if version:
        found = [each for each in wheels if each.version == version]
        if not found:
            known = ", ".join(sorted({each.version for each in wheels}, key=version_order)) or "none"
            raise DownloadError(f"'{package}' has no wheel of version {version}. Versions: {known}.")
    else:
        usable = [each for each in wheels if not each.yanked]
        found = [each for each in usable if version_order(each.version)[1] == 0] or usable
    if not found:
        raise DownloadError(f"'{package}' has no wheel. Only wheels are read: building a package would run its code.")
    chosen = max(found, key=lambda each: version_order(each.version))
    if not chosen.sha256:
        raise DownloadError(f"The index gives no SHA-256 of {chosen.filename}, so it cannot be verified.")
    return chosen


def version_order(version: str) -> tuple[tuple[int, ...], int, str]:
    """Return a key that sorts versions: numbers by value, pre-releases (its second part is -1) before their release."""
    release = re.match(r"(?:\d+!)?(\d+(?:\.\d+)*)", version)
    numbers = tuple(int(part) for part in release[1].split(".")) if release else ()
    while numbers and numbers[-1] == 0:
        numbers = numbers[:-1]
    rest = version[release.end() :] if release else version
    return numbers, -1 if re.search(r"(?i)a|b|rc|dev", rest.partition("+")[0].replace(".post", "")) else 0, rest


def download(
    file: IndexFile, target: Path, settings: PipSettings, progress: Progress = lambda done, total: None
) -> None:
    """Download a file to `target`, from where an earlier download stopped. DownloadError if it is not what the index
    promises; what came is deleted then."""
    for tried in range(_TRIES):
        try:
            _fetch(file, target, settings, progress)
            break
        except urllib.error.HTTPError as error:
            raise DownloadError(f"{shown(file.url)} answered {error.code}.") from None
        except (OSError, ValueError) as error:
            if tried + 1 == _TRIES:
                raise DownloadError(
                    f"The download of {file.filename} broke off: {_reason(error)}. Run the command again to resume it."
                ) from None
    digest = hashlib.sha256()
    with target.open("rb") as opened:
        while piece := opened.read(_READ_AT_ONCE):
            digest.update(piece)
    if digest.hexdigest() != file.sha256:
        target.unlink()
        raise DownloadError(
            f"{file.filename} is not what the index promises: its SHA-256 is {digest.hexdigest()}, expected "
            f"{file.sha256}. It was deleted."
        )


def _fetch(file: IndexFile, target: Path, settings: PipSettings, progress: Progress) -> None:
    have = target.stat().st_size if target.exists() else 0
    if file.size is not None and have == file.size:
        return
    if file.size is not None and have > file.size:
        target.unlink()
        have = 0
    headers = {"range": f"bytes={have}-"} if have else {}
    try:
        answer = _open(file.url, settings, {**headers, "accept-encoding": "identity"})
    except urllib.error.HTTPError as error:
        if error.code != 416:
            raise
        return  # nothing is missing; the hash decides
    with answer:
        resumes = getattr(answer, "status", 200) == 206
        have = have if resumes else 0
        length = answer.headers.get("content-length")
        total = file.size if file.size is not None else have + int(length or 0)
        with target.open("ab" if resumes else "wb") as opened:
            while piece := answer.read(_READ_AT_ONCE):
                opened.write(piece)
                have += len(piece)
                progress(have, total)
                if file.size is not None and have > file.size:
                    return  # the hash will say so
    if have < total:
        raise OSError(f"{have} of {total} bytes came")


def _open(url: str, settings: PipSettings, headers: dict[str, str]) -> Any:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https", "file"):
        raise ValueError(f"'{parts.scheme}' is no scheme of a package index")
    if parts.scheme == "file" and not settings.index_url.startswith("file:"):
        raise ValueError("an index on the network may not name files of this machine")
    if parts.username is not None:
        secret = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        headers = {**headers, "authorization": "Basic " + base64.b64encode(secret.encode()).decode()}
        url = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    elif parts.scheme == "file" and parts.path.endswith("/"):
        url += "index.html"
    context = ssl.create_default_context(cafile=settings.certificates or None) if parts.scheme == "https" else None
    request = urllib.request.Request(url, headers=headers)
    return urllib.request.urlopen(request, timeout=settings.timeout_s, context=context)


def shown(url: str) -> str:
    """Return a URL without its user and password."""
    parts = urllib.parse.urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _reason(error: BaseException) -> str:
    reason = getattr(error, "reason", None)
    return str(reason if isinstance(reason, BaseException) else error) or type(error).__name__


def _from_json(page: bytes, base: str) -> list[IndexFile]:
    found: list[IndexFile] = []
    for each in msgspec.json.decode(page)["files"]:
        found.append(
            IndexFile(
                each["filename"],
                urllib.parse.urljoin(base, each["url"]),
                str(each.get("hashes", {}).get("sha256", "")).lower(),
                each.get("size"),
                bool(each.get("yanked", False)),
            )
        )
    return found


def _from_html(page: str, base: str) -> list[IndexFile]:
    parser = _Anchors(base)
    parser.feed(page)
    return parser.files


class _Anchors(HTMLParser):
    def __init__(self, base: str) -> None:
        super().__init__()
        self._base = base
        self.files: list[IndexFile] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "base" and values.get("href"):
            self._base = urllib.parse.urljoin(self._base, values["href"] or "")
        if tag != "a" or not values.get("href"):
            return
        url, _, fragment = urllib.parse.urljoin(self._base, values["href"] or "").partition("#")
        kind, _, digest = fragment.partition("=")
        filename = urllib.parse.unquote(urllib.parse.urlsplit(url).path.rpartition("/")[2])
        sha256 = digest.lower() if kind == "sha256" else ""
        self.files.append(IndexFile(filename, url, sha256, None, "data-yanked" in values))
