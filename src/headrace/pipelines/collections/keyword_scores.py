"""KeywordScores: keyword searches of large collections, without scoring every chunk again for each query.

BM25 adds the scores of a query's words, and a word's score in a chunk does not depend on the query. FTS5 computes them
for every chunk that has any of the words: more than a second in 100,000 chunks. Here each word's scores are read from
FTS5 once, kept in memory within a bound, follow the collection's changes, and are added up as arrays.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Sequence
from functools import partial
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.gateway.database import Database
from headrace.gateway.vector_index import Neighbours
from headrace.pipelines.collections.chunk_queries import (
    chunks_that_match,
    count_keyword_chunks,
    query_words,
    search_keywords,
    word_scores,
)
from headrace.pipelines.collections.chunk_store import IndexChange
from headrace.pipelines.collections.hits import Filters
from headrace.pipelines.collections.records import CollectionRecord

_LEAST_CHUNKS: Final = 5000  # smaller collections are searched by FTS5 itself
_GROWTH: Final = 1.1  # of a collection's chunks, after which a word's scores are computed again: they depend on it
_CHANGES: Final = 4096  # changed chunks that are made up for; after more, all words of the collection are read again
_COLLECTIONS: Final = 256  # whose changes are followed
_WORD_BYTES: Final = 512  # of a word beside its arrays, about

Ids = NDArray[np.int64]
Scores = NDArray[np.float32]


class _Word(msgspec.Struct):
    ids: Ids
    scores: Scores
    chunks: int  # of the collection when they were computed
    seen: int  # changes that they include

    @property
    def nbytes(self) -> int:
        return self.ids.nbytes + self.scores.nbytes + _WORD_BYTES


class _Changes(msgspec.Struct):
    """Chunks that have come and gone, in the order of the transactions."""

    added: list[int] = []
    removed: set[int] = msgspec.field(default_factory=set[int])
    count: int = 0


class KeywordScores:
    """All of it belongs to one event loop."""

    def __init__(self, database: Database, *, most_bytes: int, least_chunks: int = _LEAST_CHUNKS) -> None:
        self.least_chunks = least_chunks
        self.bytes = 0
        self._database = database
        self._most_bytes = most_bytes
        self._words: OrderedDict[tuple[int, str], _Word] = OrderedDict()  # the least recently used first
        self._changes: OrderedDict[int, _Changes] = OrderedDict()  # by collection
        self._reading: dict[tuple[int, str], asyncio.Task[_Word]] = {}

    async def search(self, record: CollectionRecord, query: str, count: int, filters: Filters | None) -> Neighbours:
        """Return chunks with BM25 scores, best first."""
        run, collection = self._database.run, record.seq
        chunks = await run(partial(count_keyword_chunks, collection=collection))
        if chunks < self.least_chunks:
            return await run(partial(search_keywords, collection=collection, query=query, count=count, filters=filters))
        allowed: Sequence[int] | None = None
        if filters:
            among = partial(chunks_that_match, collection=collection, filters=filters, embedded=False)
            allowed = await run(among)
        words = [await self._word(collection, word, chunks) for word in query_words(query)]
        found = [word for word in words if len(word.ids)]
        if not found or (allowed is not None and not allowed):
            return []
        gone = set(changes.removed) if (changes := self._changes.get(collection)) is not None else set[int]()
        pairs = [(word.ids, word.scores) for word in found]
        return await asyncio.to_thread(add_up_words, pairs, count, allowed, gone)

    def follow(self, collection: int, change: IndexChange) -> None:
        """Note which chunks a transaction has added and removed."""
        if not change.worded and not change.removed:
            return
        changes = self._changes.get(collection)
        if changes is None:
            return  # no word of it is known
        changes.added += change.worded
        changes.removed.update(change.removed)
        changes.removed.difference_update(change.worded)
        if len(changes.added) + len(changes.removed) > _CHANGES:
            self.forget(collection)

    def forget(self, collection: int) -> None:
        """Drop all that is known of a collection."""
        self._changes.pop(collection, None)
        for key in [key for key in self._words if key[0] == collection]:
            self.bytes -= self._words.pop(key).nbytes

    async def _word(self, collection: int, word: str, chunks: int) -> _Word:
        key = (collection, word)
        changes = self._changes_of(collection)
        known = self._words.get(key)
        if known is not None:
            self._words.move_to_end(key)
            if known.seen == len(changes.added) and chunks <= known.chunks * _GROWTH:
                return known
        reading = self._reading.get(key)
        if reading is None:
            reading = self._reading[key] = asyncio.ensure_future(self._read(key, known, chunks))
            reading.add_done_callback(partial(self._read_ended, key))
        return await asyncio.shield(reading)  # a search that leaves at its deadline leaves the word to the next one

    def _read_ended(self, key: tuple[int, str], reading: asyncio.Task[_Word]) -> None:
        self._reading.pop(key, None)
        if not reading.cancelled():
            reading.exception()  # raised where it was awaited, unless all searches have left

    async def _read(self, key: tuple[int, str], known: _Word | None, chunks: int) -> _Word:
        collection, word = key
        changes = self._changes_of(collection)
        seen = len(changes.added)  # changes that come meanwhile are in the result already, and made up for once more
        if known is None or chunks > known.chunks * _GROWTH:
            rows = await self._database.run(partial(word_scores, collection=collection, word=word))
            made = _Word(*as_arrays(rows), chunks, seen)
        else:
            new = changes.added[known.seen :]
            rows = await self._database.run(partial(word_scores, collection=collection, word=word, among=new))
            ids, scores = as_arrays(rows)
            kept = ~np.isin(known.ids, np.array(new, dtype=np.int64))
            made = _Word(
                np.concatenate((known.ids[kept], ids)), np.concatenate((known.scores[kept], scores)), known.chunks, seen
            )
        if self._changes.get(collection) is changes:  # it was not forgotten meanwhile
            self._keep(key, made)
        return made

    def _keep(self, key: tuple[int, str], word: _Word) -> None:
        if (old := self._words.pop(key, None)) is not None:
            self.bytes -= old.nbytes
        if word.nbytes > self._most_bytes:
            return
        self._words[key] = word
        self.bytes += word.nbytes
        while self.bytes > self._most_bytes:
            _, oldest = self._words.popitem(last=False)
            self.bytes -= oldest.nbytes

    def _changes_of(self, collection: int) -> _Changes:
        changes = self._changes.get(collection)
        if changes is None:
            changes = self._changes[collection] = _Changes()
            if len(self._changes) > _COLLECTIONS:
                self.forget(next(iter(self._changes)))
        self._changes.move_to_end(collection)
        return changes


def as_arrays(rows: Sequence[tuple[int, float]]) -> tuple[Ids, Scores]:
    """Return chunks and their scores."""
    ids = np.fromiter((row[0] for row in rows), dtype=np.int64, count=len(rows))
    return ids, np.fromiter((row[1] for row in rows), dtype=np.float32, count=len(rows))


def add_up_words(
    words: Sequence[tuple[Ids, Scores]],
    count: int,
    allowed: Sequence[int] | None = None,
    gone: Collection[int] = (),
) -> Neighbours:
    """Return the chunks with the highest sums. Ties go to the older chunk, as in FTS5."""
    first = min(int(ids.min()) for ids, _ in words)
    last = max(int(ids.max()) for ids, _ in words)
    sums = np.zeros(last - first + 1, dtype=np.float64)
    for ids, scores in words:
        sums[ids - first] += scores  # an id is there once in a word
    if allowed is not None:
        places = np.array(allowed, dtype=np.int64) - first
        mask = np.zeros(len(sums), dtype=bool)
        mask[places[(places >= 0) & (places < len(sums))]] = True
        sums[~mask] = 0.0
    for id in gone:
        if first <= id <= last:
            sums[id - first] = 0.0
    most = min(count, int(np.count_nonzero(sums)))
    if not most:
        return []
    threshold = np.partition(sums, len(sums) - most)[len(sums) - most]
    places = np.flatnonzero(sums >= threshold)
    places = places[np.lexsort((places, -sums[places]))][:most]
    return [(int(place) + first, float(sums[place])) for place in places]
