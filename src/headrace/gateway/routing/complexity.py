"""Estimates from 0 to 1 how likely a request is too hard for the small model, with features that cost microseconds.

Owns the features and a logistic classifier. Its weights are in complexity.json, which `python -m training.routing`
makes from answers of the bundled models: a question is simple if the small model answers it correctly, and complex
otherwise; both classes weigh the same. Needs no tokenizer and no model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.errors import HeadraceError
from headrace.gateway.requests.text_request import TextRequest

WEIGHTS: Final = Path(__file__).with_name("complexity.json")
FEATURES: Final = (
    "length",  # logarithm of the characters of all messages
    "asked",  # the same of the last user's message
    "system",  # the same of the system message
    "question_words",
    "reasons",  # words that ask for reasons, comparisons, steps
    "constraints",  # words that restrict the answer
    "digits",
    "operators",
    "code",  # characters of code and JSON
    "sources",  # numbered
    "lines",
    "turns",
    "tools",
    "formatted",  # the answer must follow a grammar
)
_FIRST_CHARS: Final = 512  # read from the beginning of a text
_LAST_CHARS: Final = 256  # and from its end
_SYSTEM_CHARS: Final = 256
_MAX_COUNT: Final = 8.0  # so that a long list does not decide everything

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


class ClassifierError(HeadraceError):
    """A file of a classifier cannot be used."""


class Classifier(msgspec.Struct, frozen=True):
    """A logistic classifier over FEATURES."""

    weights: dict[str, float]
    bias: float
    made: dict[str, Any] = {}  # how it was trained, for readers

    def score(self, values: Sequence[float]) -> float:
        total = self.bias
        for name, value in zip(FEATURES, values, strict=True):
            total += self.weights[name] * value
        return 1.0 / (1.0 + math.exp(-max(-40.0, min(40.0, total))))


def read_classifier(path: Path) -> Classifier:
    """Read a classifier. ClassifierError for a file that is none, or of other features."""
    try:
        loaded = msgspec.json.decode(path.read_bytes(), type=Classifier)
    except OSError as error:
        raise ClassifierError(f"{path}: {error.strerror or error}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ClassifierError(f"{path}: {error}") from None
    if set(loaded.weights) != set(FEATURES):
        raise ClassifierError(f"{path}: The classifier is for other features. Fit it again with headrace tune cascade.")
    return loaded


@cache
def classifier(path: Path = WEIGHTS) -> Classifier:
    """Return a classifier, which is read once."""
    return read_classifier(path)


def complexity(text_request: TextRequest, path: Path = WEIGHTS) -> float:
    return classifier(path).score(features(text_request))


def features(text_request: TextRequest) -> list[float]:
    """Return the features in the order of FEATURES."""
    length, turns, user, system = 0, 0, "", ""
    if text_request.messages is not None:
        for message in text_request.messages:
            content = message.get("content") or ""
            length += len(content)
            role = message["role"]
            if role == "user":
                turns += 1
                user = content
            elif role == "system":
                system = content
    else:
        for prompt in text_request.prompts or ():
            length += len(prompt) if isinstance(prompt, str) else 4 * len(prompt)
            if isinstance(prompt, str):
                user = prompt
        turns = 1
    read = user if len(user) <= _FIRST_CHARS + _LAST_CHARS else f"{user[:_FIRST_CHARS]} {user[-_LAST_CHARS:]}"
    both = f"{system[:_SYSTEM_CHARS]} {read}" if system else read
    distinct = set(both.lower().replace("?", " ").replace(".", " ").replace(",", " ").split())
    return [
        math.log1p(length),
        math.log1p(len(user)),
        math.log1p(len(system)),
        min(_MAX_COUNT, len(_QUESTION & distinct)),
        min(_MAX_COUNT, len(_REASONS & distinct)),
        min(_MAX_COUNT, len(_CONSTRAINTS & distinct)),
        min(_MAX_COUNT, sum(map(read.count, _DIGITS))),
        min(_MAX_COUNT, sum(map(read.count, _OPERATORS))),
        min(_MAX_COUNT, sum(map(both.count, _CODE))),
        min(_MAX_COUNT, len(_SOURCE.findall(both))),
        min(_MAX_COUNT, read.count("\n")),
        min(_MAX_COUNT, turns - 1.0),
        min(_MAX_COUNT, float(len(text_request.tools))),
        1.0 if text_request.grammar is not None else 0.0,
    ]
