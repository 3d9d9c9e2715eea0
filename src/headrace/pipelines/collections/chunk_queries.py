"""Statements that search and read chunks. Only chunks of ready documents are found."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from typing import Final

from headrace.gateway.database import rows_of
from headrace.gateway.degradation.ladder.question_terms import STOP
from headrace.gateway.folded_words import words
from headrace.pipelines.collections.collection_schema import keyword_table
from headrace.pipelines.collections.hits import Filters
from headrace.pipelines.collections.metadata_filters import filter_condition
from headrace.pipelines.collections.records import StoredChunk

_TERMS: Final = 48  # words of a query that are looked up
_VARIABLES: Final = 500  # values in one statement


def query_words(query: str) -> list[str]:
    """Return the words of a query that are looked up, without function words if there are others."""
    found = list(dict.fromkeys(words(query)))
    return ([word for word in found if word not in STOP] or found)[:_TERMS]


def keyword_expression(query: str) -> str | None:
    """Return the full-text expression of a query: any of its words."""
    return " OR ".join(f'"{word}"' for word in query_words(query)) or None


def count_keyword_chunks(connection: sqlite3.Connection, collection: int) -> int:
    """Return about how many chunks have words: the span of their numbers, which takes no time to find."""
    table = keyword_table(collection)  # one query each: sqlite reads the whole table if both are asked for in one
    first, last = connection.execute(
        f"SELECT (SELECT MIN(rowid) FROM {table}), (SELECT MAX(rowid) FROM {table})"
    ).fetchone()
    return 0 if first is None else last - first + 1


def word_scores(
    connection: sqlite3.Connection, collection: int, word: str, among: Sequence[int] | None = None
) -> list[tuple[int, float]]:
    """Return all chunks that have a word, each with the word's part of its BM25 score. `among`: only these chunks."""
    table = keyword_table(collection)
    statement, values = f"SELECT rowid, -rank FROM {table} WHERE {table} MATCH ?", [f'"{word}"']
    if among is not None:
        # The plus keeps FTS5 from looking for each chunk by itself, which would count the word's chunks each time.
        statement += " AND +rowid IN (SELECT value FROM json_each(?))"
        values.append(json.dumps(list(among)))
    return connection.execute(statement, values).fetchall()


def search_keywords(
    connection: sqlite3.Connection,
    collection: int,
    query: str,
    count: int,
    filters: Filters | None,
) -> list[tuple[int, float]]:
    """Return chunks with BM25 scores, best first. See KeywordScores for large collections."""
    expression = keyword_expression(query)
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


def chunks_that_match(
    connection: sqlite3.Connection, collection: int, filters: Filters, *, embedded: bool = True
) -> list[int]:
    """Return the chunks whose documents match the filters. `embedded`: only those with vectors."""
    condition, values = filter_condition(filters)
    rows = connection.execute(
        "SELECT chunks.seq FROM documents JOIN chunks ON chunks.document = documents.seq "
        "WHERE documents.collection = ? AND documents.state = 'ready' AND chunks.repeats IS NULL "
        f"AND (chunks.embedded OR NOT ?) AND {condition}",
        (collection, embedded, *values),
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
