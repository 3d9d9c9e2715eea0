"""Collections: creates, fills, finds and deletes the collections of all tenants, and keeps their vectors in memory.

server/api ──▶ Collections ──▶ collection_store, chunk_store (sqlite)     Indexer embeds in the background
                   └──▶ Collection.find, which searches                   CollectionIndex has the vectors
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from headrace.config.collection_section import CollectionsConfig
from headrace.gateway.api_errors import ApiError, invalid_request
from headrace.gateway.database import Database, ListOrder, ListPage, check_listing
from headrace.observe import metrics
from headrace.pipelines.collections import collection_store
from headrace.pipelines.collections.blocks import ReadDocument
from headrace.pipelines.collections.chunk_store import (
    IndexChange,
    NewChunk,
    NewDocument,
    add_document,
    begin_encoder,
    find_unchanged,
    remove_all_of,
)
from headrace.pipelines.collections.chunking import cut_into_chunks
from headrace.pipelines.collections.collection import Collection, RerankCall
from headrace.pipelines.collections.collection_index import CollectionIndex
from headrace.pipelines.collections.collection_schema import STEPS
from headrace.pipelines.collections.document_source import document_type, fetch_document, read_document
from headrace.pipelines.collections.duplicate_chunks import sketch_bands, text_digest
from headrace.pipelines.collections.encoder import Encoder, ServedEncoder, find_encoder
from headrace.pipelines.collections.indexer import CallerFor, EncoderFor, Indexer
from headrace.pipelines.collections.keyword_scores import KeywordScores
from headrace.pipelines.collections.metadata_filters import check_metadata
from headrace.pipelines.collections.records import CollectionRecord, CollectionStats, DocumentRecord
from headrace.pipelines.collections.rerank_pass import RerankCosts, find_reranker, rerank_within
from headrace.pipelines.public_fetch import FetchPolicy

if TYPE_CHECKING:
    from headrace.gateway.caches.results.result_cache import ResultCache
    from headrace.gateway.flow.services import Services
    from headrace.gateway.serving.exchange import Caller

log: Final = logging.getLogger(__name__)

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_DOCUMENT_ID: Final = re.compile(r"[\x21-\x7e]{1,256}")
_SOURCE: Final = 1024  # characters of the longest source and title
_FORMAT: Final = "1"  # of chunks: a new one makes unchanged documents new
_FRAME_TOKENS: Final = 8  # of an encoder's context that its special tokens and prompt may take
_MODES: Final = ("hybrid", "keyword")

RerankFor = Callable[["Caller", str], RerankCall]


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


class AddedRecord(msgspec.Struct, frozen=True):
    record: DocumentRecord
    unchanged: bool


class Collections:
    """All of it belongs to one event loop."""

    def __init__(
        self,
        config: CollectionsConfig,
        folder: Path,
        *,
        caller_for: CallerFor,
        encoder_for: EncoderFor,
        rerank_for: RerankFor | None = None,
        default_model: Callable[[Caller], str] = lambda caller: "",
        results: ResultCache | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._folder = folder.expanduser()
        self._database = Database(folder, name="collections", steps=STEPS)
        self._caller_for = caller_for
        self._encoder_for = encoder_for
        self.keywords = KeywordScores(self._database, most_bytes=config.keyword_bytes)
        self._rerank_for = rerank_for
        self._default_model = default_model
        self._results = results
        self._now = now
        self._indexes: OrderedDict[int, CollectionIndex] = OrderedDict()  # the least recently used first
        self._fetching = FetchPolicy(
            hosts=config.url_hosts,
            private_hosts=config.private_hosts,
            max_bytes=config.document_bytes,
            timeout_s=config.url_s,
        )
        self.indexer = Indexer(self._database, caller_for, encoder_for, self._changed)
        self._running: asyncio.Task[None] | None = None

    @classmethod
    def from_config(cls, config: CollectionsConfig, folder: Path, services: Services) -> Collections:
        costs = RerankCosts()

        def encoder_for(caller: Caller, model: str) -> Encoder:
            return ServedEncoder(services, find_encoder(services, caller, model))

        def rerank_for(caller: Caller, model: str) -> RerankCall:
            served = find_reranker(services, caller, model or config.reranker)
            return lambda query, texts, budget_s: rerank_within(
                services, caller, served, query, texts, budget_s=budget_s, costs=costs
            )

        return cls(
            config,
            folder,
            caller_for=lambda tenant, key: services.accounts.directory.on_behalf(
                tenant, key=key or None, surface="batch"
            ),
            encoder_for=encoder_for,
            rerank_for=rerank_for,
            default_model=lambda caller: find_encoder(services, caller, config.embedder).name,
            results=services.results,
        )

    async def start(self) -> None:
        """Go on with documents that were pending. Without any collection, nothing is opened."""
        if (self._folder / "collections.sqlite").exists():
            await self.check_encoders()
            self._run_indexer()

    async def check_encoders(self) -> None:
        """Have all vectors made again whose model has changed since."""
        records = await self._database.run(collection_store.collections_with_vectors)
        for record in records:
            try:
                caller = self._caller_for(record.tenant, "")
                identity = self._encoder_for(caller, record.model).identity
            except ApiError as error:  # its model or tenant is gone, for now
                log.warning("the vectors of the collection '%s' were not checked: %s", record.name, error)
                continue
            if identity != record.encoder:
                begin = partial(begin_encoder, collection=record.seq, encoder=identity)
                await self._changed(record.seq, IndexChange(dropped=await self._database.run(begin)))
                self._run_indexer()

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await self.sweep()
        await self._database.close()

    async def sweep(self) -> None:
        """Save what makes the next start faster."""
        for index in list(self._indexes.values()):
            await index.save()

    def _run_indexer(self) -> None:
        self.indexer.wake()
        if self._running is None:
            self._running = asyncio.create_task(self.indexer.run())

    # Collections

    async def create(
        self,
        caller: Caller,
        name: str,
        *,
        model: str = "",
        mode: str = "hybrid",
        chunk_tokens: int | None = None,
        overlap_tokens: int | None = None,
        recall: Literal["fast", "balanced", "high", "exact"] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> CollectionRecord:
        """Create a collection. ApiError for an invalid or known name, and where no model makes embeddings.

        `mode` "keyword": without vectors, so that no model is needed.
        """
        if _NAME.fullmatch(name) is None:
            raise invalid_request("'name' must have 1 to 64 letters, digits and _ . -", "name")
        if mode not in _MODES:
            raise invalid_request(f"'mode' must be hybrid or keyword, not '{mode[:40]}'.", "mode")
        if mode == "keyword" and model:
            raise invalid_request("Set 'model', or 'mode' to \"keyword\", not both.", "mode")
        wanted = self._config
        tokens = wanted.chunk_tokens if chunk_tokens is None else chunk_tokens
        overlap = min(wanted.overlap_tokens, tokens // 2) if overlap_tokens is None else overlap_tokens
        if overlap > tokens // 2:
            raise invalid_request("'overlap_tokens' must be at most half of 'chunk_tokens'.", "overlap_tokens")
        if mode == "keyword":
            model = ""
        elif model:
            self._encoder_for(caller, model)
        else:
            model = self._default_model(caller)
        new = CollectionRecord(
            seq=0,
            tenant=caller.tenant,
            name=name,
            uid=secrets.token_hex(8),
            model=model,
            chunk_tokens=tokens,
            overlap_tokens=overlap,
            recall=recall or wanted.recall,
            metadata=check_metadata(metadata or {}, "metadata"),
            created_at=int(self._now()),
        )
        create = partial(collection_store.create_collection, new=new, most=wanted.collections)
        return await self._database.run(create)

    async def find(self, tenant: str, name: str) -> CollectionRecord:
        """ApiError if the tenant has no such collection."""
        return await self._database.run(partial(collection_store.find_collection, tenant=tenant, name=name))

    async def list(
        self, tenant: str, *, after: str | None = None, limit: int = 100, order: str = "desc"
    ) -> ListPage[CollectionRecord]:
        checked = check_listing(limit=limit, most=1000, order=order)
        return await self._database.run(
            partial(collection_store.list_collections, tenant=tenant, after=after, limit=limit, order=checked)
        )

    async def stats(self, record: CollectionRecord) -> CollectionStats:
        return await self._database.run(partial(collection_store.collection_stats, collection=record.seq))

    async def delete(self, tenant: str, name: str) -> None:
        """Hide a collection at once, and remove its rows in the background."""
        record = await self.find(tenant, name)
        await self._database.run(partial(collection_store.mark_deleted, collection=record.seq))
        self._indexes.pop(record.seq, None)
        self.keywords.forget(record.seq)
        self._run_indexer()

    async def open(self, caller: Caller, name: str, *, rerank: str | None = None) -> Collection:
        """Return a collection to search. `rerank`: a reranker; empty: the configured one; None: none."""
        record = await self.find(caller.tenant, name)
        call = None
        if rerank is not None and self._rerank_for is not None:
            call = self._rerank_for(caller, rerank)
        index = None
        if record.model:
            index = self._index_of(record)
            await self._evict(record.seq)
        return Collection(
            record,
            self._database,
            caller=caller,
            index=index,
            encoder=lambda: self._encoder_for(caller, record.model),
            keywords=self.keywords,
            rerank=call,
            reranker=f"{rerank or self._config.reranker}" if call is not None else "",
            results=self._results,
            default_s=self._config.search_ms / 1e3,
        )

    # Documents

    async def add(self, caller: Caller, name: str, given: Sequence[GivenDocument]) -> list[AddedRecord]:
        """Store documents, which are embedded in the background. ApiError for the first invalid one; the ones before
        it are stored.

        A document takes the place of the one with its id, once it is ready. One that has not changed costs nothing.
        """
        record = await self.find(caller.tenant, name)
        if len(given) > self._config.documents:
            raise invalid_request(
                f"'documents' has {len(given)} items. Expected at most {self._config.documents}.",
                "documents",
                code="too_many_values",
            )
        return [await self._add(caller, record, each, place) for place, each in enumerate(given)]

    async def _add(self, caller: Caller, record: CollectionRecord, given: GivenDocument, place: int) -> AddedRecord:
        where = f"documents[{place}]"
        metadata = check_metadata(given.metadata, f"{where}.metadata")
        document, size, digest = await self._read(given, where)
        source = (given.source or given.url or "")[:_SOURCE]
        id = given.id or f"doc_{hashlib.sha256((source or digest).encode()).hexdigest()[:24]}"
        if _DOCUMENT_ID.fullmatch(id) is None:
            raise invalid_request(f"'{where}.id' must have 1 to 256 printable ASCII characters.", f"{where}.id")
        title = (given.title or document.title)[:_SOURCE]
        parts = (_FORMAT, digest, source, title, collection_store.metadata_text(metadata))
        whole = hashlib.sha256("\0".join(parts).encode(errors="surrogatepass")).digest()
        run = self._database.run
        there = await run(partial(find_unchanged, collection=record.seq, id=id, digest=whole))
        if there is not None:
            return AddedRecord(there, unchanged=True)
        encoder = self._encoder_for(caller, record.model) if record.model else None
        chunks, tokens = await asyncio.to_thread(_cut, document, title, record, encoder)
        if not chunks:
            raise invalid_request(f"'{where}' has no text.", where)
        new = NewDocument(
            id=id,
            source=source,
            title=title,
            metadata=metadata,
            digest=whole,
            key=caller.key,
            bytes=size,
            tokens=tokens,
            created_at=int(self._now()),
            chunks=chunks,
        )
        added = await run(partial(add_document, collection=record, new=new, most_chunks=self._config.chunks))
        metrics.of(metrics.collections, "document_added").inc()
        metrics.of(metrics.collections, "document_ready").inc(len(added.change.published))
        metrics.of(metrics.collections, "chunk_duplicate").inc(added.record.duplicates)
        await self._changed(record.seq, added.change)
        self._run_indexer()
        return AddedRecord(added.record, added.unchanged)

    async def _read(self, given: GivenDocument, where: str) -> tuple[ReadDocument, int, str]:
        """Return the document, its size in bytes and a digest of what was given."""
        forms = [name for name in ("text", "content", "url") if getattr(given, name) is not None]
        if len(forms) != 1:
            raise invalid_request(f"'{where}' must have one of 'text', 'content', 'url' and 'file_id'.", where)
        most = self._config.document_bytes
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

    async def document(self, tenant: str, name: str, id: str) -> DocumentRecord:
        record = await self.find(tenant, name)
        return await self._database.run(partial(collection_store.find_document, collection=record.seq, id=id))

    async def list_documents(
        self,
        tenant: str,
        name: str,
        *,
        after: str | None = None,
        limit: int = 100,
        order: str = "desc",
        status: str | None = None,
    ) -> ListPage[DocumentRecord]:
        checked: ListOrder = check_listing(limit=limit, most=1000, order=order)
        states = ("ready", "pending", "failed")
        if status is not None and status not in states:
            raise invalid_request(f"Invalid 'status'. Expected one of {', '.join(states)}.", "status")
        record = await self.find(tenant, name)
        return await self._database.run(
            partial(
                collection_store.list_documents,
                collection=record.seq,
                after=after,
                limit=limit,
                order=checked,
                states=states if status is None else (status,),
            )
        )

    async def delete_document(self, tenant: str, name: str, id: str) -> None:
        """Remove a document, whatever its state. ApiError if there is none."""
        record = await self.find(tenant, name)

        def remove(connection: Any) -> IndexChange:
            collection_store.find_document(connection, record.seq, id)
            return remove_all_of(connection, record.seq, id)

        change = await self._database.run(remove)
        metrics.of(metrics.collections, "document_removed").inc()
        await self._changed(record.seq, change)
        self._run_indexer()  # a chunk that repeated one of this document may need a vector now

    # Vectors

    def _index_of(self, record: CollectionRecord) -> CollectionIndex:
        index = self._indexes.get(record.seq)
        if index is None or index.encoder != record.encoder:
            config = self._config
            index = self._indexes[record.seq] = CollectionIndex(
                self._database,
                record.seq,
                record.encoder,
                exact=config.exact,
                kind=config.vectors,
                folder=self._folder / "collections",
            )
        self._indexes.move_to_end(record.seq)
        return index

    async def _evict(self, kept: int) -> None:
        """Unload the least recently used indexes while all together are too large. One is always kept."""
        while sum(index.nbytes for index in self._indexes.values()) > self._config.memory_bytes:
            oldest = next(iter(self._indexes))
            if oldest == kept:
                return
            await self._indexes.pop(oldest).save()

    async def _changed(self, collection: int, change: IndexChange) -> None:
        self.keywords.follow(collection, change)
        if change.dropped:
            self._indexes.pop(collection, None)
        elif (change.added or change.removed) and collection in self._indexes:
            await self._indexes[collection].apply(change)


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
