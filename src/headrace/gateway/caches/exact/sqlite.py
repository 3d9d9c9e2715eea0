"""Entries in the server's sqlite file: they outlive a restart.

Owns SqliteStore with its tables, which it makes itself the first time that it is used. The least recently used goes
first, with a bound on the bytes of all entries and one on each tenant's, as in memory. A use is remembered in memory
and written with the next entry: no read waits for a disk to sync.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from headrace.gateway.caches.exact.cache_key import CacheKey
from headrace.gateway.caches.exact.entry_store import CacheSize, InvalidationScope, LookupBatcher, StoreLookup
from headrace.gateway.database import Database

Result = TypeVar("Result")

# One statement each: sqlite3's `executescript` would end the transaction that they are to be made in.
SCHEMA: Final = (
    """
    CREATE TABLE IF NOT EXISTS exact_entries (
        seq INTEGER PRIMARY KEY,
        key BLOB NOT NULL UNIQUE,
        tenant TEXT NOT NULL,
        expires REAL NOT NULL,  -- seconds since 1970
        used INTEGER NOT NULL,  -- grows with every use
        bytes INTEGER NOT NULL,
        answer BLOB NOT NULL
    )
    """,
    "CREATE INDEX IF NOT EXISTS exact_entries_by_use ON exact_entries (used)",
    "CREATE INDEX IF NOT EXISTS exact_entries_of_tenant ON exact_entries (tenant, used)",
    "CREATE INDEX IF NOT EXISTS exact_entries_that_expire ON exact_entries (expires)",
    """
    CREATE TABLE IF NOT EXISTS exact_tags (
        tag TEXT NOT NULL,
        entry INTEGER NOT NULL REFERENCES exact_entries (seq) ON DELETE CASCADE,
        PRIMARY KEY (tag, entry)
    ) WITHOUT ROWID
    """,
    "CREATE INDEX IF NOT EXISTS exact_tags_of_entry ON exact_tags (entry)",
    # What a tenant's entries are together: summing them up for each new one would look at all.
    """
    CREATE TABLE IF NOT EXISTS exact_totals (
        tenant TEXT PRIMARY KEY,
        entries INTEGER NOT NULL,
        bytes INTEGER NOT NULL
    ) WITHOUT ROWID
    """,
    """
    CREATE TRIGGER IF NOT EXISTS exact_entry_comes AFTER INSERT ON exact_entries BEGIN
        INSERT INTO exact_totals VALUES (new.tenant, 1, new.bytes)
            ON CONFLICT (tenant) DO UPDATE SET entries = entries + 1, bytes = bytes + new.bytes;
    END
    """,
    """
    CREATE TRIGGER IF NOT EXISTS exact_entry_goes AFTER DELETE ON exact_entries BEGIN
        UPDATE exact_totals SET entries = entries - 1, bytes = bytes - old.bytes WHERE tenant = old.tenant;
        DELETE FROM exact_totals WHERE tenant = old.tenant AND entries = 0;
    END
    """,
)

_ENTRY: Final = 320  # bytes of an entry beside its answer: its row, and its places in five indexes
_TAG: Final = 160
_TURN: Final = 1000  # entries that one transaction removes for their age
_USES: Final = 4096  # that are remembered before they are written


class SqliteStore:
    def __init__(
        self,
        database: Database,
        *,
        most_bytes: int = 1024**3,  # 1 GiB
        tenant_bytes: int | None = None,  # of one tenant; all by default
        bound_s: float = 0.05,  # of one transaction that looks for entries
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.most_bytes = most_bytes
        self.tenant_bytes = most_bytes if tenant_bytes is None else min(tenant_bytes, most_bytes)
        self._database = database
        self._clock = clock
        self._gathering = LookupBatcher(self._find, seconds=bound_s)
        # Used by the database's thread alone.
        self._opened: sqlite3.Connection | None = None
        self._use = 0
        self._uses: dict[bytes, int] = {}  # not written yet, by the key

    async def open(self) -> None:
        """Makes the tables. Whatever comes first does it, too."""
        await self._run(lambda connection: None)

    async def get(self, wanted: CacheKey) -> StoreLookup:
        return await self._gathering.get(wanted)

    async def _find(self, wanteds: Sequence[CacheKey]) -> Sequence[StoreLookup]:
        now = self._clock()

        def find(connection: sqlite3.Connection) -> list[StoreLookup]:
            return [StoreLookup(self._select(connection, wanted, now)) for wanted in wanteds]

        return await self._run(find)

    async def put(self, wanted: CacheKey, data: bytes, seconds: float, ticket: Any = None) -> bool:
        size = len(data) + _ENTRY + len(wanted.tags) * _TAG
        if size > self.tenant_bytes:
            return False
        now = self._clock()

        def put(connection: sqlite3.Connection) -> None:
            self._write_uses(connection)
            _sweep(connection, now)
            connection.execute("DELETE FROM exact_entries WHERE key = ?", (wanted.key,))
            self._make_room(connection, wanted.tenant, size)
            self._use += 1
            seq = connection.execute(
                "INSERT INTO exact_entries (key, tenant, expires, used, bytes, answer) VALUES (?, ?, ?, ?, ?, ?)",
                (wanted.key, wanted.tenant, now + seconds, self._use, size, data),
            ).lastrowid
            connection.executemany("INSERT INTO exact_tags VALUES (?, ?)", [(tag, seq) for tag in wanted.tags])

        await self._run(put)
        return True

    async def remove(self, scope: InvalidationScope) -> int:
        now = self._clock()
        where, values = ["TRUE"], list[Any]()
        if scope.tenant is not None:
            where.append("tenant = ?")
            values.append(scope.tenant)
        if scope.key is not None:
            where.append("key = ?")
            values.append(scope.key)
        if scope.tag is not None:
            where.append("seq IN (SELECT entry FROM exact_tags WHERE tag = ?)")
            values.append(scope.tag)
        meant = " AND ".join(where)  # of our own words; what a client said is in the values

        def last(connection: sqlite3.Connection) -> int:
            return connection.execute("SELECT COALESCE(MAX(seq), 0) FROM exact_entries").fetchone()[0]

        def remove(connection: sqlite3.Connection) -> tuple[int, int]:
            rows = connection.execute(
                f"SELECT seq, expires > ? FROM exact_entries WHERE {meant} AND seq <= ? LIMIT ?",
                (now, *values, latest, _TURN),
            ).fetchall()
            connection.executemany("DELETE FROM exact_entries WHERE seq = ?", [(seq,) for seq, _ in rows])
            return len(rows), sum(live for _, live in rows)

        # Bit by bit, because others wait for this thread, too.
        latest, count = await self._run(last), 0
        while True:
            gone, live = await self._run(remove)
            count += live
            if gone < _TURN:
                return count

    async def sweep(self) -> int:
        now = self._clock()
        return await self._run(lambda connection: _sweep(connection, now))

    async def size(self) -> CacheSize:
        return await self._run(_total)

    async def close(self) -> None:
        """The database is its owner's."""
        await self._gathering.close()

    async def _run(self, function: Callable[[sqlite3.Connection], Result]) -> Result:
        def with_tables(connection: sqlite3.Connection) -> Result:
            # The database opens its file anew after an error, and it may be another file by then.
            if self._opened is not connection:
                for statement in SCHEMA:
                    connection.execute(statement)
                (last,) = connection.execute("SELECT COALESCE(MAX(used), 0) FROM exact_entries").fetchone()
                self._use = max(self._use, last)
                self._opened = connection
            try:
                return function(connection)
            except sqlite3.Error:
                self._opened = None
                raise

        return await self._database.run(with_tables)

    # In the database's thread, in a transaction.

    def _select(self, connection: sqlite3.Connection, wanted: CacheKey, now: float) -> bytes | None:
        row = connection.execute(
            "SELECT answer FROM exact_entries WHERE key = ? AND tenant = ? AND expires > ?",
            (wanted.key, wanted.tenant, now),
        ).fetchone()
        if row is None:
            return None
        self._use += 1
        self._uses[wanted.key] = self._use
        if len(self._uses) >= _USES:
            self._write_uses(connection)
        return row[0]

    def _write_uses(self, connection: sqlite3.Connection) -> None:
        connection.executemany(
            "UPDATE exact_entries SET used = ? WHERE key = ?", [(use, key) for key, use in self._uses.items()]
        )
        self._uses.clear()

    def _make_room(self, connection: sqlite3.Connection, tenant: str, size: int) -> None:
        while _total(connection, tenant).bytes + size > self.tenant_bytes:
            if not _drop_oldest(connection, "tenant = ?", (tenant,)):
                break
        while _total(connection).bytes + size > self.most_bytes:
            if not _drop_oldest(connection, "TRUE", ()):
                break


def _drop_oldest(connection: sqlite3.Connection, where: str, values: tuple[Any, ...]) -> bool:
    """False where there is none, whatever the totals say; then they are counted anew."""
    dropped = connection.execute(
        f"DELETE FROM exact_entries WHERE seq = (SELECT seq FROM exact_entries WHERE {where} ORDER BY used LIMIT 1)",
        values,
    )
    if dropped.rowcount:
        return True
    connection.execute("DELETE FROM exact_totals")
    connection.execute(
        "INSERT INTO exact_totals SELECT tenant, COUNT(*), SUM(bytes) FROM exact_entries GROUP BY tenant"
    )
    return False


def _total(connection: sqlite3.Connection, tenant: str | None = None) -> CacheSize:
    where, values = ("", ()) if tenant is None else (" WHERE tenant = ?", (tenant,))
    row = connection.execute(
        f"SELECT COALESCE(SUM(entries), 0), COALESCE(SUM(bytes), 0) FROM exact_totals{where}", values
    ).fetchone()
    return CacheSize(*row)


def _sweep(connection: sqlite3.Connection, now: float) -> int:
    return connection.execute(
        "DELETE FROM exact_entries WHERE seq IN (SELECT seq FROM exact_entries WHERE expires <= ? LIMIT ?)",
        (now, _TURN),
    ).rowcount
