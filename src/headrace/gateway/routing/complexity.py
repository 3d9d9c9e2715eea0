"""How likely a request is to be too much for the small model, from 0 to 1, by features that cost microseconds.

Owns the features and the classifier, a logistic one. Its weights are numbers in complexity.json, which
`python -m training.routing` makes from answers of the bundled models: a question counts as simple where the small one's
answer is right, and as complex where it is not; both weigh the same. Knows no tokenizer and no model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.gateway.requests.text_request import TextRequest

WEIGHTS: Final = Path(__file__).with_name("complexity.json")
FEATURES: Final = (
    "length",  # of all messages: logarithm of the characters
    "asked",  # of the last user's message
    "system",  # of what the system said
    "question_words",
    "reasons",  # words that ask for reasons, comparisons, steps
    "constraints",  # words that bind the answer
    "digits",
    "operators",
    "code",  # marks of code and of JSON
    "sources",  # numbered ones
    "lines",
    "turns",
    "tools",
    "formatted",  # the answer is to have a form
)
_FIRST: Final = 512  # characters of a text that are looked at: from its beginning, and from its end
_LAST: Final = 256
_SYSTEM: Final = 256
_MOST: Final = 8.0  # that a count adds, so that no long list decides everything

_QUESTION: Final = frozenset("who what when where which whose how why is are does do can could".split())
_REASONS: Final = frozenset(
    "why explain compare difference between because prove derive steps step analyse analyze evaluate calculate sum "
    "total longer faster more less than versus tradeoff".split()
)
_CONSTRAINTS: Final = frozenset(
    "must only exactly most least without not never always except unless cite json null fields schema format label "
    "priority rules rule following each every none other".split()
)
_SOURCE: Final = re.compile(r"\[\d")
_DIGITS: Final = "0123456789"
_OPERATORS: Final = "+*/=<>%×"  # noqa: RUF001 (the multiplication sign is meant)
_CODE: Final = "{}`;"


class Classifier(msgspec.Struct, frozen=True):
    """Weights of the features as they are, and where the score is a half."""

    weights: dict[str, float]
    bias: float
    made: dict[str, Any] = {}  # from what, for people

    def score(self, values: Sequence[float]) -> float:
        total = self.bias
        for name, value in zip(FEATURES, values, strict=True):
            total += self.weights[name] * value
        return 1.0 / (1.0 + math.exp(-max(-40.0, min(40.0, total))))


@cache
def classifier(path: Path = WEIGHTS) -> Classifier:
    found = msgspec.json.decode(path.read_bytes(), type=Classifier)
    assert set(found.weights) == set(FEATURES), f"{path} was made for other features"
    return found


def complexity(asked: TextRequest) -> float:
    return classifier().score(features(asked))


def features(asked: TextRequest) -> list[float]:
    """In the order of FEATURES."""
    length, turns, user, system = 0, 0, "", ""
    if asked.messages is not None:
        for message in asked.messages:
            content = message.get("content") or ""
            length += len(content)
            role = message["role"]
            if role == "user":
                turns += 1
                user = content
            elif role == "system":
                system = content
    else:
        for prompt in asked.prompts or ():
            length += len(prompt) if isinstance(prompt, str) else 4 * len(prompt)
            if isinstance(prompt, str):
                user = prompt
        turns = 1
    looked = user if len(user) <= _FIRST + _LAST else f"{user[:_FIRST]} {user[-_LAST:]}"
    both = f"{system[:_SYSTEM]} {looked}" if system else looked
    distinct = set(both.lower().replace("?", " ").replace(".", " ").replace(",", " ").split())
    return [
        math.log1p(length),
        math.log1p(len(user)),
        math.log1p(len(system)),
        min(_MOST, len(_QUESTION & distinct)),
        min(_MOST, len(_REASONS & distinct)),
        min(_MOST, len(_CONSTRAINTS & distinct)),
        min(_MOST, sum(map(looked.count, _DIGITS))),
        min(_MOST, sum(map(looked.count, _OPERATORS))),
        min(_MOST, sum(map(both.count, _CODE))),
        min(_MOST, len(_SOURCE.findall(both))),
        min(_MOST, looked.count("\n")),
        min(_MOST, turns - 1.0),
        min(_MOST, float(len(asked.tools))),
        1.0 if asked.grammar is not None else 0.0,
    ]
