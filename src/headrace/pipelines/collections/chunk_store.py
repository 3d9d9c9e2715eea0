"""Statements that change documents and their chunks. Each function runs in one transaction, so that a process that is
killed loses nothing that it has reported.

    add ──▶ a pending document: chunks without vectors, duplicates marked ──▶ store_vectors ... ──▶ publish
    publish: the document takes the place of the ready one of its id, in one transaction

A chunk that nearly repeats another one is kept, points to it and is not indexed. If that one goes, the first of those
that repeat it is indexed in its place.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Final

import msgspec

from headrace.gateway.api_errors import ApiError, invalid_request
from headrace.gateway.database import rows_of
from headrace.gateway.folded_words import words
from headrace.pipelines.collections.collection_schema import keyword_table
from headrace.pipelines.collections.collection_store import document_of, metadata_text
from headrace.pipelines.collections.duplicate_chunks import BANDS, find_repeated, sketch_bands
from headrace.pipelines.collections.hits import Metadata
from headrace.pipelines.collections.records import CollectionRecord, DocumentRecord, PendingChunk

_CANDIDATES: Final = 32  # chunks that a new one is compared with


class NewChunk(msgspec.Struct, frozen=True):
    heading: str
    text: str
    digest: bytes
    bands: list[int]


class NewDocument(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    source: str
    title: str
    metadata: Metadata
    digest: bytes
    key: str
    bytes: int
    tokens: int
    created_at: int
    chunks: list[NewChunk]


class IndexChange(msgspec.Struct, frozen=True, kw_only=True):
    """What a transaction changed for searches."""

    added: Sequence[tuple[int, bytes]] = ()  # chunks with their vectors
    removed: Sequence[int] = ()  # chunks
    published: Sequence[str] = ()  # ids of documents that are ready now
    dropped: bool = False  # all vectors are gone: another encoder makes new ones
    worded: Sequence[int] = ()  # chunks that keyword searches find now


class AddedDocument(msgspec.Struct, frozen=True):
    record: DocumentRecord
    change: IndexChange
    unchanged: bool = False  # it was there already


class AddedDocuments(msgspec.Struct, frozen=True):
    documents: Sequence[AddedDocument]  # fewer than were given, if there is an error
    change: IndexChange
    error: ApiError | None = None  # why the next one was not added


def find_unchanged(connection: sqlite3.Connection, collection: int, id: str, digest: bytes) -> DocumentRecord | None:
    """Return the newest document of an id if it has this digest and has not failed."""
    rows = rows_of(
        connection,
        "SELECT * FROM documents WHERE collection = ? AND id = ? ORDER BY seq DESC LIMIT 1",
        (collection, id),
    )
    if not rows or rows[0]["digest"] != digest or rows[0]["state"] == "failed":
        return None
    return document_of(rows[0])


def add_documents(
    connection: sqlite3.Connection, collection: CollectionRecord, new: Sequence[NewDocument], *, most_chunks: int
) -> AddedDocuments:
    """Add documents up to the first that the tenant has no room for."""
    added: list[AddedDocument] = []
    error: ApiError | None = None
    for each in new:
        try:
            added.append(add_document(connection, collection, each, most_chunks=most_chunks))
        except ApiError as caught:  # nothing of it was written
            error = caught
            break
    return AddedDocuments(added, _joined([each.change for each in added]), error)


def add_document(
    connection: sqlite3.Connection, collection: CollectionRecord, new: NewDocument, *, most_chunks: int
) -> AddedDocument:
    """Write a pending document, and publish it if all of its vectors are known. ApiError if the tenant has too many
    chunks."""
    same = find_unchanged(connection, collection.seq, new.id, new.digest)
    if same is not None:
        return AddedDocument(same, IndexChange(), unchanged=True)
    (count,) = connection.execute(
        "SELECT COALESCE(SUM(chunks), 0) FROM collections WHERE tenant = ?", (collection.tenant,)
    ).fetchone()
    if count + len(new.chunks) > most_chunks:
        raise invalid_request(
            f"The document has {len(new.chunks)} chunks, and {count} are stored. Expected at most {most_chunks} "
            "together (collections.chunks).",
            "documents",
            code="too_many_values",
        )
    for (replaced,) in connection.execute(
        "SELECT seq FROM documents WHERE collection = ? AND id = ? AND state <> 'ready'", (collection.seq, new.id)
    ).fetchall():
        remove_document(connection, collection.seq, replaced)
    document = connection.execute(
        "INSERT INTO documents (collection, id, source, title, metadata, digest, state, key, chunks, tokens, bytes, "
        "created_at) VALUES (?, ?, ?, ?, ?, ?, 'pending', ?, ?, ?, ?, ?)",
        (
            collection.seq,
            new.id,
            new.source,
            new.title,
            metadata_text(new.metadata),
            new.digest,
            new.key,
            len(new.chunks),
            new.tokens,
            new.bytes,
            new.created_at,
        ),
    ).lastrowid
    assert document is not None
    duplicates = 0
    for place, chunk in enumerate(new.chunks):
        duplicates += _insert_chunk(connection, collection, document, new, place, chunk)
    connection.execute("UPDATE documents SET duplicates = ? WHERE seq = ?", (duplicates, document))
    change = publish_if_complete(connection, collection.seq, document)
    row = _document(connection, document)
    assert row is not None
    return AddedDocument(document_of(row), change)


def _insert_chunk(
    connection: sqlite3.Connection,
    collection: CollectionRecord,
    document: int,
    new: NewDocument,
    place: int,
    chunk: NewChunk,
) -> bool:
    """Return whether the chunk repeats another one."""
    repeated = _find_repeated(connection, collection.seq, document, new, chunk)
    seq = connection.execute(
        "INSERT INTO chunks (collection, document, place, heading, text, digest, repeats, embedded) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        # Without a model there is nothing to embed.
        (collection.seq, document, place, chunk.heading, chunk.text, chunk.digest, repeated, not collection.model),
    ).lastrowid
    assert seq is not None
    if repeated is not None:
        return True
    _write_bands(connection, collection.seq, seq, chunk.bands)
    if collection.model:
        _reuse_vector(connection, collection.seq, seq, chunk.heading, chunk.text, chunk.digest)
    return False


def _find_repeated(
    connection: sqlite3.Connection, collection: int, document: int, new: NewDocument, chunk: NewChunk
) -> int | None:
    """Look in this document, and in others with the same metadata: filters would tell documents with other metadata
    apart. The ready document of the same id is about to go."""
    candidates = connection.execute(
        "SELECT DISTINCT chunks.seq, chunks.text FROM chunk_bands "
        "JOIN chunks ON chunks.seq = chunk_bands.chunk JOIN documents ON documents.seq = chunks.document "
        f"WHERE chunk_bands.collection = ? AND chunk_bands.band IN ({', '.join('?' * BANDS)}) "
        "AND (documents.seq = ? OR (documents.id <> ? AND documents.metadata = ?)) LIMIT ?",
        (collection, *chunk.bands, document, new.id, metadata_text(new.metadata), _CANDIDATES),
    ).fetchall()
    found = find_repeated(chunk.text, [text for _, text in candidates])
    return None if found is None else candidates[found][0]


def _reuse_vector(
    connection: sqlite3.Connection, collection: int, seq: int, heading: str, text: str, digest: bytes
) -> bool:
    """Copy the vector of a chunk with the same text, such as the one of the document's version before."""
    copied = connection.execute(
        "INSERT INTO chunk_vectors SELECT ?, chunk_vectors.collection, vector FROM chunk_vectors "
        "JOIN chunks ON chunks.seq = chunk_vectors.chunk "
        "WHERE chunks.collection = ? AND chunks.digest = ? AND chunks.heading = ? AND chunks.text = ? LIMIT 1",
        (seq, collection, digest, heading, text),
    ).rowcount
    if copied:
        connection.execute("UPDATE chunks SET embedded = 1 WHERE seq = ?", (seq,))
    return bool(copied)


def _write_bands(connection: sqlite3.Connection, collection: int, seq: int, bands: Sequence[int]) -> None:
    connection.executemany(
        "INSERT OR IGNORE INTO chunk_bands VALUES (?, ?, ?)", [(collection, band, seq) for band in bands]
    )


def next_to_embed(connection: sqlite3.Connection, collection: int, limit: int) -> list[PendingChunk]:
    """Return the first chunks without vectors whose documents the same key has added."""
    rows = connection.execute(
        "SELECT chunks.seq, chunks.document, documents.key, chunks.heading, chunks.text FROM chunks "
        "JOIN documents ON documents.seq = chunks.document "
        "WHERE chunks.collection = ? AND NOT chunks.embedded AND chunks.repeats IS NULL "
        "ORDER BY chunks.seq LIMIT ?",
        (collection, limit),
    ).fetchall()
    chunks = [PendingChunk(*row) for row in rows]
    return [chunk for chunk in chunks if chunk.key == chunks[0].key]


def store_vectors(
    connection: sqlite3.Connection, collection: int, encoder: str, vectors: Sequence[tuple[int, bytes]]
) -> IndexChange:
    """Write vectors, and publish the documents that have all of theirs now.

    Nothing is written for chunks that are gone, or if the collection's vectors are another encoder's by now.
    """
    current = connection.execute("SELECT encoder FROM collections WHERE seq = ?", (collection,)).fetchone()
    if current is None or current[0] != encoder:
        return IndexChange()
    added: list[tuple[int, bytes]] = []
    pending: dict[int, None] = {}
    for seq, vector in vectors:
        found = connection.execute(
            "SELECT documents.seq, documents.state FROM chunks JOIN documents ON documents.seq = chunks.document "
            "WHERE chunks.seq = ? AND NOT chunks.embedded",
            (seq,),
        ).fetchone()
        if found is None:
            continue
        connection.execute("INSERT INTO chunk_vectors VALUES (?, ?, ?)", (seq, collection, vector))
        connection.execute("UPDATE chunks SET embedded = 1 WHERE seq = ?", (seq,))
        if found[1] == "ready":
            added.append((seq, vector))
        else:
            pending[found[0]] = None
    changes = [publish_if_complete(connection, collection, document) for document in pending]
    if added:
        _next_version(connection, collection)
    return _joined([IndexChange(added=added), *changes])


def publish_if_complete(connection: sqlite3.Connection, collection: int, document: int) -> IndexChange:
    """Make a pending document ready in place of the ready one of its id, once all of its vectors are there."""
    row = _document(connection, document)
    if row is None or row["state"] != "pending":
        return IndexChange()
    missing = connection.execute(
        "SELECT 1 FROM chunks WHERE document = ? AND NOT embedded AND repeats IS NULL LIMIT 1", (document,)
    ).fetchone()
    if missing is not None:
        return IndexChange()
    replaced = connection.execute(
        "SELECT seq FROM documents WHERE collection = ? AND id = ? AND state = 'ready'", (collection, row["id"])
    ).fetchone()
    change = IndexChange() if replaced is None else remove_document(connection, collection, replaced[0])
    connection.execute("UPDATE documents SET state = 'ready', error = '' WHERE seq = ?", (document,))
    worded = _index_keywords(connection, collection, document)
    _next_version(connection, collection)
    added = connection.execute(
        "SELECT seq, vector FROM chunks JOIN chunk_vectors ON chunk = seq WHERE document = ?", (document,)
    ).fetchall()
    return _joined([change, IndexChange(added=added, published=[row["id"]], worded=worded)])


def remove_document(connection: sqlite3.Connection, collection: int, document: int) -> IndexChange:
    """Remove a document with its chunks. Chunks of others that repeat one of them are indexed in their place."""
    removed = [seq for (seq,) in connection.execute("SELECT seq FROM chunks WHERE document = ?", (document,))]
    connection.execute(
        f"DELETE FROM {keyword_table(collection)} WHERE rowid IN (SELECT seq FROM chunks WHERE document = ?)",
        (document,),
    )
    repeating = rows_of(
        connection,
        "SELECT chunks.seq, repeats, heading, text, chunks.digest, document, state FROM chunks "
        "JOIN documents ON documents.seq = chunks.document WHERE repeats IN (SELECT seq FROM chunks "
        "WHERE document = ?) AND document <> ? ORDER BY chunks.seq",
        (document, document),
    )
    successors: dict[int, int] = {}
    added: list[tuple[int, bytes]] = []
    worded: list[int] = []
    for row in repeating:
        successor = successors.setdefault(row["repeats"], row["seq"])
        if successor != row["seq"]:
            connection.execute("UPDATE chunks SET repeats = ? WHERE seq = ?", (successor, row["seq"]))
            continue
        connection.execute("UPDATE chunks SET repeats = NULL WHERE seq = ?", (row["seq"],))
        connection.execute("UPDATE documents SET duplicates = duplicates - 1 WHERE seq = ?", (row["document"],))
        _write_bands(connection, collection, row["seq"], sketch_bands(row["text"]))
        reused = _reuse_vector(connection, collection, row["seq"], row["heading"], row["text"], row["digest"])
        if row["state"] == "ready":
            _write_keywords(connection, collection, [(row["seq"], row["heading"], row["text"])])
            worded.append(row["seq"])
            if reused:
                added += connection.execute(
                    "SELECT chunk, vector FROM chunk_vectors WHERE chunk = ?", (row["seq"],)
                ).fetchall()
    connection.execute("DELETE FROM documents WHERE seq = ?", (document,))
    _next_version(connection, collection)
    return IndexChange(added=added, removed=removed, worded=worded)


def remove_all_of(connection: sqlite3.Connection, collection: int, id: str) -> IndexChange:
    """Remove all rows of a document's id."""
    rows = connection.execute("SELECT seq FROM documents WHERE collection = ? AND id = ?", (collection, id)).fetchall()
    return _joined([remove_document(connection, collection, seq) for (seq,) in rows])


def fail_document(connection: sqlite3.Connection, collection: int, document: int, reason: str) -> IndexChange:
    """Keep a pending document's record with an error; its chunks go."""
    row = _document(connection, document)
    if row is None or row["state"] != "pending":
        return IndexChange()
    change = remove_document(connection, collection, document)
    fields = [name for name in row.keys() if name != "seq"]  # noqa: SIM118 - a Row iterates over values
    values = {**{name: row[name] for name in fields}, "state": "failed", "error": reason[:1000], "chunks": 0}
    connection.execute(
        f"INSERT INTO documents ({', '.join(fields)}) VALUES ({', '.join('?' * len(fields))})",
        [values[name] for name in fields],
    )
    return change


def begin_encoder(connection: sqlite3.Connection, collection: int, encoder: str) -> bool:
    """Say whose vectors come next. Return whether that is another encoder than before: its vectors are dropped, and all
    chunks will be embedded again. They are found by keywords until then."""
    current = connection.execute("SELECT encoder FROM collections WHERE seq = ?", (collection,)).fetchone()
    if current is None or current[0] == encoder:
        return False
    connection.execute("DELETE FROM chunk_vectors WHERE collection = ?", (collection,))
    connection.execute("UPDATE chunks SET embedded = 0 WHERE collection = ? AND embedded", (collection,))
    connection.execute("UPDATE collections SET encoder = ? WHERE seq = ?", (encoder, collection))
    _next_version(connection, collection)
    return True


def _index_keywords(connection: sqlite3.Connection, collection: int, document: int) -> list[int]:
    """Return the chunks."""
    rows = connection.execute(
        "SELECT seq, heading, text FROM chunks WHERE document = ? AND repeats IS NULL", (document,)
    ).fetchall()
    _write_keywords(connection, collection, rows)
    return [seq for seq, _, _ in rows]


def _write_keywords(connection: sqlite3.Connection, collection: int, rows: Sequence[tuple[int, str, str]]) -> None:
    connection.executemany(
        f"INSERT INTO {keyword_table(collection)} (rowid, heading, text) VALUES (?, ?, ?)",
        [(seq, " ".join(words(heading)), " ".join(words(text))) for seq, heading, text in rows],
    )


def _document(connection: sqlite3.Connection, document: int) -> sqlite3.Row | None:
    rows = rows_of(connection, "SELECT * FROM documents WHERE seq = ?", (document,))
    return rows[0] if rows else None


def _next_version(connection: sqlite3.Connection, collection: int) -> None:
    connection.execute("UPDATE collections SET version = version + 1 WHERE seq = ?", (collection,))


def _joined(changes: Sequence[IndexChange]) -> IndexChange:
    """Join changes. A chunk that one adds and another removes is gone."""
    removed = [seq for change in changes for seq in change.removed]
    gone = set(removed)
    return IndexChange(
        added=[each for change in changes for each in change.added if each[0] not in gone],
        removed=removed,
        published=[id for change in changes for id in change.published],
        worded=[seq for change in changes for seq in change.worded if seq not in gone],
    )
