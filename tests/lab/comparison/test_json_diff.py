"""Answers in JSON are compared field by field."""

from __future__ import annotations

from headrace.lab.comparison.json_diff import FieldChange, diff_json, parse_json

SCHEMA = {"type": "object", "required": ["total"], "properties": {"total": {"type": "number"}}}


def test_every_change_has_a_path_and_a_kind() -> None:
    found = diff_json('{"a": 1, "b": [1, 2], "c": {"d": "x"}}', '{"a": "1", "b": [1, 3, 4], "e": null}')
    assert found.changes == (
        FieldChange("$.a", "type", "1", '"1"'),
        FieldChange("$.b[1]", "value", "2", "3"),
        FieldChange("$.c.d", "missing", '"x"'),
        FieldChange("$.b[2]", "added", "", "4"),
        FieldChange("$.e", "added", "", "null"),
    )
    assert (found.fields, found.same) == (6, 1)


def test_order_and_spacing_do_not_matter() -> None:
    found = diff_json('{"a": 1, "b": {}}', '{"b":{},\n"a":1.0}')
    assert found.fidelity == 1.0
    assert found.changes == ()


def test_prose_around_json_is_invalid() -> None:
    found = diff_json('{"a": 1}', '```json\n{"a": 1}\n```')
    assert found.baseline_valid
    assert not found.candidate_valid
    assert found.fidelity == 0.0


def test_both_sides_are_checked_against_the_schema() -> None:
    found = diff_json('{"total": 3}', '{"total": "3"}', SCHEMA)
    assert found.baseline_keeps_schema
    assert not found.keeps_schema
    assert found.candidate_problems == ("$.total: expected number, found string",)


def test_nan_and_deep_nesting_are_no_json() -> None:
    assert parse_json("NaN") == (False, None)
    assert parse_json("[" * 100_000)[0] is False
