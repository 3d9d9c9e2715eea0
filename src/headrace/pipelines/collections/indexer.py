"""Indexer: embeds the chunks of pending documents in the background, batch by batch, and publishes the documents.

Each batch is committed before the next one begins, so a process that is killed continues where it was. A model that is
busy, over its limits or gone is asked again later; other collections go on meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from headrace.errors import HeadraceError
from headrace.gateway.api_errors import ApiError, as_api_error
from headrace.gateway.database import Database, rows_of
from headrace.observe import metrics
from headrace.pipelines.collections.chunk_store import (
    IndexChange,
    begin_encoder,
    fail_document,
    next_to_embed,
    store_vectors,
)
from headrace.pipelines.collections.chunking import embedded_text
from headrace.pipelines.collections.collection_store import collection_of, delete_slice
from headrace.pipelines.collections.encoder import Encoder
from headrace.pipelines.collections.records import CollectionRecord, PendingChunk

if TYPE_CHECKING:
    from headrace.gateway.serving.exchange import Caller

log: Final = logging.getLogger(__name__)

_BATCH: Final = 64  # chunks that are embedded and committed together
_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 60.0

# The caller on whose behalf a tenant's chunk is embedded, by tenant and key.
CallerFor = Callable[[str, str], "Caller"]
EncoderFor = Callable[["Caller", str], Encoder]


class Indexer:
    def __init__(
        self,
        database: Database,
        caller_for: CallerFor,
        encoder_for: EncoderFor,
        changed: Callable[[int, IndexChange], Awaitable[None]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`changed` is called after each transaction that searches can see."""
        self._database = database
        self._caller_for = caller_for
        self._encoder_for = encoder_for
        self._changed = changed
        self._clock = clock
        self._wake = asyncio.Event()
        self._pauses: dict[int, tuple[float, float]] = {}  # by collection: until when, and how long the next one is
        self.idle = asyncio.Event()  # there is nothing to embed

    def wake(self) -> None:
        """Call this after documents were added or a collection was deleted."""
        self.idle.clear()
        self._wake.set()

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            self._wake.clear()
            try:
                while await self._database.run(delete_slice):
                    pass
                rest_s = await self._round()
            except ApiError as error:  # of the storage, which has logged it
                log.debug("the indexer waits for storage: %s", error)
                rest_s = _FIRST_PAUSE_S
            if rest_s == 0.0:
                continue
            if rest_s is None:
                self.idle.set()
            try:
                async with asyncio.timeout(rest_s):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _round(self) -> float | None:
        """Embed one batch of each collection that has one. Return the seconds to wait; None if there is nothing."""
        rests: list[float] = []
        for record in await self._database.run(_with_work):
            until, _ = self._pauses.get(record.seq, (0.0, 0.0))
            if (rest := until - self._clock()) > 0:
                rests.append(rest)
                continue
            try:
                await self._embed_batch(record)
                self._pauses.pop(record.seq, None)
                rests.append(0.0)
            except (ApiError, HeadraceError, OSError) as error:
                rests.append(self._pause(record, as_api_error(error)))
        return min(rests, default=None)

    def _pause(self, record: CollectionRecord, error: ApiError) -> float:
        _, pause = self._pauses.get(record.seq, (0.0, _FIRST_PAUSE_S))
        seconds = max(pause, error.retry_after or 0.0)
        self._pauses[record.seq] = self._clock() + seconds, min(2 * pause, _LONGEST_PAUSE_S)
        metrics.of(metrics.collections, "embedding_failed").inc()
        log.warning("the collection '%s' is embedded later: %s", record.name, error)
        return seconds

    async def _embed_batch(self, record: CollectionRecord) -> None:
        chunks = await self._database.run(partial(next_to_embed, collection=record.seq, limit=_BATCH))
        if not chunks:
            return
        try:
            caller = self._caller_for(record.tenant, chunks[0].key)
        except ApiError as error:  # the key or the tenant is gone
            await self._fail(record, chunks, str(error))
            return
        encoder = self._encoder_for(caller, record.model)
        if encoder.identity != record.encoder:
            # Begun by the first batch; again when the model's weights have changed.
            begin = partial(begin_encoder, collection=record.seq, encoder=encoder.identity)
            await self._changed(record.seq, IndexChange(dropped=await self._database.run(begin)))
        texts = [embedded_text(chunk.heading, chunk.text) for chunk in chunks]
        try:
            rows = await encoder.embed(texts, caller, "document")
        except ApiError as error:
            if error.kind != "invalid_request_error" or error.status != 400:
                raise
            await self._fail(record, chunks, str(error))
            return
        vectors = [(chunk.seq, row.tobytes()) for chunk, row in zip(chunks, rows, strict=True)]
        store = partial(store_vectors, collection=record.seq, encoder=encoder.identity, vectors=vectors)
        change = await self._database.run(store)
        metrics.of(metrics.collections, "chunk_embedded").inc(len(vectors))
        metrics.of(metrics.collections, "document_ready").inc(len(change.published))
        await self._changed(record.seq, change)

    async def _fail(self, record: CollectionRecord, chunks: list[PendingChunk], reason: str) -> None:
        for document in dict.fromkeys(chunk.document for chunk in chunks):
            fail = partial(fail_document, collection=record.seq, document=document, reason=reason)
            change = await self._database.run(fail)
            metrics.of(metrics.collections, "document_failed").inc()
            await self._changed(record.seq, change)


def _with_work(connection: sqlite3.Connection) -> list[CollectionRecord]:
    rows = rows_of(
        connection,
        "SELECT * FROM collections WHERE NOT deleted AND model <> '' AND EXISTS (SELECT 1 FROM chunks "
        "WHERE chunks.collection = collections.seq AND NOT embedded AND repeats IS NULL) ORDER BY seq",
    )
    return [collection_of(row) for row in rows]
