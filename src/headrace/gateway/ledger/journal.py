"""The journal: exchanges that are open, and charges that no store has yet, in a file that outlives the process.

Owns a file of slots, one for each exchange, made in its full size at the start: so it is bounded, and writing to it
needs no room on the disk. A write is one `pwrite` into the page cache, about a microsecond: it cannot be lost by a
process that is killed, whenever that is. `sync` makes it outlive the machine too; it is called from a thread.

    slot, 1 KiB     0  length, CRC, what was reserved       written before the first byte goes to the client
                  640  tokens, microseconds, CRC            written before each piece does
                  704  length, CRC, what was settled        written before the last byte does

Each CRC goes on from that of the slot's first record, so that what an earlier exchange left there counts for nothing.
A slot lies within one page, and a kill never splits a write within a page. A slot whose settlement is torn all the same
(a power cut) still has its other two records. Knows no database and no prices: its records are bytes.
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
_RUN: Final = 64  # of the header, where the run's name is


class JournalError(HeadraceError):
    """A journal that cannot be used."""


class JournalRecord(msgspec.Struct, frozen=True):
    """What an earlier run left in a slot."""

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
        self.previous_run = ""  # the name that the run before gave itself
        self.torn = 0  # slots that said nothing that can be read

    @classmethod
    def open(cls, path: Path, *, slots: int, run: str) -> tuple[Journal, list[JournalRecord]]:
        """The journal and what is in it. JournalError where another process has it, or it is none; OSError else."""
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise JournalError(f"{path}: another server writes this journal") from None
            header = os.pread(file, _HEADER, 0)
            if header.strip(b"\0") and not header.startswith(_MAGIC):
                raise JournalError(f"{path}: this is no journal that this Headrace can read; move it away")
            # A journal that was longer keeps its length: every slot may have a charge.
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
        if reserved is None:  # torn: `reserve` had not returned, so nothing was served
            self.torn += 1
            return None
        self._seals[slot] = seal
        tokens, machine_us, crc = _COUNTS.unpack_from(data, _PROGRESS)
        if crc != zlib.crc32(data[_PROGRESS : _PROGRESS + 16], seal):
            tokens = machine_us = 0
        settled, _ = _record(data, _SETTLED, _SLOT, seal)
        return JournalRecord(slot, reserved, tokens, machine_us, settled)

    def take(self) -> int | None:
        """A slot, or None where all are in use."""
        return self._free.pop() if self._free else None

    # OSError where the disk does not take it.

    def reserve(self, slot: int, record: bytes) -> None:
        if len(record) > _PROGRESS - _RECORD.size:
            raise JournalError("the names of the tenant, key, endpoint, model and variant are too long for the ledger")
        seal = zlib.crc32(record)
        first = (_RECORD.pack(len(record), seal) + record).ljust(_PROGRESS, b"\0")
        self._put(slot, 0, first + bytes(_SETTLED + _RECORD.size - _PROGRESS))  # and neither of the others
        self._seals[slot] = seal

    def progress(self, slot: int, output_tokens: int, machine_us: int) -> None:
        counts = struct.pack("<QQ", output_tokens, machine_us)
        self._put(slot, _PROGRESS, counts + zlib.crc32(counts, self._seals[slot]).to_bytes(4, "little"))

    def settle(self, slot: int, record: bytes) -> None:
        if len(record) > _SLOT - _SETTLED - _RECORD.size:
            raise JournalError("the names of what saved money are too long for the ledger")
        self._put(slot, _SETTLED, _RECORD.pack(len(record), zlib.crc32(record, self._seals[slot])) + record)

    def free(self, slot: int) -> None:
        """Its charge is in the store, or there is none. Where the disk does not take this, the slot is used again all
        the same: a charge that is found there twice is charged once, by its id."""
        self._free.append(slot)
        self._put(slot, 0, bytes(_RECORD.size))

    def _put(self, slot: int, offset: int, data: bytes) -> None:
        self.changed = True
        _write(self._file, data, _HEADER + slot * _SLOT + offset)

    def sync(self) -> None:
        """From then on, what was written before outlives a power cut."""
        self.changed = False
        try:
            os.fdatasync(self._file)
        except OSError:
            self.changed = True
            raise

    def close(self) -> None:
        os.close(self._file)


def _record(data: bytes, offset: int, end: int, seed: int) -> tuple[bytes | None, int]:
    """A record and its CRC; None where it is torn or of an earlier exchange."""
    length, crc = _RECORD.unpack_from(data, offset)
    start = offset + _RECORD.size
    if not 0 < length <= end - start or zlib.crc32(data[start : start + length], seed) != crc:
        return None, 0
    return data[start : start + length], crc


def _write(file: int, data: bytes, offset: int) -> None:
    if os.pwrite(file, data, offset) != len(data):
        raise OSError(28, "the journal was not written whole")  # ENOSPC
