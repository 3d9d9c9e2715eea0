"""Collections in a folder, with a fake encoder."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from headrace.config.collection_section import CollectionsConfig
from headrace.gateway.serving.exchange import Caller
from headrace.pipelines.collections.collection import SearchOptions, SearchResult
from headrace.pipelines.collections.collections import AddedRecord, Collections
from headrace.pipelines.collections.document_intake import GivenDocument
from tests.support.stores.fake_encoders import WordEncoder

ANNA = Caller(key="anna-key", tenant="anna")
BERT = Caller(key="bert-key", tenant="bert")


class Shelf:
    """Collections, and what a test does with them. `folder` may be used by another shelf later."""

    def __init__(self, folder: Path, encoder: WordEncoder, config: CollectionsConfig, **options: Any) -> None:
        self.encoder = encoder
        self.collections = Collections(
            config,
            folder,
            caller_for=lambda tenant, key: Caller(key=key, tenant=tenant),
            encoder_for=lambda caller, model: self.encoder,
            default_model=lambda caller: "words",
            **options,
        )

    async def add(self, *texts: str, caller: Caller = ANNA, name: str = "notes", **fields: Any) -> list[AddedRecord]:
        """Documents with the ids 0, 1, ..., unless `fields` has one."""
        given = [GivenDocument(**({"id": str(place), "text": text} | fields)) for place, text in enumerate(texts)]
        return await self.collections.add(caller, name, given)

    async def indexed(self) -> None:
        """Nothing is left to embed."""
        await self.collections.indexer.idle.wait()

    async def find(self, query: str, *, caller: Caller = ANNA, name: str = "notes", **options: Any) -> SearchResult:
        collection = await self.collections.open(caller, name)
        return await collection.find(query, SearchOptions(**options))

    async def documents(self, query: str, **options: Any) -> list[str]:
        """Ids of the documents found, best first."""
        return [hit.document for hit in (await self.find(query, **options)).hits]


@contextlib.asynccontextmanager
async def shelf(
    folder: Path,
    encoder: WordEncoder | None = None,
    *,
    create: bool = True,
    now: Any = None,
    rerank_for: Any = None,
    **config: Any,
) -> AsyncIterator[Shelf]:
    """With `create`, Anna has the collection `notes`."""
    options = {"rerank_for": rerank_for} | ({} if now is None else {"now": now})
    opened = Shelf(folder, encoder or WordEncoder(), CollectionsConfig(**config), **options)
    try:
        await opened.collections.start()
        if create:
            await opened.collections.create(ANNA, "notes")
        yield opened
    finally:
        await opened.collections.close()
