"""The SQL statements on the two tables of batches and their requests.

Decides which changes share a transaction: a result and its count, an output file and its link in the batch, an end and
the release of the input file. Each function runs in a transaction on the database's thread. Does not run batches.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from headrace.gateway.api_errors import ApiError, invalid_request
from headrace.gateway.database import ListPage, rows_of, select_page
from headrace.server.api.batches.batch_kind import OPENAI_BATCH, BatchKind
from headrace.server.api.batches.batch_lines import InputLine
from headrace.server.api.files import hold, release

_UNFINISHED: Final = ("validating", "in_progress", "finalizing", "cancelling")
_IN: Final = f"status IN ({', '.join(repr(status) for status in _UNFINISHED)})"
_PAGE: Final = 64  # requests or lines that are in memory at once


class BatchRecord(msgspec.Struct, frozen=True):
    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: str
    errors: list[dict[str, Any]]
    metadata: dict[str, str] | None
    output_file_id: str | None
    error_file_id: str | None
    times: Mapping[str, int | None]  # created_at, expires_at, ...: seconds since 1970
    total: int
    completed: int
    failed: int
    unrun: int = 0  # of the failed: never executed, because the batch was cancelled or expired
    output_seconds: int = 0  # that the output files are kept

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            **self.times,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }


_TIMES: Final = (
    "created_at",
    "in_progress_at",
    "expires_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)


class BatchRequest(msgspec.Struct):
    line: int
    custom_id: str
    start: int
    length: int
    tries: int = 0  # temporary rejections so far


class NewBatch(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    tenant: str
    key: str  # that created it
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: dict[str, str] | None
    output_seconds: int
    created_at: int
    seconds: int  # of the window
    total: int = 0  # requests, where that is known before the input file is read


def find(connection: sqlite3.Connection, id: str, tenant: str, kind: BatchKind) -> sqlite3.Row:
    rows: list[sqlite3.Row] = []
    if kind.is_id(id):
        rows = rows_of(connection, "SELECT * FROM batches WHERE id = ? AND tenant = ?", (id, tenant))
    if not rows:
        raise ApiError("No batch has this id.", kind="not_found_error", parameter="batch_id", code="batch_not_found")
    return rows[0]


def record(row: sqlite3.Row) -> BatchRecord:
    return BatchRecord(
        id=row["id"],
        tenant=row["tenant"],
        endpoint=row["endpoint"],
        input_file_id=row["input_file_id"],
        completion_window=row["completion_window"],
        status=row["status"],
        errors=json.loads(row["errors"] or "[]"),
        metadata=None if row["metadata"] is None else json.loads(row["metadata"]),
        output_file_id=row["output_file_id"],
        error_file_id=row["error_file_id"],
        times={name: row[name] for name in _TIMES},
        total=row["total"],
        completed=row["completed"],
        failed=row["failed"],
        unrun=row["unrun"],
        output_seconds=row["output_seconds"],
    )


def count_unfinished(connection: sqlite3.Connection, tenant: str) -> tuple[int, int]:
    """Return the number of unfinished batches: of all tenants, and of this one."""
    return connection.execute(
        f"SELECT COUNT(*), COUNT(*) FILTER (WHERE tenant = ?) FROM batches WHERE {_IN}", (tenant,)
    ).fetchone()


def insert(connection: sqlite3.Connection, new: NewBatch, kind: BatchKind, *, kept: int) -> sqlite3.Row:
    """Insert a batch, which holds its input file. Delete the oldest ended batches beyond `kept`."""
    try:
        file = hold(connection, new.input_file_id, new.tenant, new.created_at)
    except ApiError as error:
        error.parameter = "input_file_id"
        raise
    if file.purpose != "batch":
        raise invalid_request("The input file's purpose must be batch.", "input_file_id")
    connection.execute(
        "DELETE FROM batches WHERE seq IN "
        f"(SELECT seq FROM batches WHERE NOT {_IN} ORDER BY seq DESC LIMIT -1 OFFSET ?)",
        (kept,),
    )
    connection.execute(
        "INSERT INTO batches (id, tenant, key, endpoint, input_file_id, completion_window, status, metadata, "
        "output_seconds, created_at, expires_at, total) VALUES (?, ?, ?, ?, ?, ?, 'validating', ?, ?, ?, ?, ?)",
        (
            new.id,
            new.tenant,
            new.key,
            new.endpoint,
            new.input_file_id,
            new.completion_window,
            None if new.metadata is None else json.dumps(new.metadata),
            new.output_seconds,
            new.created_at,
            new.created_at + new.seconds,
            new.total,
        ),
    )
    return find(connection, new.id, new.tenant, kind)


def unfinished(connection: sqlite3.Connection) -> list[sqlite3.Row]:
    return rows_of(connection, f"SELECT * FROM batches WHERE {_IN} ORDER BY seq")


def page(
    connection: sqlite3.Connection,
    tenant: str,
    after: str | None,
    limit: int,
    kind: BatchKind = OPENAI_BATCH,
    *,
    before: str | None = None,
) -> ListPage[BatchRecord]:
    """Return a page, the newest first: those after (older than) an id, or the nearest before (newer than) one."""
    found = select_page(
        connection,
        "batches",
        tenant,
        after=after if before is None else before,
        limit=limit,
        order="desc" if before is None else "asc",
        where="id GLOB ?",
        values=(f"{kind.prefix}_*",),
    )
    rows = found.data if before is None else found.data[::-1]
    return ListPage([record(row) for row in rows], found.has_more)


def begin(connection: sqlite3.Connection, seq: int, lines: list[InputLine], now: int) -> None:
    """Insert the requests, once. Those of a batch that was cancelled meanwhile are not run, but each gets its line."""
    changed = connection.execute(
        "UPDATE batches SET status = IIF(status = 'validating', 'in_progress', status), in_progress_at = ?, total = ? "
        "WHERE seq = ? AND status IN ('validating', 'cancelling') AND in_progress_at IS NULL",
        (now, len(lines), seq),
    )
    if changed.rowcount:
        connection.executemany(
            "INSERT INTO batch_requests (batch, line, custom_id, start, length) VALUES (?, ?, ?, ?, ?)",
            ((seq, line.number, line.custom_id, line.start, line.length) for line in lines),
        )


def cancel(connection: sqlite3.Connection, id: str, tenant: str, now: int, kind: BatchKind) -> sqlite3.Row:
    row = find(connection, id, tenant, kind)
    if row["status"] == "cancelling":
        return row
    if row["status"] not in ("validating", "in_progress"):
        raise ApiError(
            f"The batch is {row['status']} and cannot be cancelled.", code="batch_not_cancellable", status=409
        )
    connection.execute(
        "UPDATE batches SET status = 'cancelling', ending = 'cancelled', cancelling_at = ? WHERE id = ?", (now, id)
    )
    return find(connection, id, tenant, kind)


def delete(connection: sqlite3.Connection, id: str, tenant: str, kind: BatchKind) -> BatchRecord:
    """Delete an ended batch and return what it was. Its files remain."""
    found = record(find(connection, id, tenant, kind))
    if found.status in _UNFINISHED:
        raise ApiError(
            f"The batch is {found.status} and cannot be deleted. Cancel it, or wait for its end.",
            code="batch_not_deletable",
            status=409,
        )
    connection.execute("DELETE FROM batches WHERE id = ?", (id,))
    return found


def pending(connection: sqlite3.Connection, seq: int, last: int) -> list[BatchRequest]:
    rows = connection.execute(
        "SELECT line, custom_id, start, length FROM batch_requests "
        "WHERE batch = ? AND line > ? AND status IS NULL ORDER BY line LIMIT ?",
        (seq, last, _PAGE),
    )
    return [BatchRequest(*row) for row in rows]


def save(connection: sqlite3.Connection, seq: int, line: int, status: int, answer: bytes) -> None:
    changed = connection.execute(
        "UPDATE batch_requests SET status = ?, answer = ? WHERE batch = ? AND line = ? AND status IS NULL",
        (status, answer, seq, line),
    )
    if changed.rowcount:
        column = "completed" if status < 400 else "failed"
        connection.execute(f"UPDATE batches SET {column} = {column} + 1 WHERE seq = ?", (seq,))


def decide(connection: sqlite3.Connection, seq: int, now: int) -> sqlite3.Row:
    """Decide how the batch ends, unless that is decided: expired if a request is left to run, else completed."""
    left = connection.execute("SELECT 1 FROM batch_requests WHERE batch = ? AND status IS NULL LIMIT 1", (seq,))
    connection.execute(
        "UPDATE batches SET status = 'finalizing', ending = ?, finalizing_at = ? WHERE seq = ? AND ending IS NULL",
        ("completed" if left.fetchone() is None else "expired", now, seq),
    )
    return rows_of(connection, "SELECT * FROM batches WHERE seq = ?", (seq,))[0]


def give_up(connection: sqlite3.Connection, seq: int, unrun_line: Callable[[str], bytes]) -> int:
    """Write error lines for up to 1,000 requests that will not run. Return their number."""
    rows = connection.execute(
        "SELECT line, custom_id FROM batch_requests WHERE batch = ? AND status IS NULL LIMIT 1000", (seq,)
    ).fetchall()
    connection.executemany(
        "UPDATE batch_requests SET status = 0, answer = ? WHERE batch = ? AND line = ?",
        ((unrun_line(custom_id), seq, line) for line, custom_id in rows),
    )
    connection.execute(
        "UPDATE batches SET failed = failed + ?, unrun = unrun + ? WHERE seq = ?", (len(rows), len(rows), seq)
    )
    return len(rows)


def lines(connection: sqlite3.Connection, seq: int, which: str, last: int) -> list[tuple[int, bytes]]:
    """Return the next lines of an output file after the request `last`, in order."""
    return connection.execute(
        f"SELECT line, answer FROM batch_requests WHERE batch = ? AND line > ? AND {which} ORDER BY line LIMIT ?",
        (seq, last, _PAGE),
    ).fetchall()


def link(connection: sqlite3.Connection, seq: int, column: str, id: str) -> None:
    connection.execute(f"UPDATE batches SET {column} = ? WHERE seq = ?", (id, seq))


def end(
    connection: sqlite3.Connection, seq: int, ending: str, now: int, errors: list[dict[str, Any]] | None = None
) -> None:
    changed = connection.execute(
        f"UPDATE batches SET status = ?, {ending}_at = ?, errors = ? WHERE seq = ? AND {_IN} RETURNING input_file_id",
        (ending, now, json.dumps(errors) if errors else None, seq),
    ).fetchall()
    for (input_file_id,) in changed:
        connection.execute("DELETE FROM batch_requests WHERE batch = ?", (seq,))
        release(connection, input_file_id)
