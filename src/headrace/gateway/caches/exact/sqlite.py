"""Stores entries of the exact cache, or of another one, in the server's sqlite file, so that they survive a restart.

Owns SqliteStore and its tables, which it creates on first use. Evicts the least recently used entry, with one bound for
all entries and one for each tenant's. Uses are collected in memory and written with the next entry, so that no read
waits for a disk sync.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from headrace.gateway.caches.exact.cache_key import CacheKey
from headrace.gateway.caches.exact.entry_store import CacheSize, LookupBatcher, StoreLookup
from headrace.gateway.caches.invalidation_log import InvalidationScope
from headrace.gateway.database import Database

Result = TypeVar("Result")

# One statement each, because sqlite3's `executescript` would end the transaction.
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
    # Totals by tenant, because summing them up for each new entry would read all entries.
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

_ENTRY_BYTES: Final = 320  # overhead of an entry: its row and its places in five indexes
_TAG_BYTES: Final = 160
_BATCH: Final = 1000  # entries that one transaction removes
_MAX_USES: Final = 4096  # collected before they are written


class _Tables:
    """Executes statements on the tables of one cache: `exact_` in a statement stands for its name."""

    def __init__(self, connection: sqlite3.Connection, name: str) -> None:
        self._connection = connection
        self._prefix = f"{name}_"

    def execute(self, statement: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        return self._connection.execute(statement.replace("exact_", self._prefix), values)

    def executemany(self, statement: str, rows: Sequence[Sequence[Any]]) -> sqlite3.Cursor:
        return self._connection.executemany(statement.replace("exact_", self._prefix), rows)


class SqliteStore:
    def __init__(
        self,
        database: Database,
        *,
        name: str = "exact",  # of the cache; its tables' names begin with it
        most_bytes: int = 1024**3,  # 1 GiB
        tenant_bytes: int | None = None,  # of one tenant; by default the same
        bound_s: float = 0.05,  # timeout of one lookup transaction
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.most_bytes = most_bytes
        self.tenant_bytes = most_bytes if tenant_bytes is None else min(tenant_bytes, most_bytes)
        self._database = database
        self._name = name
        self._clock = clock
        self._batcher = LookupBatcher(self._find, seconds=bound_s)
        # Used only by the database's thread.
        self._opened: sqlite3.Connection | None = None
        self._use = 0
        self._uses: dict[bytes, int] = {}  # not written yet, by digest

    async def open(self) -> None:
        """Create the tables. The first other call does so too."""
        await self._run(lambda connection: None)

    async def get(self, cache_key: CacheKey) -> StoreLookup:
        return await self._batcher.get(cache_key)

    async def _find(self, cache_keys: Sequence[CacheKey]) -> Sequence[StoreLookup]:
        now = self._clock()

        def find(connection: _Tables) -> list[StoreLookup]:
            return [StoreLookup(self._select(connection, cache_key, now)) for cache_key in cache_keys]

        return await self._run(find)

    async def put(self, cache_key: CacheKey, data: bytes, seconds: float, ticket: Any = None) -> bool:
        size = len(data) + _ENTRY_BYTES + len(cache_key.tags) * _TAG_BYTES
        if size > self.tenant_bytes:
            return False
        now = self._clock()

        def put(connection: _Tables) -> None:
            self._write_uses(connection)
            _sweep(connection, now)
            connection.execute("DELETE FROM exact_entries WHERE key = ?", (cache_key.digest,))
            self._make_room(connection, cache_key.tenant, size)
            self._use += 1
            seq = connection.execute(
                "INSERT INTO exact_entries (key, tenant, expires, used, bytes, answer) VALUES (?, ?, ?, ?, ?, ?)",
                (cache_key.digest, cache_key.tenant, now + seconds, self._use, size, data),
            ).lastrowid
            connection.executemany("INSERT INTO exact_tags VALUES (?, ?)", [(tag, seq) for tag in cache_key.tags])

        await self._run(put)
        return True

    async def remove(self, scope: InvalidationScope) -> int:
        now = self._clock()
        where, values = ["TRUE"], list[Any]()
        if scope.tenant is not None:
            where.append("tenant = ?")
            values.append(scope.tenant)
        if scope.digest is not None:
            where.append("key = ?")
            values.append(scope.digest)
        if scope.tag is not None:
            where.append("seq IN (SELECT entry FROM exact_tags WHERE tag = ?)")
            values.append(scope.tag)
        condition = " AND ".join(where)  # constant texts; client input is only in `values`

        def last(connection: _Tables) -> int:
            return connection.execute("SELECT COALESCE(MAX(seq), 0) FROM exact_entries").fetchone()[0]

        def remove(connection: _Tables) -> tuple[int, int]:
            rows = connection.execute(
                f"SELECT seq, expires > ? FROM exact_entries WHERE {condition} AND seq <= ? LIMIT ?",
                (now, *values, latest, _BATCH),
            ).fetchall()
            connection.executemany("DELETE FROM exact_entries WHERE seq = ?", [(seq,) for seq, _ in rows])
            return len(rows), sum(live for _, live in rows)

        # In batches, because others wait for this thread too.
        latest, count = await self._run(last), 0
        while True:
            gone, live = await self._run(remove)
            count += live
            if gone < _BATCH:
                return count

    async def sweep(self) -> int:
        now = self._clock()
        return await self._run(lambda connection: _sweep(connection, now))

    async def size(self) -> CacheSize:
        return await self._run(_total)

    async def close(self) -> None:
        """Stop lookups. The database belongs to its owner."""
        await self._batcher.close()

    async def _run(self, function: Callable[[_Tables], Result]) -> Result:
        def with_tables(connection: sqlite3.Connection) -> Result:
            tables = _Tables(connection, self._name)
            # The database reopens its file after an error, and it may be another file by then.
            if self._opened is not connection:
                for statement in SCHEMA:
                    tables.execute(statement)
                (last,) = tables.execute("SELECT COALESCE(MAX(used), 0) FROM exact_entries").fetchone()
                self._use = max(self._use, last)
                self._opened = connection
            try:
                return function(tables)
            except sqlite3.Error:
                self._opened = None
                raise

        return await self._database.run(with_tables)

    # These run in the database's thread, in a transaction.

    def _select(self, connection: _Tables, cache_key: CacheKey, now: float) -> bytes | None:
        row = connection.execute(
            "SELECT answer FROM exact_entries WHERE key = ? AND tenant = ? AND expires > ?",
            (cache_key.digest, cache_key.tenant, now),
        ).fetchone()
        if row is None:
            return None
        self._use += 1
        self._uses[cache_key.digest] = self._use
        if len(self._uses) >= _MAX_USES:
            self._write_uses(connection)
        return row[0]

    def _write_uses(self, connection: _Tables) -> None:
        connection.executemany(
            "UPDATE exact_entries SET used = ? WHERE key = ?", [(use, key) for key, use in self._uses.items()]
        )
        self._uses.clear()

    def _make_room(self, connection: _Tables, tenant: str, size: int) -> None:
        while _total(connection, tenant).bytes + size > self.tenant_bytes:
            if not _drop_oldest(connection, "tenant = ?", (tenant,)):
                break
        while _total(connection).bytes + size > self.most_bytes:
            if not _drop_oldest(connection, "TRUE", ()):
                break


def _drop_oldest(connection: _Tables, where: str, values: tuple[Any, ...]) -> bool:
    """Evict one entry. False if there is none although the totals say so; then recount them."""
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


def _total(connection: _Tables, tenant: str | None = None) -> CacheSize:
    where, values = ("", ()) if tenant is None else (" WHERE tenant = ?", (tenant,))
    row = connection.execute(
        f"SELECT COALESCE(SUM(entries), 0), COALESCE(SUM(bytes), 0) FROM exact_totals{where}", values
    ).fetchone()
    return CacheSize(*row)


def _sweep(connection: _Tables, now: float) -> int:
    return connection.execute(
        "DELETE FROM exact_entries WHERE seq IN (SELECT seq FROM exact_entries WHERE expires <= ? LIMIT ?)",
        (now, _BATCH),
    ).rowcount
