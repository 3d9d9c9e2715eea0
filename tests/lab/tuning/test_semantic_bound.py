"""The semantic cache's threshold, on questions and vectors whose neighbours are known."""

from __future__ import annotations

import string

import numpy as np
import pytest

from headrace.gateway.caches.semantic.pair_score import score
from headrace.lab.tuning.semantic_bound import SemanticBound, fit_semantic_bound

LETTERS = string.ascii_lowercase
ASKED = ("How do I open the {} menu?", "How can I open the {} menu?")


def traffic(
    pairs: int, *, close: float = 0.97, wrong: int = 0, texts: tuple[str, str] = ASKED, delta: float = 0.02
) -> SemanticBound:
    """Pairs of questions that are `close`, each pair far from the others; of `wrong` pairs the answers differ."""
    vectors = np.zeros((2 * pairs, pairs + 1), dtype=np.float32)
    questions: list[str] = []
    answers: list[str] = []
    for place in range(pairs):
        vectors[2 * place, place] = 1.0
        vectors[2 * place + 1, place] = close
        vectors[2 * place + 1, pairs] = np.sqrt(1 - close * close)
        name = f"b{LETTERS[place // 26]}{LETTERS[place % 26]}r"
        questions += [text.format(name) for text in texts]
        answers += [f"answer {place}", f"other {place}" if place < wrong else f"answer {place}"]
    # Questions that are near each other only by the last dimension are below the floor.
    return fit_semantic_bound(questions, vectors, answers, lambda one, other: one == other, delta=delta)


def test_close_questions_with_the_same_answer_give_a_threshold_of_their_score() -> None:
    found = traffic(250)
    expected = score(ASKED[1].format("baar"), ASKED[0].format("baar"), 0.97)
    assert found.threshold == pytest.approx(expected, abs=2e-2)
    assert found.threshold is not None
    assert found.threshold <= expected
    assert (found.share, found.wrong) == (0.5, 0.0)
    assert found.wrong_most <= 0.02


def test_wrong_neighbours_leave_no_threshold() -> None:
    assert traffic(250, wrong=25).threshold is None
    assert traffic(250, wrong=25, delta=0.2).threshold is not None


def test_what_a_guard_refuses_or_is_below_the_floor_is_no_evidence() -> None:
    opposites = ("How do I open the {} menu?", "How do I close the {} menu?")
    assert traffic(250, wrong=250, texts=opposites) == SemanticBound(None, 0.0, 0.0, 1.0, 500)
    assert traffic(250, close=0.5).threshold is None


def test_few_questions_are_no_proof() -> None:
    assert traffic(20, close=0.99).threshold is None
