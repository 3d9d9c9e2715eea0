"""Configuration of collections of documents. headrace.pipelines.collections applies it."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from headrace.config.value_types import Count, Milliseconds, Seconds, Section, Text

ChunkTokens = Annotated[int, Meta(ge=32, le=8192)]


class CollectionsConfig(Section, frozen=True):
    enabled: bool = True  # serve /v1/collections
    embedder: str = ""  # model that computes embeddings; empty: the first served encoder
    reranker: str = ""  # model that reranks search results; empty: none, unless a search names one
    rerank_ms: Milliseconds = 400.0  # milliseconds, budget of reranking in one search
    search_ms: Milliseconds = 5_000.0  # milliseconds, budget of a search that sets no deadline
    recall: Literal["fast", "balanced", "high", "exact"] = "balanced"  # of searches that set none
    chunk_tokens: ChunkTokens = 200  # tokens of a chunk in new collections; at most what the encoder reads
    overlap_tokens: Annotated[int, Meta(ge=0, le=1024)] = 30  # tokens that a chunk repeats of the one before
    exact: Count = 20_000  # vectors of a collection that are compared one by one; more need the extra `vector`
    keyword_bytes: Count = 128 * 1024 * 1024  # 128 MiB of words' scores in memory, for large collections
    vectors: Literal["float32", "int8"] = "float32"  # of vectors in memory
    memory_bytes: Count = 1024**3  # 1 GiB of vectors in memory; the least recently used collection is unloaded
    collections: Count = 100  # collections per tenant
    chunks: Count = 1_000_000  # chunks per tenant
    document_bytes: Count = 16 * 1024 * 1024  # 16 MiB, one document
    documents: Count = 256  # documents in one request
    url_hosts: tuple[Text, ...] = ()  # hosts whose URLs may be added: "docs.example.com", "*.example.com", "*"
    private_hosts: tuple[Text, ...] = ()  # hosts that may have private addresses; not covered by url_hosts
    url_s: Seconds = 20.0  # seconds to fetch a URL
