"""Collection: searches one collection by words and by meaning, fuses both, and reranks, all within one deadline.

    keywords (BM25, sqlite FTS5) ─┐
                                  ├─▶ reciprocal rank fusion ──▶ rerank (cross-encoder, if asked for) ──▶ hits
    query ──embed──▶ vectors ─────┘

A stage that would miss the deadline is left out and named in the result. Nothing here changes a collection.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from collections.abc import Collection as IdCollection
from functools import partial
from typing import Any, Final, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np

from headrace.errors import HeadraceError
from headrace.gateway.api_errors import ApiError, as_api_error
from headrace.gateway.caches.results.result_cache import ResultCache
from headrace.gateway.database import Database
from headrace.gateway.serving.exchange import Caller
from headrace.gateway.vector_index import Neighbours, Recall
from headrace.observe import metrics
from headrace.pipelines.collections.chunk_queries import chunks_that_match, read_chunks
from headrace.pipelines.collections.chunking import embedded_text
from headrace.pipelines.collections.collection_index import CollectionIndex
from headrace.pipelines.collections.encoder import Encoder
from headrace.pipelines.collections.hits import Filters, Hit, Passages, QueryVector, passage_id, passage_seq
from headrace.pipelines.collections.keyword_scores import KeywordScores
from headrace.pipelines.collections.metadata_filters import filter_condition
from headrace.pipelines.collections.records import CollectionRecord, StoredChunk

SearchMode = Literal["hybrid", "keyword", "vector"]
MOST_HITS: Final = 100
_RANK_OFFSET: Final = 60  # of reciprocal rank fusion, as in the paper by Cormack, Clarke and Büttcher (2009)
_CANDIDATES: Final = 50  # least number that each stage finds
_RERANKED: Final = 50  # candidates at most that are reranked
_READING_S: Final = 0.05  # kept back from the deadline for reading the chunks, at most
_READING_SHARE: Final = 0.2  # of the time, at most

Result = TypeVar("Result")
# Ranks texts within a budget in seconds; None: it was not worth a pass, or came late.
RerankCall = Callable[[str, Sequence[str], float], Awaitable[list[float] | None]]


class Reranker(NamedTuple):
    identity: str  # of the model and its weights, for caches' keys
    rank: RerankCall


class SearchOptions(msgspec.Struct, frozen=True, kw_only=True):
    k: int = 10
    filters: Filters | None = None
    mode: SearchMode = "hybrid"
    recall: Recall | None = None  # None: the collection's
    deadline_s: float | None = None  # seconds from now
    rerank_s: float = 0.0  # budget of reranking
    vector: QueryVector | None = None  # of the query, if it is known


class SearchResult(msgspec.Struct, frozen=True, kw_only=True):
    hits: list[Hit]
    version: int  # of the collection
    skipped: Mapping[str, str]  # stages that contributed nothing, each with the reason
    stages_ms: Mapping[str, float]
    reranked: int = 0  # hits and other candidates that were reranked
    cached: bool = False  # it is an earlier search's


_decoder: Final = msgspec.msgpack.Decoder(SearchResult)


class Collection:
    """One collection as it was when it was looked up; its chunks are read when it is searched."""

    def __init__(
        self,
        record: CollectionRecord,
        database: Database,
        *,
        caller: Caller,
        index: CollectionIndex | None,
        encoder: Callable[[], Encoder],
        keywords: KeywordScores,
        reranker: Reranker | None = None,
        results: ResultCache | None = None,
        default_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`index` is None for a collection without a model. `default_s`: the deadline of searches without one."""
        self.record = record
        self._database = database
        self._caller = caller
        self._index = index
        self._encoder = encoder
        self._keywords = keywords
        self._reranker = reranker
        self._results = results
        self._default_s = default_s
        self._clock = clock

    async def search(
        self,
        query: str,
        *,
        k: int = 10,
        filters: Filters | None = None,
        deadline_s: float | None = None,
        tenant: str = "",
        caller: Caller | None = None,
        vector: QueryVector | None = None,
    ) -> Passages:
        """Return the best chunks, best first; see SearchableCollection."""
        if tenant != self.record.tenant or (caller is not None and caller.tenant != tenant):
            raise ApiError("Unknown collection.", kind="not_found_error", code="collection_not_found")
        options = SearchOptions(k=k, filters=filters, deadline_s=deadline_s, vector=vector)
        found = await self.find(query, options, caller)
        return Passages(hits=found.hits, skipped=found.skipped)

    @property
    def uid(self) -> str:
        return self.record.uid

    async def has_all(self, ids: IdCollection[str]) -> bool:
        """Return whether all of these passages are still there; see SearchableCollection."""
        seqs = {seq for seq in map(passage_seq, ids) if seq is not None}
        if not seqs:
            return True
        read = partial(read_chunks, collection=self.record.seq, seqs=list(seqs))
        return len(await self._database.run(read)) == len(seqs)

    async def embed_query(self, query: str, caller: Caller) -> QueryVector | None:
        """Return the query's vector; see SearchableCollection."""
        if self._index is None:
            return None
        encoder = self._encoder()
        (row,) = await encoder.embed([query], caller, "query")
        return QueryVector(encoder.identity, tuple(row.tolist()))

    async def find(self, query: str, options: SearchOptions, caller: Caller | None = None) -> SearchResult:
        """Search with all options. ApiError for an invalid filter, or if every stage fails.

        The result may come from the cache of results, if the collection has not changed since. Only results of all
        stages are kept there.
        """
        filter_condition(options.filters)  # an invalid one is an error, not a stage that failed
        payer = self._caller if caller is None else caller
        if self._results is None:
            return await self._find(query, options, payer)
        record, began = self.record, self._clock()
        asked = (query, options.k, options.filters, options.mode, options.recall or record.recall)
        reranker = self._reranker.identity if self._reranker is not None and options.rerank_s > 0 else ""
        parts = (record.uid, record.version, *asked, reranker)
        lookup = await self._results.look("retrieval", record.tenant, parts)
        if lookup.data is not None:
            known = _decoder.decode(lookup.data)
            took_ms = round((self._clock() - began) * 1e3, 3)
            return msgspec.structs.replace(known, cached=True, stages_ms={"cache": took_ms})
        found = await self._find(query, options, payer)
        if not found.skipped:
            await self._results.keep(lookup, msgspec.msgpack.encode(found))
        return found

    async def _find(self, query: str, options: SearchOptions, payer: Caller) -> SearchResult:
        began = self._clock()
        seconds = self._default_s if options.deadline_s is None else options.deadline_s
        reading_s = min(_READING_S, seconds * _READING_SHARE)
        search = _Search(due=began + max(0.0, seconds - reading_s), clock=self._clock)
        count = max(_CANDIDATES, 4 * options.k)
        stages: dict[str, Awaitable[Neighbours]] = {}
        if options.mode != "vector":
            stages["keyword"] = self._keywords.search(self.record, query, count, options.filters)
        if options.mode != "keyword":
            if self._index is None:
                if options.mode == "vector":
                    raise ApiError(
                        f"The collection '{self.record.name}' has no model. Search it with mode \"keyword\".",
                        parameter="mode",
                        code="no_encoder",
                    )
            else:
                stages["vector"] = self._by_vector(self._index, query, count, options, payer)
        found = await search.run(stages)
        fused = fuse(list(found.values()))
        chunks = await self._database.run(
            partial(read_chunks, collection=self.record.seq, seqs=[seq for seq, _ in fused])
        )
        ranked = [(chunks[seq], score) for seq, score in fused if seq in chunks]
        scores = {name: dict(rows) for name, rows in found.items()}
        reranked: list[float] = []
        if options.rerank_s > 0 and self._reranker is not None and len(ranked) > 1:
            reranked = await self._reranked(search, self._reranker.rank, query, ranked, options.rerank_s)
        hits = _hits(ranked, reranked, scores, options.k)
        metrics.of(metrics.collections, "search").inc()
        for stage in search.skipped:
            metrics.of(metrics.collections, f"{stage}_skipped").inc()
        return SearchResult(
            hits=hits,
            version=self.record.version,
            skipped=search.skipped,
            stages_ms={name: round(each * 1e3, 3) for name, each in search.seconds.items()},
            reranked=len(reranked),
        )

    async def _by_vector(
        self, index: CollectionIndex, query: str, count: int, options: SearchOptions, caller: Caller
    ) -> Neighbours:
        encoder = self._encoder()
        if encoder.identity != index.encoder:
            raise HeadraceError("The vectors are computed again, because the encoder has changed.")
        among: list[int] | None = None
        if options.filters:
            among = await self._database.run(
                partial(chunks_that_match, collection=self.record.seq, filters=options.filters)
            )
            if not among:
                return []
        if options.vector is not None and options.vector.encoder == index.encoder:
            row = np.array(options.vector.values, dtype="<f4")
        else:
            (row,) = await encoder.embed([query], caller, "query")
        return await index.search(row, count, recall=options.recall or self.record.recall, among=among)

    async def _reranked(
        self,
        search: _Search,
        rerank: RerankCall,
        query: str,
        ranked: Sequence[tuple[StoredChunk, float]],
        budget_s: float,
    ) -> list[float]:
        texts = [embedded_text(chunk.heading, chunk.text) for chunk, _ in ranked[:_RERANKED]]
        budget_s = min(budget_s, search.left_s)
        if budget_s <= 0:
            search.skipped["rerank"] = "deadline"
            return []
        began = self._clock()
        try:
            scores = await rerank(query, texts, budget_s)
        except Exception as error:
            search.skipped["rerank"] = as_api_error(error).code or "failed"
            return []
        finally:
            search.seconds["rerank"] = self._clock() - began
        if scores is None:
            search.skipped["rerank"] = "budget"
            return []
        return scores


class _Search:
    """The deadline of one search, and what its stages took."""

    def __init__(self, *, due: float, clock: Callable[[], float]) -> None:
        self.skipped: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        self._due = due
        self._clock = clock

    @property
    def left_s(self) -> float:
        return self._due - self._clock()

    async def run(self, stages: Mapping[str, Awaitable[Result]]) -> dict[str, Result]:
        """Run the stages at once and return what came in time. ApiError if all of them failed."""
        tasks = {name: asyncio.ensure_future(self._timed(name, stage)) for name, stage in stages.items()}
        try:
            if tasks:
                await asyncio.wait(tasks.values(), timeout=max(0.0, self.left_s))
        finally:
            for task in tasks.values():
                task.cancel()
        found: dict[str, Result] = {}
        errors: list[Exception] = []
        for name, task in tasks.items():
            if not task.done() or task.cancelled():
                self.skipped[name] = "deadline"
            elif (error := task.exception()) is not None:
                if not isinstance(error, Exception):
                    raise error
                errors.append(error)
                reason = as_api_error(error).code or "failed"
                self.skipped[name] = "reindexing" if type(error) is HeadraceError else reason
            else:
                found[name] = task.result()
        if errors and len(errors) == len(tasks):
            raise as_api_error(errors[0])
        return found

    async def _timed(self, name: str, stage: Awaitable[Result]) -> Result:
        began = self._clock()
        try:
            return await stage
        finally:
            self.seconds[name] = self._clock() - began


def fuse(rankings: Sequence[Neighbours]) -> Neighbours:
    """Fuse rankings by reciprocal rank. Scores are 0 to 1: 1 for a chunk that is first in all of them."""
    scores: dict[int, float] = {}
    for ranking in rankings:
        for rank, (seq, _) in enumerate(ranking, start=1):
            scores[seq] = scores.get(seq, 0.0) + (_RANK_OFFSET + 1) / (_RANK_OFFSET + rank) / len(rankings)
    return sorted(scores.items(), key=lambda each: (-each[1], each[0]))


def _hits(
    ranked: Sequence[tuple[StoredChunk, float]],
    reranked: Sequence[float],
    scores: Mapping[str, Mapping[int, float]],
    k: int,
) -> list[Hit]:
    """The reranked candidates come first, then the others, whose scores are below theirs."""
    order = sorted(range(len(reranked)), key=lambda place: -reranked[place])
    floor = min(reranked, default=1.0)
    hits: list[Hit] = []
    for place in [*order, *range(len(reranked), len(ranked))][:k]:
        chunk, fused = ranked[place]
        stages: dict[str, Any] = {name: found[chunk.seq] for name, found in scores.items() if chunk.seq in found}
        if place < len(reranked):
            stages["rerank"] = reranked[place]
        hits.append(
            Hit(
                text=chunk.text,
                source=chunk.source,
                score=reranked[place] if place < len(reranked) else floor * fused,
                id=passage_id(chunk.seq),
                document=chunk.document,
                heading=chunk.heading,
                metadata=chunk.metadata,
                scores=stages,
            )
        )
    return hits
