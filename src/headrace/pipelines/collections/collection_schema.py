"""The tables of `collections.sqlite`. Each collection has a keyword table of its own, so that neither its words nor
their statistics mix with those of another tenant."""

from __future__ import annotations

from typing import Final

STEPS: Final = (
    """
    CREATE TABLE collections (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL,  -- its name; of a deleted one, its seq
        tenant TEXT NOT NULL,
        uid TEXT NOT NULL,  -- random, for caches that several servers share
        model TEXT NOT NULL,
        encoder TEXT NOT NULL DEFAULT '',
        chunk_tokens INTEGER NOT NULL,
        overlap_tokens INTEGER NOT NULL,
        recall TEXT NOT NULL,
        metadata TEXT NOT NULL,  -- JSON
        version INTEGER NOT NULL DEFAULT 0,
        created_at INTEGER NOT NULL,
        deleted INTEGER NOT NULL DEFAULT 0,  -- its rows are being removed
        UNIQUE (tenant, id)
    );

    -- At most one row of an id is ready; another one may be pending or failed, until it takes the ready one's place.
    CREATE TABLE documents (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        collection INTEGER NOT NULL REFERENCES collections (seq) ON DELETE CASCADE,
        id TEXT NOT NULL,
        source TEXT NOT NULL,
        title TEXT NOT NULL,
        metadata TEXT NOT NULL,  -- JSON, keys in order
        digest BLOB NOT NULL,
        state TEXT NOT NULL,
        error TEXT NOT NULL DEFAULT '',
        key TEXT NOT NULL,
        chunks INTEGER NOT NULL,
        duplicates INTEGER NOT NULL DEFAULT 0,
        tokens INTEGER NOT NULL,
        bytes INTEGER NOT NULL,
        created_at INTEGER NOT NULL,
        UNIQUE (collection, id, state)
    );
    CREATE INDEX documents_pending ON documents (collection, seq) WHERE state = 'pending';

    CREATE TABLE chunks (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        collection INTEGER NOT NULL,
        document INTEGER NOT NULL REFERENCES documents (seq) ON DELETE CASCADE,
        place INTEGER NOT NULL,
        heading TEXT NOT NULL,
        text TEXT NOT NULL,
        digest BLOB NOT NULL,  -- of the words of the text
        repeats INTEGER,  -- the chunk that has the same text, and is indexed in place of this one
        embedded INTEGER NOT NULL DEFAULT 0
    );
    CREATE INDEX chunks_of_document ON chunks (document, place);
    CREATE INDEX chunks_to_embed ON chunks (collection, seq) WHERE NOT embedded AND repeats IS NULL;
    CREATE INDEX chunks_by_text ON chunks (collection, digest);
    CREATE INDEX chunks_that_repeat ON chunks (repeats) WHERE repeats IS NOT NULL;

    CREATE TABLE chunk_vectors (
        chunk INTEGER PRIMARY KEY REFERENCES chunks (seq) ON DELETE CASCADE,
        collection INTEGER NOT NULL,
        vector BLOB NOT NULL  -- little-endian 32-bit floats of length 1
    );
    CREATE INDEX chunk_vectors_of_collection ON chunk_vectors (collection, chunk);

    CREATE TABLE chunk_bands (
        collection INTEGER NOT NULL,
        band INTEGER NOT NULL,
        chunk INTEGER NOT NULL REFERENCES chunks (seq) ON DELETE CASCADE,
        PRIMARY KEY (collection, band, chunk)
    ) WITHOUT ROWID;
    CREATE INDEX chunk_bands_of_chunk ON chunk_bands (chunk);
    """,
    # A collection knows how many chunks its documents have, so that adding one does not count those of all others.
    """
    ALTER TABLE collections ADD COLUMN chunks INTEGER NOT NULL DEFAULT 0;
    UPDATE collections SET chunks =
        (SELECT COALESCE(SUM(documents.chunks), 0) FROM documents WHERE documents.collection = collections.seq);
    CREATE TRIGGER document_counted AFTER INSERT ON documents BEGIN
        UPDATE collections SET chunks = chunks + NEW.chunks WHERE seq = NEW.collection;
    END;
    CREATE TRIGGER document_uncounted AFTER DELETE ON documents BEGIN
        UPDATE collections SET chunks = chunks - OLD.chunks WHERE seq = OLD.collection;
    END;
    """,
)


def keyword_table(collection: int) -> str:
    """Name the keyword table of a collection."""
    return f"keywords_{int(collection)}"


def create_keyword_table(collection: int) -> str:
    # porter finds other forms of English words, and changes few words of other languages.
    return (
        f"CREATE VIRTUAL TABLE {keyword_table(collection)} "
        "USING fts5(heading, text, tokenize = 'porter unicode61 remove_diacritics 2')"
    )
