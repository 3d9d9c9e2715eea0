"""CollectionIndex: the vectors of one collection in memory, and the file that keeps its graph over restarts.

The database is authoritative. The file only saves the time to build the graph again: at the start its ids are compared
with the database's, and vectors are added and removed to match. All calls are for one event loop; the work happens in
threads, one at a time for each collection.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headrace.gateway.database import Database
from headrace.gateway.vector_index import (
    GraphVectors,
    GrowingVectors,
    Neighbours,
    Recall,
    VectorFormat,
    usearch_index,
)
from headrace.pipelines.collections.chunk_queries import read_ids, read_vectors, read_vectors_of
from headrace.pipelines.collections.chunk_store import IndexChange

log: Final = logging.getLogger(__name__)

Floats = NDArray[np.float32]
_SLICE: Final = 4096  # vectors that are read at once


class CollectionIndex:
    def __init__(
        self, database: Database, collection: int, encoder: str, *, exact: int, kind: VectorFormat, folder: Path
    ) -> None:
        """`exact`: vectors up to which they are compared one by one. `folder`: of the graphs' files."""
        self.encoder = encoder
        self._database = database
        self._collection = collection
        self._exact = exact
        self._kind: VectorFormat = kind
        digest = hashlib.sha256(f"{encoder}\0{kind}".encode()).hexdigest()[:16]
        self._file = folder / f"{collection}-{digest}.graph"
        self._lock = asyncio.Lock()
        self._vectors: GrowingVectors | None = None  # of the first vector's width
        self._ids: set[int] = set()
        self._unsaved = 0
        self._loaded = False
        self._loading: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def nbytes(self) -> int:
        return 0 if self._vectors is None else self._vectors.nbytes

    @property
    def approximate(self) -> bool:
        return self._vectors is not None and self._vectors.approximate

    async def load(self) -> None:
        """Read the vectors, once. A caller that leaves at its deadline does not stop it for the next one."""
        if self._loaded:
            return
        if self._loading is None:
            self._loading = asyncio.ensure_future(self._load())
            self._loading.add_done_callback(self._load_ended)
        await asyncio.shield(self._loading)

    def _load_ended(self, loading: asyncio.Future[None]) -> None:
        self._loading = None
        if not loading.cancelled():
            loading.exception()  # raised where it was awaited, unless all callers have left; the next one tries again

    async def _load(self) -> None:
        async with self._lock:
            run, collection = self._database.run, self._collection
            if self._vectors is None and self._file.exists():
                await asyncio.to_thread(self._load_graph)
            if self._vectors is not None:
                there = set(await run(lambda connection: read_ids(connection, collection)))
                missing = sorted(there - self._ids)
                await asyncio.to_thread(self._apply, (), sorted(self._ids - there))
                for start in range(0, len(missing), _SLICE):
                    some = missing[start : start + _SLICE]
                    rows = await run(partial(read_vectors_of, seqs=some))
                    await asyncio.to_thread(self._apply, rows, ())
            else:
                last = 0
                while rows := await run(partial(read_vectors, collection=collection, after=last, limit=_SLICE)):
                    last = rows[-1][0]
                    await asyncio.to_thread(self._apply, rows, ())
            self._loaded = True

    async def apply(self, change: IndexChange) -> None:
        """Follow a transaction. One that `load` has seen already changes nothing."""
        if not self._loaded and not self._lock.locked():
            return  # loading will see it
        async with self._lock:
            await asyncio.to_thread(self._apply, change.added, change.removed)

    async def search(
        self, vector: Floats, count: int, *, recall: Recall, among: Sequence[int] | None = None
    ) -> Neighbours:
        await self.load()
        # Its thread cannot be stopped, so the lock is held until it ends, even if the caller leaves.
        return await asyncio.shield(asyncio.ensure_future(self._search(vector, count, recall, among)))

    async def _search(self, vector: Floats, count: int, recall: Recall, among: Sequence[int] | None) -> Neighbours:
        async with self._lock:
            if self._vectors is None or len(vector) != self._vectors.width:
                return []
            return await asyncio.to_thread(self._vectors.search_with, vector, count, recall=recall, among=among)

    async def save(self) -> None:
        """Write the graph if it has changed. A disk that cannot be written costs the next start time, nothing else."""
        async with self._lock:
            if self._vectors is None or self._vectors.graph is None or not self._unsaved:
                return
            try:
                await asyncio.to_thread(self._save, self._vectors.graph)
                self._unsaved = 0
            except (OSError, RuntimeError) as error:
                log.warning("the graph of a collection was not saved: %s", error)

    # In a thread

    def _save(self, graph: GraphVectors) -> None:
        self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = self._file.with_suffix(".new")
        graph.save(made)
        os.replace(made, self._file)

    def _load_graph(self) -> None:
        made = usearch_index()
        if made is None:
            return
        try:
            graph = GraphVectors(0, self._kind, made, file=self._file)
        except ValueError as error:
            log.warning("the graph of a collection is built again: %s", error)
            return
        self._vectors = GrowingVectors(graph.width, kind=self._kind, exact=self._exact, graph=graph)
        self._ids = set(graph.ids.tolist())

    def _apply(self, added: Sequence[tuple[int, bytes]], removed: Sequence[int]) -> None:
        for seq in removed:
            if self._vectors is not None and seq in self._ids:
                self._vectors.remove(seq)
                self._ids.discard(seq)
                self._unsaved += 1
        new = [(seq, vector) for seq, vector in added if seq not in self._ids]
        if not new:
            return
        rows = np.stack([np.frombuffer(vector, dtype="<f4") for _, vector in new])
        if self._vectors is None:
            self._vectors = GrowingVectors(rows.shape[1], kind=self._kind, exact=self._exact)
        ids = np.array([seq for seq, _ in new], dtype=np.int64)
        self._vectors.add_all(ids, rows)
        self._ids.update(ids.tolist())
        self._unsaved += len(new)
