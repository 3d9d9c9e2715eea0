"""Stores conversations: lists of items that clients and responses add to.

The store does not interpret items, which are JSON with an id. Conversations expire some time after their last change.
The bytes of one are bounded, and so are the number and the bytes of all: beyond these bounds, the least recently
changed conversation of the tenant with the most is evicted. A conversation belongs to one tenant and does not exist
for any other.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from headrace.gateway.api_errors import ApiError, invalid_request
from headrace.gateway.database import Database, ListPage, check_listing, make_room, rows_of
from headrace.server.api.response_items import new_id
from headrace.server.api.response_store import encode

_PAGE_MOST: Final = 100


class Conversation(msgspec.Struct, frozen=True):
    id: str
    created_at: int  # seconds since 1970
    metadata: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "conversation",
            "created_at": self.created_at,
            "metadata": self.metadata,
        }


class ConversationStore:
    def __init__(
        self,
        db: Database,
        *,
        hours: float = 720.0,  # that a conversation is kept after its last change
        count: int = 10_000,
        total_bytes: int = 1024**3,  # 1 GiB
        own_bytes: int = 16 * 1024**2,  # 16 MiB, of one conversation
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._db = db
        self._seconds = hours * 3600
        self._count = count
        self._bytes = total_bytes
        self._own_bytes = own_bytes
        self._clock = clock

    async def create(self, tenant: str, items: Sequence[dict[str, Any]], metadata: Mapping[str, str]) -> Conversation:
        now = int(self._clock())
        made = Conversation(f"conv_{secrets.token_hex(16)}", now, dict(metadata))

        def create(connection: sqlite3.Connection) -> None:
            _sweep(connection, now)
            encoded = encode(made.metadata)
            self._make_room(connection, rows=1, size=len(encoded))
            connection.execute(
                "INSERT INTO conversations (id, tenant, created_at, expires_at, metadata, bytes) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (made.id, tenant, now, int(now + self._seconds), encoded, len(encoded)),
            )
            self._append(connection, made.id, tenant, items, now)

        await self._db.run(create)
        return made

    async def get(self, id: str, tenant: str) -> Conversation:
        now = self._clock()
        return _record(await self._db.run(lambda connection: _find(connection, id, tenant, now)))

    async def update(self, id: str, tenant: str, metadata: Mapping[str, str]) -> Conversation:
        """Replace the metadata."""
        now = self._clock()

        def update(connection: sqlite3.Connection) -> sqlite3.Row:
            row = _find(connection, id, tenant, now)
            encoded = encode(dict(metadata))
            connection.execute(
                "UPDATE conversations SET metadata = ?, bytes = bytes + ?, expires_at = ? WHERE seq = ?",
                (encoded, len(encoded) - len(row["metadata"]), int(now + self._seconds), row["seq"]),
            )
            return _find(connection, id, tenant, now)

        return _record(await self._db.run(update))

    async def delete(self, id: str, tenant: str) -> None:
        now = self._clock()

        def delete(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM conversations WHERE seq = ?", (_find(connection, id, tenant, now)["seq"],))

        await self._db.run(delete)

    async def append(self, id: str, tenant: str, items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Add items at the end and return them. An item whose id is taken in the conversation gets a new one."""
        now = self._clock()
        return await self._db.run(lambda connection: self._append(connection, id, tenant, items, now))

    async def first_items(self, id: str, tenant: str, most: int) -> list[dict[str, Any]]:
        """Return the items, at most so many of them."""
        now = self._clock()

        def select(connection: sqlite3.Connection) -> list[bytes]:
            seq = _find(connection, id, tenant, now)["seq"]
            rows = connection.execute(
                "SELECT item FROM conversation_items WHERE conversation = ? ORDER BY seq LIMIT ?", (seq, most)
            )
            return [item for (item,) in rows]

        return [json.loads(item) for item in await self._db.run(select)]

    async def items(
        self, id: str, tenant: str, *, after: str | None = None, limit: int = 20, order: str = "desc"
    ) -> ListPage[dict[str, Any]]:
        """Return a page of the items. `after` is the id of one of them."""
        checked = check_listing(limit=limit, most=_PAGE_MOST, order=order)
        now = self._clock()

        def select(connection: sqlite3.Connection) -> list[bytes]:
            seq = _find(connection, id, tenant, now)["seq"]
            sign, start = (">", 0) if checked == "asc" else ("<", 2**62)
            if after is not None:
                place = connection.execute(
                    "SELECT seq FROM conversation_items WHERE conversation = ? AND id = ?", (seq, after)
                ).fetchone()
                if place is None:
                    raise invalid_request("No item of the conversation has this id.", "after")
                start = place[0]
            rows = connection.execute(
                f"SELECT item FROM conversation_items WHERE conversation = ? AND seq {sign} ? "
                f"ORDER BY seq {checked} LIMIT ?",
                (seq, start, limit + 1),
            )
            return [item for (item,) in rows]

        found = [json.loads(item) for item in await self._db.run(select)]
        return ListPage(found[:limit], len(found) > limit)

    async def item(self, id: str, tenant: str, item_id: str) -> dict[str, Any]:
        now = self._clock()

        def select(connection: sqlite3.Connection) -> bytes:
            seq = _find(connection, id, tenant, now)["seq"]
            return _find_item(connection, seq, item_id)

        return json.loads(await self._db.run(select))

    async def delete_item(self, id: str, tenant: str, item_id: str) -> Conversation:
        now = self._clock()

        def delete(connection: sqlite3.Connection) -> sqlite3.Row:
            row = _find(connection, id, tenant, now)
            size = len(_find_item(connection, row["seq"], item_id))
            connection.execute(
                "DELETE FROM conversation_items WHERE conversation = ? AND id = ?", (row["seq"], item_id)
            )
            self._change(connection, row["seq"], -size, now)
            return row

        return _record(await self._db.run(delete))

    async def sweep(self) -> int:
        """Remove expired conversations and return their number."""
        now = self._clock()
        return await self._db.run(lambda connection: _sweep(connection, now))

    def _append(
        self, connection: sqlite3.Connection, id: str, tenant: str, items: Sequence[dict[str, Any]], now: float
    ) -> list[dict[str, Any]]:
        conversation = _find(connection, id, tenant, now)
        seq = conversation["seq"]
        added: list[dict[str, Any]] = []
        encoded: list[bytes] = []
        taken: set[str] = set()
        for item in items:
            if item["id"] in taken or _has_item(connection, seq, item["id"]):
                item = {**item, "id": new_id(item["id"].partition("_")[0] or "item")}
            taken.add(item["id"])
            added.append(item)
            encoded.append(encode(item))
        size = sum(map(len, encoded))
        if conversation["bytes"] + size > self._own_bytes:
            raise _too_large()
        self._change(connection, seq, 0, now)  # so that it is the last of its tenant to be evicted
        self._make_room(connection, rows=0, size=size)
        if not rows_of(connection, "SELECT 1 FROM conversations WHERE seq = ?", (seq,)):
            raise _too_large()
        connection.executemany(
            "INSERT INTO conversation_items (conversation, id, item) VALUES (?, ?, ?)",
            ((seq, item["id"], data) for item, data in zip(added, encoded, strict=True)),
        )
        self._change(connection, seq, size, now)
        return added

    def _change(self, connection: sqlite3.Connection, seq: int, size: int, now: float) -> None:
        connection.execute(
            "UPDATE conversations SET bytes = bytes + ?, expires_at = ? WHERE seq = ?",
            (size, int(now + self._seconds), seq),
        )

    def _make_room(self, connection: sqlite3.Connection, *, rows: int, size: int) -> None:
        bounds = {"count": self._count, "total": self._bytes}
        make_room(connection, "conversations", rows=rows, size=size, oldest="expires_at, seq", **bounds)


def _record(row: sqlite3.Row) -> Conversation:
    return Conversation(row["id"], row["created_at"], json.loads(row["metadata"]))


def _sweep(connection: sqlite3.Connection, now: float) -> int:
    return connection.execute("DELETE FROM conversations WHERE expires_at <= ?", (now,)).rowcount


def _find(connection: sqlite3.Connection, id: str, tenant: str, now: float) -> sqlite3.Row:
    rows = rows_of(
        connection, "SELECT * FROM conversations WHERE tenant = ? AND id = ? AND expires_at > ?", (tenant, id, now)
    )
    if not rows:
        raise ApiError(
            "No conversation has this id.",
            kind="not_found_error",
            parameter="conversation_id",
            code="conversation_not_found",
        )
    return rows[0]


def _too_large() -> ApiError:
    return ApiError(
        "The conversation is too large to be stored. Delete items, or begin a new conversation.",
        code="conversation_too_large",
        status=413,
    )


def _has_item(connection: sqlite3.Connection, seq: int, item_id: str) -> bool:
    return bool(
        rows_of(connection, "SELECT 1 FROM conversation_items WHERE conversation = ? AND id = ?", (seq, item_id))
    )


def _find_item(connection: sqlite3.Connection, seq: int, item_id: str) -> bytes:
    found = connection.execute(
        "SELECT item FROM conversation_items WHERE conversation = ? AND id = ?", (seq, item_id)
    ).fetchone()
    if found is None:
        raise ApiError(
            "No item of the conversation has this id.",
            kind="not_found_error",
            parameter="item_id",
            code="item_not_found",
        )
    return found[0]
