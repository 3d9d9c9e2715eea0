"""Finds texts that repeat an earlier one, by the runs of five words that they share.

The comparison is exact (sets of runs, no sampling), deterministic and bounded: at most `max_words` of a text are read,
and each pair of kept texts costs one intersection. Two measures count: Jaccard's (shared runs of all runs of both), and
the share of the later text that the earlier one contains, which finds a passage cut from a longer one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from headrace.gateway.folded_words import words

RUN_WORDS: Final = 5
_WORD_BITS: Final = 24  # more word numbers than any bound admits
_RUN_MASK: Final = (1 << (_WORD_BITS * RUN_WORDS)) - 1


def find_repeats(
    texts: Sequence[str],
    *,
    jaccard: float = 0.8,  # from this similarity on, two texts are the same
    contained: float = 0.9,  # a text with this share of its runs in an earlier one adds nothing
    max_words: int = 2048,  # of each text
) -> list[int | None]:
    """Return for each text the index of the earlier one that it repeats, or None if it stays.

    Later texts are compared only with texts that stay, so any two texts that stay differ.
    """
    numbers: dict[str, int] = {}
    kept: list[tuple[int, set[int]]] = []
    originals: list[int | None] = []
    for index, text in enumerate(texts):
        runs = _runs([numbers.setdefault(word, len(numbers) + 1) for word in words(text)[:max_words]])
        original = next((other for other, theirs in kept if _is_same(runs, theirs, jaccard, contained)), None)
        if original is None:
            kept.append((index, runs))
        originals.append(original)
    return originals


def _is_same(runs: set[int], earlier: set[int], jaccard: float, contained: float) -> bool:
    few, many = sorted((len(runs), len(earlier)))
    if few < jaccard * many and len(earlier) < contained * len(runs):
        return False  # their sizes alone rule it out
    shared = len(runs & earlier)
    return shared >= jaccard * (few + many - shared) or shared >= contained * len(runs)


def _runs(numbers: Sequence[int]) -> set[int]:
    """Encode each run of words as one number. A text shorter than a run is one run."""
    run = 0
    runs: set[int] = set()
    for count, number in enumerate(numbers, start=1):
        run = ((run << _WORD_BITS) | number) & _RUN_MASK
        if count >= RUN_WORDS:
            runs.add(run)
    return runs or {run}


def similarity(one: str, other: str) -> float:
    """Return Jaccard's measure of two texts: 1 with the same runs, 0 with no shared run."""
    numbers: dict[str, int] = {}
    first, second = (
        _runs([numbers.setdefault(word, len(numbers) + 1) for word in words(text)]) for text in (one, other)
    )
    shared = len(first & second)
    return shared / (len(first) + len(second) - shared)
