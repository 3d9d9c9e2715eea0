"""The store behind the Files API: uploads of clients and results of batches.

Holds the folder `files` in the storage folder, where a file is named by its id alone, and the table of files. Counts
bytes while they arrive against the limits of one file and of all; an upload that fails leaves nothing behind. Does not
know HTTP or the contents of a file.

A file belongs to one tenant and does not exist for any other. An unfinished batch holds its input file: held files are
neither deleted nor do they expire.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import sqlite3
import string
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol, TypeVar

import msgspec

from headrace.gateway.api_errors import ApiError, invalid_request
from headrace.gateway.database import (
    Database,
    ListPage,
    check_listing,
    rows_of,
    select_page,
    storage_error,
    storage_full,
)
from headrace.models.formats.atomic_file import NewFile

log = logging.getLogger(__name__)

Result = TypeVar("Result")

PURPOSES: Final = ("batch", "user_data")  # that clients may upload for
OUTPUT: Final = "batch_output"  # what batches write
_OTHERS: Final = ("assistants", "evals", "fine-tune", "vision")  # OpenAI's, which nothing in this server reads

_ID: Final = re.compile(r"file-[a-z0-9]{24}")
_ALPHABET: Final = string.ascii_lowercase + string.digits  # a file system may be case-insensitive
_NAME_LETTERS: Final = 255
_WRITE: Final = 1024 * 1024  # 1 MiB gathered for each visit to the disk
_READ: Final = 256 * 1024  # 256 KiB
EXPIRY: Final = (3600, 30 * 24 * 3600)  # seconds: an hour to 30 days, OpenAI's own bounds
_BATCH_SECONDS: Final = 30 * 24 * 3600  # default expiry of files with the purpose batch


async def run_to_end(work: Coroutine[Any, Any, Result]) -> Result:
    """Wait for the work even if the caller is cancelled, so that nothing is cleaned up while it runs."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.done():
            await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it
        raise


async def in_thread(function: Callable[[], Result]) -> Result:
    return await run_to_end(asyncio.to_thread(function))


async def on_disk(function: Callable[[], Result]) -> Result:
    try:
        return await in_thread(function)
    except OSError as error:
        log.error("storage is unavailable: %s", error)
        raise storage_error(error) from error


class FileLimits(Protocol):
    """Limits, from config.Storage."""

    @property
    def file_bytes(self) -> int: ...  # of one upload
    @property
    def files_bytes(self) -> int: ...  # of all together


class FileRecord(msgspec.Struct, frozen=True):
    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    created_at: int  # seconds since 1970, as all of OpenAI's
    expires_at: int | None

    def as_json(self) -> dict[str, Any]:
        result: dict[str, Any] = {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }
        if self.expires_at is not None:
            result["expires_at"] = self.expires_at
        return result


class FileStore:
    def __init__(
        self,
        db: Database,
        folder: Path,
        limits: FileLimits,
        *,
        count: int = 100_000,  # files at once; small ones take room too
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._db = db
        self._folder = folder.expanduser() / "files"
        self._limits = limits
        self._count = count
        self._clock = clock
        self._opening = asyncio.Lock()
        self._opened = False
        # Files and bytes on the disk, with those that are arriving. One server owns the folder, so this is exact.
        self._files = 0
        self._bytes = 0

    async def create(
        self,
        stream: AsyncIterator[bytes],
        *,
        filename: str,
        purpose: str,
        tenant: str,
        expires_after: int | None = None,
    ) -> FileRecord:
        """Store a client's upload. `expires_after` is in seconds."""
        if purpose in _OTHERS or purpose == OUTPUT:
            raise invalid_request(
                f"'purpose' is '{purpose}', which is not supported. Expected {' or '.join(PURPOSES)}.", "purpose"
            )
        if purpose not in PURPOSES:
            raise invalid_request(f"'purpose' must be {' or '.join(PURPOSES)}.", "purpose")
        if expires_after is not None and not EXPIRY[0] <= expires_after <= EXPIRY[1]:
            raise invalid_request(
                f"'expires_after.seconds' must be between {EXPIRY[0]} and {EXPIRY[1]}.", "expires_after"
            )
        if expires_after is None and purpose == "batch":
            expires_after = _BATCH_SECONDS
        return await self._write(
            stream, plain_name(filename), purpose, tenant, expires_after, most=self._limits.file_bytes, also=None
        )

    async def create_output(
        self,
        stream: AsyncIterator[bytes],
        *,
        filename: str,
        tenant: str,
        expires_after: int,
        also: Callable[[sqlite3.Connection, str], None],
    ) -> FileRecord:
        """Store a batch's results. `also` is called with the file's id in the transaction that creates the file."""
        return await self._write(stream, filename, OUTPUT, tenant, expires_after, most=None, also=also)

    async def get(self, id: str, tenant: str) -> FileRecord:
        _check_id(id)
        now = self._clock()
        row = await self._db.run(lambda connection: _find(connection, id, tenant, now))
        return _record(row)

    async def list(
        self,
        tenant: str,
        *,
        after: str | None = None,
        limit: int = 10_000,
        order: str = "desc",
        purpose: str | None = None,
    ) -> ListPage[FileRecord]:
        checked = check_listing(limit=limit, most=10_000, order=order)
        now = self._clock()

        def select(connection: sqlite3.Connection) -> ListPage[FileRecord]:
            page = select_page(
                connection,
                "files",
                tenant,
                after=after,
                limit=limit,
                order=checked,
                where="(expires_at IS NULL OR expires_at > ?) AND (? IS NULL OR purpose = ?)",
                values=(now, purpose, purpose),
            )
            return ListPage([_record(row) for row in page.data], page.has_more)

        return await self._db.run(select)

    async def delete(self, id: str, tenant: str) -> None:
        await run_to_end(self._delete(id, tenant))

    async def content(self, id: str, tenant: str) -> tuple[FileRecord, AsyncGenerator[bytes]]:
        """Return the file's bytes in pieces, complete even if the file is deleted meanwhile."""
        record = await self.get(id, tenant)
        file = await on_disk(lambda: self.open(id))

        async def pieces() -> AsyncGenerator[bytes]:
            try:
                while piece := await on_disk(lambda: file.read(_READ)):
                    yield piece
            finally:
                file.close()

        return record, pieces()

    async def sweep(self) -> int:
        """Remove expired files and return their number. Every upload does this first."""
        return await run_to_end(self._sweep())

    def used(self) -> tuple[int, int]:
        """Return the number of files and bytes, including uploads under way. Zero before the first upload."""
        return self._files, self._bytes

    # Batches read their input with these two, even if the file has expired. Both block.

    def open(self, id: str) -> BinaryIO:
        _check_id(id)
        return (self._folder / id).open("rb")

    def read(self, id: str, start: int, length: int) -> bytes:
        with self.open(id) as file:
            return os.pread(file.fileno(), length, start)

    async def _write(
        self,
        stream: AsyncIterator[bytes],
        filename: str,
        purpose: str,
        tenant: str,
        expires_after: int | None,
        *,
        most: int | None,
        also: Callable[[sqlite3.Connection, str], None] | None,
    ) -> FileRecord:
        await self.sweep()
        if self._files >= self._count:
            raise storage_full("The server's limit of files is reached. Delete some files.")
        id = "file-" + "".join(secrets.choice(_ALPHABET) for _ in range(24))
        size = await self._receive(stream, id, most)
        now = int(self._clock())
        expires_at = None if expires_after is None else now + expires_after
        record = FileRecord(id, tenant, filename, purpose, size, now, expires_at)
        await run_to_end(self._register(record, also))
        return record

    async def _receive(self, stream: AsyncIterator[bytes], id: str, most: int | None) -> int:
        """Write the stream to a file that has no row yet. Return its size."""
        size = 0
        self._take(1, 0)
        made: list[NewFile] = []
        try:
            await on_disk(lambda: made.append(NewFile(self._folder / id)))
            gathered = bytearray()
            async for piece in stream:
                if most is not None and size + len(piece) > most:
                    raise ApiError(
                        f"The file is too large. Expected at most {most} bytes.",
                        parameter="file",
                        code="file_too_large",
                        status=413,
                    )
                if self._bytes + len(piece) > self._limits.files_bytes:
                    raise storage_full("The server's storage for files is full. Delete some files.")
                size += len(piece)
                self._take(0, len(piece))
                gathered += piece
                if len(gathered) >= _WRITE:
                    await on_disk(lambda data=bytes(gathered): made[0].file.write(data))
                    gathered.clear()
            await on_disk(lambda: made[0].file.write(gathered))
            await on_disk(made[0].finish)
        except BaseException:
            self._take(-1, -size)
            await in_thread(lambda: [*map(_abandon, made), self._remove(id)])
            raise
        return size

    async def _register(self, record: FileRecord, also: Callable[[sqlite3.Connection, str], None] | None) -> None:
        def insert(connection: sqlite3.Connection) -> None:
            connection.execute(
                "INSERT INTO files (id, tenant, filename, purpose, bytes, created_at, expires_at) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    record.id,
                    record.tenant,
                    record.filename,
                    record.purpose,
                    record.bytes,
                    record.created_at,
                    record.expires_at,
                ),
            )
            if also is not None:
                also(connection, record.id)

        try:
            await self._db.run(insert)
        except BaseException:
            self._take(-1, -record.bytes)
            await in_thread(lambda: self._remove(record.id))
            raise

    async def _delete(self, id: str, tenant: str) -> None:
        _check_id(id)
        await self._open()
        now = self._clock()

        def delete(connection: sqlite3.Connection) -> int:
            row = _find(connection, id, tenant, now)
            if row["holds"]:
                raise ApiError(
                    "An unfinished batch uses this file. Cancel the batch first.", code="file_in_use", status=409
                )
            connection.execute("DELETE FROM files WHERE id = ?", (id,))
            return row["bytes"]

        size = await self._db.run(delete)
        self._take(-1, -size)
        await in_thread(lambda: self._remove(id))

    async def _sweep(self) -> int:
        await self._open()
        now = self._clock()

        def select(connection: sqlite3.Connection) -> list[tuple[str, int]]:
            gone = connection.execute(
                "SELECT id, bytes FROM files WHERE expires_at <= ? AND holds = 0 ORDER BY expires_at LIMIT 1000", (now,)
            ).fetchall()
            connection.executemany("DELETE FROM files WHERE id = ?", [(id,) for id, _ in gone])
            return gone

        removed = 0
        while gone := await self._db.run(select):
            self._take(-len(gone), -sum(size for _, size in gone))
            removed += len(gone)
            ids = [id for id, _ in gone]
            await in_thread(lambda ids=ids: [self._remove(id) for id in ids])
        return removed

    async def _open(self) -> None:
        """Count the files and remove what a crashed server left behind. Runs once."""
        async with self._opening:
            if self._opened:
                return
            rows = await self._db.run(lambda connection: connection.execute("SELECT id, bytes FROM files").fetchall())
            known = {id for id, _ in rows}

            def prepare() -> None:
                self._folder.mkdir(mode=0o700, exist_ok=True)
                for path in self._folder.iterdir():
                    ours = _ID.fullmatch(path.name) or (path.name.startswith(".file-") and path.name.endswith(".part"))
                    if ours and path.name not in known:
                        path.unlink(missing_ok=True)

            await on_disk(prepare)
            self._take(len(rows), sum(size for _, size in rows))
            self._opened = True

    def _take(self, files: int, size: int) -> None:
        self._files += files
        self._bytes += size

    def _remove(self, id: str) -> None:
        """Remove a file; blocks. One that cannot be removed has no row, so the next start removes it."""
        try:
            (self._folder / id).unlink(missing_ok=True)
        except OSError as error:
            log.error("file %s cannot be removed: %s", id, error)


def hold(connection: sqlite3.Connection, id: str, tenant: str, now: float) -> FileRecord:
    """Hold a file for a batch, in the transaction that creates the batch."""
    _check_id(id)
    row = _find(connection, id, tenant, now)
    connection.execute("UPDATE files SET holds = holds + 1 WHERE id = ?", (id,))
    return _record(row)


def release(connection: sqlite3.Connection, id: str) -> None:
    connection.execute("UPDATE files SET holds = holds - 1 WHERE id = ?", (id,))


def _abandon(new: NewFile) -> None:
    with contextlib.suppress(OSError):
        new.abandon()


def plain_name(filename: str) -> str:
    """Make a client's filename safe to show: no folders, printable, of bounded length."""
    name = re.split(r"[/\\]", filename)[-1][: 16 * _NAME_LETTERS]
    name = "".join(letter for letter in name if letter.isprintable()).strip()[:_NAME_LETTERS]
    return "upload" if name in ("", ".", "..") else name


def _check_id(id: str) -> None:
    if _ID.fullmatch(id) is None:
        raise _unknown()


def _unknown() -> ApiError:
    return ApiError("No file has this id.", kind="not_found_error", parameter="file_id", code="file_not_found")


def _find(connection: sqlite3.Connection, id: str, tenant: str, now: float) -> sqlite3.Row:
    rows = rows_of(connection, "SELECT * FROM files WHERE id = ? AND tenant = ?", (id, tenant))
    if not rows or (rows[0]["expires_at"] is not None and rows[0]["expires_at"] <= now):
        raise _unknown()
    return rows[0]


def _record(row: sqlite3.Row) -> FileRecord:
    return FileRecord(
        row["id"],
        row["tenant"],
        row["filename"],
        row["purpose"],
        row["bytes"],
        row["created_at"],
        row["expires_at"],
    )
