"""Measures how confident a model was in an answer, from the log-probabilities of its tokens.

Each measure is between 0 and 1 and independent of the answer's length: the probability of the average token (`mean`),
of the least likely one (`least`), and the certainty over alternatives at the beginning (`entropy`). Knows no threshold.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final, get_args

from headrace.config.routing_section import Measure

MEASURES: Final[tuple[Measure, ...]] = get_args(Measure)
FIRST: Final = 8  # tokens that the entropy covers: they settle what an answer will say
TOP: Final = 5  # likeliest tokens at each position that the entropy takes


class Confidence:
    __slots__ = ("_entropy", "_entropy_tokens", "_least", "_sum", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self._sum = 0.0
        self._least = 0.0
        self._entropy = 0.0
        self._entropy_tokens = 0  # tokens with a known entropy

    def add(self, logprob: float, top: Iterable[float] = ()) -> None:
        """Add the next token's log-probability, and those of the likeliest tokens at its position."""
        self.tokens += 1
        self._sum += logprob
        self._least = min(self._least, logprob)
        if self.tokens <= FIRST:
            likeliest = list(top)[:TOP]
            if likeliest:
                self._entropy += _entropy(likeliest)
                self._entropy_tokens += 1

    def value(self, measure: Measure) -> float:
        """Return 0 if nothing is known."""
        if not self.tokens:
            return 0.0
        match measure:
            case "mean":
                return math.exp(self._sum / self.tokens)
            case "least":
                return math.exp(self._least)
            case "entropy":
                return math.exp(-self._entropy / self._entropy_tokens) if self._entropy_tokens else 0.0


def _entropy(logprobs: Iterable[float]) -> float:
    """Return a lower bound in nats: all tokens that are not listed count as one."""
    entropy, rest = 0.0, 1.0
    for logprob in logprobs:
        probability = math.exp(logprob)
        entropy -= probability * logprob
        rest -= probability
    return entropy - rest * math.log(rest) if rest > 1e-9 else entropy
