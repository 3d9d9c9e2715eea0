"""Runs windows of tokens through one executor, or two side by side, and scores every token.

Holds the logits of one step at a time: what it keeps is three numbers for each token.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.bench.evaluation.documents import Window
from headrace.engine.executors.executor import Executor
from headrace.engine.executors.runner import Floats, Runner
from headrace.errors import HeadraceError

Doubles = NDArray[np.float64]
Progress = Callable[[int], None]  # tokens of windows done

STEP_LOGITS: Final = 1 << 24  # of one executor in one step: 64 MiB
_SLICE: Final = 1 << 20  # logits whose probabilities are computed together: 8 MiB
ROUNDS: Final = 3  # of a speed, of which the median counts
DECODED: Final = 32  # tokens, to measure decode


class TokenScores(msgspec.Struct, frozen=True):
    """One value for each scored token. `loss` is the negative log-probability, in nats."""

    chunk: NDArray[np.intp]
    loss: Doubles
    reference_loss: Doubles | None = None
    divergence: Doubles | None = None  # KL(reference || model) of the two distributions, in nats
    agrees: Doubles | None = None  # 1.0 where both have the same most likely token


class Speed(msgspec.Struct, frozen=True):
    """Tokens per second of one sequence on an otherwise idle engine."""

    prompt: float
    decode: float


def score(
    model: Executor,
    windows: Sequence[Window],
    *,
    reference: Executor | None = None,
    progress: Progress = lambda _: None,
) -> TokenScores:
    """Score every token of the windows, beside a reference if there is one."""
    executors = [model] if reference is None else [model, reference]
    runners = [Runner(executor) for executor in executors]
    rows = min(step_rows(executor) for executor in executors)
    total = sum(window.scored for window in windows)
    losses = [np.empty(total) for _ in executors]
    divergence, agrees = np.empty(total), np.empty(total)
    chunk = np.empty(total, dtype=np.intp)
    at = done = 0
    for window in windows:
        # The last token has no successor, so it is not computed.
        sequences = [runner.open(window.tokens[:-1]) for runner in runners]
        end = at + window.scored
        chunk[at:end] = window.chunk
        computed = 0
        while computed < len(window.tokens) - 1:
            unscored = window.first - 1 - computed
            pending = len(window.tokens) - 1 - computed
            count = min(unscored, model.capacity.max_rows) if unscored > 0 else min(pending, rows)
            wanted = () if unscored > 0 else range(count)
            found = [
                runner.step([(sequence, count)], wanted) for runner, sequence in zip(runners, sequences, strict=True)
            ]
            computed += count
            if not wanted:
                continue
            targets = np.array(window.tokens[computed - count + 1 : computed + 1])
            part = slice(at, at + count)
            _score_rows(found, targets, [loss[part] for loss in losses], divergence[part], agrees[part])
            at += count
        for runner, sequence in zip(runners, sequences, strict=True):
            runner.close(sequence)
        done += len(window.tokens)
        progress(done)
    if not all(np.isfinite(loss).all() for loss in losses):
        raise HeadraceError("The model computed a probability that is not a number. Its weights may be corrupt.")
    if reference is None:
        return TokenScores(chunk, losses[0])
    return TokenScores(chunk, losses[0], losses[1], divergence, agrees)


def step_rows(executor: Executor) -> int:
    """Return how many rows of logits a step may return."""
    return max(1, min(executor.capacity.max_rows, STEP_LOGITS // executor.spec.vocab_size))


def _score_rows(
    logits: Sequence[Floats], targets: NDArray[np.intp], losses: Sequence[Doubles], divergence: Doubles, agrees: Doubles
) -> None:
    size = max(1, _SLICE // logits[0].shape[1])
    for begin in range(0, len(targets), size):
        part = slice(begin, min(begin + size, len(targets)))
        places = np.arange(part.stop - begin)
        probabilities = [log_softmax(values[part]) for values in logits]
        for loss, each in zip(losses, probabilities, strict=True):
            loss[part] = -each[places, targets[part]]
        if len(probabilities) == 1:
            continue
        # Vocabularies may be padded to different lengths.
        shared = min(each.shape[1] for each in probabilities)
        found, expected = (each if each.shape[1] == shared else log_softmax(each[:, :shared]) for each in probabilities)
        # Rounding could make the divergence of nearly equal distributions negative, which no divergence is.
        divergence[part] = np.maximum((np.exp(expected) * (expected - found)).sum(axis=1), 0.0)
        agrees[part] = found.argmax(axis=1) == expected.argmax(axis=1)


def log_softmax(logits: Floats | Doubles) -> Doubles:
    values = logits.astype(np.float64)
    values -= values.max(axis=1, keepdims=True)
    values -= np.log(np.exp(values).sum(axis=1, keepdims=True))
    return values


def measure_speed(executors: Sequence[Executor], prompt: Sequence[int]) -> list[Speed]:
    """Measure each executor's speed, in turns, after one uncounted turn."""
    found: list[list[Speed]] = [[] for _ in executors]
    for turn in range(ROUNDS + 1):
        for speeds, executor in zip(found, executors, strict=True):
            speed = _one_speed(executor, prompt)
            if turn:
                speeds.append(speed)
    return [
        Speed(statistics.median(each.prompt for each in speeds), statistics.median(each.decode for each in speeds))
        for speeds in found
    ]


def _one_speed(executor: Executor, prompt: Sequence[int]) -> Speed:
    runner = Runner(executor)
    sequence = runner.open(prompt, total=len(prompt) + DECODED)
    begin = time.perf_counter()
    last = runner.prefill([sequence])
    prefilled = time.perf_counter()
    for _ in range(DECODED):
        sequence.tokens.append(int(last[0].argmax()))
        last = runner.prefill([sequence])
    end = time.perf_counter()
    return Speed(len(prompt) / (prefilled - begin), DECODED / (end - prefilled))
