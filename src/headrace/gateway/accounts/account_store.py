"""Stores account records with versions, an epoch that every change increments, and the audit log.

Defines the interface AccountStore and its sqlite implementation. A change is one transaction that succeeds only if the
replaced records still have the expected versions; it also writes the audit entry and the next epoch. So the epoch tells
whether anything is new, and no change is lost. Does not interpret records.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Protocol, TypeVar

import msgspec
from msgspec.structs import replace

from headrace.gateway.accounts.account_records import (
    AccountRecord,
    RecordValue,
    TenantRecord,
    decode_records,
    encode_value,
)
from headrace.gateway.accounts.audit_log import AuditEntry, AuditRow, ChainPosition, pruning_entry, seal
from headrace.gateway.database import Database, storage_unavailable

Result = TypeVar("Result")

REMEMBERED: Final = 1000  # removed records that are remembered as removed
_DAY: Final = 86_400  # seconds
_LEAST: Final = 1000  # newest audit rows, kept at any age

SCHEMA: Final = (
    """
    CREATE TABLE IF NOT EXISTS shared_state (
        one INTEGER PRIMARY KEY CHECK (one = 1),
        epoch INTEGER NOT NULL,
        forgotten INTEGER NOT NULL,  -- the epoch up to which removed records are forgotten
        head_seq INTEGER NOT NULL, head_hash TEXT NOT NULL,  -- of the audit log
        anchor_seq INTEGER NOT NULL, anchor_hash TEXT NOT NULL  -- the last of its rows that was removed
    )
    """,
    f"INSERT OR IGNORE INTO shared_state VALUES (1, 0, 0, 0, '{ChainPosition().hash}', 0, '{ChainPosition().hash}')",
    """
    CREATE TABLE IF NOT EXISTS shared_records (
        kind TEXT NOT NULL,
        id TEXT NOT NULL,
        version INTEGER NOT NULL,  -- the epoch in which it was written
        body TEXT,  -- JSON; NULL: it was removed
        PRIMARY KEY (kind, id)
    ) WITHOUT ROWID
    """,
    "CREATE INDEX IF NOT EXISTS shared_records_by_version ON shared_records (version)",
    "CREATE TABLE IF NOT EXISTS key_uses (id TEXT PRIMARY KEY, at INTEGER NOT NULL) WITHOUT ROWID",
    """
    CREATE TABLE IF NOT EXISTS audit (
        seq INTEGER PRIMARY KEY, at INTEGER NOT NULL, body TEXT NOT NULL, hash TEXT NOT NULL
    )
    """,
    # Guards against bugs. An attacker can drop the triggers, but the hash chain then shows the change.
    """
    CREATE TRIGGER IF NOT EXISTS audit_never_changes BEFORE UPDATE ON audit
    BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END
    """,
    """
    CREATE TRIGGER IF NOT EXISTS audit_keeps_its_end BEFORE DELETE ON audit
    WHEN OLD.seq > (SELECT anchor_seq FROM shared_state)
    BEGIN SELECT RAISE(ABORT, 'only rows before the anchor can be deleted'); END
    """,
)


class RecordWrite(msgspec.Struct, frozen=True):
    kind: str
    id: str
    value: RecordValue | None  # None removes it
    replaces: int  # expected version; 0: the record must not exist


class AccountChange(msgspec.Struct, frozen=True, kw_only=True):
    """A change, applied completely or not at all."""

    entry: AuditEntry
    writes: tuple[RecordWrite, ...] = ()
    expects: tuple[tuple[str, str, int], ...] = ()  # (kind, id, version) of records that must not have changed


class AccountChanges(msgspec.Struct, frozen=True, kw_only=True):
    """The changes since an epoch."""

    epoch: int
    now: float  # the clock of the store, shared by all gateways
    records: tuple[AccountRecord, ...]
    whole: bool = False  # True: all records; every other record was removed

    @property
    def deleted_tenants(self) -> frozenset[str]:
        """Return the tenants that were deleted, whose texts must not be kept."""
        return frozenset(
            record.id
            for record in self.records
            if isinstance(record.value, TenantRecord) and record.value.deleted is not None
        )


class CommitResult(msgspec.Struct, frozen=True):
    epoch: int
    now: float
    head: ChainPosition  # end of the audit log


class AuditCut(msgspec.Struct, frozen=True):
    """A decision to prune the audit log up to a row."""

    through: int
    why: str
    younger: float | None = None  # rows from this time on stay, even before `through`

    def before(self, young: int | None) -> AuditCut:
        """Keep rows from `young` on: the first row at or after `younger`, or None."""
        return self if young is None else replace(self, through=min(self.through, young - 1))


class AuditRetention(msgspec.Struct, frozen=True):
    """How many audit rows to keep, and for how long."""

    rows: int = 100_000
    days: int = 400  # the newest rows always stay, so that a clock jump cannot empty the log

    def cut(self, head: int, anchor: int, oldest: float | None, now: float) -> AuditCut | None:
        """Decide what to prune of the rows after `anchor` up to `head`. `oldest`: time of the oldest row.

        Prunes a tenth of the rows at once, and only when rows are a day too old, so that not every change prunes.
        """
        keep = max(1, self.rows * 9 // 10)
        if head - anchor > self.rows:
            return AuditCut(head - keep + 1, f"more than {self.rows} rows")
        through = head - min(keep, _LEAST)
        if oldest is None or oldest >= now - (self.days + 1) * _DAY or through <= anchor:
            return None
        return AuditCut(through, f"older than {self.days} days", now - self.days * _DAY)


class AuditPage(msgspec.Struct, frozen=True):
    """A page of the audit log, with both ends of the log."""

    rows: tuple[AuditRow, ...]
    head: ChainPosition
    anchor: ChainPosition


class VersionConflictError(Exception):
    """A record was changed by another gateway. Retry with the current records."""


class AccountStore(Protocol):
    """Every method returns within a timeout or raises ApiError."""

    shared: bool  # whether other gateways change it too

    async def changes(self, since: int) -> AccountChanges: ...

    async def commit(self, change: AccountChange) -> CommitResult:
        """Apply a change. Raise VersionConflictError if a record has another version than expected."""
        ...

    async def touch(self, uses: Mapping[str, int]) -> None:
        """Record when keys were last used, if later than known."""
        ...

    async def uses(self) -> dict[str, int]: ...

    async def audit(
        self, *, after: int = 0, before: int | None = None, limit: int = 100, newest: bool = False
    ) -> AuditPage:
        """Return the rows between `after` and `before`, both exclusive."""
        ...

    async def close(self) -> None: ...


async def with_timeout(work: Awaitable[Result], seconds: float) -> Result:
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        raise storage_unavailable(
            f"The server's storage did not answer within {seconds:g} s. A change may or may not have been made.",
            retry_after=1.0,
        ) from None


class SqliteAccountStore:
    """The store in the server's own sqlite file, which no other server can open."""

    shared = False

    def __init__(
        self,
        database: Database,
        *,
        retention: AuditRetention | None = None,
        answer_s: float = 5.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._retention = retention or AuditRetention()
        self._answer_s = answer_s
        self._clock = clock
        self._opened = False

    async def _run(self, function: Callable[[sqlite3.Connection], Result]) -> Result:
        def opened(connection: sqlite3.Connection) -> Result:
            if not self._opened:
                for statement in SCHEMA:
                    connection.execute(statement)
            return function(connection)

        result = await with_timeout(self._database.run(opened), self._answer_s)
        self._opened = True  # only now that the tables are committed
        return result

    async def changes(self, since: int) -> AccountChanges:
        def changes(connection: sqlite3.Connection) -> AccountChanges:
            epoch, forgotten = connection.execute("SELECT epoch, forgotten FROM shared_state").fetchone()
            now = self._clock()
            if since == epoch:
                return AccountChanges(epoch=epoch, now=now, records=())
            whole = since < forgotten or since > epoch  # the latter: an older file was restored
            rows = connection.execute(
                "SELECT kind, id, version, body FROM shared_records WHERE version > ?", (0 if whole else since,)
            )
            return AccountChanges(epoch=epoch, now=now, records=decode_records(rows), whole=whole)

        return await self._run(changes)

    async def commit(self, change: AccountChange) -> CommitResult:
        return await self._run(lambda connection: self._commit(connection, change))

    def _commit(self, connection: sqlite3.Connection, change: AccountChange) -> CommitResult:
        for kind, id, version in change.expects:
            _check(connection, kind, id, version)
        (epoch,) = connection.execute("UPDATE shared_state SET epoch = epoch + 1 RETURNING epoch").fetchone()
        for write in change.writes:
            _check(connection, write.kind, write.id, write.replaces)
            body = None if write.value is None else encode_value(write.value)
            connection.execute(
                "INSERT OR REPLACE INTO shared_records (kind, id, version, body) VALUES (?, ?, ?, ?)",
                (write.kind, write.id, epoch, body),
            )
        _drop_tombstones(connection)
        head = _append(connection, change.entry)
        head = self._prune(connection, head)
        return CommitResult(epoch, self._clock(), head)

    def _prune(self, connection: sqlite3.Connection, head: ChainPosition) -> ChainPosition:
        (anchor,) = connection.execute("SELECT anchor_seq FROM shared_state").fetchone()
        oldest = connection.execute("SELECT at FROM audit ORDER BY seq LIMIT 1").fetchone()
        cut = self._retention.cut(head.seq, anchor, None if oldest is None else oldest[0], self._clock())
        if cut is None:
            return head
        if cut.younger is not None:
            (young,) = connection.execute("SELECT MIN(seq) FROM audit WHERE at >= ?", (cut.younger,)).fetchone()
            cut = cut.before(young)
        row = connection.execute("SELECT hash FROM audit WHERE seq = ?", (cut.through,)).fetchone()
        if row is None or cut.through <= anchor:
            return head  # if a row is missing, verification will report it
        connection.execute("UPDATE shared_state SET anchor_seq = ?, anchor_hash = ?", (cut.through, row[0]))
        removed = connection.execute("DELETE FROM audit WHERE seq <= ?", (cut.through,)).rowcount
        last = ChainPosition(cut.through, row[0])
        return _append(connection, pruning_entry(last, at=int(self._clock()), removed=removed, why=cut.why))

    async def touch(self, uses: Mapping[str, int]) -> None:
        def touch(connection: sqlite3.Connection) -> None:
            connection.executemany(
                "INSERT INTO key_uses (id, at) SELECT ?1, ?2 "
                "WHERE EXISTS (SELECT 1 FROM shared_records WHERE kind = 'key' AND id = ?1 AND body IS NOT NULL) "
                "ON CONFLICT (id) DO UPDATE SET at = MAX(at, excluded.at)",
                list(uses.items()),
            )
            connection.execute(
                "DELETE FROM key_uses WHERE id NOT IN "
                "(SELECT id FROM shared_records WHERE kind = 'key' AND body IS NOT NULL)"
            )

        await self._run(touch)

    async def uses(self) -> dict[str, int]:
        return await self._run(lambda connection: dict(connection.execute("SELECT id, at FROM key_uses")))

    async def audit(
        self, *, after: int = 0, before: int | None = None, limit: int = 100, newest: bool = False
    ) -> AuditPage:
        def audit(connection: sqlite3.Connection) -> AuditPage:
            ends = connection.execute("SELECT head_seq, head_hash, anchor_seq, anchor_hash FROM shared_state")
            head_seq, head_hash, anchor_seq, anchor_hash = ends.fetchone()
            order = "DESC" if newest else "ASC"
            rows = connection.execute(
                f"SELECT seq, body, hash FROM audit WHERE seq > ? AND seq < ? ORDER BY seq {order} LIMIT ?",
                (after, 2**62 if before is None else before, limit),
            )
            return AuditPage(
                tuple(AuditRow(*row) for row in rows),
                ChainPosition(head_seq, head_hash),
                ChainPosition(anchor_seq, anchor_hash),
            )

        return await self._run(audit)

    async def close(self) -> None:
        """The owner of the database closes it."""


def _check(connection: sqlite3.Connection, kind: str, id: str, version: int) -> None:
    row = connection.execute(
        "SELECT version FROM shared_records WHERE kind = ? AND id = ? AND body IS NOT NULL", (kind, id)
    ).fetchone()
    if (row[0] if row else 0) != version:
        raise VersionConflictError(kind, id)


def _append(connection: sqlite3.Connection, entry: AuditEntry) -> ChainPosition:
    head = ChainPosition(*connection.execute("SELECT head_seq, head_hash FROM shared_state").fetchone())
    row = seal(head, entry)
    connection.execute(
        "INSERT INTO audit (seq, at, body, hash) VALUES (?, ?, ?, ?)", (row.seq, entry.at, row.body, row.hash)
    )
    connection.execute("UPDATE shared_state SET head_seq = ?, head_hash = ?", (row.seq, row.hash))
    return ChainPosition(row.seq, row.hash)


def _drop_tombstones(connection: sqlite3.Connection) -> None:
    """Drop the oldest tombstones beyond REMEMBERED. Gateways that missed them reload everything."""
    row = connection.execute(
        "SELECT version FROM shared_records WHERE body IS NULL ORDER BY version DESC LIMIT 1 OFFSET ?", (REMEMBERED,)
    ).fetchone()
    if row is not None:
        connection.execute("DELETE FROM shared_records WHERE body IS NULL AND version <= ?", row)
        connection.execute("UPDATE shared_state SET forgotten = MAX(forgotten, ?)", row)
