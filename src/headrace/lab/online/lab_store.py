"""LabStore: bodies by name in the server's database, for what the lab must remember over a restart."""

from __future__ import annotations

import sqlite3
from typing import Final, Protocol

from headrace.gateway.database import Database

_SCHEMA: Final = "CREATE TABLE IF NOT EXISTS lab_state (name TEXT PRIMARY KEY, body BLOB NOT NULL) WITHOUT ROWID"


class LabStore(Protocol):
    async def load(self, name: str) -> bytes | None: ...

    async def save(self, name: str, body: bytes) -> None: ...


class SqliteLabStore:
    """ApiError where the storage does not work."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def load(self, name: str) -> bytes | None:
        def read(connection: sqlite3.Connection) -> bytes | None:
            connection.execute(_SCHEMA)
            row = connection.execute("SELECT body FROM lab_state WHERE name = ?", (name,)).fetchone()
            return None if row is None else bytes(row[0])

        return await self._database.run(read)

    async def save(self, name: str, body: bytes) -> None:
        def write(connection: sqlite3.Connection) -> None:
            connection.execute(_SCHEMA)
            connection.execute("INSERT OR REPLACE INTO lab_state VALUES (?, ?)", (name, body))

        await self._database.run(write)
