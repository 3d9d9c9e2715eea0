"""Writes a file that appears complete or not at all: a temporary name in the same folder, a flush to disk, a rename.

Removes the temporary file after any failure. Does not know formats.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Generator
from pathlib import Path
from typing import BinaryIO


class NewFile:
    """A file under a temporary name; `finish` renames it, `abandon` removes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = path.with_name(f".{path.name[:128]}.{secrets.token_hex(8)}.part")
        # tempfile creates private files; a model folder should follow the umask.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self.file: BinaryIO = os.fdopen(os.open(self._temporary, flags, 0o666), "wb")

    def finish(self, *, durable: bool = True) -> None:
        """Flush and rename. `durable` waits for the disk, so that a power cut leaves the old or the new file."""
        try:
            self.file.flush()
            if durable:
                os.fsync(self.file.fileno())
            self.file.close()
            os.replace(self._temporary, self.path)
        except BaseException:
            self.abandon()
            raise
        if durable:
            _sync_folder(self.path.parent)

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            self.file.close()
        self._temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def new_file(path: Path, *, durable: bool = True) -> Generator[BinaryIO, None, None]:
    """Yield a file to write; create or replace `path` when the block ends without an exception."""
    target = NewFile(path)
    try:
        yield target.file
    except BaseException:
        target.abandon()
        raise
    target.finish(durable=durable)


def _sync_folder(folder: Path) -> None:
    # Some network file systems cannot sync a folder; the file itself is already safe.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
