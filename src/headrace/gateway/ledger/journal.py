"""The journal: a file with open requests and charges that are not stored yet, which survives the process.

The file has one slot per request and its full size from the start, so it is bounded and writing needs no disk space. A
write is one `pwrite` into the page cache, about a microsecond; it survives a kill of the process at any time. `sync`,
called from a thread, also makes it survive a power cut.

    slot, 1 KiB     0  length, CRC, what was reserved       written before the first byte is sent
                  640  tokens, microseconds, CRC            written after each chunk is sent
                  704  length, CRC, what was settled        written before the last byte is sent

Each CRC continues from that of the slot's first record, so remains of an earlier request are ignored. A slot lies
within one page, and a kill never splits a write within a page. If a power cut tears the settlement, the other two
records are still valid. Records are opaque bytes.
"""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from pathlib import Path
from typing import Final

import msgspec

from headrace.errors import HeadraceError

_MAGIC: Final = b"headrace ledger 1"
_HEADER: Final = 4096  # bytes
_SLOT: Final = 1024
_PROGRESS: Final = 640
_SETTLED: Final = 704
_RECORD: Final = struct.Struct("<II")  # length, CRC
_COUNTS: Final = struct.Struct("<QQI")
_RUN: Final = 64  # offset of the run's name in the header


class JournalError(HeadraceError):
    """An unusable journal."""


class JournalRecord(msgspec.Struct, frozen=True):
    """A record that an earlier run left in a slot."""

    slot: int
    reserved: bytes
    output_tokens: int
    machine_us: int
    settled: bytes | None


class Journal:
    def __init__(self, file: int, slots: int) -> None:
        self._file = file
        self._seals = [0] * slots  # CRC of each slot's first record
        self._free = list(range(slots - 1, -1, -1))
        self.slots = slots
        self.changed = False  # since the last sync
        self.previous_run = ""  # name of the previous run
        self.torn = 0  # unreadable slots

    @classmethod
    def open(cls, path: Path, *, slots: int, run: str) -> tuple[Journal, list[JournalRecord]]:
        """Open the journal and read its records. Raise JournalError if it is in use or not a journal."""
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise JournalError(
                    f"{path}: another server is using this journal. Give each server its own storage.folder."
                ) from None
            header = os.pread(file, _HEADER, 0)
            if header.strip(b"\0") and not header.startswith(_MAGIC):
                raise JournalError(f"{path}: not a journal of this version. Move the file away.")
            # A longer journal keeps its length: any slot may contain a charge.
            there = max(0, os.fstat(file).st_size - _HEADER) // _SLOT
            slots = max(slots, there)
            os.posix_fallocate(file, 0, _HEADER + slots * _SLOT)
            journal = cls(file, slots)
            journal.previous_run = header[_RUN : _RUN + 64].rstrip(b"\0").decode("ascii", "replace")
            found = journal._read(there)
            name = run.encode("ascii").ljust(64, b"\0")
            _write(file, _MAGIC.ljust(_RUN, b"\0") + name[:64], 0)
            os.fdatasync(file)
        except BaseException:
            os.close(file)
            raise
        return journal, found

    def _read(self, there: int) -> list[JournalRecord]:
        found: list[JournalRecord] = []
        chunk = 512  # slots: 512 KiB
        for first in range(0, there, chunk):
            block = os.pread(self._file, min(chunk, there - first) * _SLOT, _HEADER + first * _SLOT)
            for offset in range(0, len(block) - _SLOT + 1, _SLOT):
                each = self._look(first + offset // _SLOT, block[offset : offset + _SLOT])
                if each is not None:
                    found.append(each)
        taken = {each.slot for each in found}
        self._free = [slot for slot in range(self.slots - 1, -1, -1) if slot not in taken]
        return found

    def _look(self, slot: int, data: bytes) -> JournalRecord | None:
        length, _ = _RECORD.unpack_from(data, 0)
        if length == 0:
            return None
        reserved, seal = _record(data, 0, _PROGRESS, 0)
        if reserved is None:  # torn before `reserve` returned, so nothing was served
            self.torn += 1
            return None
        self._seals[slot] = seal
        tokens, machine_us, crc = _COUNTS.unpack_from(data, _PROGRESS)
        if crc != zlib.crc32(data[_PROGRESS : _PROGRESS + 16], seal):
            tokens = machine_us = 0
        settled, _ = _record(data, _SETTLED, _SLOT, seal)
        return JournalRecord(slot, reserved, tokens, machine_us, settled)

    def take(self) -> int | None:
        """Take a free slot; None if all are in use."""
        return self._free.pop() if self._free else None

    # These raise OSError if the disk fails.

    def reserve(self, slot: int, record: bytes) -> None:
        if len(record) > _PROGRESS - _RECORD.size:
            raise JournalError(
                "The names of tenant, key, endpoint, model and variant are too long for the ledger's journal."
            )
        seal = zlib.crc32(record)
        first = (_RECORD.pack(len(record), seal) + record).ljust(_PROGRESS, b"\0")
        self._put(slot, 0, first + bytes(_SETTLED + _RECORD.size - _PROGRESS))  # clears the other two records
        self._seals[slot] = seal

    def progress(self, slot: int, output_tokens: int, machine_us: int) -> None:
        counts = struct.pack("<QQ", output_tokens, machine_us)
        self._put(slot, _PROGRESS, counts + zlib.crc32(counts, self._seals[slot]).to_bytes(4, "little"))

    def settle(self, slot: int, record: bytes) -> None:
        if len(record) > _SLOT - _SETTLED - _RECORD.size:
            raise JournalError("The names of sources of savings are too long for the ledger's journal.")
        self._put(slot, _SETTLED, _RECORD.pack(len(record), zlib.crc32(record, self._seals[slot])) + record)

    def free(self, slot: int) -> None:
        """Free a slot whose charge is stored. It is reused even if the disk fails here: a charge found again is counted
        once, by its id."""
        self._free.append(slot)
        self._put(slot, 0, bytes(_RECORD.size))

    def _put(self, slot: int, offset: int, data: bytes) -> None:
        self.changed = True
        _write(self._file, data, _HEADER + slot * _SLOT + offset)

    def sync(self) -> None:
        """Make everything written so far survive a power cut."""
        self.changed = False
        try:
            os.fdatasync(self._file)
        except OSError:
            self.changed = True
            raise

    def close(self) -> None:
        os.close(self._file)


def _record(data: bytes, offset: int, end: int, seed: int) -> tuple[bytes | None, int]:
    """Return a record and its CRC; None if it is torn or of an earlier request."""
    length, crc = _RECORD.unpack_from(data, offset)
    start = offset + _RECORD.size
    if not 0 < length <= end - start or zlib.crc32(data[start : start + length], seed) != crc:
        return None, 0
    return data[start : start + length], crc


def _write(file: int, data: bytes, offset: int) -> None:
    if os.pwrite(file, data, offset) != len(data):
        raise OSError(28, "the journal was not written whole")  # ENOSPC
