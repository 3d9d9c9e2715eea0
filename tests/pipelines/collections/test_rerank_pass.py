"""Reranking fits its budget: the number of candidates follows their measured cost, and a late pass is dropped."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace.gateway.api_errors import ApiError
from headrace.pipelines.collections.collection import Reranker, SearchOptions, SearchResult, fuse
from headrace.pipelines.collections.rerank_pass import RerankCosts
from tests.support.stores.tiny_collections import ANNA, shelf


def test_more_candidates_are_affordable_when_they_are_cheap() -> None:
    costs = RerankCosts()
    first = costs.affordable("m", 0.4)
    for _ in range(20):
        costs.record("m", 10, 0.01)
    assert costs.affordable("m", 0.4) > 10 * first
    assert costs.affordable("other", 0.4) == first
    for _ in range(20):
        costs.record("m", 10, 2.0)
    assert costs.affordable("m", 0.4) == 1


def test_a_late_pass_makes_the_next_one_smaller() -> None:
    costs = RerankCosts()
    counts = [costs.affordable("m", 0.4)]
    for _ in range(3):
        costs.record("m", counts[-1], 0.4, late=True)
        counts.append(costs.affordable("m", 0.4))
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] < counts[0] / 2


TEXTS = ("ferry one", "ferry two", "ferry three", "ferry four")


async def search(
    folder: Path, rerank: object, **options: float
) -> tuple[SearchResult, list[tuple[Sequence[str], float]]]:
    """`rerank`: the scores that the reranker gives, an error that it raises, or None for a late one."""
    asked: list[tuple[Sequence[str], float]] = []

    async def answer(query: str, texts: Sequence[str], budget_s: float) -> list[float] | None:
        asked.append((texts, budget_s))
        if isinstance(rerank, Exception):
            raise rerank
        return rerank  # type: ignore[return-value]

    async with shelf(folder, rerank_for=lambda caller, model: Reranker("ranker fp_1", answer)) as notes:
        await notes.add(*TEXTS)
        await notes.indexed()
        collection = await notes.collections.open(ANNA, "notes", rerank="")
        return await collection.find("ferry", SearchOptions(mode="keyword", rerank_s=0.4, **options)), asked


def test_the_reranked_come_first_by_their_scores_and_the_rest_follows(tmp_path: Path) -> None:
    found, asked = asyncio.run(search(tmp_path, [0.2, 0.9]))
    texts, budget_s = asked[0]
    assert budget_s == pytest.approx(0.4)
    assert found.reranked == 2
    assert [hit.text for hit in found.hits][:2] == [texts[1], texts[0]]
    assert [hit.text for hit in found.hits][2:] == list(texts[2:])
    assert [hit.score for hit in found.hits] == sorted((hit.score for hit in found.hits), reverse=True)
    assert found.hits[0].scores["rerank"] == 0.9
    assert "rerank" in found.stages_ms


@pytest.mark.parametrize(
    ("rerank", "reason"),
    [(None, "budget"), (ApiError("Busy.", kind="overloaded_error", code="overloaded"), "overloaded")],
)
def test_a_pass_that_is_late_or_fails_is_named_and_the_order_stays(tmp_path: Path, rerank: object, reason: str) -> None:
    found, _ = asyncio.run(search(tmp_path, rerank))
    assert found.skipped == {"rerank": reason}
    assert len(found.hits) == 4
    assert found.reranked == 0


def test_a_search_without_time_skips_all_stages(tmp_path: Path) -> None:
    found, asked = asyncio.run(search(tmp_path, [1.0, 1.0], deadline_s=0.0))
    assert found.hits == []
    assert found.skipped == {"keyword": "deadline"}
    assert asked == []


def test_fusion_ranks_by_both_lists() -> None:
    one, other = [(1, 9.0), (2, 8.0), (3, 7.0)], [(3, 0.9), (1, 0.8), (4, 0.7)]
    assert [seq for seq, _ in fuse([one, other])] == [1, 3, 2, 4]
    assert fuse([one])[0] == (1, 1.0)
    assert fuse([]) == []
