"""The pairs are many, of many patterns, and no pattern is in two splits."""

from __future__ import annotations

from collections import Counter

from tests.gateway.caches.semantic.pairs import pairs


def test_there_are_enough_pairs_of_enough_kinds() -> None:
    wrong = [pair for pair in pairs() if not pair.shared]
    right = [pair for pair in pairs() if pair.shared]
    assert len(wrong) >= 400
    assert len(right) >= 300
    assert len({pair.category for pair in wrong}) >= 15
    assert max(Counter(pair.pattern for pair in wrong).values()) <= 11
    assert max(Counter(pair.pattern for pair in right).values()) <= 11


def test_patterns_and_pairs_are_in_one_split_alone() -> None:
    splits: dict[str, set[str]] = {}
    for pair in pairs():
        splits.setdefault(f"{pair.shared} {pair.pattern}", set()).add(pair.split)
    assert all(len(each) == 1 for each in splits.values())
    seen = Counter(frozenset((pair.one, pair.other)) for pair in pairs())
    assert [pair for pair, count in seen.items() if count > 1] == []
    assert all(len(pair) == 2 for pair in seen)
