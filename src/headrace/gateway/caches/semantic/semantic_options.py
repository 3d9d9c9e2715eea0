"""What an operator may set of the semantic cache.

Owns the options with their defaults. What they mean is said where they are used.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from headrace.config.cache_section import SemanticConfig, lifetime_s
from headrace.gateway.caches.cache_modes import CacheMode
from headrace.gateway.caches.semantic.agreement import AgreementMethod
from headrace.gateway.caches.semantic.vector_index import EXACT, VectorFormat


class SemanticOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[cache.semantic]` of the configuration."""

    mode: CacheMode = "off"
    share: float = 0.1  # of tenants, with mode "share"
    modes: dict[str, CacheMode] = {}  # of tenants that have one of their own
    serve: Literal["answer", "prime"] = "answer"  # the kept answer itself, or as an example before the question
    delta: float = 0.02  # the bound on wrong answers
    per: Literal["hit", "request"] = "hit"  # what the bound is a share of
    threshold: float | None = None  # a fixed least score in place of learned ones
    floor: float = 0.75  # cosine under which nothing is looked at
    least: float = 0.2  # score under which a candidate is none
    nearest: int = 4  # entries that are looked at
    guards: bool = True
    check_share: float = 0.05  # of hits that are checked against a fresh answer
    agree_by: AgreementMethod = "embedding"
    agree_least: float = 0.9  # cosine of two answers that count as the same
    agree_wait_s: float = 1.0  # for the comparison, which no client waits for
    judge_least: float = 0.5  # share of yes under which a judge refuses
    sampled: bool = False  # requests with a temperature too
    tools: bool = False  # requests with tools, and agents' turns, too
    surfaces: tuple[str, ...] = ()  # all where none is named
    policy: str = ""  # raised, it leaves all older answers behind
    longest: int = 1000  # characters of a question
    answer_bytes: int = 64 * 1024  # 64 KiB of an answer that is kept
    entries: int = 20_000  # of a tenant
    tenant_bytes: int = 64 * 1024 * 1024  # 64 MiB of a tenant's texts and vectors
    total_bytes: int = 1024**3  # 1 GiB of all tenants together
    tenants: int = 256  # that are kept in memory
    ttl_s: float = 24 * 3600.0
    tag_ttl_s: dict[str, float] = {}
    vectors: VectorFormat = "float32"
    exact: int = EXACT  # entries of one prompt beyond which usearch takes over
    embed_wait_s: float = 0.05
    judge_wait_s: float = 0.2
    seed: int = 0

    @classmethod
    def from_config(cls, config: SemanticConfig) -> SemanticOptions:
        return cls(
            mode=config.mode,
            share=config.share,
            serve=config.serve,
            delta=config.delta,
            per=config.per,
            threshold=config.threshold,
            floor=config.floor,
            nearest=config.nearest,
            guards=config.guards,
            check_share=config.check_share,
            sampled=config.sampled,
            tools=config.tools,
            surfaces=config.surfaces,
            policy=config.policy,
            entries=config.entries,
            tenant_bytes=config.tenant_bytes,
            total_bytes=config.total_bytes,
            ttl_s=lifetime_s(config.ttl),
            tag_ttl_s={tag: lifetime_s(span) for tag, span in config.tags.items()},
            vectors=config.vectors,
            embed_wait_s=config.wait_ms / 1e3,
        )
