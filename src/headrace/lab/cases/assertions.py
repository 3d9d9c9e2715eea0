"""Assertions on an answer, in the form of promptfoo's deterministic ones. Nothing in them is executed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, cast

import msgspec

from headrace.errors import RequestError
from headrace.lab.comparison.json_diff import parse_json
from headrace.lab.comparison.json_schema import problems
from headrace.lab.comparison.refusals import is_refusal

# Types that run code or call a model or a web server: refused by name, with what to use instead.
REFUSED: Final = {
    "javascript": "it runs code; use contains, regex or is-json",
    "python": "it runs code; use contains, regex or is-json",
    "ruby": "it runs code; use contains, regex or is-json",
    "webhook": "it calls a server",
    "llm-rubric": "it calls a model",
    "model-graded-closedqa": "it calls a model",
    "factuality": "it calls a model; give sources, and the gate checks facts against them",
    "similar": "it calls a model; the gate measures similarity to the baseline",
    "latency": "set limits of ttft, tpot and e2el in the thresholds file",
    "cost": "set a limit of cost in the thresholds file",
    "perplexity": "set a limit of perplexity in the thresholds file",
}
KNOWN: Final = (
    "equals",
    "contains",
    "icontains",
    "contains-any",
    "icontains-any",
    "contains-all",
    "icontains-all",
    "starts-with",
    "regex",
    "is-json",
    "contains-json",
    "is-refusal",
    "word-count",
)


class Assertion(msgspec.Struct, frozen=True):
    type: str  # of KNOWN
    value: Any = None
    negated: bool = False

    @property
    def name(self) -> str:
        kind = f"not-{self.type}" if self.negated else self.type
        return kind if self.value is None else f"{kind}: {str(self.value)[:80]}"

    def holds(self, text: str) -> bool:
        return _holds(self.type, self.value, text) != self.negated


def read_assertion(given: dict[str, Any], where: str) -> Assertion:
    """Read one assertion. RequestError for an unknown type, or one that would run code."""
    kind = str(given.get("type", ""))
    negated = kind.startswith("not-")
    kind = kind.removeprefix("not-")
    if kind in REFUSED:
        raise RequestError(f"{where}: assertions of the type '{kind}' are not supported: {REFUSED[kind]}.")
    if kind not in KNOWN:
        raise RequestError(f"{where}: unknown assertion type '{kind}'. Known: {', '.join(KNOWN)}.")
    value = given.get("value")
    if isinstance(value, str) and "{{" in value:
        raise RequestError(f"{where}: values of assertions may not be templates. Write the text itself.")
    _check_value(kind, value, where)
    return Assertion(kind, value, negated)


def failed_assertions(assertions: Sequence[Assertion], text: str) -> list[str]:
    return [each.name for each in assertions if not each.holds(text)]


def _check_value(kind: str, value: Any, where: str) -> None:
    if kind in ("contains-any", "icontains-any", "contains-all", "icontains-all"):
        right = isinstance(value, list)
    elif kind == "word-count":
        right = isinstance(value, int | dict)
    elif kind in ("is-json", "contains-json"):
        right = value is None or isinstance(value, dict)
    elif kind == "is-refusal":
        right = value is None
    else:
        right = isinstance(value, str | int | float)
    if not right:
        raise RequestError(f"{where}: '{kind}' has a value of a wrong type.")
    if kind == "regex":
        try:
            re.compile(str(cast(object, value)))
        except re.error as error:
            raise RequestError(f"{where}: not a regular expression: {error}.") from None


def _holds(kind: str, value: Any, text: str) -> bool:
    match kind:
        case "equals":
            return text.strip() == str(value).strip()
        case "contains":
            return str(value) in text
        case "icontains":
            return str(value).lower() in text.lower()
        case "contains-any":
            return any(str(each) in text for each in value)
        case "icontains-any":
            return any(str(each).lower() in text.lower() for each in value)
        case "contains-all":
            return all(str(each) in text for each in value)
        case "icontains-all":
            return all(str(each).lower() in text.lower() for each in value)
        case "starts-with":
            return text.startswith(str(value))
        case "regex":
            return re.search(str(value), text) is not None
        case "is-json":
            return _is_json(text, value)
        case "contains-json":
            return any(_is_json(part, value) for part in _json_parts(text))
        case "is-refusal":
            return is_refusal(text)
        case _:
            return _has_word_count(text, value)


def _is_json(text: str, schema: Any) -> bool:
    valid, found = parse_json(text)
    return valid and (schema is None or not problems(found, schema))


def _json_parts(text: str) -> list[str]:
    """Return the texts from each opening bracket to the last closing one, the outermost first."""
    starts = [place for place, char in enumerate(text) if char in "{["][:100]
    ends = {"{": text.rfind("}"), "[": text.rfind("]")}
    return [text[start : ends[text[start]] + 1] for start in starts if ends[text[start]] > start]


def _has_word_count(text: str, value: Any) -> bool:
    count = len(text.split())
    if isinstance(value, int):
        return count == value
    return value.get("min", 0) <= count <= value.get("max", count)
