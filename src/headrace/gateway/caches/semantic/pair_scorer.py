"""Scores two questions with a reranker, which reads both at once where an embedding reads each alone.

A reranker (cross-encoder) compares the questions word by word, so it sees what cosine and guards do not. It can only
refuse a hit. Each pair is read in both orders, and the lower score counts. Does not know entries or thresholds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from headrace.errors import HeadraceError
from headrace.gateway.serving.text_evaluation import TextEvaluation

if TYPE_CHECKING:
    from headrace.gateway.serving.exchange import Caller
    from headrace.gateway.serving.served_variant import ServedVariant


class PairScorer(Protocol):
    async def score(self, one: str, other: str) -> float:
        """Return how surely two questions ask the same, from 0 to 1."""
        ...


class ServedPairScorer:
    """A reranker among the served variants. Its work counts as the caller's: its tenant and fair share."""

    def __init__(self, served: ServedVariant, caller: Caller, *, surface: str = "chat") -> None:
        if served.ranking is None:
            raise HeadraceError(f"'{served.name}' is no reranker; the semantic cache needs one")
        self._served = served
        self._ranking = served.ranking
        self._caller = caller
        self._given: Mapping[str, Any] = {"surface": surface}

    async def score(self, one: str, other: str) -> float:
        work = TextEvaluation(self._served, self._caller, self._given)
        await work.take_pairs(self._ranking, one, [other])
        await work.take_pairs(self._ranking, other, [one])
        return min(self._ranking.probability(vector) for vector in (await work.vectors()).tolist())
