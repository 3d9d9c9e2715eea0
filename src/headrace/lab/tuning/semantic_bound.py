"""Finds the similarity of questions above which a semantic cache's answers are right often enough. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.gateway.caches.semantic.thresholds import wilson_interval

MOST_QUESTIONS: Final = 20_000


class SemanticBound(msgspec.Struct, frozen=True):
    threshold: float | None  # cosine; None: no threshold keeps the bound
    share: float  # of questions that have a neighbour above it
    wrong: float  # of these, the answer of the neighbour is another one
    wrong_most: float  # upper end of its 95 % interval
    questions: int


def fit_semantic_bound(
    vectors: NDArray[np.float32],
    answers: Sequence[str],
    same: Callable[[str, str], bool],
    *,
    delta: float = 0.02,
) -> SemanticBound:
    """Return the lowest threshold at which at most `delta` of the served answers are wrong, with 95 % confidence.

    Each question is compared with the nearest one before it, as a cache would: what it would have been served is that
    one's answer. `same` tells whether two answers say the same.
    """
    lengths = np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    unit = vectors / lengths
    pairs: list[tuple[float, bool]] = []
    for place in range(1, len(unit)):
        cosines = unit[:place] @ unit[place]
        nearest = int(cosines.argmax())
        pairs.append((float(cosines[nearest]), same(answers[place], answers[nearest])))
    pairs.sort(key=lambda each: -each[0])
    best = SemanticBound(None, 0.0, 0.0, 1.0, len(unit))
    wrong = 0
    for count, (cosine, right) in enumerate(pairs, 1):
        wrong += not right
        if count < len(pairs) and pairs[count][0] == cosine:
            continue  # equal similarities fall on the same side of any threshold
        most = wilson_interval(wrong, count)[1]
        if most <= delta:
            best = SemanticBound(round(cosine, 4), count / len(unit), wrong / count, most, len(unit))
    return best
