"""Configuration of the response caches: exact and semantic. headrace.gateway.caches applies it."""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from headrace.config.value_types import Count, Milliseconds, Section, Share, Text

CacheMode = Literal["off", "record", "share", "on"]
Lifetime = Annotated[str, Meta(pattern=r"^(?=[0-9.]*[1-9])[0-9]{1,9}(\.[0-9]{1,6})?(ms|s|m|h|d)\Z")]  # 90s, 5m, 1h, 7d
Cosine = Annotated[float, Meta(ge=-1, le=1)]
ANSWERING_MODEL: Final = "model"  # `cache.semantic.verify`: the variant that would answer the request


class ExactConfig(Section, frozen=True):
    mode: CacheMode = "off"
    share: Share = 0.1  # share of tenants, with mode = "share"
    store: Literal["memory", "sqlite", "redis"] = "memory"
    redis_env: Text = "HEADRACE_CACHE_REDIS"  # environment variable with the Redis URL
    secret_env: Text | None = None  # environment variable with a secret that signs entries; default: none
    bytes: Count = 256 * 1024 * 1024  # 256 MiB, all entries
    tenant_bytes: Count = 64 * 1024 * 1024  # 64 MiB, entries of one tenant; at most bytes
    entry_bytes: Count = 1024 * 1024  # 1 MiB, one entry
    ttl: Lifetime = "1h"  # lifetime of entries without tags: 90s, 5m, 1h, 7d
    tags: dict[str, Lifetime] = msgspec.field(default_factory=dict[str, Lifetime])  # lifetime by tag
    # Tags whose entries an event invalidates
    events: dict[str, tuple[Text, ...]] = msgspec.field(default_factory=dict[str, tuple[Text, ...]])
    repeatable_only: bool = True  # do not cache responses sampled without a seed
    joins: bool = True  # identical requests in flight share one generation
    stale: Lifetime | None = None  # how long expired entries are kept for the ladder's stale step; default: not at all
    wait_ms: Milliseconds = 50.0  # milliseconds, store timeout
    policy: str = ""  # any string; changing it invalidates all earlier entries


class SemanticConfig(Section, frozen=True):
    mode: CacheMode = "off"
    share: Share = 0.1  # share of tenants, with mode = "share"
    embedder: str = ""  # model that computes embeddings; required unless mode is off
    serve: Literal["answer", "prime"] = "answer"  # return the cached response, or prime the model with it as an example
    delta: Annotated[float, Meta(gt=0, lt=1)] = 0.02  # highest share of wrong responses
    per: Literal["hit", "request"] = "hit"  # what delta is a share of: hit or request
    threshold: Cosine | None = None  # fixed similarity threshold; default: learned
    floor: Cosine = 0.75  # cosine similarity below which entries are ignored
    nearest: Annotated[int, Meta(ge=1, le=64)] = 4  # nearest entries to compare, 1 to 64
    guards: bool = True
    # model, or a served reranker or chat model that must find that both questions ask the same; empty: none
    verify: str = ""
    verify_least: Share = 0.5  # its lowest score for a hit, 0 to 1; the lower of both orders counts
    verify_wait_ms: Milliseconds = 250.0  # milliseconds for a verification
    check_share: Share = 0.05  # share of hits checked against a fresh response
    sampled: bool = False  # include requests with a temperature
    tools: bool = False  # include requests with tools, and agent turns
    surfaces: tuple[Text, ...] = ()  # surfaces to include; empty: all
    policy: str = ""  # any string; changing it invalidates all earlier entries
    entries: Count = 20_000  # entries per tenant
    tenant_bytes: Count = 64 * 1024 * 1024  # 64 MiB, text and vectors of one tenant
    total_bytes: Count = 1024**3  # 1 GiB, text and vectors of all tenants
    ttl: Lifetime = "1d"
    tags: dict[str, Lifetime] = msgspec.field(default_factory=dict[str, Lifetime])  # lifetime by tag
    vectors: Literal["float32", "int8"] = "float32"
    wait_ms: Milliseconds = 50.0  # milliseconds for an embedding


class ResultsConfig(Section, frozen=True):
    """Cache of intermediate results: embeddings, search results, and answers of HTTP services, SQL and tools."""

    mode: CacheMode = "off"
    share: Share = 0.1  # share of tenants, with mode = "share"
    store: Literal["memory", "sqlite", "redis"] = "memory"
    redis_env: Text = "HEADRACE_CACHE_REDIS"  # environment variable with the Redis URL
    secret_env: Text | None = None  # environment variable with a secret that signs entries; default: none
    bytes: Count = 128 * 1024 * 1024  # 128 MiB, all entries
    tenant_bytes: Count = 32 * 1024 * 1024  # 32 MiB, entries of one tenant
    entry_bytes: Count = 1024 * 1024  # 1 MiB, one entry
    embedding_ttl: Lifetime = "7d"  # lifetime of vectors, which are the same whenever they are computed
    retrieval_ttl: Lifetime = "1h"  # lifetime of search results; a change of the collection ends them at once
    http_ttl: Lifetime = "5m"  # lifetime of answers of HTTP services
    sql_ttl: Lifetime = "1m"  # lifetime of rows of a database
    tool_ttl: Lifetime = "5m"  # lifetime of results of other tools
    tags: dict[str, Lifetime] = msgspec.field(default_factory=dict[str, Lifetime])  # lifetime by tag
    wait_ms: Milliseconds = 50.0  # milliseconds, store timeout


class CacheConfig(Section, frozen=True):
    """Response caches. The prefix cache belongs to the engine."""

    exact: ExactConfig = ExactConfig()
    semantic: SemanticConfig = SemanticConfig()
    results: ResultsConfig = ResultsConfig()


_UNIT_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def lifetime_s(text: str) -> float:
    """Return the seconds of a Lifetime such as 90s, 5m, 1.5h or 7d."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)", text)
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"Invalid lifetime '{text}'. Write it like 90s, 5m, 1h or 7d.")
    return float(match[1]) * _UNIT_SECONDS[match[2]]
