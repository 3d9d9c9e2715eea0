"""Statements that search and read chunks. Only chunks of ready documents are found."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Final

from headrace.gateway.database import rows_of
from headrace.gateway.degradation.ladder.question_terms import STOP
from headrace.gateway.folded_words import words
from headrace.pipelines.collections.collection_schema import keyword_table
from headrace.pipelines.collections.hits import Filters
from headrace.pipelines.collections.metadata_filters import filter_condition
from headrace.pipelines.collections.records import StoredChunk

_SAMPLE: Final = 500  # chunks whose words are counted
_FREQUENT: Final = 0.4  # of the chunks
_TERMS: Final = 48  # words of a query that are looked up
_VARIABLES: Final = 500  # values in one statement


def keyword_expression(query: str, frequent: Collection[str] = ()) -> str | None:
    """Return the full-text expression of a query: any of its words, without function words and the collection's most
    frequent ones if it has others."""
    found = list(dict.fromkeys(words(query)))
    told = [word for word in found if word not in STOP] or found
    rare = [word for word in told if word not in frequent] or told
    return " OR ".join(f'"{word}"' for word in rare[:_TERMS]) or None


def count_keyword_chunks(connection: sqlite3.Connection, collection: int) -> int:
    """Return about how many chunks have words: the span of their numbers, which takes no time to find."""
    first, last = connection.execute(f"SELECT MIN(rowid), MAX(rowid) FROM {keyword_table(collection)}").fetchone()
    return 0 if first is None else last - first + 1


def frequent_words(connection: sqlite3.Connection, collection: int) -> frozenset[str]:
    """Return the words that more than two fifths of the chunks have, by a sample.

    FTS5 scores every chunk that has any word of a query. These words cost nearly all of that time, and add least to a
    score.
    """
    table = keyword_table(collection)
    first, last = connection.execute(f"SELECT MIN(rowid), MAX(rowid) FROM {table}").fetchone()
    if first is None:
        return frozenset()
    step = max(1, (last - first) // _SAMPLE)
    counts: Counter[str] = Counter()
    sampled = 0
    for rowid in range(first, last + 1, step):
        row = connection.execute(f"SELECT heading, text FROM {table} WHERE rowid = ?", (rowid,)).fetchone()
        if row is not None:
            sampled += 1
            counts.update(set(f"{row[0]} {row[1]}".split()))
    return frozenset(word for word, chunks in counts.items() if chunks > _FREQUENT * sampled)


def search_keywords(
    connection: sqlite3.Connection,
    collection: int,
    query: str,
    count: int,
    filters: Filters | None,
    frequent: Collection[str] = (),
) -> list[tuple[int, float]]:
    """Return chunks with BM25 scores, best first. `frequent`: words that are left out if there are others."""
    expression = keyword_expression(query, frequent)
    if expression is None:
        return []
    table = keyword_table(collection)
    tables, condition, values = table, "TRUE", []
    if filters:
        condition, values = filter_condition(filters)
        tables = f"{table} JOIN chunks ON chunks.seq = {table}.rowid JOIN documents ON documents.seq = document"
    statement = f"SELECT {table}.rowid, -rank FROM {tables} WHERE {table} MATCH ? AND {condition} ORDER BY rank LIMIT ?"
    rows = connection.execute(statement, (expression, *values, count))
    return [(seq, score) for seq, score in rows]


def chunks_that_match(connection: sqlite3.Connection, collection: int, filters: Filters) -> list[int]:
    """Return the chunks with vectors whose documents match the filters."""
    condition, values = filter_condition(filters)
    rows = connection.execute(
        "SELECT chunks.seq FROM documents JOIN chunks ON chunks.document = documents.seq "
        "WHERE documents.collection = ? AND documents.state = 'ready' AND chunks.embedded AND chunks.repeats IS NULL "
        f"AND {condition}",
        (collection, *values),
    )
    return [seq for (seq,) in rows]


def read_chunks(connection: sqlite3.Connection, collection: int, seqs: Sequence[int]) -> dict[int, StoredChunk]:
    """Return the chunks that are still there."""
    found: dict[int, StoredChunk] = {}
    for start in range(0, len(seqs), _VARIABLES):
        some = seqs[start : start + _VARIABLES]
        rows = rows_of(
            connection,
            "SELECT chunks.seq, documents.id, place, heading, text, source, title, metadata FROM chunks "
            "JOIN documents ON documents.seq = chunks.document "
            f"WHERE chunks.seq IN ({', '.join('?' * len(some))}) AND chunks.collection = ? AND state = 'ready'",
            (*some, collection),
        )
        for row in rows:
            found[row["seq"]] = StoredChunk(
                row["seq"],
                row["id"],
                row["place"],
                row["heading"],
                row["text"],
                row["source"],
                json.loads(row["metadata"]),
            )
    return found


def read_vectors(connection: sqlite3.Connection, collection: int, after: int, limit: int) -> list[tuple[int, bytes]]:
    """Return a slice of the vectors of ready documents, in the order of their chunks."""
    return connection.execute(
        "SELECT chunk, vector FROM chunk_vectors JOIN chunks ON chunks.seq = chunk "
        "JOIN documents ON documents.seq = chunks.document "
        "WHERE chunk_vectors.collection = ? AND chunk > ? AND documents.state = 'ready' ORDER BY chunk LIMIT ?",
        (collection, after, limit),
    ).fetchall()


def read_ids(connection: sqlite3.Connection, collection: int) -> list[int]:
    """Return the chunks of ready documents that have vectors."""
    rows = connection.execute(
        "SELECT chunk FROM chunk_vectors JOIN chunks ON chunks.seq = chunk "
        "JOIN documents ON documents.seq = chunks.document "
        "WHERE chunk_vectors.collection = ? AND documents.state = 'ready'",
        (collection,),
    )
    return [seq for (seq,) in rows]


def read_vectors_of(connection: sqlite3.Connection, seqs: Sequence[int]) -> list[tuple[int, bytes]]:
    return [
        row
        for start in range(0, len(seqs), _VARIABLES)
        for row in connection.execute(
            "SELECT chunk, vector FROM chunk_vectors WHERE chunk IN "
            f"({', '.join('?' * len(seqs[start : start + _VARIABLES]))})",
            seqs[start : start + _VARIABLES],
        )
    ]
