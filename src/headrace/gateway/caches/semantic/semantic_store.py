"""Stores the semantic cache's entries on disk, so that a restart does not begin with an empty cache.

Owns the table `semantic_entries`. A row belongs to one tenant; every statement names it. A failed write loses the row
and is counted, and never fails the request.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Collection, Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.gateway.api_errors import ApiError
from headrace.gateway.caches.semantic.semantic_entry import SemanticEntry, StoredAnswer
from headrace.gateway.caches.semantic.thresholds import Evidence
from headrace.gateway.database import Database, storage_unavailable
from headrace.observe.outage_log import OutageLog

log = logging.getLogger(__name__)

_OPERATOR_S: Final = 5.0  # timeout of an operator's request

SCHEMA: Final = (
    """
    CREATE TABLE IF NOT EXISTS semantic_entries (
        tenant TEXT NOT NULL,
        id INTEGER NOT NULL,
        embedder TEXT NOT NULL,
        digest BLOB NOT NULL,
        question TEXT NOT NULL,
        answer BLOB NOT NULL,  -- JSON
        vector BLOB NOT NULL,  -- 32-bit floats, little end first
        tags TEXT NOT NULL,  -- each between two line ends
        created REAL NOT NULL,  -- seconds since 1970
        expires REAL NOT NULL,
        hits INTEGER NOT NULL,
        evidence BLOB NOT NULL,
        PRIMARY KEY (tenant, id)
    ) WITHOUT ROWID
    """,
    "CREATE INDEX IF NOT EXISTS semantic_entries_that_expire ON semantic_entries (expires)",
)


class StoredEntry(msgspec.Struct, frozen=True):
    entry: SemanticEntry
    vector: NDArray[np.float32]


class SemanticStore:
    def __init__(self, db: Database, *, wait_s: float = 0.05) -> None:
        self._db = db
        self._wait_s = wait_s  # how long a caller waits; the write continues after that
        self._open: asyncio.Task[None] | None = None
        self._outage = OutageLog(log, "the semantic cache cannot write to its table", level=logging.WARNING)
        self.lost = 0  # writes that failed or did not end in time

    async def open(self) -> None:
        """Create the tables, once."""
        if self._open is None or (self._open.done() and self._open.exception() is not None):
            self._open = asyncio.ensure_future(self._db.run(_make))
        await asyncio.shield(self._open)

    async def load(self, tenant: str, embedder: str, *, now: float, most: int) -> tuple[list[StoredEntry], int]:
        """Return a tenant's newest entries that have not expired, oldest first, and the last id in use.

        Has no timeout: requests must not wait for it.
        """
        await self.open()
        return await self._db.run(lambda connection: _load(connection, tenant, embedder, now, most))

    async def save(self, tenant: str, embedder: str, rows: Sequence[StoredEntry]) -> bool:
        return await self._write(lambda connection: _save(connection, tenant, embedder, rows))

    async def note(self, tenant: str, entries: Sequence[SemanticEntry]) -> bool:
        """Update the hits and evidence of existing entries."""
        values = [(each.hits, each.evidence.packed(), tenant, each.id) for each in entries]

        def note(connection: sqlite3.Connection) -> None:
            connection.executemany(
                "UPDATE semantic_entries SET hits = ?, evidence = ? WHERE tenant = ? AND id = ?", values
            )

        return await self._write(note)

    async def remove(self, tenant: str, ids: Sequence[int]) -> bool:
        values = [(tenant, id) for id in ids]

        def remove(connection: sqlite3.Connection) -> None:
            connection.executemany("DELETE FROM semantic_entries WHERE tenant = ? AND id = ?", values)

        return await self._write(remove)

    async def invalidate(self, tenant: str | None, tag: str | None) -> None:
        """Remove the entries that match all given fields, loaded or not. ApiError if it fails in time."""
        where = [text for text, value in (("tenant = ?", tenant), ("instr(tags, ?) > 0", tag)) if value is not None]
        values = [value for value in (tenant, None if tag is None else _listed([tag])) if value is not None]

        def invalidate(connection: sqlite3.Connection) -> None:
            connection.execute(f"DELETE FROM semantic_entries WHERE {' AND '.join(where) or 'TRUE'}", values)

        try:
            async with asyncio.timeout(_OPERATOR_S):
                await self.open()
                await self._db.run(invalidate)
        except TimeoutError:
            raise storage_unavailable("The semantic cache's table did not answer in time. Try again.") from None

    async def sweep(self, now: float) -> bool:
        """Remove the expired entries of all tenants."""

        def sweep(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM semantic_entries WHERE expires <= ?", (now,))

        return await self._write(sweep)

    async def _write(self, function: Callable[[sqlite3.Connection], None]) -> bool:
        try:
            async with asyncio.timeout(self._wait_s):
                await self.open()
                await self._db.run(function)
        except (TimeoutError, ApiError, sqlite3.Error) as error:
            self.lost += 1
            self._outage.failed(error)
            return False
        self._outage.succeeded()
        return True


def _listed(tags: Collection[str]) -> str:
    return "".join(f"\n{tag}\n" for tag in sorted(tags))


def _make(connection: sqlite3.Connection) -> None:
    for statement in SCHEMA:
        connection.execute(statement)


def _load(
    connection: sqlite3.Connection, tenant: str, embedder: str, now: float, most: int
) -> tuple[list[StoredEntry], int]:
    (last,) = connection.execute(
        "SELECT COALESCE(MAX(id), 0) FROM semantic_entries WHERE tenant = ?", (tenant,)
    ).fetchone()
    rows = connection.execute(
        "SELECT id, digest, question, answer, vector, tags, created, expires, hits, evidence FROM semantic_entries "
        "WHERE tenant = ? AND embedder = ? AND expires > ? ORDER BY created DESC, id DESC LIMIT ?",
        (tenant, embedder, now, most),
    ).fetchall()
    found: list[StoredEntry] = []
    for id, digest, question, answer, vector, tags, created, expires, hits, evidence in rows[::-1]:
        try:
            entry = SemanticEntry(
                id=id,
                digest=digest,
                question=question,
                answer=msgspec.json.decode(answer, type=StoredAnswer),
                tags=frozenset(tags.split()),
                created=created,
                expires=expires,
                hits=hits,
                evidence=Evidence.unpacked(evidence),
            )
            found.append(StoredEntry(entry, np.frombuffer(vector, dtype="<f4").astype(np.float32)))
        except (msgspec.DecodeError, ValueError):
            continue  # skip a corrupt row
    return found, last


def _save(connection: sqlite3.Connection, tenant: str, embedder: str, rows: Sequence[StoredEntry]) -> None:
    connection.executemany(
        "INSERT OR REPLACE INTO semantic_entries "
        "(tenant, id, embedder, digest, question, answer, vector, tags, created, expires, hits, evidence) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [
            (
                tenant,
                row.entry.id,
                embedder,
                row.entry.digest,
                row.entry.question,
                msgspec.json.encode(row.entry.answer),
                row.vector.astype("<f4").tobytes(),
                _listed(row.entry.tags),
                row.entry.created,
                row.entry.expires,
                row.entry.hits,
                row.entry.evidence.packed(),
            )
            for row in rows
        ],
    )
