"""RotatingFile: a log file of bounded size. A full one is renamed to `.1`, and what was `.1` to `.2`, and so on.

Only whole lines are written, so no line is split between two files. Whoever follows it with `tail -F` loses none.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
from pathlib import Path
from typing import Final

from headrace.errors import HeadraceError

_PRIVATE: Final = 0o640  # lines name tenants and keys


class RotatingFile(io.TextIOBase):
    def __init__(self, path: Path, *, most_bytes: int, keep: int) -> None:
        """Append to a file. `keep`: rotated files beside it. HeadraceError if it cannot be written."""
        self.path = path
        self._most = most_bytes
        self._keep = keep
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file, self._size = self._open()
        except OSError as error:
            reason = error.strerror or str(error)
            raise HeadraceError(f"log.file: Cannot write '{path}': {reason}. Choose another file.") from None

    def _open(self) -> tuple[int, int]:
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, _PRIVATE)
        return file, os.fstat(file).st_size

    def write(self, text: str, /) -> int:
        data = text.encode("utf-8", "backslashreplace")
        with self._lock:
            if self._size and self._size + len(data) > self._most:
                self._rotate()
            self._size += len(data)
            while data:
                data = data[os.write(self._file, data) :]
        return len(text)

    def _rotate(self) -> None:
        """Begin a new file. If that fails, for example in a folder that is read-only now, the old one goes on."""
        with contextlib.suppress(OSError):
            for number in range(self._keep, 1, -1):
                with contextlib.suppress(FileNotFoundError):
                    os.replace(self._numbered(number - 1), self._numbered(number))
            if self._keep:
                os.replace(self.path, self._numbered(1))
            else:
                os.truncate(self.path, 0)
            before = self._file
            self._file, self._size = self._open()
            os.close(before)

    def _numbered(self, number: int) -> str:
        return f"{self.path}.{number}"

    def isatty(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        with self._lock:
            if not self.closed:
                os.close(self._file)
                super().close()
