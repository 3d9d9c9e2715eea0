"""A semantic cache with what is around it: a clock, an encoder of words, and counters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.config.cache_section import SemanticConfig
from headrace.gateway.caches.semantic.hit_verifier import HitVerifier
from headrace.gateway.caches.semantic.semantic_cache import SemanticCache, SemanticLookup
from headrace.gateway.caches.semantic.semantic_entry import StoredAnswer
from headrace.gateway.caches.semantic.semantic_tuning import SemanticTuning
from headrace.gateway.requests.text_request import TextRequest
from tests.support.clock import Clock
from tests.support.stores.fake_encoders import WordEmbedder, asking

QUESTION = "How do I cancel my subscription?"
SAME = "How can I cancel my subscription?"
ANSWER = StoredAnswer("Open Settings, then Plan, then Cancel.")
Settings = tuple[SemanticConfig, SemanticTuning]


def fixed(**settings: Any) -> Settings:
    """Settings that serve from a fixed score on, so that a test needs no learning first."""
    chosen: dict[str, Any] = {"mode": "on", "threshold": 0.3, "agree_by": "normalised", "wait_ms": 10e3, **settings}
    tuning = {name: chosen.pop(name) for name in SemanticTuning.__struct_fields__ if name in chosen}
    return SemanticConfig(**chosen), SemanticTuning(**tuning)


def tagged(text: str | TextRequest, *tags: str) -> TextRequest:
    asked = asking(text) if isinstance(text, str) else text
    return asked.but(metadata={"cache_tags": ",".join(tags)})


class Bench:
    """A cache and what is around it."""

    def __init__(self, settings: Settings | None = None, **parts: Any) -> None:
        self.clock = Clock()
        self.embedder = WordEmbedder()
        tables = ("outcomes", "refusals", "verifications", "comparisons")
        self.counts: dict[str, dict[str, int]] = {table: {} for table in tables}
        config, tuning = settings or (SemanticConfig(), SemanticTuning())
        parts.setdefault("counted", self._count)
        self.cache = SemanticCache(config, tuning=tuning, clock=self.clock, **parts)

    def _count(self, table: str, name: str) -> None:
        self.counts[table][name] = self.counts[table].get(name, 0) + 1

    def reconfigure(self, settings: Settings) -> None:
        self.cache.config, self.cache.tuning = settings

    async def recall(
        self, text: str | TextRequest, tenant: str = "a", *, surface: str = "chat", verifier: HitVerifier | None = None
    ) -> SemanticLookup:
        asked = asking(text) if isinstance(text, str) else text
        return await self.cache.recall(
            tenant, asked, self.embedder, variant="mini fp_1", surface=surface, verifier=verifier
        )

    async def answered(
        self, text: str | TextRequest, answer: StoredAnswer = ANSWER, tenant: str = "a", tags: Sequence[str] = ()
    ) -> SemanticLookup:
        """A request that misses, its answer kept."""
        recall = await self.recall(tagged(text, *tags) if tags else text, tenant)
        await self.cache.settle(recall, answer, self.embedder)
        return recall
