"""Texts that say again what an earlier one said: by the runs of five words that they share.

Owns the comparison. It is exact (sets of runs, no sampling), the same everywhere, and bounded: so many words of a text
are looked at, and every pair of kept texts costs one intersection. Two measures count: Jaccard's (shared runs of all
runs of both), and how much of the later text the earlier one contains, which finds a passage cut from a longer one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from headrace.gateway.degradation.shaping.folded_words import words

RUN: Final = 5  # words
_BITS: Final = 24  # of a word's number: more than there are words within any bound
_MASK: Final = (1 << (_BITS * RUN)) - 1


def find_repeats(
    texts: Sequence[str],
    *,
    jaccard: float = 0.8,  # from here on, two texts are the same
    contained: float = 0.9,  # share of a text's runs in an earlier one from which on it adds nothing
    most_words: int = 2048,  # of each text
) -> list[int | None]:
    """For each text, which earlier one it repeats; None where it stays. What repeats something is compared with no
    later text, so every text that stays differs from every other that does."""
    numbers: dict[str, int] = {}
    kept: list[tuple[int, set[int]]] = []
    found: list[int | None] = []
    for place, text in enumerate(texts):
        runs = _runs([numbers.setdefault(word, len(numbers) + 1) for word in words(text)[:most_words]])
        original = next((other for other, theirs in kept if _same(runs, theirs, jaccard, contained)), None)
        if original is None:
            kept.append((place, runs))
        found.append(original)
    return found


def _same(runs: set[int], theirs: set[int], jaccard: float, contained: float) -> bool:
    few, many = sorted((len(runs), len(theirs)))
    if few < jaccard * many and len(theirs) < contained * len(runs):
        return False  # their sizes alone rule it out
    shared = len(runs & theirs)
    return shared >= jaccard * (few + many - shared) or shared >= contained * len(runs)


def _runs(numbers: Sequence[int]) -> set[int]:
    """A number for each run, another for every other run. A text shorter than a run is one itself."""
    run = 0
    found: set[int] = set()
    for place, number in enumerate(numbers, start=1):
        run = ((run << _BITS) | number) & _MASK
        if place >= RUN:
            found.add(run)
    return found or {run}


def similarity(one: str, other: str) -> float:
    """Jaccard's measure of two texts: 1 where they have the same runs, 0 where they share none."""
    numbers: dict[str, int] = {}
    first, second = (
        _runs([numbers.setdefault(word, len(numbers) + 1) for word in words(text)]) for text in (one, other)
    )
    shared = len(first & second)
    return shared / (len(first) + len(second) - shared)
