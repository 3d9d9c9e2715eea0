"""What reads a near question together with the cached one before its answer is served."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from headrace.engine.interface.request import GenerationRequest
from headrace.errors import HeadraceError
from headrace.gateway.caches.semantic.hit_verifier import RerankerVerifier
from headrace.gateway.caches.semantic.semantic_entry import StoredAnswer
from headrace.gateway.requests.text_request import TokenUsage
from headrace.gateway.serving.exchange import Caller
from headrace.gateway.serving.served_variant import ServedVariant
from headrace.models.spec import RankingSpec
from tests.support.dialect_exchanges import tokenizer
from tests.support.file_storage import asynchronous
from tests.support.stores.fake_encoders import EncoderEngine
from tests.support.stores.semantic_bench import QUESTION, SAME, Bench, fixed


class Verifier:
    """Gives every pair one score; None: it fails."""

    def __init__(self, found: float | None, *, meanwhile: Callable[[], Awaitable[Any]] | None = None) -> None:
        self.variant = "judge"
        self.usage = TokenUsage(prompt_tokens=7)
        self.found = found
        self.pairs: list[tuple[str, str]] = []
        self._meanwhile = meanwhile

    async def score(self, one: str, other: str) -> float:
        self.pairs.append((one, other))
        if self._meanwhile is not None:
            await self._meanwhile()
        if self.found is None:
            raise OSError("the verifier is gone")
        return self.found


def test_a_hit_must_also_convince_the_verifier() -> None:
    async def test() -> None:
        bench = Bench(fixed(verify_least=0.6))
        await bench.answered(QUESTION)
        sure = Verifier(0.6)
        assert (await bench.recall(SAME, verifier=sure)).outcome == "hit"
        assert sure.pairs == [(QUESTION, SAME)]
        doubtful = await bench.recall(SAME, verifier=Verifier(0.59))
        assert (doubtful.outcome, doubtful.reason, doubtful.entry) == ("refused", "verifier", None)
        assert bench.counts["refusals"] == {"verifier": 1}
        assert (await bench.recall(SAME, verifier=Verifier(None))).outcome == "unavailable"
        far = Verifier(1.0)
        assert (await bench.recall("What does the house wine cost?", verifier=far)).outcome == "miss"
        assert far.pairs == []  # the verifier can only refuse
        assert (await bench.recall(QUESTION, verifier=far)).outcome == "hit"
        assert far.pairs == []  # the same text needs none
        bench.reconfigure(fixed(threshold=0.999))
        assert (await bench.recall(SAME, verifier=far)).outcome == "explore"
        assert far.pairs == []  # the score alone is too low
        assert bench.counts["verifications"] == {"yes": 1, "no": 1, "failed": 1}

    asynchronous(test)


def test_a_candidate_that_the_verifier_refuses_teaches_nothing_and_its_answer_is_kept_beside() -> None:
    async def test() -> None:
        bench = Bench(fixed())
        await bench.answered(QUESTION)
        refused = await bench.recall(SAME, verifier=Verifier(0.0))
        await bench.cache.settle(refused, StoredAnswer("Another answer."), bench.embedder)
        assert bench.counts["comparisons"] == {}
        assert bench.cache.about("a")["entries"] == 2

    asynchronous(test)


def test_an_entry_that_is_invalidated_while_the_verifier_reads_is_not_served() -> None:
    async def test() -> None:
        bench = Bench(fixed())
        await bench.answered(QUESTION)
        verifier = Verifier(1.0, meanwhile=lambda: bench.cache.invalidate(tenant="a"))
        assert (await bench.recall(SAME, verifier=verifier)).outcome == "miss"

    asynchronous(test)


def test_a_reranker_reads_a_pair_in_both_orders_and_the_lower_score_counts() -> None:
    class Engine(EncoderEngine):
        """Its number is higher if the shorter text comes first."""

        def stream(self, request: GenerationRequest) -> Any:
            stream = super().stream(request)
            first = tokenizer().decode(list(request.prompt)).startswith("ab")
            stream.vector = np.array([4.0 if first else -4.0], dtype="<f4")
            return stream

    async def test() -> None:
        engine = Engine()
        served = ServedVariant(
            name="judge",
            engine=engine,
            tokenizer=tokenizer(),
            context=64,
            kind="reranker",
            ranking=RankingSpec(template="pair", activation="identity"),
        )
        verifier = RerankerVerifier(served, Caller(tenant="a"), surface="voice")
        lower = 1 / (1 + np.exp(4.0))
        assert await verifier.score("ab", "xyz and more") == pytest.approx(lower)
        assert await verifier.score("xyz and more", "ab") == pytest.approx(lower)
        assert {(each.tenant, each.surface) for each in engine.text_request} == {("a", "voice")}
        with pytest.raises(HeadraceError, match="no reranker"):
            RerankerVerifier(replace(served, ranking=None), Caller(tenant="a"))

    asynchronous(test)
