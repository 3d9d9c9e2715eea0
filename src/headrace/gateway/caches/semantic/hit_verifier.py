"""Verifies a near question before its cached answer is served: a model reads both questions together.

An embedding reads each question alone; a verifier compares them word by word, so it sees what cosine and guards do not.
It can only refuse a hit. Owns the protocol and the reranker (cross-encoder) as a verifier; the chat model as one is in
`gateway.flow.model_verifier`. Does not know entries or thresholds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from headrace.errors import HeadraceError
from headrace.gateway.requests.text_request import TokenUsage
from headrace.gateway.serving.text_evaluation import TextEvaluation

if TYPE_CHECKING:
    from headrace.gateway.serving.exchange import Caller
    from headrace.gateway.serving.served_variant import ServedVariant


class HitVerifier(Protocol):
    """One verification for one request."""

    @property
    def variant(self) -> str: ...

    @property
    def usage(self) -> TokenUsage:
        """What was computed so far, also after a failure."""
        ...

    async def score(self, one: str, other: str) -> float:
        """Return how surely one answer fits both questions, from 0 to 1."""
        ...


class Verification(msgspec.Struct, frozen=True):
    """What a verifier found and used. `score` is None if it failed, was too late or was skipped."""

    variant: str
    score: float | None
    usage: TokenUsage
    began: float  # on the monotonic clock of the process
    ended: float
    is_charged: bool  # False: the cache only records, so the tenant gains nothing


class RerankerVerifier:
    """A served reranker. It reads each pair in both orders; the lower score counts."""

    def __init__(self, served: ServedVariant, caller: Caller, *, surface: str = "chat") -> None:
        if served.ranking is None:
            raise HeadraceError(f"'{served.name}' is no reranker, so it gives pairs of questions no score.")
        self.variant = served.name
        self.usage = TokenUsage()
        self._served = served
        self._ranking = served.ranking
        self._caller = caller
        self._given: Mapping[str, Any] = {"surface": surface}

    async def score(self, one: str, other: str) -> float:
        work = TextEvaluation(self._served, self._caller, self._given)
        self.usage = work.usage
        await work.take_pairs(self._ranking, one, [other])
        await work.take_pairs(self._ranking, other, [one])
        return min(self._ranking.probability(vector) for vector in (await work.vectors()).tolist())
