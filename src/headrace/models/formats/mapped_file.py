"""Maps a regular file read-only. The map lives as long as an array that views it.

If another program truncates a mapped file, the next access kills the process (SIGBUS). Replace weights by renaming a
new file over the old one, never in place.
"""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ModelError


def map_file(path: Path, *, minimum_bytes: int) -> NDArray[np.uint8]:
    """Map a regular file of at least `minimum_bytes` as a read-only array; raise ModelError for anything else."""
    try:
        # O_NONBLOCK: do not wait for the writer of a FIFO. It has no effect on regular files.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        raise ModelError(f"Cannot open the file: {getattr(error, 'strerror', None) or error}.", path=path) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ModelError("The path is not a regular file.", path=path)
        if status.st_size < max(minimum_bytes, 1):
            raise ModelError(f"The file is truncated: {status.st_size} bytes are too few for this format.", path=path)
        try:
            return np.frombuffer(mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_READ), dtype=np.uint8)
        except (OSError, ValueError) as error:
            raise ModelError(f"Cannot map the file: {error}.", path=path) from None
    finally:
        os.close(descriptor)


def drop_pages(mapped: NDArray[np.uint8]) -> None:
    """Give back the memory of the pages of a map that were read. They are read from the file again when needed."""
    base: Any = mapped
    while isinstance(base, np.ndarray):
        base = base.base  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    if isinstance(base, memoryview):
        base = base.obj
    if isinstance(base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        base.madvise(mmap.MADV_DONTNEED)
