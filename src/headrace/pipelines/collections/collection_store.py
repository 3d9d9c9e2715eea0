"""Statements about collections and their documents. Each function runs in a transaction of the database's thread."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from headrace.gateway.api_errors import ApiError, invalid_request
from headrace.gateway.database import ListOrder, ListPage, rows_of, select_page
from headrace.pipelines.collections.collection_schema import create_keyword_table, keyword_table
from headrace.pipelines.collections.hits import Metadata
from headrace.pipelines.collections.records import CollectionRecord, CollectionStats, DocumentRecord

_SLICE: Final = 500  # chunks that one transaction of a deletion removes


def metadata_text(metadata: Metadata) -> str:
    """Write metadata so that equal metadata is equal text."""
    return json.dumps(metadata, sort_keys=True, ensure_ascii=False)


def collection_of(row: sqlite3.Row) -> CollectionRecord:
    return CollectionRecord(
        seq=row["seq"],
        tenant=row["tenant"],
        name=row["id"],
        uid=row["uid"],
        model=row["model"],
        encoder=row["encoder"],
        chunk_tokens=row["chunk_tokens"],
        overlap_tokens=row["overlap_tokens"],
        recall=row["recall"],
        metadata=json.loads(row["metadata"]),
        version=row["version"],
        created_at=row["created_at"],
    )


def document_of(row: sqlite3.Row) -> DocumentRecord:
    fields = {name: row[name] for name in DocumentRecord.__struct_fields__ if name != "metadata"}
    return DocumentRecord(**fields, metadata=json.loads(row["metadata"]))


def create_collection(connection: sqlite3.Connection, new: CollectionRecord, *, most: int) -> CollectionRecord:
    """Create a collection. ApiError if the tenant has one of this name, or as many as it may have."""
    (there,) = connection.execute(
        "SELECT COUNT(*) FROM collections WHERE tenant = ? AND NOT deleted", (new.tenant,)
    ).fetchone()
    if there >= most:
        raise invalid_request(
            f"There are {there} collections. Expected at most {most}. Delete one, or raise collections.collections.",
            code="too_many_values",
        )
    try:
        seq = connection.execute(
            "INSERT INTO collections "
            "(id, tenant, uid, model, chunk_tokens, overlap_tokens, recall, metadata, created_at) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                new.name,
                new.tenant,
                new.uid,
                new.model,
                new.chunk_tokens,
                new.overlap_tokens,
                new.recall,
                metadata_text(new.metadata),
                new.created_at,
            ),
        ).lastrowid
    except sqlite3.IntegrityError:
        raise ApiError(
            f"The collection '{new.name}' exists already.", parameter="name", code="collection_exists", status=409
        ) from None
    assert seq is not None
    connection.execute(create_keyword_table(seq))
    return msgspec.structs.replace(new, seq=seq)


def find_collection(connection: sqlite3.Connection, tenant: str, name: str) -> CollectionRecord:
    """Return a collection of the tenant. ApiError if it has none of this name."""
    rows = rows_of(connection, "SELECT * FROM collections WHERE tenant = ? AND id = ? AND NOT deleted", (tenant, name))
    if not rows:
        raise ApiError(
            f"Unknown collection '{name[:64]}'. Create it with POST /v1/collections.",
            kind="not_found_error",
            parameter="collection",
            code="collection_not_found",
        )
    return collection_of(rows[0])


def list_collections(
    connection: sqlite3.Connection, tenant: str, *, after: str | None, limit: int, order: ListOrder
) -> ListPage[CollectionRecord]:
    page = select_page(connection, "collections", tenant, after=after, limit=limit, order=order, where="NOT deleted")
    return ListPage([collection_of(row) for row in page.data], page.has_more)


def collections_with_vectors(connection: sqlite3.Connection) -> list[CollectionRecord]:
    rows = rows_of(connection, "SELECT * FROM collections WHERE NOT deleted AND encoder <> ''")
    return [collection_of(row) for row in rows]


def collection_stats(connection: sqlite3.Connection, collection: int) -> CollectionStats:
    states: dict[str, int] = dict(
        connection.execute("SELECT state, COUNT(*) FROM documents WHERE collection = ? GROUP BY state", (collection,))
    )
    chunks, duplicates, tokens = connection.execute(
        "SELECT COALESCE(SUM(chunks), 0), COALESCE(SUM(duplicates), 0), COALESCE(SUM(tokens), 0) FROM documents "
        "WHERE collection = ? AND state <> 'failed'",
        (collection,),
    ).fetchone()
    (embedded,) = connection.execute(
        "SELECT COUNT(*) FROM chunk_vectors WHERE collection = ?", (collection,)
    ).fetchone()
    return CollectionStats(
        ready=states.get("ready", 0),
        pending=states.get("pending", 0),
        failed=states.get("failed", 0),
        chunks=chunks - duplicates,
        embedded=embedded,
        duplicates=duplicates,
        tokens=tokens,
    )


def mark_deleted(connection: sqlite3.Connection, collection: int) -> None:
    """Hide a collection at once. `delete_slice` removes its rows."""
    connection.execute("UPDATE collections SET deleted = 1, id = seq || '\n' WHERE seq = ?", (collection,))


def delete_slice(connection: sqlite3.Connection) -> bool:
    """Remove some rows of deleted collections. Return whether there is more to remove."""
    found = connection.execute("SELECT seq FROM collections WHERE deleted LIMIT 1").fetchone()
    if found is None:
        return False
    (collection,) = found
    gone = connection.execute(
        "DELETE FROM chunks WHERE seq IN (SELECT seq FROM chunks WHERE collection = ? LIMIT ?)", (collection, _SLICE)
    ).rowcount
    if gone < _SLICE:
        connection.execute("DELETE FROM documents WHERE collection = ?", (collection,))
        connection.execute(f"DROP TABLE IF EXISTS {keyword_table(collection)}")
        connection.execute("DELETE FROM collections WHERE seq = ?", (collection,))
    return True


def find_document(connection: sqlite3.Connection, collection: int, id: str) -> DocumentRecord:
    """Return a document: the row that is newest. ApiError if there is none."""
    rows = rows_of(
        connection,
        "SELECT * FROM documents WHERE collection = ? AND id = ? ORDER BY seq DESC LIMIT 1",
        (collection, id),
    )
    if not rows:
        raise ApiError(
            f"Unknown document '{id[:200]}'.",
            kind="not_found_error",
            parameter="document",
            code="document_not_found",
        )
    return document_of(rows[0])


def list_documents(
    connection: sqlite3.Connection,
    collection: int,
    *,
    after: str | None,
    limit: int,
    order: ListOrder,
    states: Sequence[str],
) -> ListPage[DocumentRecord]:
    sign, start = (">", 0) if order == "asc" else ("<", 2**62)
    if after is not None:
        start = find_document(connection, collection, after).seq
    marks = ", ".join("?" * len(states))
    values: tuple[Any, ...] = (collection, start, *states, limit + 1)
    rows = rows_of(
        connection,
        f"SELECT * FROM documents WHERE collection = ? AND seq {sign} ? AND state IN ({marks}) "
        f"ORDER BY seq {order} LIMIT ?",
        values,
    )
    return ListPage([document_of(row) for row in rows[:limit]], len(rows) > limit)
