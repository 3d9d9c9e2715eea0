"""DocumentIntake: reads a document as a client gives it, and cuts it into chunks. Stores nothing."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from headrace.config.collection_section import CollectionsConfig
from headrace.gateway.api_errors import ApiError, invalid_request
from headrace.pipelines.collections.blocks import ReadDocument
from headrace.pipelines.collections.chunk_store import NewChunk, NewDocument
from headrace.pipelines.collections.chunking import cut_into_chunks
from headrace.pipelines.collections.collection_store import metadata_text
from headrace.pipelines.collections.document_source import document_type, fetch_document, read_document
from headrace.pipelines.collections.duplicate_chunks import sketch_bands, text_digest
from headrace.pipelines.collections.encoder import Encoder
from headrace.pipelines.collections.metadata_filters import check_metadata
from headrace.pipelines.collections.records import CollectionRecord
from headrace.pipelines.public_fetch import FetchPolicy

_DOCUMENT_ID: Final = re.compile(r"[\x21-\x7e]{1,256}")
_SOURCE: Final = 1024  # characters of the longest source and title
_FORMAT: Final = "1"  # of chunks: a new one makes unchanged documents new
_FRAME_TOKENS: Final = 8  # of an encoder's context that its special tokens and prompt may take


class GivenDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A document as a client gives it: `text`, `content` or `url`."""

    text: str | None = None
    content: bytes | None = None
    url: str | None = None
    type: str | None = None
    id: str | None = None
    source: str = ""
    title: str = ""
    metadata: Mapping[str, Any] = {}


class DocumentDraft(msgspec.Struct, frozen=True, kw_only=True):
    """A document that was read, before it is cut."""

    where: str  # the request's field
    document: ReadDocument
    id: str
    source: str
    title: str
    metadata: Mapping[str, Any]
    digest: bytes  # of all that its chunks depend on
    bytes: int


class DocumentIntake:
    def __init__(self, config: CollectionsConfig, *, now: Callable[[], float] = time.time) -> None:
        self._document_bytes = config.document_bytes
        self._now = now
        self._fetching = FetchPolicy(
            hosts=config.url_hosts,
            private_hosts=config.private_hosts,
            max_bytes=config.document_bytes,
            timeout_s=config.url_s,
        )

    async def read(self, given: GivenDocument, where: str) -> DocumentDraft:
        """Read a document. ApiError for an invalid one. `where`: the request's field, for errors."""
        metadata = check_metadata(given.metadata, f"{where}.metadata")
        document, size, digest = await self._content(given, where)
        source = (given.source or given.url or "")[:_SOURCE]
        id = given.id or f"doc_{hashlib.sha256((source or digest).encode()).hexdigest()[:24]}"
        if _DOCUMENT_ID.fullmatch(id) is None:
            raise invalid_request(f"'{where}.id' must have 1 to 256 printable ASCII characters.", f"{where}.id")
        title = (given.title or document.title)[:_SOURCE]
        parts = (_FORMAT, digest, source, title, metadata_text(metadata))
        whole = hashlib.sha256("\0".join(parts).encode(errors="surrogatepass")).digest()
        return DocumentDraft(
            where=where,
            document=document,
            id=id,
            source=source,
            title=title,
            metadata=metadata,
            digest=whole,
            bytes=size,
        )

    async def cut(
        self, draft: DocumentDraft, record: CollectionRecord, encoder: Encoder | None, key: str
    ) -> NewDocument:
        """Cut a document for a collection. ApiError if it has no text. `key`: of the caller that adds it."""
        chunks, tokens = await asyncio.to_thread(_cut, draft.document, draft.title, record, encoder)
        if not chunks:
            raise invalid_request(f"'{draft.where}' has no text.", draft.where)
        return NewDocument(
            id=draft.id,
            source=draft.source,
            title=draft.title,
            metadata=draft.metadata,
            digest=draft.digest,
            key=key,
            bytes=draft.bytes,
            tokens=tokens,
            created_at=int(self._now()),
            chunks=chunks,
        )

    async def _content(self, given: GivenDocument, where: str) -> tuple[ReadDocument, int, str]:
        """Return the document, its size in bytes and a digest of what was given."""
        forms = [name for name in ("text", "content", "url") if getattr(given, name) is not None]
        if len(forms) != 1:
            raise invalid_request(f"'{where}' must have one of 'text', 'content', 'url' and 'file_id'.", where)
        most = self._document_bytes
        if given.url is not None:
            document, size = await fetch_document(given.url, self._fetching)
            blocks = msgspec.msgpack.encode(document)
            return document, size, hashlib.sha256(blocks).hexdigest()
        data = given.content if given.text is None else given.text.encode(errors="surrogatepass")
        assert data is not None
        if len(data) > most:
            raise ApiError(
                f"'{where}' is longer than {most} bytes (collections.document_bytes).",
                parameter=where,
                code="document_too_long",
                status=413,
            )
        kind = document_type(given.type, given.source, given.content)
        digest = hashlib.sha256(kind.encode() + b"\0" + data).hexdigest()
        return await read_document(data if given.text is None else given.text, kind), len(data), digest


def _cut(
    document: ReadDocument, title: str, record: CollectionRecord, encoder: Encoder | None
) -> tuple[list[NewChunk], int]:
    most = record.chunk_tokens
    if encoder is not None:
        most = max(8, min(most, encoder.context - _FRAME_TOKENS))
    count = _characters_as_tokens if encoder is None else encoder.count_tokens
    overlap = min(record.overlap_tokens, most // 2)
    chunks = cut_into_chunks(document.blocks, count, title=title, most=most, overlap=overlap)
    found = [NewChunk(each.heading, each.text, text_digest(each.text), sketch_bands(each.text)) for each in chunks]
    return found, sum(each.tokens for each in chunks)


def _characters_as_tokens(text: str) -> int:
    return len(text.encode()) // 4 + 1
