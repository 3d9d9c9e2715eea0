"""The result of an evaluation: what was measured on which text, and estimates with their intervals."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from headrace.bench.compare.bootstrap import group_draws, interval
from headrace.bench.evaluation.token_scores import Doubles, Speed, TokenScores

DRAWS = 2000
CONFIDENCE = 0.95
FEW_CHUNKS = 10  # below, an interval is only a hint


class Estimate(msgspec.Struct, frozen=True):
    """A mean over tokens, and its bootstrap interval; without one if there is only one chunk."""

    value: float
    low: float | None = None
    high: float | None = None


class Distance(msgspec.Struct, frozen=True):
    """How far a model's predictions are from the reference's, token by token."""

    kl: Estimate  # KL(reference || model), nats per token
    kl_p99: float
    kl_max: float
    top1: Estimate  # share of tokens where both have the same most likely token
    perplexity_change: Estimate  # ratio of the perplexities, minus 1


class EvaluatedVariant(msgspec.Struct, frozen=True):
    model: str
    weights: str
    kv: str
    keep: tuple[str, ...]
    weight_bytes: int
    kv_bytes_per_token: float
    loss: Estimate  # nats per token
    perplexity: Estimate
    distance: Distance | None = None  # None: the reference itself, or there is none
    speed: Speed | None = None
    kv_offsets: str | None = None  # file of what its KV memory subtracts from keys


class EvaluationReport(msgspec.Struct, frozen=True):
    """The output of --json."""

    source: str  # file of texts
    tokens: int  # scored
    chunks: int
    window: int  # tokens computed together
    stride: int
    seed: int
    cpu: str
    isa: str
    threads: int
    speed_prompt: int | None  # tokens of the prompt whose speed was measured
    variants: list[EvaluatedVariant]  # the reference first, if there is one
    confidence: float = CONFIDENCE
    draws: int = DRAWS


def mean(
    values: Doubles, scores: TokenScores, seed: int, of: Callable[[Doubles], Doubles] = lambda value: value
) -> Estimate:
    """Estimate `of` the mean of a value per token. Equal seeds draw equal chunks, so estimates are paired."""
    value = float(of(np.array([values.mean()]))[0])
    if len(np.unique(scores.chunk)) < 2:
        return Estimate(value)
    picks = np.zeros((DRAWS, 1), dtype=np.intp)
    means, _ = group_draws(np.random.default_rng(seed), [values], [scores.chunk], picks, ())
    low, high = interval(of(means[:, 0]), CONFIDENCE)
    return Estimate(value, low, high)


def distance(scores: TokenScores, seed: int) -> Distance | None:
    if scores.reference_loss is None or scores.divergence is None or scores.agrees is None:
        return None
    return Distance(
        kl=mean(scores.divergence, scores, seed),
        kl_p99=float(np.quantile(scores.divergence, 0.99)),
        kl_max=float(scores.divergence.max()),
        top1=mean(scores.agrees, scores, seed),
        perplexity_change=mean(scores.loss - scores.reference_loss, scores, seed, np.expm1),
    )
