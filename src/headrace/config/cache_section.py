"""The caches of answers: the exact one and the semantic one.

Owns these sections with their defaults. What is kept, and when an answer may be another's, is gateway.caches's and
gateway.semantic's.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from headrace.config.value_types import Count, Milliseconds, Section, Share, Text

CacheMode = Literal["off", "record", "share", "on"]
Lifetime = Annotated[str, Meta(pattern=r"^(?=[0-9.]*[1-9])[0-9]{1,9}(\.[0-9]{1,6})?(ms|s|m|h|d)\Z")]  # 90s, 5m, 1h, 7d
Cosine = Annotated[float, Meta(ge=-1, le=1)]


class ExactConfig(Section, frozen=True):
    mode: CacheMode = "off"
    share: Share = 0.1  # of the tenants, with mode = "share"
    store: Literal["memory", "sqlite", "redis"] = "memory"
    redis_env: Text = "HEADRACE_CACHE_REDIS"  # the environment variable that has its address
    secret_env: Text | None = None  # that has a secret which signs entries, where others can write to the store
    bytes: Count = 256 * 1024 * 1024  # 256 MiB of all entries
    tenant_bytes: Count = 64 * 1024 * 1024  # 64 MiB of one tenant's
    entry_bytes: Count = 1024 * 1024  # 1 MiB of one
    ttl: Lifetime = "1h"  # of an entry without tags
    tags: dict[str, Lifetime] = msgspec.field(default_factory=dict[str, Lifetime])  # the time to live, by tag
    # The tags that each event ends.
    events: dict[str, tuple[Text, ...]] = msgspec.field(default_factory=dict[str, tuple[Text, ...]])
    repeatable_only: bool = True  # neither keeps nor shares what is drawn at random without a seed
    joins: bool = True  # identical requests under way share one generation
    stale: Lifetime | None = None  # that an entry stays beyond its time, for a ladder's `stale`
    wait_ms: Milliseconds = 50.0  # that the store has for an answer
    policy: str = ""  # raised, it leaves all older answers behind


class SemanticConfig(Section, frozen=True):
    mode: CacheMode = "off"
    share: Share = 0.1  # of the tenants, with mode = "share"
    embedder: str = ""  # a served encoder
    serve: Literal["answer", "prime"] = "answer"  # the kept answer itself, or as an example before the question
    delta: Annotated[float, Meta(gt=0, lt=1)] = 0.02  # the bound on wrong answers
    per: Literal["hit", "request"] = "hit"  # what the bound is a share of
    threshold: Cosine | None = None  # a fixed least score in place of learned ones
    floor: Cosine = 0.75  # cosine under which nothing is looked at
    nearest: Annotated[int, Meta(ge=1, le=64)] = 4  # entries that are looked at
    guards: bool = True
    check_share: Share = 0.05  # of hits that are checked against a fresh answer
    sampled: bool = False  # requests with a temperature too
    tools: bool = False  # requests with tools, and agents' turns, too
    surfaces: tuple[Text, ...] = ()  # all where none is named
    policy: str = ""  # raised, it leaves all older answers behind
    entries: Count = 20_000  # of a tenant
    tenant_bytes: Count = 64 * 1024 * 1024  # 64 MiB of a tenant's texts and vectors
    total_bytes: Count = 1024**3  # 1 GiB of all tenants together
    ttl: Lifetime = "1d"
    tags: dict[str, Lifetime] = msgspec.field(default_factory=dict[str, Lifetime])  # the time to live, by tag
    vectors: Literal["float32", "int8"] = "float32"
    wait_ms: Milliseconds = 50.0  # that an embedding may take


class CacheConfig(Section, frozen=True):
    """Caches of answers. (The prefix cache is the engine's.)"""

    exact: ExactConfig = ExactConfig()
    semantic: SemanticConfig = SemanticConfig()
