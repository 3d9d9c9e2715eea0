"""How sure a model was of what it wrote, by the log-probabilities of its tokens.

Owns Confidence, for one answer token by token, and the measures made of it. Each is between 0 and 1, does not depend on
the answer's length, and is a probability of a kind: of the average token (`mean`), of the least likely one (`least`),
and of what the model would have said instead at the beginning (`entropy`). Knows no threshold.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final, get_args

from headrace.config.routing_section import Measure

MEASURES: Final[tuple[Measure, ...]] = get_args(Measure)
FIRST: Final = 8  # tokens that the entropy is taken over: there it is settled what an answer will say
TOP: Final = 5  # likeliest tokens at each place that it takes


class Confidence:
    __slots__ = ("_entropy", "_least", "_looked", "_sum", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self._sum = 0.0
        self._least = 0.0
        self._entropy = 0.0
        self._looked = 0  # tokens whose entropy is known

    def add(self, logprob: float, top: Iterable[float] = ()) -> None:
        """The next token's log-probability, and those of the likeliest tokens in its place."""
        self.tokens += 1
        self._sum += logprob
        self._least = min(self._least, logprob)
        if self.tokens <= FIRST:
            likeliest = list(top)[:TOP]
            if likeliest:
                self._entropy += _entropy(likeliest)
                self._looked += 1

    def value(self, measure: Measure) -> float:
        """0 where nothing is known."""
        if not self.tokens:
            return 0.0
        match measure:
            case "mean":
                return math.exp(self._sum / self.tokens)
            case "least":
                return math.exp(self._least)
            case "entropy":
                return math.exp(-self._entropy / self._looked) if self._looked else 0.0


def _entropy(logprobs: Iterable[float]) -> float:
    """In nats, as if all the other tokens were one: never more than the true one."""
    found, rest = 0.0, 1.0
    for logprob in logprobs:
        probability = math.exp(logprob)
        found -= probability * logprob
        rest -= probability
    return found - rest * math.log(rest) if rest > 1e-9 else found
