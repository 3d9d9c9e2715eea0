"""Scores equal a plain computation on all logits, and are the same however the work is divided."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.bench.evaluation import token_scores
from headrace.bench.evaluation.documents import DocumentTokens, Window, cut
from headrace.bench.evaluation.token_scores import TokenScores, log_softmax, measure_speed, score
from headrace.engine.executors.cpu_executor import CpuExecutor
from headrace.engine.executors.executor import StepBatch
from headrace.engine.executors.runner import logits
from headrace.llm import LLM
from headrace.models.model_folder import open_model

BODY = [int(token) for token in np.random.default_rng(3).integers(5, 800, 150)]
WINDOWS = cut([DocumentTokens([], BODY)], window=64, stride=32)


def loaded(folder: Path, **options: Any) -> CpuExecutor:
    return CpuExecutor.load(open_model(folder), threads=2, context=128, kv_tokens=128, kv="f32", **options)


@pytest.fixture(scope="module")
def executors(tiny_folder: Path) -> Iterator[tuple[CpuExecutor, CpuExecutor]]:
    found = loaded(tiny_folder, weights="int4"), loaded(tiny_folder, weights="f32")
    yield found
    for each in found:
        each.close()


@pytest.fixture(scope="module")
def scores(executors: tuple[CpuExecutor, CpuExecutor]) -> TokenScores:
    return score(executors[0], WINDOWS, reference=executors[1])


def plain_probabilities(executor: CpuExecutor, window: Window) -> np.ndarray:
    """Each row of a window's logits as probabilities, by the textbook formula."""
    (rows,) = logits(executor, [window.tokens])
    powers = np.exp(rows.astype(np.float64))
    return (powers / powers.sum(axis=1, keepdims=True))[window.first - 1 : -1]


def test_losses_divergences_and_agreement_are_those_of_a_plain_computation(
    executors: tuple[CpuExecutor, CpuExecutor], scores: TokenScores
) -> None:
    found, expected = (np.concatenate([plain_probabilities(each, one) for one in WINDOWS]) for each in executors)
    targets = np.array(BODY[1:])
    places = np.arange(len(targets))
    assert scores.reference_loss is not None
    assert scores.divergence is not None
    assert scores.agrees is not None
    np.testing.assert_allclose(scores.loss, -np.log(found[places, targets]), rtol=1e-9)
    np.testing.assert_allclose(scores.reference_loss, -np.log(expected[places, targets]), rtol=1e-9)
    np.testing.assert_allclose(
        scores.divergence, (expected * np.log(expected / found)).sum(axis=1), rtol=1e-6, atol=1e-12
    )
    np.testing.assert_array_equal(scores.agrees, found.argmax(axis=1) == expected.argmax(axis=1))
    assert scores.divergence.mean() > 1e-3  # int4 is not f32
    assert 0 < scores.agrees.mean() < 1


def test_losses_are_the_log_probabilities_that_the_engine_reports(tiny_folder: Path) -> None:
    window = Window(BODY[:60], 1, 0)
    executor = loaded(tiny_folder, weights="bf16")
    found = score(executor, [window])
    executor.close()
    with LLM(tiny_folder, weights="bf16", kv="f32", threads=2, context=128) as llm:
        (reported,) = llm.score([(BODY[:1], BODY[1:60])])
    expected = [-(token.logprob or 0.0) for token in reported.tokens]
    np.testing.assert_allclose(found.loss, expected, rtol=1e-5)
    assert found.divergence is None


def test_a_model_does_not_diverge_from_itself(tiny_folder: Path, executors: tuple[CpuExecutor, CpuExecutor]) -> None:
    same = loaded(tiny_folder, weights="int4")
    found = score(executors[0], WINDOWS, reference=same)
    same.close()
    assert found.divergence is not None
    assert found.agrees is not None
    assert not found.divergence.any()
    assert found.agrees.all()
    np.testing.assert_array_equal(found.loss, found.reference_loss)


def test_the_logits_in_memory_are_bounded_and_the_bound_changes_no_bit(
    executors: tuple[CpuExecutor, CpuExecutor], scores: TokenScores, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    launch = executors[0].launch

    def watched(batch: StepBatch) -> Any:
        rows.append(len(batch.wanted))
        return launch(batch)

    monkeypatch.setattr(executors[0], "launch", watched)
    monkeypatch.setattr(token_scores, "STEP_LOGITS", 7 * executors[0].spec.vocab_size)
    monkeypatch.setattr(token_scores, "_SLICE", 3 * executors[0].spec.vocab_size)
    found = score(executors[0], WINDOWS, reference=executors[1])
    assert max(rows) == 7
    np.testing.assert_array_equal(found.loss, scores.loss)
    np.testing.assert_array_equal(found.divergence, scores.divergence)


def test_vocabularies_of_different_lengths_are_compared_on_the_tokens_that_both_have() -> None:
    generator = np.random.default_rng(1)
    short = generator.normal(size=(4, 10)).astype(np.float32)
    padded = np.concatenate([short, generator.normal(size=(4, 3)).astype(np.float32)], axis=1)
    divergence, agrees = np.empty(4), np.empty(4)
    losses = [np.empty(4), np.empty(4)]
    token_scores._score_rows([short, padded], np.arange(4), losses, divergence, agrees)
    np.testing.assert_allclose(divergence, 0.0, atol=1e-12)
    assert agrees.all()
    assert (losses[1] > losses[0]).all()  # the padding has a part of the probability


def test_progress_counts_every_token_of_every_window(executors: tuple[CpuExecutor, CpuExecutor]) -> None:
    seen: list[int] = []
    score(executors[0], WINDOWS, progress=seen.append)
    assert seen == list(np.cumsum([len(window.tokens) for window in WINDOWS]))


def test_large_logits_do_not_overflow() -> None:
    found = log_softmax(np.array([[1e30, 0.0, -1e30]], dtype=np.float32))
    assert found[0, 0] == 0.0
    assert np.isfinite(found).all()


def test_speeds_are_measured_for_each_executor(executors: tuple[CpuExecutor, CpuExecutor]) -> None:
    speeds = measure_speed(executors, BODY[:40])
    assert len(speeds) == 2
    assert all(each.prompt > 0 and each.decode > 0 for each in speeds)
