"""Retrieval: recall and latency of the vector graph and of hybrid search, FTS5 beside bm25s, and the rate of ingest.

    python benchmarks/retrieval.py vectors [--chunks 100000]     recall@10 and time of each `recall`, against exact
    python benchmarks/retrieval.py keywords [--chunks 20000]     FTS5, added scores of words, bm25s if installed
    python benchmarks/retrieval.py collection [--chunks 100000]  a whole collection: ingest, memory, hybrid search

Texts have words by Zipf's law; vectors lie in clusters on a space of few dimensions, as those of encoders do, plus
noise. They are synthetic and cost no time, so the numbers are those of the index and not of an encoder. Prints one JSON
object, and on stderr how far it is. Times are milliseconds of one query after the other, as p50 and p95.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from headrace.config.collection_section import CollectionsConfig
from headrace.gateway.serving.exchange import Caller
from headrace.gateway.vector_index import GrowingVectors, Neighbours, Recall
from headrace.pipelines.collections.chunk_queries import query_words, search_keywords, word_scores
from headrace.pipelines.collections.collection import Collection, SearchOptions
from headrace.pipelines.collections.collection_schema import create_keyword_table, keyword_table
from headrace.pipelines.collections.collections import Collections
from headrace.pipelines.collections.document_intake import GivenDocument
from headrace.pipelines.collections.keyword_scores import add_up_words, as_arrays

Floats = NDArray[np.float32]
WIDTH: Final = 384
QUERIES: Final = 200  # by default
WORDS: Final = 120  # of a chunk
VOCABULARY: Final = 50_000
TOGETHER: Final = 200  # documents in one request
CALLER: Final = Caller(tenant="benchmark")
SEARCHES: Final = {
    "keyword, words read by these queries": SearchOptions(mode="keyword", deadline_s=60),
    "keyword, words known": SearchOptions(mode="keyword", deadline_s=60),
    "hybrid, exact": SearchOptions(recall="exact", deadline_s=60),
    **{
        f"{mode}, {recall}": SearchOptions(mode=mode, recall=recall, deadline_s=60)
        for recall in ("fast", "balanced", "high")
        for mode in ("vector", "hybrid")
    },
}


def made_vectors(count: int, seed: int) -> Floats:
    """Unit vectors in clusters on 48 of 384 dimensions, with noise on all."""
    random = np.random.default_rng(seed)
    basis = np.random.default_rng(1).normal(size=(48, WIDTH)).astype(np.float32)
    centres = np.random.default_rng(2).normal(size=(500, 48)).astype(np.float32)
    rows = centres[random.integers(0, 500, count)] + 1.5 * random.normal(size=(count, 48)).astype(np.float32)
    found = rows @ basis / 7 + 0.15 * random.normal(size=(count, WIDTH)).astype(np.float32)
    return (found / np.linalg.norm(found, axis=1, keepdims=True)).astype(np.float32)


def made_texts(count: int, words: int, seed: int) -> list[str]:
    random = np.random.default_rng(seed)
    ranks = np.minimum(random.zipf(1.15, size=(count, words)), VOCABULARY)
    return [" ".join(f"w{rank}" for rank in row) for row in ranks.tolist()]


def milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    return {f"p{share}": round(float(np.percentile(seconds, share)) * 1e3, 3) for share in (50, 95)}


def timed(call: Callable[[Any], Any], queries: Sequence[Any]) -> tuple[list[Any], dict[str, float]]:
    found: list[Any] = []
    seconds: list[float] = []
    for query in queries:
        began = time.perf_counter()
        found.append(call(query))
        seconds.append(time.perf_counter() - began)
    return found, milliseconds(seconds)


def memory_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def vectors(chunks: int) -> dict[str, Any]:
    rows, queries = made_vectors(chunks, 3), list(made_vectors(QUERIES, 4))
    before = memory_mib()
    index = GrowingVectors(WIDTH, exact=1000)
    began = time.perf_counter()
    for start in range(0, chunks, 4096):
        part = rows[start : start + 4096]
        index.add_all(np.arange(start, start + len(part)), part)
    build_s = time.perf_counter() - began
    exact, exact_ms = timed(lambda query: np.argsort(-(rows @ query))[:10].tolist(), queries)
    results: dict[str, Any] = {"exact, one matrix product": {"recall@10": 1.0, "ms": exact_ms}}
    recalls: tuple[Recall, ...] = ("fast", "balanced", "high")
    for recall in recalls:
        found, ms = timed(lambda query, recall=recall: index.search_with(query, 10, recall=recall), queries)
        hits = sum(len(set(want) & {id for id, _ in got}) for want, got in zip(exact, found, strict=True))
        results[recall] = {"recall@10": round(hits / (10 * len(queries)), 4), "ms": ms}
    return {
        "chunks": chunks,
        "build_s": round(build_s, 1),
        "built_per_s": round(chunks / build_s),
        "memory_mib": round(memory_mib() - before),
        "searches": results,
    }


def keywords(chunks: int, count: int) -> dict[str, Any]:
    texts, queries = made_texts(chunks, WORDS, 5), made_texts(count, 6, 6)
    connection = sqlite3.connect(":memory:")
    connection.execute(create_keyword_table(1))
    began = time.perf_counter()
    connection.executemany(
        f"INSERT INTO {keyword_table(1)} (rowid, heading, text) VALUES (?, '', ?)", enumerate(texts, start=1)
    )
    fts_s = time.perf_counter() - began
    whole, whole_ms = timed(lambda query: search_keywords(connection, 1, query, 50, None), queries)
    known: dict[str, tuple[Any, Any]] = {}

    def add_up(query: str) -> Neighbours:
        for word in query_words(query):
            if word not in known:
                known[word] = as_arrays(word_scores(connection, 1, word))
        return add_up_words([known[word] for word in query_words(query) if len(known[word][0])], 50)

    cold, cold_ms = timed(add_up, queries)
    warm, warm_ms = timed(add_up, queries)
    found: dict[str, Any] = {
        "fts5": {"index_s": round(fts_s, 2), "ms": whole_ms},
        "scores of words, at first": {"ms": cold_ms, "share of the same ten as FTS5": _same_ten(whole, cold)},
        "scores of words, known": {
            "ms": warm_ms,
            "words": len(known),
            "mib": round(sum(ids.nbytes + scores.nbytes for ids, scores in known.values()) / 2**20, 1),
            "share of the same ten as FTS5": _same_ten(whole, warm),
        },
    }
    try:
        import bm25s
    except ImportError:
        return {"chunks": chunks, "searches": found, "bm25s": "not installed"}
    began = time.perf_counter()
    retriever = bm25s.BM25(method="lucene", k1=1.2, b=0.75)  # the numbers of FTS5
    retriever.index([text.split() for text in texts], show_progress=False)
    bm25s_s = time.perf_counter() - began

    def retrieve(query: str) -> list[int]:
        documents, _ = retriever.retrieve([query.split()], k=50, show_progress=False)
        return [int(each) + 1 for each in documents[0]]

    other, other_ms = timed(retrieve, queries)
    found["bm25s"] = {
        "index_s": round(bm25s_s, 2),
        "ms": other_ms,
        "share of the same ten as FTS5": _same_ten(whole, [[(seq, 0.0) for seq in each] for each in other]),
    }
    return {"chunks": chunks, "searches": found}


def _same_ten(one: Sequence[Sequence[tuple[int, float]]], other: Sequence[Sequence[tuple[int, float]]]) -> float:
    shares = [
        len({seq for seq, _ in a[:10]} & {seq for seq, _ in b[:10]}) / 10 for a, b in zip(one, other, strict=True)
    ]
    return round(sum(shares) / len(shares), 3)


class TableEncoder:
    """Gives each text a made vector, so that the encoder's time is not in the numbers."""

    identity = "table"
    context = 4096

    def __init__(self, count: int, queries: int) -> None:
        self._rows = made_vectors(count, 3)
        self._queries = made_vectors(max(QUERIES, queries), 4)

    def count_tokens(self, text: str) -> int:
        return len(text.split())

    async def embed(self, texts: Sequence[str], caller: Caller, purpose: str) -> Floats:
        places = [int(text.partition(" ")[0].rpartition("#")[2]) for text in texts]
        return (self._rows if purpose == "document" else self._queries)[places]


async def collection(chunks: int, count: int) -> dict[str, Any]:
    encoder = TableEncoder(chunks, count)
    before = memory_mib()
    with tempfile.TemporaryDirectory() as folder:
        config = CollectionsConfig(chunk_tokens=WORDS + 10, overlap_tokens=0, exact=1000)
        held = Collections(
            config, Path(folder), caller_for=lambda tenant, key: CALLER, encoder_for=lambda caller, model: encoder
        )
        await held.create(CALLER, "c", model="table")
        texts = made_texts(chunks, WORDS, 5)
        began = time.perf_counter()
        marks: list[float] = []
        for start in range(0, chunks, TOGETHER):
            given = range(start, min(chunks, start + TOGETHER))
            await held.add(CALLER, "c", [GivenDocument(id=str(n), text=f"#{n} {texts[n]}") for n in given])
            await held.indexer.idle.wait()
            marks.append(time.perf_counter())
            tell(f"{given.stop} chunks", began)
        ingest_s = marks[-1] - began
        opened = await held.open(CALLER, "c")
        queries = [f"#{place} {text}" for place, text in enumerate(made_texts(count, 6, 6))]
        began = time.perf_counter()
        while (await opened.find(queries[0], SearchOptions(mode="vector", deadline_s=30))).skipped:
            pass  # the vectors are being read; a search leaves them out until its deadline
        load_s = time.perf_counter() - began
        results: dict[str, Any] = {}
        wanted: list[list[str]] = []
        for name, options in SEARCHES.items():
            found, ms = await searched(opened, queries, options)
            results[name] = {"ms": ms}
            if name == "hybrid, exact":
                wanted = found
            if options.mode == "hybrid":
                hits = sum(len(set(a) & set(b)) / max(1, len(a)) for a, b in zip(wanted, found, strict=True))
                results[name]["recall@10 of exact hybrid"] = round(hits / len(queries), 4)
            tell(f"{name}: {results[name]}", began)
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
        await held.close()
    tenth = max(1, len(marks) // 10)
    parts = marks if len(marks) < 2 * tenth + 1 else [marks[tenth] - marks[0], marks[-1] - marks[-1 - tenth]]
    return {
        "chunks": chunks,
        "ingest": {
            "s": round(ingest_s, 1),
            "chunks_per_s": round(chunks / ingest_s),
            "of the first and the last tenth": [round(tenth * TOGETHER / part) for part in parts],
        },
        "load_s": round(load_s, 2),
        "memory_mib": round(memory_mib() - before),
        "disk_mib": round(size / 2**20),
        "searches": results,
    }


async def searched(
    opened: Collection, queries: Sequence[str], options: SearchOptions
) -> tuple[list[list[str]], dict[str, float]]:
    """Return the hits of each query, and the times."""
    found: list[list[str]] = []
    seconds: list[float] = []
    for query in queries:
        began = time.perf_counter()
        result = await opened.find(query, options)
        seconds.append(time.perf_counter() - began)
        if result.skipped:
            raise RuntimeError(f"A search has left out {dict(result.skipped)}: its numbers would mean nothing.")
        found.append([hit.id for hit in result.hits])
    return found, milliseconds(seconds)


def tell(what: str, began: float) -> None:
    print(f"{time.perf_counter() - began:7.1f} s  {what}", file=sys.stderr, flush=True)


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("vectors", "keywords", "collection"))
    parser.add_argument("--chunks", type=int)
    parser.add_argument("--queries", type=int, default=QUERIES)
    parser.add_argument("--out", type=Path, help="file to write the result to as well")
    given = parser.parse_args()
    load = os.getloadavg()[0]
    if given.kind == "vectors":
        found = vectors(given.chunks or 100_000)
    elif given.kind == "keywords":
        found = keywords(given.chunks or 20_000, given.queries)
    else:
        found = asyncio.run(collection(given.chunks or 100_000, given.queries))
    about = {
        "processor": processor(),
        "cores": os.cpu_count(),
        "load_before": round(load, 1),
        "load_after": round(os.getloadavg()[0], 1),
    }
    text = json.dumps({"kind": given.kind, "machine": about, **found}, indent=2)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
