"""The semantic cache's threshold, on vectors whose neighbours are known."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.lab.tuning.semantic_bound import fit_semantic_bound


def traffic(pairs: int, *, close: float, wrong: int = 0) -> tuple[np.ndarray, list[str]]:
    """Pairs of questions that are `close`, each pair far from the others; of `wrong` pairs the answers differ."""
    vectors = np.zeros((2 * pairs, pairs + 1), dtype=np.float32)
    answers: list[str] = []
    for place in range(pairs):
        vectors[2 * place, place] = 1.0
        vectors[2 * place + 1, place] = close
        vectors[2 * place + 1, pairs] = np.sqrt(1 - close * close)
        answers += [f"answer {place}", f"other {place}" if place < wrong else f"answer {place}"]
    return vectors, answers


def same(one: str, other: str) -> bool:
    return one == other


def test_close_questions_with_the_same_answer_give_a_threshold() -> None:
    vectors, answers = traffic(300, close=0.9)
    found = fit_semantic_bound(vectors, answers, same, delta=0.02)
    assert found.threshold == pytest.approx(0.9, abs=0.01)
    assert (found.share, found.wrong) == (0.5, 0.0)
    assert found.wrong_most <= 0.02


def test_wrong_neighbours_leave_no_threshold() -> None:
    vectors, answers = traffic(300, close=0.9, wrong=30)
    assert fit_semantic_bound(vectors, answers, same, delta=0.02).threshold is None
    assert fit_semantic_bound(vectors, answers, same, delta=0.15).threshold is not None


def test_few_questions_are_no_proof() -> None:
    vectors, answers = traffic(20, close=0.99)
    assert fit_semantic_bound(vectors, answers, same, delta=0.02).threshold is None
