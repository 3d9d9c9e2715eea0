"""Records of collections, their documents and chunks, as stored and as shown to clients."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from headrace.gateway.vector_index import Recall
from headrace.pipelines.collections.hits import Metadata

DocumentState = Literal["ready", "pending", "failed"]


class CollectionRecord(msgspec.Struct, frozen=True, kw_only=True):
    seq: int
    tenant: str
    name: str
    uid: str = ""  # random, for caches that several servers share
    model: str  # of the embeddings; empty: keyword search only
    encoder: str = ""  # identity of the model that made the stored vectors; empty: there are none
    chunk_tokens: int
    overlap_tokens: int
    recall: Recall
    metadata: Metadata = {}
    version: int = 0  # grows with every change that a search can see
    created_at: int = 0

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": "collection",
            "model": self.model or None,
            "chunk_tokens": self.chunk_tokens,
            "overlap_tokens": self.overlap_tokens,
            "recall": self.recall,
            "metadata": self.metadata,
            "version": self.version,
            "created_at": self.created_at,
        }


class CollectionStats(msgspec.Struct, frozen=True, kw_only=True):
    ready: int  # documents that searches find
    pending: int  # documents whose chunks are being embedded
    failed: int
    chunks: int  # distinct chunks, of pending documents too
    embedded: int  # of them, with a vector
    duplicates: int  # chunks that repeat another one
    tokens: int

    def as_json(self) -> dict[str, Any]:
        documents = {"ready": self.ready, "pending": self.pending, "failed": self.failed}
        return {
            "documents": documents,
            "chunks": self.chunks,
            "embedded": self.embedded,
            "duplicates": self.duplicates,
            "tokens": self.tokens,
        }


class DocumentRecord(msgspec.Struct, frozen=True, kw_only=True):
    seq: int
    collection: int
    id: str
    source: str
    title: str
    metadata: Metadata
    digest: bytes  # of all that its chunks depend on
    state: DocumentState
    error: str
    key: str  # name of the API key that added it
    chunks: int
    duplicates: int  # of the chunks
    tokens: int
    bytes: int
    created_at: int

    def as_json(self, *, unchanged: bool = False) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "collection.document",
            "source": self.source,
            "title": self.title,
            "metadata": self.metadata,
            "status": self.state,
            "error": self.error or None,
            "chunks": self.chunks,
            "duplicates": self.duplicates,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "created_at": self.created_at,
            **({"unchanged": True} if unchanged else {}),
        }


class StoredChunk(msgspec.Struct, frozen=True):
    seq: int
    document: str  # its id
    place: int  # in the document, from 0
    heading: str
    text: str
    source: str
    metadata: Metadata


class PendingChunk(msgspec.Struct, frozen=True):
    """A chunk without a vector."""

    seq: int
    document: int  # its seq
    key: str  # name of the API key that added the document
    heading: str
    text: str
