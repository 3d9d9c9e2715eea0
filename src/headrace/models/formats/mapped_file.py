"""A file mapped into memory, read-only.

Owns the mapping of a whole regular file. Knows nothing of formats. The map lives as long as an array that views it
does, and the descriptor is closed at once. A file that another program truncates while it is mapped kills the process
at the next touch (SIGBUS): weights are replaced by renaming a new file over the old one, never in place.
"""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ModelError


def map_file(path: Path, *, minimum_bytes: int) -> NDArray[np.uint8]:
    """Map a regular file of at least `minimum_bytes` as a read-only array; raise ModelError for anything else."""
    try:
        # O_NONBLOCK: to open a FIFO must not wait for a writer. It has no effect on regular files.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        raise ModelError(f"cannot be opened: {getattr(error, 'strerror', None) or error}", path=path) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ModelError("not a regular file", path=path)
        if status.st_size < max(minimum_bytes, 1):
            raise ModelError(f"file is truncated: {status.st_size} bytes, too few for any file of this kind", path=path)
        try:
            return np.frombuffer(mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_READ), dtype=np.uint8)
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot be mapped: {error}", path=path) from None
    finally:
        os.close(descriptor)
