"""Compares two answers to one request, and sums up many comparisons in bounded memory.

Owns AnswerText (what of an answer is compared) and DifferenceSummary. The similarity itself is passed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from headrace.gateway.requests.text_request import Choice
from headrace.observe.latency.sketch import Sketch

# Returns how much two texts say the same, from 0 to 1.
Similarity = Callable[[str, str], float]


class AnswerText(msgspec.Struct, frozen=True):
    """What is compared of an answer."""

    text: str  # its content, and its tool calls as lines of JSON
    tokens: int
    seconds: float  # until its end
    first_s: float  # until the model's first output; 0.0 where something held that back, or it is not known

    @classmethod
    def of(cls, choices: Sequence[Choice], *, tokens: int, seconds: float, first_s: float) -> AnswerText:
        return cls("\n\n".join(map(_choice_text, choices)), tokens, seconds, first_s)


def _choice_text(choice: Choice) -> str:
    calls = [msgspec.json.encode([call.name, _canonical(call.arguments)]).decode() for call in choice.calls]
    return "\n".join((choice.content.strip(), *calls)) if calls else choice.content.strip()


def _canonical(arguments: str) -> Any:
    """Return the arguments with sorted keys, so that their order makes no difference."""
    try:
        return msgspec.json.decode(msgspec.json.encode(msgspec.json.decode(arguments), order="sorted"))
    except (msgspec.DecodeError, RecursionError):
        return arguments


def is_exact(one: AnswerText, other: AnswerText) -> bool:
    return one.text == other.text


class DifferenceSummary(msgspec.Struct):
    """Sums of comparisons. `length` is the other answer's tokens by the served one's."""

    compared: int = 0
    exact: int = 0
    similarity: float = 0.0  # sum
    squares: float = 0.0  # of similarities
    lowest: float = 1.0
    served_tokens: int = 0
    other_tokens: int = 0
    served_s: Sketch = msgspec.field(default_factory=Sketch)
    other_s: Sketch = msgspec.field(default_factory=Sketch)
    served_first_s: Sketch = msgspec.field(default_factory=Sketch)
    other_first_s: Sketch = msgspec.field(default_factory=Sketch)

    def add(self, served: AnswerText, other: AnswerText, similarity: float) -> None:
        self.compared += 1
        self.exact += is_exact(served, other)
        self.similarity += similarity
        self.squares += similarity * similarity
        self.lowest = min(self.lowest, similarity)
        self.served_tokens += served.tokens
        self.other_tokens += other.tokens
        for sketch, seconds in ((self.served_s, served.seconds), (self.other_s, other.seconds)):
            if seconds > 0.0:
                sketch.add(seconds)
        if served.first_s > 0.0 and other.first_s > 0.0:  # so that both are of the same requests
            self.served_first_s.add(served.first_s)
            self.other_first_s.add(other.first_s)

    def as_json(self) -> dict[str, Any]:
        """Return shares, means and milliseconds; None where nothing was compared."""
        count = self.compared
        mean = self.similarity / count if count else None
        spread = None
        if mean is not None and count > 1:
            spread = 1.96 * math.sqrt(max(0.0, self.squares / count - mean * mean) / count)
        return {
            "compared": count,
            "exact_share": _rounded(self.exact / count) if count else None,
            "similarity": _rounded(mean),
            "similarity_error": _rounded(spread),  # half of a 95 % interval
            "lowest_similarity": _rounded(self.lowest) if count else None,
            "length_ratio": _rounded(self.other_tokens / self.served_tokens) if self.served_tokens else None,
            "served": {"e2e": _times(self.served_s), "ttft": _times(self.served_first_s)},
            "other": {"e2e": _times(self.other_s), "ttft": _times(self.other_first_s)},
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _times(sketch: Sketch) -> dict[str, float] | None:
    if not sketch.count:
        return None
    p50, p95 = (round(each * 1e3, 3) for each in sketch.quantiles((0.5, 0.95)))
    return {"p50_ms": p50, "p95_ms": p95}
