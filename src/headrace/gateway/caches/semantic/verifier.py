"""Scores a pair of questions that no guard refused, from cheap features.

Owns the features and a small logistic model whose weights are in `verifier_weights`. `benchmarks/semantic_cache.py fit`
fits them on the training pairs of the tests; the reported pairs are others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headrace.gateway.caches.semantic.guarded_question import ParsedQuestion, parse_question
from headrace.gateway.caches.semantic.verifier_weights import BIAS, WEIGHTS
from headrace.gateway.caches.semantic.word_forms import OPPOSED

FEATURES: Final = (
    "cosine",
    "cosine_top",  # the part above 0.85
    "overlap",  # content words: shared / all
    "containment",  # content words: shared / those of the shorter question
    "unmatched",  # content words on only one side, summed over both
    "both_unmatched",  # the same on the side with fewer of them
    "length",  # shorter / longer, in content words
    "order",  # share of the shared words in the same order
    "same_kind",
    "other_kind",
    "exact_parts",  # shared numbers, dates, names and identifiers
    "loose_opposites",  # words with a known opposite on only one side
    "changed",  # shared letters if a content word differs: the rest is equal, so that word is the point
)
# The required sign of each weight.
SIGNS: Final = np.array([1, 1, 1, 1, -1, -1, 1, 1, 1, -1, 1, -1, -1])
_TOP: Final = 0.85


def features(question: ParsedQuestion, candidate: ParsedQuestion, cosine: float) -> NDArray[np.float64]:
    """Return the features of a pair, which is symmetric."""
    one, other = Counter(question.content), Counter(candidate.content)
    shared = sum((one & other).values())
    total = sum((one | other).values())
    sizes = sorted((sum(one.values()), sum(other.values())))
    removed, added = sum((one - other).values()), sum((other - one).values())
    exact = sum(
        len(set(here) & set(there))
        for here, there in (
            (question.numbers, candidate.numbers),
            (question.dates, candidate.dates),
            (question.names, candidate.names),
            (question.identifiers, candidate.identifiers),
        )
    )
    kinds = (question.kind, candidate.kind)
    loose = sum(bool(OPPOSED.get(key)) for key in set(question.affirmed) ^ set(candidate.affirmed))
    return np.array(
        [
            cosine,
            max(0.0, cosine - _TOP) / (1.0 - _TOP),
            shared / total if total else 0.0,
            shared / sizes[0] if sizes[0] else 0.0,
            min(removed + added, 8) / 8.0,
            min(removed, added, 4) / 4.0,
            sizes[0] / sizes[1] if sizes[1] else 1.0,
            _order(question.content, candidate.content),
            float(kinds[0] == kinds[1]),
            float(bool(kinds[0] and kinds[1]) and kinds[0] != kinds[1]),
            min(exact, 3) / 3.0,
            min(loose, 4) / 4.0,
            _letter_overlap(question.text, candidate.text) if removed or added else 0.0,
        ]
    )


def _order(one: Sequence[str], other: Sequence[str]) -> float:
    """Return the share of the shared words that come in the same order."""
    shared = set(one) & set(other)
    if not shared:
        return 0.0
    here = [key for key in one if key in shared]
    there = [key for key in other if key in shared]
    matched = sum(block.size for block in SequenceMatcher(None, here, there, autojunk=False).get_matching_blocks())
    return matched / max(len(here), len(there))


def _letter_overlap(one: str, other: str) -> float:
    """Return the share of letter triples that both texts have."""
    here, there = _triples(one), _triples(other)
    return len(here & there) / len(here | there) if here or there else 1.0


def _triples(text: str) -> set[str]:
    text = f" {' '.join(text.lower().split())} "
    return {text[place : place + 3] for place in range(len(text) - 2)}


_WEIGHTS: Final = np.array([WEIGHTS[name] for name in FEATURES])


def score(question: str, candidate: str, cosine: float) -> float:
    """Return from 0 to 1 how likely one answer fits both questions, on pairs like those of the training set."""
    values = features(parse_question(question), parse_question(candidate), cosine)
    return sigmoid(float(values @ _WEIGHTS) + BIAS)


def sigmoid(value: float) -> float:
    return 1.0 / (1.0 + math.exp(-max(-60.0, min(60.0, value))))


def fit(
    found: NDArray[np.float64], right: NDArray[np.float64], *, penalty: float = 1.0, rounds: int = 50
) -> tuple[NDArray[np.float64], float]:
    """Fit the weights and bias of a logistic model by Newton's method; `penalty` is on the squares of the weights."""
    rows = np.concatenate([found, np.ones((len(found), 1))], axis=1)
    weights = np.zeros(rows.shape[1])
    ridge = penalty * np.eye(rows.shape[1])
    ridge[-1, -1] = 1e-6
    for _ in range(rounds):
        expected = 1.0 / (1.0 + np.exp(-np.clip(rows @ weights, -60, 60)))
        slope = rows.T @ (right - expected) - ridge @ weights
        curve = (rows * (expected * (1 - expected))[:, None]).T @ rows + ridge
        step = np.linalg.solve(curve, slope)
        weights += step
        if float(np.abs(step).max()) < 1e-9:
            break
    return weights[:-1], float(weights[-1])
