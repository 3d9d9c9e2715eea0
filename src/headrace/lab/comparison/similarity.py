"""How alike two answers are, from 0 to 1: by the cosine of an encoder's vectors, or by shared words.

The lexical measure knows nothing of meaning: it cannot tell a paraphrase from another answer, so a report names it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.gateway.folded_words import words

Embed = Callable[[Sequence[str]], NDArray[np.float32]]


class Similarity(Protocol):
    @property
    def name(self) -> str: ...

    def of(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """Return the similarity of each pair."""
        ...


class LexicalSimilarity:
    """The Dice coefficient of words and neighbouring words."""

    name = "lexical overlap"

    def of(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        return [lexical_overlap(one, other) for one, other in pairs]


class EncoderSimilarity:
    """The cosine of two texts' vectors, for example of `LLM("minilm").embed`."""

    def __init__(self, embed: Embed, model: str) -> None:
        self.name = f"cosine by {model}"
        self._embed = embed

    def of(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        texts = list(dict.fromkeys(text for pair in pairs for text in pair if text.strip()))
        vectors: dict[str, NDArray[np.float32]] = {}
        if texts:
            found = self._embed(texts)
            lengths = np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)
            vectors = dict(zip(texts, found / lengths, strict=True))
        return [self._cosine(one, other, vectors) for one, other in pairs]

    @staticmethod
    def _cosine(one: str, other: str, vectors: dict[str, NDArray[np.float32]]) -> float:
        if one == other:
            return 1.0
        if one not in vectors or other not in vectors:
            return 0.0
        return float(np.clip(vectors[one] @ vectors[other], 0.0, 1.0))


def lexical_overlap(one: str, other: str) -> float:
    if one == other:
        return 1.0
    left, right = _terms(one), _terms(other)
    total = left.total() + right.total()
    return 2.0 * (left & right).total() / total if total else 0.0


def _terms(text: str) -> Counter[tuple[str, ...]]:
    found = words(text)
    return Counter([*((word,) for word in found), *itertools.pairwise(found)])
