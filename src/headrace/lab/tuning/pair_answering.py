"""Answers cases with a small and a large variant and judges both, for the fits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from headrace.gateway.routing.confidence import TOP, Confidence
from headrace.lab.answering.model_server import ModelServer
from headrace.lab.cases.case import COMPLETIONS, Case
from headrace.lab.comparison.answer import Answer
from headrace.lab.tuning.judged_pair import JudgedPair, judged_pair


async def answer_pairs(
    cases: Sequence[Case],
    small: ModelServer,
    large: ModelServer,
    *,
    concurrency: int = 4,
    price_ratio: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[JudgedPair]:
    """Answer every case by both. Cases that either fails are left out.

    `price_ratio`: price of the large variant's token by the small one's. None: costs are seconds.
    """
    gate = asyncio.Semaphore(concurrency)
    done = 0

    async def one(case: Case) -> JudgedPair | None:
        nonlocal done
        async with gate:
            first, choice = await small.complete(case, **_logprobs(case))
            second, _ = await large.complete(case)
        done += 1
        if progress is not None:
            progress(done, len(cases))
        return None if first.error or second.error else _judged(case, first, second, choice, price_ratio)

    found = await asyncio.gather(*map(one, cases))
    return [pair for pair in found if pair is not None]


def _logprobs(case: Case) -> dict[str, Any]:
    return {"logprobs": TOP} if case.endpoint == COMPLETIONS else {"logprobs": True, "top_logprobs": TOP}


def _judged(
    case: Case, small: Answer, large: Answer, choice: dict[str, Any], price_ratio: float | None
) -> JudgedPair | None:
    if price_ratio is None:
        costs = small.e2el_s or 0.0, large.e2el_s or 0.0
    else:
        costs = _tokens(small), price_ratio * _tokens(large)
    return judged_pair(case, small, large, confidence_of(choice), costs)


def _tokens(answer: Answer) -> float:
    return float(answer.prompt_tokens + answer.output_tokens)


def confidence_of(choice: dict[str, Any]) -> Confidence:
    """Return the confidence from a choice's log-probabilities, of a chat or a completion."""
    found = Confidence()
    logprobs: dict[str, Any] = choice.get("logprobs") or {}
    tokens: list[dict[str, Any]] = logprobs.get("content") or []
    for token in tokens:
        likeliest: list[dict[str, Any]] = token.get("top_logprobs") or []
        found.add(float(token["logprob"]), [float(each["logprob"]) for each in likeliest])
    values: list[float | None] = logprobs.get("token_logprobs") or []
    tops: list[dict[str, float] | None] = logprobs.get("top_logprobs") or []
    for place, value in enumerate(values):
        if value is not None:
            top = tops[place] if place < len(tops) else None
            found.add(value, [] if top is None else list(top.values()))
    return found
