"""How the next token of a sequence is to be chosen: what a caller may wish, its bounds, and what comes out.

Owns SamplingParams, a row of logits as a sampler takes it (SampleRow) and the choice (SampledToken). Knows nothing of
arrays: the core's sampler, with the laying out of rows for it, is engine.sampler. Random numbers are counter-based:
they follow from the seed and the token's position alone, so a sampled sequence, like a greedy one, does not depend on
what else runs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from headrace.errors import HeadraceError, RequestError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MOST_LOGPROBS: Final = 1024


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
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

    @property
    def penalises(self) -> bool:
        """Whether the tokens seen so far matter."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

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


def sequence_seed(seed: int, index: int) -> int:
    """The seed of the `index`-th of a request's n sequences; the first has the request's own."""
    if index == 0:
        return seed
    # SplitMix64's finaliser: neighbouring indices get seeds that have nothing in common.
    mixed = (seed + index * 0x9E3779B97F4A7C15) & _WORD
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _WORD
    return mixed ^ (mixed >> 31)


_WORD: Final = 2**64 - 1


class SampleRow(msgspec.Struct):
    """One row of logits and what is wished of it."""

    sampling: SamplingParams
    position: int  # of the token to be chosen, in its sequence
    seen: Mapping[int, int] = {}  # token of prompt or output -> count in the output
    mask: NDArray[np.uint32] | None = None  # a bit per token, set where it is allowed
    forbidden: Collection[int] = ()  # tokens that must not be chosen, beside the mask
    given: int | None = None  # a token that is known already: it is taken, and only its log-probability is of interest
    seed: int | None = None  # in place of the sampling's


class SampledToken(msgspec.Struct, frozen=True, array_like=True):
    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # likeliest tokens with their log-probabilities


class NoTokenError(HeadraceError):
    """A row from which no token can be chosen: everything is masked, or the logits are not numbers."""
