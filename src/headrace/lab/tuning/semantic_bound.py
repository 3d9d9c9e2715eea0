"""Finds the score above which a semantic cache's answers are right often enough, on recorded questions. Pure.

Each question is looked up among those before it, as the cache does: nearest vectors, guards, score. The threshold is
one of `cache.semantic.threshold`, which the cache compares with the same score.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.config.cache_section import SemanticConfig
from headrace.gateway.caches.semantic.guards import refusal_reason
from headrace.gateway.caches.semantic.pair_score import score
from headrace.gateway.caches.semantic.thresholds import wilson_interval

MOST_QUESTIONS: Final = 20_000


class SemanticBound(msgspec.Struct, frozen=True):
    threshold: float | None  # score; None: no threshold keeps the bound
    share: float  # of questions that have a candidate above it
    wrong: float  # of these, the candidate's answer is another one
    wrong_most: float  # upper end of its 95 % interval
    questions: int


def fit_semantic_bound(
    questions: Sequence[str],
    vectors: NDArray[np.float32],
    answers: Sequence[str],
    same: Callable[[str, str], bool],
    *,
    delta: float = 0.02,
    config: SemanticConfig | None = None,
) -> SemanticBound:
    """Return the lowest threshold at which at most `delta` of the served answers are wrong, with 95 % confidence.

    `same` tells whether two answers say the same. `config`: for `floor`, `nearest` and `guards`.
    """
    config = config or SemanticConfig()
    lengths = np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    unit = vectors / lengths
    pairs: list[tuple[float, bool]] = []
    for place in range(1, len(unit)):
        found = _candidate(questions, unit[:place] @ unit[place], place, config)
        if found is not None:
            pairs.append((found[0], same(answers[place], answers[found[1]])))
    pairs.sort(key=lambda each: -each[0])
    best = SemanticBound(None, 0.0, 0.0, 1.0, len(unit))
    wrong = 0
    for count, (value, right) in enumerate(pairs, 1):
        wrong += not right
        threshold = _rounded_down(value)
        if count < len(pairs) and pairs[count][0] >= threshold:
            continue  # scores that the written threshold does not tell apart fall on the same side of it
        most = wilson_interval(wrong, count)[1]
        if most <= delta:
            best = SemanticBound(threshold, count / len(unit), wrong / count, most, len(unit))
    return best


def _candidate(
    questions: Sequence[str], cosines: NDArray[np.float32], place: int, config: SemanticConfig
) -> tuple[float, int] | None:
    """Return the score and place of the best earlier question that the cache would consider."""
    best: tuple[float, int] | None = None
    nearest: list[int] = np.argsort(-cosines, kind="stable")[: config.nearest].tolist()
    for other in nearest:
        cosine = float(cosines[other])
        if cosine < config.floor:
            break
        if config.guards and refusal_reason(questions[place], questions[other]) is not None:
            continue
        value = score(questions[place], questions[other], cosine)
        if best is None or value > best[0]:
            best = value, other
    return best


def _rounded_down(value: float) -> float:
    """Return the value to four digits, never above it: what it is the threshold of must still reach it."""
    return np.floor(value * 1e4).item() / 1e4
