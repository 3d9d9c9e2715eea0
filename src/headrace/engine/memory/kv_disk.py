"""KvDisk: a bounded folder of KV blocks, one file each, that survives a crash of the process.

A file is written beside its place and renamed, so it is whole or absent; a checksum (or the cipher's) finds what a disk
damaged. A file that cannot be read is a miss and is removed. The least recently used files go first. Several processes
may share a folder. Only its owner can read it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.aes_cipher import NONCE_BYTES, TAG_BYTES, DamagedError
from headrace.engine.memory.kv_cipher import KvCipher

log = logging.getLogger(__name__)

_MAGIC: Final = b"HRKV1\n"
_SUM_BYTES: Final = 16
_SUFFIX: Final = ".kv"
_STALE_S: Final = 3600.0  # age of an unfinished file that belongs to a process that is gone
_PAUSE_S: Final = 10.0  # without writes after one failed

Bytes = NDArray[np.uint8]


class KvDiskStats(msgspec.Struct):
    """`entries` and `bytes` are current, the others are counts since the start."""

    entries: int = 0
    bytes: int = 0
    written: int = 0
    read: int = 0
    corrupt: int = 0
    failed: int = 0


class KvDisk:
    def __init__(
        self,
        folder: Path,
        *,
        block_bytes: int,
        most_bytes: int,
        cipher: KvCipher | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """OSError if the folder cannot be used. Files of another size are not ours and count as corrupt when read."""
        self._folder = folder
        self._block_bytes = block_bytes
        self._most_bytes = most_bytes
        self._cipher = cipher
        self._monotonic = monotonic
        self._paused_until = 0.0
        self.stats = KvDiskStats()
        overhead = NONCE_BYTES + TAG_BYTES if cipher is not None else _SUM_BYTES
        self._file_bytes = len(_MAGIC) + overhead + block_bytes
        self._files: OrderedDict[bytes, int] = OrderedDict()  # digest -> size, least recently used first
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._scan()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._files

    def _scan(self) -> None:
        found: list[tuple[float, bytes, int]] = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError, ValueError):
                    status = entry.stat(follow_symlinks=False)
                    if entry.name.endswith(_SUFFIX):
                        found.append((status.st_mtime, bytes.fromhex(entry.name.removesuffix(_SUFFIX)), status.st_size))
                    elif entry.name.startswith(".") and time.time() - status.st_mtime > _STALE_S:
                        os.unlink(entry.path)
        for _, digest, size in sorted(found):
            self._add(digest, size)
        self._evict()

    def read(self, digest: bytes, salt: str) -> Bytes | None:
        """Return a block's KV, or None if there is none that is right."""
        if digest not in self._files:
            return None
        path = self._path(digest)
        try:
            content = path.read_bytes()
            os.utime(path)
        except FileNotFoundError:  # another process removed it
            self._forget(digest)
            return None
        except OSError as error:
            self.stats.failed += 1
            log.warning("KV on disk cannot be read: %s", error)
            self._forget(digest)
            return None
        data = self._opened(digest, salt, content)
        if data is None:
            self.stats.corrupt += 1
            log.warning("%s is damaged, or belongs to another engine or key; it is removed", path)
            self._remove(digest)
            return None
        self._files.move_to_end(digest)
        self.stats.read += 1
        return data

    def _opened(self, digest: bytes, salt: str, content: bytes) -> Bytes | None:
        if len(content) != self._file_bytes or content[: len(_MAGIC)] != _MAGIC:
            return None
        body = content[len(_MAGIC) :]
        if self._cipher is not None:
            try:
                return np.frombuffer(self._cipher.open(salt, digest, body), dtype=np.uint8)
            except DamagedError:
                return None
        if body[:_SUM_BYTES] != _checksum(digest, body[_SUM_BYTES:]):
            return None
        return np.frombuffer(body[_SUM_BYTES:], dtype=np.uint8)

    def write(self, digest: bytes, salt: str, data: Bytes) -> bool:
        """Write a block. Return False if the disk does not take it now; writing pauses then."""
        if digest in self._files:
            return True
        if self._monotonic() < self._paused_until:
            return False
        path = self._path(digest)
        draft = self._folder / f".{digest.hex()}.{os.getpid()}"
        view = data.tobytes()
        if self._cipher is not None:
            parts = (_MAGIC, self._cipher.seal(salt, digest, view))
        else:
            parts = (_MAGIC, _checksum(digest, view), view)
        try:
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with open(descriptor, "wb", buffering=0) as file:
                if file.write(b"".join(parts)) != self._file_bytes:
                    raise OSError("the disk took only a part of a block")
            os.replace(draft, path)
        except OSError as error:
            self.stats.failed += 1
            self._paused_until = self._monotonic() + _PAUSE_S
            log.warning("KV cannot be written to disk, retrying in %g s: %s", _PAUSE_S, error)
            with contextlib.suppress(OSError):
                draft.unlink()
            return False
        self.stats.written += 1
        self._add(digest, self._file_bytes)
        self._evict()
        return True

    def _add(self, digest: bytes, size: int) -> None:
        self._files[digest] = size
        self.stats.entries += 1
        self.stats.bytes += size

    def _evict(self) -> None:
        while self.stats.bytes > self._most_bytes:
            self._remove(next(iter(self._files)))

    def _remove(self, digest: bytes) -> None:
        with contextlib.suppress(OSError):
            self._path(digest).unlink()
        self._forget(digest)

    def _forget(self, digest: bytes) -> None:
        self.stats.bytes -= self._files.pop(digest)
        self.stats.entries -= 1

    def _path(self, digest: bytes) -> Path:
        return self._folder / f"{digest.hex()}{_SUFFIX}"


def _checksum(digest: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_SUM_BYTES, key=digest).digest()
