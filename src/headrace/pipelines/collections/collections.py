"""Collections: creates, fills, finds and deletes the collections of all tenants, and keeps their vectors in memory.

server/api ──▶ Collections ──▶ collection_store, chunk_store (sqlite)     Indexer embeds in the background
                   └──▶ Collection.find, which searches                   CollectionIndex has the vectors
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import msgspec

from headrace.config.collection_section import CollectionsConfig
from headrace.gateway.api_errors import ApiError, invalid_request
from headrace.gateway.database import Database, ListOrder, ListPage, check_listing
from headrace.observe import metrics
from headrace.pipelines.collections import collection_store
from headrace.pipelines.collections.chunk_store import (
    IndexChange,
    NewDocument,
    add_documents,
    begin_encoder,
    find_unchanged,
    remove_all_of,
)
from headrace.pipelines.collections.collection import Collection, Reranker
from headrace.pipelines.collections.collection_index import CollectionIndex
from headrace.pipelines.collections.collection_schema import STEPS
from headrace.pipelines.collections.document_intake import DocumentIntake, GivenDocument
from headrace.pipelines.collections.encoder import Encoder, ServedEncoder, find_encoder
from headrace.pipelines.collections.hits import passage_id
from headrace.pipelines.collections.indexer import CallerFor, EncoderFor, Indexer
from headrace.pipelines.collections.keyword_scores import KeywordScores
from headrace.pipelines.collections.metadata_filters import check_metadata
from headrace.pipelines.collections.records import CollectionRecord, CollectionStats, DocumentRecord
from headrace.pipelines.collections.rerank_pass import RerankCosts, find_reranker, rerank_within
from headrace.tasks import end_tasks

if TYPE_CHECKING:
    from headrace.gateway.caches.results.result_cache import ResultCache
    from headrace.gateway.flow.services import Services
    from headrace.gateway.serving.exchange import Caller

log: Final = logging.getLogger(__name__)

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_TOGETHER: Final = 32  # documents that are stored in one transaction
_CHUNKS_TOGETHER: Final = 128  # chunks after which they are stored, so that searches do not wait long
_MODES: Final = ("hybrid", "keyword")


class PassageWatcher(Protocol):
    def passages_removed(self, ids: set[str]) -> None: ...

    def collection_removed(self, tenant: str, name: str) -> None: ...


RerankFor = Callable[["Caller", str], Reranker]


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
        self._intake = DocumentIntake(config, now=now)
        self.watcher: PassageWatcher | None = None  # hears of passages that are gone
        self.indexer = Indexer(self._database, caller_for, encoder_for, self._changed)
        self._running: asyncio.Task[None] | None = None

    @classmethod
    def from_config(cls, config: CollectionsConfig, folder: Path, services: Services) -> Collections:
        costs = RerankCosts()

        def encoder_for(caller: Caller, model: str) -> Encoder:
            return ServedEncoder(services, find_encoder(services, caller, model))

        def rerank_for(caller: Caller, model: str) -> Reranker:
            served = find_reranker(services, caller, model or config.reranker)

            async def rank(query: str, texts: Sequence[str], budget_s: float) -> list[float] | None:
                return await rerank_within(services, caller, served, query, texts, budget_s=budget_s, costs=costs)

            return Reranker(f"{served.name} {served.fingerprint}", rank)

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
        await end_tasks([self._running])
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
        if self.watcher is not None:
            self.watcher.collection_removed(tenant, name)
        self._run_indexer()

    async def open(self, caller: Caller, name: str, *, rerank: str | None = None) -> Collection:
        """Return a collection to search. `rerank`: a reranker; empty: the configured one; None: none."""
        record = await self.find(caller.tenant, name)
        reranker = None
        if rerank is not None and self._rerank_for is not None:
            reranker = self._rerank_for(caller, rerank)
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
            reranker=reranker,
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
        added: dict[int, AddedRecord] = {}
        waiting: dict[int, NewDocument] = {}
        try:
            for place, each in enumerate(given):
                draft = await self._intake.read(each, f"documents[{place}]")
                same = partial(find_unchanged, collection=record.seq, id=draft.id, digest=draft.digest)
                if (there := await self._database.run(same)) is not None:
                    added[place] = AddedRecord(there, unchanged=True)
                    continue
                encoder = self._encoder_for(caller, record.model) if record.model else None
                waiting[place] = await self._intake.cut(draft, record, encoder, caller.key)
                if len(waiting) == _TOGETHER or sum(len(new.chunks) for new in waiting.values()) >= _CHUNKS_TOGETHER:
                    await self._store(record, waiting, added)
        except ApiError:
            await self._store(record, waiting, added)
            raise
        await self._store(record, waiting, added)
        return [added[place] for place in range(len(given))]

    async def _store(
        self, record: CollectionRecord, waiting: dict[int, NewDocument], added: dict[int, AddedRecord]
    ) -> None:
        """Store documents in one transaction, and move them from `waiting` to `added`. ApiError for the first that
        does not fit in; the ones before it are stored."""
        new = dict(waiting)
        waiting.clear()
        if not new:
            return
        add = partial(add_documents, collection=record, new=list(new.values()), most_chunks=self._config.chunks)
        stored = await self._database.run(add)
        for place, each in zip(new, stored.documents, strict=False):
            added[place] = AddedRecord(each.record, each.unchanged)
            metrics.of(metrics.collections, "chunk_duplicate").inc(0 if each.unchanged else each.record.duplicates)
        fresh = sum(not each.unchanged for each in stored.documents)
        metrics.of(metrics.collections, "document_added").inc(fresh)
        metrics.of(metrics.collections, "document_ready").inc(len(stored.change.published))
        await self._changed(record.seq, stored.change)
        self._run_indexer()
        if stored.error is not None:
            raise stored.error

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
        if self.watcher is not None and change.removed:
            self.watcher.passages_removed({passage_id(seq) for seq in change.removed})
        if change.dropped:
            self._indexes.pop(collection, None)
        elif (change.added or change.removed) and collection in self._indexes:
            await self._indexes[collection].apply(change)
