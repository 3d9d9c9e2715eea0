"""Ranks the best candidates by a cross-encoder: as many as are expected to fit a budget of time.

The cost of a candidate is learned from the passes before. A pass that misses its budget is dropped, and the next ones
take fewer candidates.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from headrace.gateway.accounts.access import find_model
from headrace.gateway.api_errors import ApiError
from headrace.gateway.flow.metered_evaluation import run_metered
from headrace.gateway.serving.text_evaluation import TextEvaluation
from headrace.pipelines.collections.encoder import ENDPOINT

if TYPE_CHECKING:
    from headrace.gateway.flow.services import Services
    from headrace.gateway.serving.exchange import Caller
    from headrace.gateway.serving.served_variant import ServedVariant

_FIRST_ESTIMATE_S: Final = 0.02  # of one candidate, before anything was measured
_WEIGHT: Final = 0.3  # of the latest measurement
_SAFETY: Final = 0.8  # of the budget that the estimate may fill
_LEAST: Final = 2  # candidates that are worth a pass
_MODELS: Final = 64  # whose costs are remembered


class RerankCosts:
    """Estimates how many candidates fit a budget, for each model."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}  # of one candidate, by model

    def affordable(self, model: str, budget_s: float) -> int:
        return int(budget_s * _SAFETY / self._seconds.get(model, _FIRST_ESTIMATE_S))

    def record(self, model: str, count: int, seconds: float, *, late: bool = False) -> None:
        before = self._seconds.get(model, _FIRST_ESTIMATE_S)
        each = seconds / count
        # A late pass would have taken longer, by how much is unknown.
        found = 1.5 * max(before, each) if late else before + _WEIGHT * (each - before)
        if model in self._seconds or len(self._seconds) < _MODELS:
            self._seconds[model] = found


async def rerank_within(
    services: Services,
    caller: Caller,
    served: ServedVariant,
    query: str,
    texts: Sequence[str],
    *,
    budget_s: float,
    costs: RerankCosts,
    clock: Callable[[], float] = time.monotonic,
) -> list[float] | None:
    """Return the scores of the first texts, from 0 to 1, as many as fit the budget. None if the pass was not worth
    starting or came late. ApiError if the model fails."""
    count = min(len(texts), costs.affordable(served.name, budget_s))
    if count < _LEAST or served.ranking is None:
        return None
    ranking = served.ranking
    work = TextEvaluation(served, caller, {"truncate": True, "surface": caller.surface or ""})
    began = clock()
    try:
        async with asyncio.timeout(budget_s):
            await work.take_pairs(ranking, query, texts[:count])
            vectors, _ = await run_metered(services, caller, work, work.vectors, ENDPOINT)
    except TimeoutError:
        costs.record(served.name, count, clock() - began, late=True)
        return None
    costs.record(served.name, count, clock() - began)
    return [ranking.score(vector) for vector in vectors.tolist()]


def find_reranker(services: Services, caller: Caller, name: str) -> ServedVariant:
    """Find the model that reranks. ApiError if there is none of this name, or it does not rank."""
    if not name:
        raise ApiError(
            "This server has no reranker. Name a model in 'rerank', or set collections.reranker in headrace.toml.",
            parameter="rerank",
            code="no_reranker",
        )
    served = find_model(caller, services.fleet, name)
    if served.ranking is None:
        raise ApiError(
            f"'{served.name}' {served.purpose}. Reranking needs a cross-encoder.",
            parameter="rerank",
            code="no_reranker",
        )
    return served
