"""Values are checked against the keywords of a schema, with the path of each problem."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.lab.comparison.json_schema import equal, problems, unchecked_keywords

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        "home": {"$ref": "#/$defs/place"},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "required": ["city"], "properties": {"city": {"type": ["string", "null"]}}}},
}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"name": "Ada", "age": 36, "tags": ["a"], "home": {"city": None}}, []),
        ({"name": "Ada", "age": 36.0}, []),
        ({"name": "", "age": 36}, ["$.name: 0 characters are not within the schema's bounds"]),
        ({"name": "Ada", "age": True}, ["$.age: expected integer, found boolean"]),
        ({"name": "Ada"}, ["$.age: missing"]),
        ({"name": "Ada", "age": -1}, ["$.age: -1 is not within the schema's bounds"]),
        ({"name": "Ada", "age": 1, "x": 2}, ["$.x: not in the schema"]),
        ({"name": "Ada", "age": 1, "tags": ["c"]}, ["$.tags[0]: not one of the allowed values"]),
        ({"name": "Ada", "age": 1, "tags": ["a", "a", "a"]}, ["$.tags: 3 items, at most 2 expected"]),
        ({"name": "Ada", "age": 1, "home": {}}, ["$.home.city: missing"]),
        ([], ["$: expected object, found array"]),
    ],
)
def test_each_problem_is_named_with_its_path(value: Any, expected: list[str]) -> None:
    assert problems(value, PERSON) == expected


def test_alternatives_and_patterns_are_checked() -> None:
    schema = {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^x"}]}
    assert problems(None, schema) == []
    assert problems("xy", schema) == []
    assert problems("y", schema) == ["$: satisfies 0 of the alternatives of anyOf"]
    assert problems(5, {"oneOf": [{"minimum": 1}, {"maximum": 9}]}) == ["$: satisfies 2 of the alternatives of oneOf"]
    assert problems(3, {"exclusiveMaximum": 3}) == ["$: 3 is not within the schema's bounds"]
    assert problems(1, False) == ["$: not allowed"]


def test_a_schema_that_refers_to_itself_ends() -> None:
    schema = {"$ref": "#"}
    assert problems({"a": 1}, schema) == []


def test_keywords_that_are_not_checked_are_listed() -> None:
    assert unchecked_keywords(PERSON) == set()
    assert unchecked_keywords({"properties": {"a": {"format": "date", "uniqueItems": True}}}) == {"uniqueItems"}


def test_equality_is_that_of_json() -> None:
    assert equal({"a": [1, None]}, {"a": [1.0, None]})
    assert not equal(True, 1)
    assert not equal([1, 2], [2, 1])
