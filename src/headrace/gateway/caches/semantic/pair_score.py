"""Scores a pair of questions that no guard refused, from cheap features.

Owns the features and a small logistic model whose weights are in `pair_score_weights`. `benchmarks/semantic_cache.py
fit` fits them on the training pairs of the tests; the reported pairs are others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import combinations
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headrace.gateway.caches.semantic.guarded_question import ParsedQuestion, parse_question
from headrace.gateway.caches.semantic.pair_score_weights import BIAS, WEIGHTS
from headrace.gateway.caches.semantic.word_forms import OPPOSED

FEATURES: Final = (
    "cosine",
    "cosine_top",  # the part above 0.85
    "overlap",  # content words: shared / all
    "containment",  # content words: shared / those of the shorter question
    "length",  # shorter / longer, in content words
    "order",  # share of the shared words in the same order
    "same_kind",
    "other_kind",
    "exact_parts",  # shared numbers, dates, names and identifiers
    "loose_opposites",  # words with a known opposite on only one side
    "changed",  # shared letters if a content word differs: the rest is equal, so that word is the point
    "frame",  # function words: shared / all
    "equal_frame",  # the same if the content words are equal and in the same order
    "differs",  # a content word is on only one side
    "one_sided",  # only one side has such words, as with a restriction that the other lacks
    "moved",  # pairs of shared content words in another order, of all such pairs
    "any_moved",
    "moved_only",  # any, and no content word differs
)
# The required sign of each weight; 0: any. Pairs of the same frame differ in what they are about, so the shared words
# of hand-made pairs may speak against; a cosine must never.
SIGNS: Final = np.array([1, 1, *[0] * (len(FEATURES) - 2)])
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
    differs = bool(removed or added)
    moved = _moved(question.content, candidate.content)
    frame = _frame_overlap(question, candidate)
    return np.array(
        [
            cosine,
            max(0.0, cosine - _TOP) / (1.0 - _TOP),
            shared / total if total else 0.0,
            shared / sizes[0] if sizes[0] else 0.0,
            sizes[0] / sizes[1] if sizes[1] else 1.0,
            _order(question.content, candidate.content),
            float(kinds[0] == kinds[1]),
            float(bool(kinds[0] and kinds[1]) and kinds[0] != kinds[1]),
            min(exact, 3) / 3.0,
            min(loose, 4) / 4.0,
            _letter_overlap(question.text, candidate.text) if differs else 0.0,
            frame,
            frame if not differs and not moved else 0.0,
            float(differs),
            float(bool(removed) != bool(added)),
            moved,
            float(moved > 0.0),
            float(moved > 0.0 and not differs),
        ]
    )


def _frame_overlap(question: ParsedQuestion, candidate: ParsedQuestion) -> float:
    """Return the share of the function words that both questions have."""
    one = Counter(word.text for word in question.words if word.small)
    other = Counter(word.text for word in candidate.words if word.small)
    total = sum((one | other).values())
    return sum((one & other).values()) / total if total else 1.0


def _moved(one: Sequence[str], other: Sequence[str]) -> float:
    """Return the share of the pairs of shared words that come in another order."""
    shared = [key for key in dict.fromkeys(one) if key in other]
    places = [other.index(key) for key in shared]
    pairs = len(places) * (len(places) - 1) // 2
    return sum(first > second for first, second in combinations(places, 2)) / pairs if pairs else 0.0


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
    found: NDArray[np.float64],
    right: NDArray[np.float64],
    counts: NDArray[np.float64] | None = None,
    *,
    penalty: float = 1.0,
    rounds: int = 50,
) -> tuple[NDArray[np.float64], float]:
    """Fit the weights and bias of a logistic model by Newton's method.

    `counts`: how much each row counts, by default 1. `penalty` is on the squares of the weights.
    """
    rows = np.concatenate([found, np.ones((len(found), 1))], axis=1)
    shares = np.ones(len(found)) if counts is None else counts
    weights = np.zeros(rows.shape[1])
    ridge = penalty * np.eye(rows.shape[1])
    ridge[-1, -1] = 1e-6
    for _ in range(rounds):
        expected = 1.0 / (1.0 + np.exp(-np.clip(rows @ weights, -60, 60)))
        slope = rows.T @ (shares * (right - expected)) - ridge @ weights
        curve = (rows * (shares * expected * (1 - expected))[:, None]).T @ rows + ridge
        step = np.linalg.solve(curve, slope)
        weights += step
        if float(np.abs(step).max()) < 1e-9:
            break
    return weights[:-1], float(weights[-1])
