"""Sampling parameters with their bounds, a row of logits as a sampler takes it, and the sampled token.

Random numbers are counter-based: they depend only on the seed and the token's position, so a sampled sequence, like a
greedy one, does not depend on what else runs. Does not compute: the core's sampler is `executors/sampler.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from headrace.errors import HeadraceError, RequestError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MOST_LOGPROBS: Final = 1024
UNUSED_WHEN_GREEDY: Final = ("top_k", "top_p", "min_p", "seed")  # fields without effect at temperature 0


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0  # relative to the most likely token's probability
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    logprobs: int | None = None  # how many of the most likely tokens to report; 0: only the chosen one

    @property
    def penalises(self) -> bool:
        """True if the tokens so far influence the choice."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    def check(self, vocab_size: int) -> None:
        """Raise RequestError for a value out of bounds."""
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
    if not least <= value <= most:  # also where it is not a number
        raise RequestError(f"'{parameter}' must be {least:g} to {most:g}, not {value}.", parameter=parameter)


def sequence_seed(seed: int, index: int) -> int:
    """Return the seed of the `index`-th of a request's n sequences. The first has the request's own."""
    if index == 0:
        return seed
    # SplitMix64's finaliser, so that neighbouring indices get unrelated seeds.
    mixed = (seed + index * 0x9E3779B97F4A7C15) & _WORD
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _WORD
    return mixed ^ (mixed >> 31)


_WORD: Final = 2**64 - 1


class SampleRow(msgspec.Struct):
    """One row of logits and how to sample it."""

    sampling: SamplingParams
    position: int  # of the token to choose, in its sequence
    seen: Mapping[int, int] = {}  # token of prompt or output -> count in the output
    mask: NDArray[np.uint32] | None = None  # one bit per token, set if the token is allowed
    forbidden: Collection[int] = ()  # tokens excluded in addition to the mask
    given: int | None = None  # a known token: it is chosen, and only its log-probability is computed
    seed: int | None = None  # replaces `sampling.seed`


class SampledToken(msgspec.Struct, frozen=True, array_like=True):
    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # most likely tokens with their log-probabilities


class NoTokenError(HeadraceError):
    """A row from which no token can be chosen: everything is masked, or the logits are not numbers."""
