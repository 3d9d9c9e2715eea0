"""Is an answer right? One function for each metric that a held-out question can name.

Every metric is exact about what its task is about and indifferent to the rest. Owns the metrics; knows neither a task
nor how the answer was made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import cast

from training.corpus.conversation import CALL_BEGIN, CALL_END, JSON, Question

NUMBER = re.compile(r"(-?\d[\d,]*(?:\.\d+)?)\s*(%|[A-Za-z]+)?")
CITATION = re.compile(r"\[(\d+)\]")


def is_right(question: Question, answer: str) -> bool:
    return METRICS[question.metric](question.expected, answer)


def same_text(expected: str, answer: str) -> bool:
    return expected.strip() == answer.strip()


def same_fact(expected: str, answer: str) -> bool:
    """The same words: runs of white space count as one space, and capitals as small letters."""
    return folded(expected) == folded(answer)


def same_json(expected: str, answer: str) -> bool:
    """The same value whatever the order of the keys. 1 is 1.0, but neither is true; text that is no JSON is wrong."""
    try:
        return equal(json.loads(expected), json.loads(answer))
    except (ValueError, RecursionError):
        return False


def same_calls(expected: str, answer: str) -> bool:
    """The same calls in the same order, with the same text outside of them (as a rule none)."""
    try:
        expected_words, expected_calls = calls_of(expected)
        words, calls = calls_of(answer)
    except (ValueError, RecursionError):
        return False
    return folded(expected_words) == folded(words) and equal(expected_calls, calls)


def same_number(expected: str, answer: str) -> bool:
    """The last number, and the unit or word after it, are the same; how the answer got there may differ."""
    result = last_number(answer)
    return result is not None and result == last_number(expected)


def same_citation(expected: str, answer: str) -> bool:
    """The same words beside the citations, and the same passages cited, in whatever order and place."""
    words = [folded(CITATION.sub(" ", text)) for text in (expected, answer)]
    cited = [sorted(CITATION.findall(text)) for text in (expected, answer)]
    return words[0] == words[1] and cited[0] == cited[1]


METRICS: dict[str, Callable[[str, str], bool]] = {
    "exact": same_text,
    "fact": same_fact,
    "json": same_json,
    "calls": same_calls,
    "number": same_number,
    "cited": same_citation,
}


def folded(text: str) -> str:
    return " ".join(text.split()).casefold()


def equal(left: JSON, right: JSON) -> bool:
    """Equal as JSON: Python alone would take true for 1."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(equal, left, right))
    return left == right


def calls_of(text: str) -> tuple[str, list[JSON]]:
    """The text outside of the tool calls, and the calls. A call that is not closed is an error."""
    words, *rest = text.split(CALL_BEGIN)
    calls: list[JSON] = []
    for part in rest:
        call, end, after = part.partition(CALL_END)
        if not end:
            raise ValueError("a tool call is not closed")
        calls.append(cast(JSON, json.loads(call)))
        words += after
    return words, calls


def last_number(text: str) -> tuple[float, str] | None:
    found = NUMBER.findall(text)
    if not found:
        return None
    number, unit = found[-1]
    return float(number.replace(",", "")), unit.lower()
