"""The server's sqlite file, used by one thread so that the event loop never waits for a disk.

Owns `headrace.sqlite` in the storage folder, its schema migrations, and the lock that keeps a second server out of the
folder. The statements belong to the stores (files, batches, responses, ledger, accounts). Collections, which have much
data, keep it in a file of their own beside this one, so that neither waits for the other.

    event loop ──run(function)──▶ queue, bounded ──▶ thread: BEGIN, function(connection), COMMIT ──▶ result, or ApiError

A full disk, a broken file or a missing folder raises ApiError from the statement that met it. The next statement tries
again, so a repaired disk works without a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, Generic, Literal, TypeVar

import msgspec

from headrace.gateway.api_errors import ApiError, invalid_request
from headrace.observe.outage_log import OutageLog

log = logging.getLogger(__name__)

TransactionResult = TypeVar("TransactionResult")
PageItem = TypeVar("PageItem")
ListOrder = Literal["asc", "desc"]

_FIRST_PAUSE_S: Final = 0.25  # between attempts while storage does not work
LONGEST_PAUSE_S: Final = 30.0
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# Migrations: step N leads from version N to N + 1. A released step never changes.
_STEPS = (
    """
    CREATE TABLE files (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        tenant TEXT NOT NULL,
        filename TEXT NOT NULL,
        purpose TEXT NOT NULL,
        bytes INTEGER NOT NULL,
        created_at INTEGER NOT NULL,
        expires_at INTEGER,
        holds INTEGER NOT NULL DEFAULT 0  -- unfinished batches that read it
    );
    CREATE INDEX files_of_tenant ON files (tenant, seq);
    CREATE INDEX files_that_expire ON files (expires_at) WHERE expires_at IS NOT NULL;

    CREATE TABLE batches (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        tenant TEXT NOT NULL,
        endpoint TEXT NOT NULL,
        input_file_id TEXT NOT NULL,
        completion_window TEXT NOT NULL,
        status TEXT NOT NULL,
        ending TEXT,  -- what it becomes when its results are written
        errors TEXT,  -- JSON
        metadata TEXT,  -- JSON
        output_seconds INTEGER NOT NULL,  -- that its output files are kept
        output_file_id TEXT,
        error_file_id TEXT,
        created_at INTEGER NOT NULL,
        expires_at INTEGER NOT NULL,
        in_progress_at INTEGER,
        finalizing_at INTEGER,
        completed_at INTEGER,
        failed_at INTEGER,
        expired_at INTEGER,
        cancelling_at INTEGER,
        cancelled_at INTEGER,
        total INTEGER NOT NULL DEFAULT 0,
        completed INTEGER NOT NULL DEFAULT 0,
        failed INTEGER NOT NULL DEFAULT 0
    );
    CREATE INDEX batches_of_tenant ON batches (tenant, seq);
    CREATE INDEX batches_by_status ON batches (status, seq);

    -- The requests of unfinished batches; a finished one's results are in its files.
    CREATE TABLE batch_requests (
        batch INTEGER NOT NULL REFERENCES batches (seq) ON DELETE CASCADE,
        line INTEGER NOT NULL,
        custom_id TEXT NOT NULL,
        start INTEGER NOT NULL,  -- of its line in the input file
        length INTEGER NOT NULL,
        status INTEGER,  -- HTTP's; NULL: no result yet; 0: will never be run
        answer BLOB,  -- its line of the output or the error file
        PRIMARY KEY (batch, line)
    );

    CREATE TABLE responses (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL,
        tenant TEXT NOT NULL,
        created_at INTEGER NOT NULL,
        expires_at INTEGER NOT NULL,
        bytes INTEGER NOT NULL,  -- of items and body
        items BLOB NOT NULL,  -- JSON
        body BLOB NOT NULL,  -- JSON
        UNIQUE (tenant, id)
    );
    CREATE INDEX responses_of_tenant ON responses (tenant, seq, bytes);
    CREATE INDEX responses_that_expire ON responses (expires_at);
    """,
    "ALTER TABLE batches ADD COLUMN key TEXT NOT NULL DEFAULT ''",  # that asked for it
    "ALTER TABLE batches ADD COLUMN unrun INTEGER NOT NULL DEFAULT 0",  # of the failed: never executed
    """
    ALTER TABLE responses ADD COLUMN unfinished INTEGER NOT NULL DEFAULT 0;  -- it waits or runs in the background
    CREATE INDEX responses_unfinished ON responses (seq) WHERE unfinished;

    CREATE TABLE conversations (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        tenant TEXT NOT NULL,
        created_at INTEGER NOT NULL,
        expires_at INTEGER NOT NULL,  -- each change moves it
        metadata BLOB NOT NULL,  -- JSON
        bytes INTEGER NOT NULL  -- of metadata and items
    );
    CREATE INDEX conversations_of_tenant ON conversations (tenant, expires_at, bytes);
    CREATE INDEX conversations_that_expire ON conversations (expires_at);

    CREATE TABLE conversation_items (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        conversation INTEGER NOT NULL REFERENCES conversations (seq) ON DELETE CASCADE,
        id TEXT NOT NULL,
        item BLOB NOT NULL,  -- JSON
        UNIQUE (conversation, id)
    );
    """,
    # What finished requests have told: sums of each hour, good and all events of objectives, and outcomes.
    """
    CREATE TABLE latency_hours (
        hour INTEGER NOT NULL,  -- when it began, in seconds since 1970
        slice TEXT NOT NULL,  -- JSON
        bytes INTEGER NOT NULL,
        sums BLOB NOT NULL,  -- compressed JSON
        PRIMARY KEY (hour, slice)
    ) WITHOUT ROWID;

    CREATE TABLE objective_slots (
        slo TEXT NOT NULL,
        objective TEXT NOT NULL,
        began INTEGER NOT NULL,  -- in seconds since 1970
        good INTEGER NOT NULL,
        total INTEGER NOT NULL,
        PRIMARY KEY (slo, objective, began)
    ) WITHOUT ROWID;

    CREATE TABLE answered_requests (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        tenant TEXT NOT NULL,
        id TEXT NOT NULL,  -- of the response, without the prefix of its dialect
        request_id TEXT NOT NULL,  -- the header
        facts BLOB NOT NULL  -- JSON
    );
    CREATE INDEX answered_requests_by_id ON answered_requests (id);
    CREATE INDEX answered_requests_by_request_id ON answered_requests (request_id);

    CREATE TABLE outcomes (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        tenant TEXT NOT NULL,
        request TEXT NOT NULL,  -- the response's id
        name TEXT NOT NULL,
        value REAL NOT NULL,
        at INTEGER NOT NULL,  -- in seconds since 1970, as `day` in UTC
        day TEXT NOT NULL,
        model TEXT NOT NULL,
        surface TEXT NOT NULL,
        endpoint TEXT NOT NULL,
        length TEXT NOT NULL,
        route TEXT NOT NULL,
        ttft_ms REAL,
        e2e_ms REAL,
        micros INTEGER NOT NULL,
        UNIQUE (tenant, request, name)
    );
    CREATE INDEX outcomes_by_day ON outcomes (day, name);
    """,
)


class InUseError(Exception):
    """Another server owns the folder."""


class NewerSchemaError(Exception):
    """The file was written by a newer Headrace."""


class Database:
    """The sqlite file of a storage folder. `run` never blocks the event loop."""

    def __init__(
        self,
        folder: Path,
        *,
        name: str = "headrace",  # of the file and of its lock
        steps: Sequence[str] = _STEPS,  # its migrations
        waiting: int = 4096,  # statements queued, including the running one
        busy_s: float = 5.0,  # how long a statement waits for another program that locks the file
        limit_bytes: int = 16 * 1024**3,  # 16 GiB, largest file
    ) -> None:
        self.folder = folder.expanduser()
        self.waiting = 0
        self._name = name
        self._steps = steps
        self._waiting_limit = waiting
        self._busy_s = busy_s
        self._limit_bytes = limit_bytes
        self._mutex = threading.Lock()  # of `waiting` and `_closed`
        self._closed = False
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # Used only by the thread.
        self._outage = OutageLog(log, f"storage in {self.folder} is unavailable")
        self._connection: sqlite3.Connection | None = None
        self._lock: int | None = None
        # A daemon, so that a server that dies without `close` does not wait for it. Commits are atomic anyway.
        self._thread = threading.Thread(target=self._serve, name=f"{name}-database", daemon=True)
        self._thread.start()

    async def run(self, function: Callable[[sqlite3.Connection], TransactionResult]) -> TransactionResult:
        """Run `function` in one transaction and return its result; an exception rolls it back.

        It runs even if the caller is cancelled in the meantime.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[TransactionResult] = loop.create_future()

        def job() -> None:
            try:
                settle = partial(_set_result, future, self._transaction(function))
            except BaseException as error:
                settle = partial(_set_exception, future, _as_storage_error(error))
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(settle)

        with self._mutex:
            if self._closed:
                raise storage_unavailable("The server is shutting down.")
            if self.waiting >= self._waiting_limit:
                raise storage_unavailable("The server's storage is too busy. Try again in a moment.", retry_after=1.0)
            self.waiting += 1
            self._jobs.put(job)
        return await future

    async def retry(self, function: Callable[[sqlite3.Connection], TransactionResult]) -> TransactionResult:
        """Run `function` as `run` does, again and again until storage works. Bound the work that waits here."""
        pause = _FIRST_PAUSE_S
        while True:
            try:
                return await self.run(function)
            except ApiError as error:
                if error.code != "storage_unavailable":
                    raise
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE_S)

    async def close(self) -> None:
        """Run the queued statements, then stop. Further statements are rejected."""
        with self._mutex:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    # In the thread

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            with self._mutex:
                self.waiting -= 1
        self._disconnect()
        if self._lock is not None:
            os.close(self._lock)

    def _transaction(self, function: Callable[[sqlite3.Connection], TransactionResult]) -> TransactionResult:
        try:
            connection = self._connected()
            connection.execute("BEGIN IMMEDIATE")
            try:
                result = function(connection)
                connection.execute("COMMIT")
            except BaseException:
                # sqlite rolls back by itself when the disk is full.
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
        except (sqlite3.Error, OSError, InUseError, NewerSchemaError) as error:
            if not _is_mistake(error):
                self._outage.failed(error)
                self._disconnect()
            raise
        self._outage.succeeded()
        return result

    def _connected(self) -> sqlite3.Connection:
        if self._connection is None:
            if not self.folder.exists():
                self.folder.parent.mkdir(parents=True, exist_ok=True)
                self.folder.mkdir(mode=0o700, exist_ok=True)
            self._own_folder()
            path = self.folder / f"{self._name}.sqlite"
            # sqlite would use the umask; its other files take the mode of this one.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            connection = sqlite3.connect(path, timeout=self._busy_s, isolation_level=None)
            try:
                self._prepare(connection)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _own_folder(self) -> None:
        """Lock the folder: two servers on one folder would run every batch twice."""
        if self._lock is None:
            lock = os.open(self.folder / f"{self._name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                # Not flock: a forked child would keep it after the server's death.
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(lock)
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    raise InUseError(
                        "another Headrace server uses it. Give each server its own storage.folder."
                    ) from None
                raise
            self._lock = lock

    def _prepare(self, connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")  # a commit survives a power cut
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA journal_size_limit = 67108864")  # 64 MiB
        (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
        connection.execute(f"PRAGMA max_page_count = {max(1, self._limit_bytes // page_bytes)}")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > len(self._steps):
            raise NewerSchemaError(
                f"its schema is version {version}, newer than this version of Headrace supports ({len(self._steps)})"
            )
        for number, step in enumerate(self._steps[version:], start=version + 1):
            connection.executescript(f"BEGIN IMMEDIATE; {step}; PRAGMA user_version = {number}; COMMIT;")

    def _disconnect(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None


def _set_result(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


def storage_unavailable(message: str, *, status: int = 503, retry_after: float | None = None) -> ApiError:
    return ApiError(message, kind="server_error", code="storage_unavailable", status=status, retry_after=retry_after)


def storage_full(message: str = "The server's storage is full.") -> ApiError:
    return storage_unavailable(message, status=507)


def _code(error: BaseException) -> int | None:
    extended: int | None = getattr(error, "sqlite_errorcode", None)
    return None if extended is None else extended & 0xFF


def _is_mistake(error: BaseException) -> bool:
    """Return whether the error is a bug in a statement, not a problem of the disk."""
    return isinstance(error, (sqlite3.IntegrityError, sqlite3.ProgrammingError)) or _code(error) == sqlite3.SQLITE_ERROR


def _as_storage_error(error: BaseException) -> BaseException:
    """Convert an error for the client. The log has the path and the reason."""
    match error:
        case sqlite3.Error() if _is_mistake(error):
            return error
        case sqlite3.Error() if _code(error) == sqlite3.SQLITE_FULL:
            return storage_full()
        case sqlite3.Error():
            return storage_unavailable("The server's storage cannot be used right now.")
        case OSError():
            return storage_error(error)
        case InUseError() | NewerSchemaError():
            return storage_unavailable("The server's storage cannot be used right now.")
        case _:
            return error


def storage_error(error: OSError) -> ApiError:
    """Convert a disk error for the client."""
    if error.errno in _FULL:
        return storage_full()
    return storage_unavailable("The server's storage cannot be used right now.")


class ListPage(msgspec.Struct, Generic[PageItem], frozen=True):
    """A page of a list."""

    data: list[PageItem]
    has_more: bool

    def as_json(self, item: Callable[[PageItem], dict[str, Any]]) -> dict[str, Any]:
        data = [item(each) for each in self.data]
        return {
            "object": "list",
            "data": data,
            "first_id": data[0].get("id") if data else None,
            "last_id": data[-1].get("id") if data else None,
            "has_more": self.has_more,
        }


def select_page(
    connection: sqlite3.Connection,
    table: str,
    tenant: str,
    *,
    after: str | None,
    limit: int,
    order: ListOrder,
    where: str = "TRUE",
    values: tuple[Any, ...] = (),
) -> ListPage[sqlite3.Row]:
    """Return a page of the tenant's rows by age, after the id `after`. Never pass `table` or `where` from clients."""
    sign, start = (">", 0) if order == "asc" else ("<", 2**62)
    if after is not None:
        row = connection.execute(f"SELECT seq FROM {table} WHERE tenant = ? AND id = ?", (tenant, after)).fetchone()
        if row is None:
            raise invalid_request("Unknown id in 'after'.", "after")
        start = row[0]
    rows = rows_of(
        connection,
        f"SELECT * FROM {table} WHERE tenant = ? AND seq {sign} ? AND {where} ORDER BY seq {order} LIMIT ?",
        (tenant, start, *values, limit + 1),
    )
    return ListPage(rows[:limit], len(rows) > limit)


def rows_of(connection: sqlite3.Connection, statement: str, values: tuple[Any, ...] = ()) -> list[sqlite3.Row]:
    """Return rows with named columns."""
    cursor = connection.cursor()
    cursor.row_factory = sqlite3.Row
    return cursor.execute(statement, values).fetchall()


def make_room(
    connection: sqlite3.Connection,
    table: str,
    *,
    rows: int,
    count: int,
    size: int = 0,
    total: int | None = None,
    oldest: str = "seq",
) -> None:
    """Delete rows until so many more rows and bytes fit: each time the oldest of the tenant with the most.

    `oldest` orders a tenant's rows; `total` needs a column `bytes`. Never pass `table` or `oldest` from clients.
    """
    bytes_used = "0" if total is None else "COALESCE(SUM(bytes), 0)"
    while True:
        there, used = connection.execute(f"SELECT COUNT(*), {bytes_used} FROM {table}").fetchone()
        too_many = there + rows > count
        if there == 0 or (not too_many and (total is None or used + size <= total)):
            return
        by = "COUNT(*)" if too_many else "SUM(bytes)"
        connection.execute(
            f"DELETE FROM {table} WHERE seq = (SELECT seq FROM {table} WHERE tenant = "
            f"(SELECT tenant FROM {table} GROUP BY tenant ORDER BY {by} DESC, MIN(seq) LIMIT 1) "
            f"ORDER BY {oldest} LIMIT 1)"
        )


def check_listing(*, limit: int, most: int, order: str) -> ListOrder:
    """Check a client's list parameters."""
    if not 1 <= limit <= most:
        raise invalid_request(f"Invalid 'limit'. Expected 1 to {most}.", "limit")
    if order == "asc" or order == "desc":
        return order
    raise invalid_request("Invalid 'order'. Expected asc or desc.", "order")
