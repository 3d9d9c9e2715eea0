"""Assertions hold or fail as promptfoo's do, and those that run code are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.errors import RequestError
from headrace.lab.cases.assertions import KNOWN, REFUSED, failed_assertions, read_assertion

TEXT = "The answer is 42.\n"


@pytest.mark.parametrize(
    ("kind", "value", "text", "expected"),
    [
        ("equals", "The answer is 42.", TEXT, True),
        ("equals", "42", TEXT, False),
        ("contains", "answer", TEXT, True),
        ("contains", "Answer", TEXT, False),
        ("icontains", "ANSWER", TEXT, True),
        ("contains-any", ["x", "42"], TEXT, True),
        ("contains-all", ["x", "42"], TEXT, False),
        ("icontains-all", ["THE", "42"], TEXT, True),
        ("icontains-any", ["X"], TEXT, False),
        ("starts-with", "The", TEXT, True),
        ("regex", r"\d{2}\.", TEXT, True),
        ("is-json", None, '{"a": 1}', True),
        ("is-json", None, 'x {"a": 1}', False),
        ("is-json", {"required": ["b"]}, '{"a": 1}', False),
        ("contains-json", {"required": ["a"]}, 'x {"a": 1} y', True),
        ("contains-json", None, "x [1, 2", False),
        ("is-refusal", None, "I can't help with that.", True),
        ("word-count", 4, TEXT, True),
        ("word-count", {"min": 5}, TEXT, False),
        ("not-contains", "zebra", TEXT, True),
        ("not-is-json", None, "[]", False),
    ],
)
def test_each_type(kind: str, value: Any, text: str, expected: bool) -> None:
    assertion = read_assertion({"type": kind, "value": value}, "tests[0]")
    assert assertion.holds(text) == expected
    assert failed_assertions([assertion], text) == ([] if expected else [assertion.name])


def test_every_known_type_was_tried() -> None:
    tried = {"equals", "contains", "icontains", "starts-with", "regex", "is-json", "contains-json", "is-refusal"}
    tried |= {"contains-any", "contains-all", "icontains-all", "icontains-any", "word-count"}
    assert tried == set(KNOWN)


@pytest.mark.parametrize("kind", [*REFUSED, "not-javascript"])
def test_code_and_models_are_refused_by_name(kind: str) -> None:
    with pytest.raises(RequestError, match=f"'{kind.removeprefix('not-')}' are not supported"):
        read_assertion({"type": kind, "value": "output.length > 3"}, "tests[0]")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"type": "containz"}, "unknown assertion type 'containz'"),
        ({"type": "contains-any", "value": "x"}, "wrong type"),
        ({"type": "regex", "value": "("}, "not a regular expression"),
        ({"type": "contains", "value": "{{name}}"}, "templates"),
        ({"type": "contains"}, "wrong type"),
    ],
)
def test_mistakes_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read_assertion(given, "tests[0]")
