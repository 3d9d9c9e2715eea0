"""RecordingStore: recordings on disk, in one folder for each tenant, bounded in bytes and age.

A folder holds segments of JSON lines; deleting means removing whole segments, oldest first. Blocking: belongs to the
recorder's thread, or to a command. Several processes may write, each to segments of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

import msgspec

from headrace.lab.recording.line_cipher import LineCipher, RecordingError
from headrace.lab.recording.recorded_request import RecordedRequest

FOLDER: Final = "recordings"  # in storage.folder
_SEGMENTS: Final = 32  # that the bytes are divided into, at least
_MOST_SEGMENT: Final = 8 * 1024 * 1024  # bytes
_SEGMENT_S: Final = 6 * 3600.0  # seconds that a segment is written to
_LONGEST_NAME: Final = 200  # characters of a folder's name
_NAME_FILE: Final = "name"  # of a tenant whose name is too long for a folder
_NO_TENANT: Final = "no-tenant"
_PLAIN, _SEALED = ".jsonl", ".jsonl.enc"


class RecordingSummary(msgspec.Struct, frozen=True):
    """What `headrace recordings list` shows of a tenant."""

    tenant: str
    bytes: int
    segments: int
    first: float  # seconds since 1970
    last: float
    encrypted: bool


class RecordingStore:
    def __init__(
        self,
        folder: Path,
        *,
        most_bytes: int,
        days: float,
        cipher: LineCipher | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder / FOLDER
        self._most_bytes = most_bytes
        self._age_s = days * 86_400.0
        self._cipher = cipher
        self._clock = clock
        self._segment_bytes = min(_MOST_SEGMENT, max(4096, most_bytes // _SEGMENTS))
        self._open: dict[str, tuple[Path, float]] = {}  # by tenant: the segment that is written to, and since when
        self._written = 0  # bytes since the bounds were last applied

    def append(self, record: RecordedRequest) -> int:
        """Write a record and return its bytes. OSError if the disk cannot be used."""
        tenant = record.tenant
        line = msgspec.json.encode(record)
        if self._cipher is not None:
            line = self._cipher.encrypt(line, tenant)
        path = self._segment(tenant)
        size = path.stat().st_size if path.exists() else 0
        try:
            with open(path, "ab", opener=_private) as file:
                file.write(line + b"\n")
        except OSError:
            self._cut(tenant, path, size)
            raise
        self._written += len(line) + 1
        if self._written >= self._segment_bytes:
            self.apply_bounds()
        return len(line) + 1

    def _cut(self, tenant: str, path: Path, size: int) -> None:
        """Remove the part of a line that a full disk has cut, because nothing may follow it."""
        try:
            os.truncate(path, size)
        except OSError:  # the next record begins another segment
            self._open.pop(tenant, None)

    @property
    def exists(self) -> bool:
        return self._folder.is_dir()

    def apply_bounds(self) -> None:
        """Delete segments that are too old, and then the oldest until all fit into the bytes."""
        self._written = 0
        now = self._clock()
        segments = sorted(self._all_segments(), key=lambda each: (each[1].st_mtime, each[0].name))
        total = sum(found.st_size for _, found in segments)
        for path, found in segments:
            if found.st_mtime < now - self._age_s or total > self._most_bytes:
                path.unlink(missing_ok=True)
                total -= found.st_size

    def tenants(self) -> list[RecordingSummary]:
        summaries: list[RecordingSummary] = []
        for folder in self._tenant_folders():
            segments = self._segments(folder)
            if not segments:
                continue
            found = [path.stat() for path in segments]
            summaries.append(
                RecordingSummary(
                    _tenant_of(folder),
                    sum(each.st_size for each in found),
                    len(segments),
                    min(_started(path) for path in segments),
                    max(each.st_mtime for each in found),
                    any(path.name.endswith(_SEALED) for path in segments),
                )
            )
        return sorted(summaries, key=lambda each: each.tenant)

    def read(self, tenant: str, *, since: float = 0.0) -> Iterator[RecordedRequest]:
        """Yield a tenant's records that arrived after `since`. RecordingError where one cannot be read."""
        decoder = msgspec.json.Decoder(RecordedRequest)
        for path in self._segments(self._folder / _folder_name(tenant)):
            with path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if not line.endswith(b"\n"):
                        break  # it is being written, or the disk was full
                    raw = line.rstrip(b"\n")
                    if path.name.endswith(_SEALED):
                        if self._cipher is None:
                            raise RecordingError(
                                f"The recordings of '{tenant}' are encrypted. Set recording.key_env to their key."
                            )
                        raw = self._cipher.decrypt(raw, tenant)
                    try:
                        record = decoder.decode(raw)
                    except (msgspec.DecodeError, UnicodeDecodeError) as error:
                        raise RecordingError(f"{path}, line {number}: {error}") from None
                    if record.arrived >= since:
                        yield record

    def delete(self, tenant: str) -> bool:
        """Delete everything that was recorded of a tenant. Return whether there was anything."""
        self._open.pop(tenant, None)
        folder = self._folder / _folder_name(tenant)
        existed = folder.is_dir()
        shutil.rmtree(folder, ignore_errors=True)
        if folder.is_dir() and self._segments(folder):
            raise RecordingError(f"The recordings in {folder} cannot be deleted. Delete the folder yourself.")
        return existed

    def _segment(self, tenant: str) -> Path:
        """Return the segment to write to; a new one if the last is full or old, or was deleted."""
        now = self._clock()
        known = self._open.get(tenant)
        if known is not None and now - known[1] < _SEGMENT_S:
            with contextlib.suppress(FileNotFoundError):
                if known[0].stat().st_size < self._segment_bytes:
                    return known[0]
        folder = self._folder / _folder_name(tenant)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.name.endswith("~"):
            (folder / _NAME_FILE).write_text(tenant, encoding="utf-8")
        ending = _PLAIN if self._cipher is None else _SEALED
        path = folder / f"{int(now * 1000):015d}-{os.getpid()}-{len(self._segments(folder))}{ending}"
        self._open[tenant] = path, now
        return path

    def _tenant_folders(self) -> list[Path]:
        return [path for path in self._folder.iterdir() if path.is_dir()] if self._folder.is_dir() else []

    def _segments(self, folder: Path) -> list[Path]:
        if not folder.is_dir():
            return []
        return sorted(path for path in folder.iterdir() if path.name.endswith((_PLAIN, _SEALED)))

    def _all_segments(self) -> Iterator[tuple[Path, os.stat_result]]:
        for folder in self._tenant_folders():
            for path in self._segments(folder):
                with contextlib.suppress(FileNotFoundError):
                    yield path, path.stat()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _started(path: Path) -> float:
    return int(path.name.partition("-")[0]) / 1000.0


def _folder_name(tenant: str) -> str:
    if not tenant:
        return _NO_TENANT
    name = f"tenant-{quote(tenant, safe='')}"
    if len(name) > _LONGEST_NAME:
        return f"tenant-{hashlib.sha256(tenant.encode(errors='replace')).hexdigest()}~"
    return name


def _tenant_of(folder: Path) -> str:
    if folder.name == _NO_TENANT:
        return ""
    if folder.name.endswith("~") and (folder / _NAME_FILE).is_file():
        return (folder / _NAME_FILE).read_text(encoding="utf-8")
    return unquote(folder.name.removeprefix("tenant-"))
