"""Stores responses for /v1/responses with `store: true`, so that a later request can continue them.

Each has the conversation (items) and the answer (body) as JSON that the store does not interpret. Responses expire, and
their number and bytes are bounded: beyond a bound, the oldest response of the tenant with the most is evicted, so that
one tenant cannot evict another's. A response belongs to one tenant and does not exist for any other.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from headrace.gateway.api_errors import ApiError, invalid_request
from headrace.gateway.database import Database, ListPage, check_listing, make_room, rows_of

_LIST_MOST: Final = 100


class StoredResponse(msgspec.Struct, frozen=True):
    id: str
    tenant: str
    created_at: int  # seconds since 1970
    expires_at: int
    items: list[Any]  # the conversation up to this answer
    body: dict[str, Any]  # as the client got it


class ResponseStore:
    def __init__(
        self,
        db: Database,
        *,
        hours: float = 720.0,  # that a response is kept
        count: int = 10_000,
        total_bytes: int = 1024**3,  # 1 GiB
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._db = db
        self._seconds = hours * 3600
        self._count = count
        self._bytes = total_bytes
        self._clock = clock

    async def put(
        self, id: str, tenant: str, items: list[Any], body: dict[str, Any], *, unfinished: bool = False
    ) -> int:
        """Store a response, replacing the tenant's one with this id. Return its bytes.

        Do not change `items` and `body` meanwhile.

        `unfinished`: it runs in the background, and `finish` follows.
        """
        now = self._clock()

        def put(connection: sqlite3.Connection) -> int:
            encoded = encode(items), encode(body)
            size = sum(map(len, encoded))
            if size > self._bytes:
                raise ApiError(
                    "The response is too large to be stored. Set `store: false`.", code="response_too_large", status=413
                )
            _sweep(connection, now)
            connection.execute("DELETE FROM responses WHERE tenant = ? AND id = ?", (tenant, id))
            self._make_room(connection, rows=1, size=size)
            connection.execute(
                "INSERT INTO responses (id, tenant, created_at, expires_at, bytes, items, body, unfinished) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (id, tenant, int(now), int(now + self._seconds), size, *encoded, unfinished),
            )
            return size

        return await self._db.run(put)

    async def finish(self, id: str, tenant: str, body: dict[str, Any]) -> None:
        """Replace the body of an unfinished response. Waits while storage fails. ApiError if it was deleted."""

        def finish(connection: sqlite3.Connection) -> None:
            encoded = encode(body)
            changed = connection.execute(
                "UPDATE responses SET body = ?, bytes = LENGTH(items) + ?, unfinished = 0 "
                "WHERE tenant = ? AND id = ? AND unfinished",
                (encoded, len(encoded), tenant, id),
            )
            if changed.rowcount == 0:
                raise _unknown()
            self._make_room(connection)

        await self._db.retry(finish)

    async def fail_unfinished(self, error: dict[str, Any], is_running: Callable[[str, str], bool]) -> int:
        """End the unfinished responses that do not run, by tenant and id, and return their number.

        Waits while storage fails. `is_running` is called in the database's thread.
        """

        def fail(connection: sqlite3.Connection) -> int:
            rows = rows_of(connection, "SELECT seq, tenant, id, body FROM responses WHERE unfinished")
            left = [row for row in rows if not is_running(row["tenant"], row["id"])]
            for row in left:
                body = {**json.loads(row["body"]), "status": "failed", "error": error}
                connection.execute(
                    "UPDATE responses SET body = ?, unfinished = 0 WHERE seq = ?", (encode(body), row["seq"])
                )
            return len(left)

        return await self._db.retry(fail)

    async def get(self, id: str, tenant: str) -> StoredResponse:
        now = self._clock()
        return await self._db.run(lambda connection: _find(connection, id, tenant, now))

    async def items(
        self, id: str, tenant: str, *, after: str | None = None, limit: int = 20, order: str = "desc"
    ) -> ListPage[Any]:
        """Return a page of a response's items. `after` is the id of one of them."""
        checked = check_listing(limit=limit, most=_LIST_MOST, order=order)
        items = (await self.get(id, tenant)).items
        if checked == "desc":
            items = items[::-1]
        if after is not None:
            places = [place for place, item in enumerate(items) if isinstance(item, dict) and item.get("id") == after]  # pyright: ignore[reportUnknownMemberType]
            if not places:
                raise invalid_request("No item of the response has this id.", "after")
            items = items[places[0] + 1 :]
        return ListPage(items[:limit], len(items) > limit)

    async def delete(self, id: str, tenant: str) -> None:
        now = self._clock()

        def delete(connection: sqlite3.Connection) -> None:
            changed = connection.execute(
                "DELETE FROM responses WHERE tenant = ? AND id = ? AND expires_at > ?", (tenant, id, now)
            )
            if changed.rowcount == 0:
                raise _unknown()

        await self._db.run(delete)

    async def sweep(self) -> int:
        """Remove expired responses and return their number."""
        now = self._clock()
        return await self._db.run(lambda connection: _sweep(connection, now))

    def _make_room(self, connection: sqlite3.Connection, *, rows: int = 0, size: int = 0) -> None:
        make_room(connection, "responses", rows=rows, size=size, count=self._count, total=self._bytes)


def encode(value: Any) -> bytes:
    """Encode as JSON, including strings with lone surrogates, which some clients send."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.dumps(value).encode()


def _sweep(connection: sqlite3.Connection, now: float) -> int:
    return connection.execute("DELETE FROM responses WHERE expires_at <= ?", (now,)).rowcount


def _find(connection: sqlite3.Connection, id: str, tenant: str, now: float) -> StoredResponse:
    rows = rows_of(
        connection, "SELECT * FROM responses WHERE tenant = ? AND id = ? AND expires_at > ?", (tenant, id, now)
    )
    if not rows:
        raise _unknown()
    row = rows[0]
    return StoredResponse(
        row["id"],
        row["tenant"],
        row["created_at"],
        row["expires_at"],
        json.loads(row["items"]),
        json.loads(row["body"]),
    )


def _unknown() -> ApiError:
    return ApiError(
        "No stored response has this id.",
        kind="not_found_error",
        parameter="response_id",
        code="response_not_found",
    )
