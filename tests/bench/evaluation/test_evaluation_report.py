"""Intervals cover the truth as often as they say, and are paired between a model and its reference."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.bench.evaluation.evaluation_report import distance, mean
from headrace.bench.evaluation.token_scores import TokenScores


def drawn(rng: np.random.Generator, *, chunks: int = 40, tokens: int = 50) -> TokenScores:
    """Losses of mean 3 that chunks share in part; the model loses 0.01 more than the reference."""
    chunk = np.repeat(np.arange(chunks), tokens)
    base = 3.0 + rng.normal(0.0, 0.5, chunks)[chunk] + rng.normal(0.0, 1.0, chunks * tokens)
    extra = 0.01 + rng.normal(0.0, 0.02, chunks * tokens)
    return TokenScores(chunk, base + extra, base, np.abs(extra), (extra < 0.03).astype(np.float64))


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(5)
    covered = 0
    for seed in range(200):
        scores = drawn(rng)
        found = mean(scores.loss, scores, seed)
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 3.01 <= found.high
    assert 0.88 <= covered / 200 <= 0.99


def test_the_change_is_paired_so_its_interval_is_much_narrower() -> None:
    scores = drawn(np.random.default_rng(6))
    change = distance(scores, 0)
    alone = mean(scores.loss, scores, 0, np.exp)
    assert change is not None
    assert None not in (alone.low, alone.high, change.perplexity_change.low, change.perplexity_change.high)
    width = change.perplexity_change.high - change.perplexity_change.low  # type: ignore[operator]
    assert width < 0.05 * (alone.high - alone.low) / alone.value  # type: ignore[operator]
    assert change.perplexity_change.value == pytest.approx(
        np.exp(scores.loss.mean()) / np.exp(scores.reference_loss.mean()) - 1  # type: ignore[union-attr]
    )


def test_perplexity_is_the_exponential_of_the_mean_loss() -> None:
    scores = drawn(np.random.default_rng(7))
    assert mean(scores.loss, scores, 0, np.exp).value == pytest.approx(np.exp(scores.loss.mean()))


def test_the_same_seed_gives_the_same_interval_and_another_seed_another() -> None:
    scores = drawn(np.random.default_rng(8))
    assert mean(scores.loss, scores, 1) == mean(scores.loss, scores, 1)
    assert mean(scores.loss, scores, 1) != mean(scores.loss, scores, 2)


def test_a_single_chunk_has_no_interval() -> None:
    scores = drawn(np.random.default_rng(9), chunks=1)
    found = mean(scores.loss, scores, 0)
    assert (found.low, found.high) == (None, None)


def test_without_a_reference_there_is_no_distance() -> None:
    scores = drawn(np.random.default_rng(10))
    assert distance(TokenScores(scores.chunk, scores.loss), 0) is None
