"""Says how much room the disk of a folder has, also of one that is not made yet."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple


class DiskSpace(NamedTuple):
    """Bytes."""

    total: int
    free: int


def disk_space(path: Path) -> DiskSpace:
    """Return the space of the disk where `path` is, or where it will be made."""
    usage = shutil.disk_usage(nearest_folder(path))
    return DiskSpace(usage.total, usage.free)


def nearest_folder(path: Path) -> Path:
    """Return the path, or the closest of its parents that exists."""
    absolute = path.absolute()
    return next(each for each in (absolute, *absolute.parents) if each.exists())
