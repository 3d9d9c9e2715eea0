"""Remembers the most frequent words of large collections, which keyword searches leave out if they may."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from functools import partial
from typing import Final

from headrace.gateway.database import Database
from headrace.pipelines.collections.chunk_queries import count_keyword_chunks, frequent_words
from headrace.pipelines.collections.records import CollectionRecord

_KEPT: Final = 256  # collections whose words are remembered
_GROWTH: Final = 1.25  # of a collection's version after which its words are counted again
_CHANGES: Final = 64  # of a young collection


class KeywordWords:
    def __init__(self, database: Database, *, all_words: bool, least_chunks: int = 5000) -> None:
        """`all_words`: none are left out. `least_chunks`: smaller collections are searched with all words anyway."""
        self._all_words = all_words
        self.least_chunks = least_chunks
        self._database = database
        self._known: OrderedDict[int, tuple[int, Collection[str]]] = OrderedDict()  # version and words, by collection

    async def frequent(self, record: CollectionRecord) -> Collection[str]:
        if self._all_words:
            return ()
        known = self._known.get(record.seq)
        if known is not None and record.version <= known[0] * _GROWTH + _CHANGES:
            return known[1]
        found: Collection[str] = ()
        chunks = await self._database.run(partial(count_keyword_chunks, collection=record.seq))
        if chunks < self.least_chunks:
            return found  # counting is cheap, so a collection that grows is noticed
        found = await self._database.run(partial(frequent_words, collection=record.seq))
        self._known[record.seq] = record.version, found
        if len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return found
