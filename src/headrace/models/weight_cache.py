"""Locates and bounds the cache of packed weights and file digests.

You can delete the folder at any time; that only costs time at the next start.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Final

from headrace.disk import DiskSpace, disk_space
from headrace.errors import RequestError

_DEFAULT_GIB: Final = 64.0
_KEPT_FREE: Final = 2 * 2**30
_ABANDONED_S: Final = 3600.0  # without a write: no process packs one tensor so long


def cache_folder() -> Path:
    """Return HEADRACE_CACHE, or ~/.cache/headrace."""
    setting = os.environ.get("HEADRACE_CACHE")
    return Path(setting).expanduser() if setting else Path.home() / ".cache" / "headrace"


def cache_limit(folder: Path) -> int:
    """Return the maximum bytes of packed weights: HEADRACE_CACHE_GIB, or 64 GiB, and less on a disk that would be full.

    A twentieth of the folder's disk stays free, at most 2 GiB.
    """
    disk = disk_space(folder)
    if not disk.total:  # such as /proc, where writing fails
        return configured_limit()
    room = sum(size for _, size, _ in _packed_files(folder)) + disk.free - _kept_free(disk)
    return max(0, min(configured_limit(), room))


def has_room(folder: Path, needed: int) -> bool:
    """Return whether `needed` more bytes leave enough of the disk free. Evicted files that a process maps still take
    theirs."""
    disk = disk_space(folder)
    return disk.free - needed >= _kept_free(disk)


def _kept_free(disk: DiskSpace) -> int:
    return min(disk.total // 20, _KEPT_FREE)


def configured_limit() -> int:
    """Return HEADRACE_CACHE_GIB in bytes, or 64 GiB."""
    setting = os.environ.get("HEADRACE_CACHE_GIB")
    if not setting:
        return int(_DEFAULT_GIB * 2**30)
    try:
        gib = float(setting)
    except ValueError:
        gib = -1.0
    if not 0.0 <= gib < 2**33:
        raise RequestError(f"Expected a number of GiB, found '{setting}'.", parameter="HEADRACE_CACHE_GIB")
    return int(gib * 2**30)


def evict_until_fits(folder: Path, needed: int, limit: int) -> bool:
    """Delete the least recently used packed files until `needed` bytes fit; return False if they cannot."""
    if needed > limit:
        return False
    files = _packed_files(folder)
    total = needed + sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= limit:
            break
        with contextlib.suppress(OSError):  # a map of a deleted file stays valid
            path.unlink()
            total -= size
    return total <= limit


def delete_abandoned(folder: Path) -> None:
    """Delete the unfinished files of processes that were killed while they packed."""
    for path in folder.glob(".*.part"):
        with contextlib.suppress(OSError):  # another process may have finished it
            if path.stat().st_mtime < time.time() - _ABANDONED_S:
                path.unlink()


def _packed_files(folder: Path) -> list[tuple[float, int, Path]]:
    """Return the packed files of a folder with their last use and their size."""
    files: list[tuple[float, int, Path]] = []
    for path in folder.glob("*.pack"):
        with contextlib.suppress(OSError):  # another process may have deleted it
            status = path.stat()
            files.append((status.st_mtime, status.st_size, path))
    return files
