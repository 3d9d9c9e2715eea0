"""How the next token of a sequence is to be chosen, and the choice for all rows of a step at once.

Owns Sampling (what a caller may wish), its bounds, and the laying out of rows for the core's sampler. Random numbers
are counter-based: they follow from the seed and the token's position alone, so a sampled sequence, like a greedy one,
does not depend on what else runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from millrace import _core
from millrace.errors import MillraceError, RequestError

MOST_LOGPROBS: Final = 1024


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    temperature: float = 0.0  # 0 takes the likeliest token
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0  # of the likeliest token's probability
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    logprobs: int | None = None  # how many likeliest tokens to report; 0 reports the chosen one alone

    def check(self, vocab_size: int) -> None:
        """RequestError for a wish that cannot be met."""
        _within("temperature", self.temperature, 0.0, 100.0)
        _within("top_k", self.top_k, 0, 2**31 - 1)
        _within("top_p", self.top_p, 1e-6, 1.0)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("repetition_penalty", self.repetition_penalty, 1e-3, 1e3)
        _within("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        _within("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _within("seed", self.seed, 0, 2**64 - 1)
        if self.logprobs is not None:
            _within("logprobs", self.logprobs, 0, min(MOST_LOGPROBS, vocab_size))
        for token, bias in self.logit_bias.items():
            _within("logit_bias", token, 0, vocab_size - 1)
            _within("logit_bias", bias, -1e4, 1e4)


def _within(parameter: str, value: float, least: float, most: float) -> None:
    if math.isnan(value) or not least <= value <= most:
        raise RequestError(f"{parameter} must be from {least:g} to {most:g}, not {value}", parameter=parameter)


@dataclass(slots=True)
class SampleRow:
    """One row of logits and what is wished of it."""

    sampling: Sampling
    position: int  # of the token to be chosen, in its sequence
    seen: Mapping[int, int] = field(default_factory=dict[int, int])  # token of prompt or output -> count in the output
    mask: NDArray[np.uint32] | None = None  # a bit per token, set where it is allowed


@dataclass(frozen=True, slots=True)
class Chosen:
    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # likeliest tokens with their log-probabilities


class NoTokenError(MillraceError):
    """A row from which no token can be chosen: everything is masked, or the logits are not numbers."""


class Sampler:
    """The core's sampler for one vocabulary."""

    def __init__(self, vocab_size: int, pool: _core.Pool, isa: str) -> None:
        self._core = _core.Sampler(vocab_size, pool, isa)
        self._words = -(-vocab_size // 32)

    def choose(self, logits: NDArray[np.float32], rows: Sequence[SampleRow]) -> list[Chosen]:
        """A token for every row. Changes the logits where a row's wishes do."""
        wishes = [row.sampling for row in rows]
        numbers = [
            (w.temperature, w.top_p, w.min_p, w.repetition_penalty, w.frequency_penalty, w.presence_penalty)
            for w in wishes
        ]
        reported = [-1 if w.logprobs is None else w.logprobs for w in wishes]
        # The list of tokens seen is only looked at where a penalty asks for it.
        seen = _ragged(row.seen if _penalises(row.sampling) else {} for row in rows)
        biases = _ragged(w.logit_bias for w in wishes)
        masks = [row.mask for row in rows if row.mask is not None]
        places = iter(range(len(masks)))
        most = max(reported, default=0)
        tokens = np.empty(len(rows), dtype=np.int32)
        logprobs = np.empty(len(rows), dtype=np.float32)
        top = np.empty((len(rows), max(most, 0)), dtype=np.int32)
        top_logprobs = np.empty((len(rows), max(most, 0)), dtype=np.float32)
        self._core.choose(
            logits,
            np.array(numbers, dtype=np.float32).reshape(len(rows), 6),
            np.array([(w.top_k, n) for w, n in zip(wishes, reported, strict=True)], dtype=np.int32).reshape(-1, 2),
            np.array([(row.sampling.seed, row.position) for row in rows], dtype=np.uint64).reshape(-1, 2),
            seen.tokens,
            seen.values.astype(np.int32),
            seen.offsets,
            biases.tokens,
            biases.values.astype(np.float32),
            biases.offsets,
            np.stack(masks) if masks else np.zeros((0, self._words), dtype=np.uint32),
            np.array([-1 if row.mask is None else next(places) for row in rows], dtype=np.int32),
            tokens,
            logprobs,
            top,
            top_logprobs,
        )
        chosen: list[Chosen] = []
        for index, count in enumerate(reported):
            token = int(tokens[index])
            if token < 0:
                raise NoTokenError("no token can be chosen: all are masked, or the model computed NaN or infinity")
            if count < 0:
                chosen.append(Chosen(token))
                continue
            likeliest = zip(top[index, :count].tolist(), top_logprobs[index, :count].tolist(), strict=True)
            chosen.append(Chosen(token, float(logprobs[index]), tuple(likeliest)))
        return chosen


def _penalises(sampling: Sampling) -> bool:
    return (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty) != (1.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class _Ragged:
    tokens: NDArray[np.int32]
    values: NDArray[np.float64]
    offsets: NDArray[np.int32]


def _ragged(rows: Iterable[Mapping[int, Any]]) -> _Ragged:
    tokens: list[int] = []
    values: list[float] = []
    offsets = [0]
    for row in rows:
        tokens += row.keys()
        values += row.values()
        offsets.append(len(tokens))
    return _Ragged(
        np.array(tokens, dtype=np.int32), np.array(values, dtype=np.float64), np.array(offsets, dtype=np.int32)
    )
