"""The score of a pair and its features."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.gateway.caches.semantic.guarded_question import parse_question
from headrace.gateway.caches.semantic.pair_score import (
    FEATURES,
    SIGNS,
    features,
    fit,
    score,
)
from headrace.gateway.caches.semantic.pair_score_weights import WEIGHTS


def test_a_score_grows_with_the_cosine_and_with_what_is_shared() -> None:
    one, other = "How do I cancel my subscription?", "How can I cancel my subscription?"
    scores = [score(one, other, cosine) for cosine in (0.5, 0.8, 0.9, 0.95, 1.0)]
    assert scores == sorted(scores)
    assert 0.0 <= scores[0] < 0.5 < scores[-1] <= 1.0
    assert score(one, "How do I bake bread?", 0.9) < scores[2]


def test_a_score_does_not_depend_on_which_comes_first() -> None:
    one, other = "How do I undo a merge after pushing it?", "After pushing a merge, how do I undo it?"
    assert score(one, other, 0.9) == score(other, one, 0.9)


def test_features_have_names_bounds_and_weights_of_the_right_sign() -> None:
    found = features(parse_question("Is 5 GB enough for Redis?"), parse_question("Would 5 GB do for Redis?"), 0.9)
    assert len(found) == len(FEATURES) == len(SIGNS)
    assert np.all((found >= 0.0) & (found <= 1.0))
    assert set(WEIGHTS) == set(FEATURES)
    assert all(WEIGHTS[name] * sign >= 0 for name, sign in zip(FEATURES, SIGNS, strict=True))


def test_fit_finds_the_weights_that_made_the_labels() -> None:
    draw = np.random.default_rng(3)
    rows = draw.normal(size=(20_000, 3))
    chance = 1 / (1 + np.exp(-(rows @ np.array([2.0, -1.0, 0.0]) + 0.5)))
    weights, bias = fit(rows, (draw.random(20_000) < chance).astype(float), penalty=0.1)
    assert weights == pytest.approx([2.0, -1.0, 0.0], abs=0.1)
    assert bias == pytest.approx(0.5, abs=0.1)
