"""Turns the filters of a search into SQL. Every entry must hold; values are never part of a statement.

{"language": "en"}                        equal
{"year": {"gte": 2020, "lt": 2024}}       eq, ne, gt, gte, lt, lte
{"team": {"in": ["a", "b"]}}              in, nin
{"draft": {"exists": false}}              whether the document has the key
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, cast

from headrace.gateway.api_errors import ApiError, invalid_request
from headrace.pipelines.collections.hits import Filters, Metadata

KEYS: Final = 32
VALUES: Final = 64  # of `in` and `nin`
VALUE_CHARACTERS: Final = 512
_KEY: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,63}")
_COMPARISONS: Final = {"gt": ">", "gte": ">=", "lt": "<", "lte": "<="}
_OPERATORS: Final = ("eq", "ne", *_COMPARISONS, "in", "nin", "exists")


def check_metadata(given: Mapping[str, Any], parameter: str) -> Metadata:
    """Return a document's metadata. ApiError unless it is a flat object of texts, numbers and booleans."""
    if len(given) > KEYS:
        raise invalid_request(f"'{parameter}' has {len(given)} keys. Expected at most {KEYS}.", parameter)
    for key, value in given.items():
        _check_key(key, parameter)
        _check_value(value, f"{parameter}.{key}")
    return dict(given)


def filter_condition(filters: Filters | None) -> tuple[str, list[Any]]:
    """Return a condition on the table `documents` and its values. ApiError for an invalid filter."""
    conditions: list[str] = []
    values: list[Any] = []
    if filters is not None and len(filters) > KEYS:
        raise invalid_request(f"'filters' has {len(filters)} keys. Expected at most {KEYS}.", "filters")
    for key, wanted in (filters or {}).items():
        _check_key(key, "filters")
        tests: Mapping[str, Any] = cast("Mapping[str, Any]", wanted) if isinstance(wanted, Mapping) else {"eq": wanted}
        if not tests:
            raise invalid_request(f"'filters.{key}' is empty. Expected a value or an operator.", f"filters.{key}")
        for operator, value in tests.items():
            _add_condition(conditions, values, key, operator, value)
    return " AND ".join(conditions) or "TRUE", values


def _add_condition(conditions: list[str], values: list[Any], key: str, operator: str, value: Any) -> None:
    parameter = f"filters.{key}"
    field, path = "json_extract(documents.metadata, ?)", f'$."{key}"'
    match operator:
        case "eq" | "ne":
            _check_value(value, parameter)
            conditions.append(f"{field} {'IS' if operator == 'eq' else 'IS NOT'} ?")
            values += [path, value]
        case "gt" | "gte" | "lt" | "lte":
            _check_value(value, parameter)
            # sqlite orders all texts after all numbers.
            same = "= 'text'" if isinstance(value, str) else "IN ('integer', 'real', 'true', 'false')"
            conditions.append(f"(json_type(documents.metadata, ?) {same} AND {field} {_COMPARISONS[operator]} ?)")
            values += [path, path, value]
        case "in" | "nin":
            if not isinstance(value, list) or not 1 <= len(cast("list[Any]", value)) <= VALUES:
                raise invalid_request(f"'{parameter}.{operator}' must be a list of 1 to {VALUES} values.", parameter)
            choices = cast("list[Any]", value)
            for each in choices:
                _check_value(each, parameter)
            marks = ", ".join("?" * len(choices))
            conditions.append(f"{field} {'IN' if operator == 'in' else 'NOT IN'} ({marks})")
            values += [path, *choices]
        case "exists":
            if not isinstance(value, bool):
                raise invalid_request(f"'{parameter}.exists' must be true or false.", parameter)
            conditions.append(f"json_type(documents.metadata, ?) IS {'NOT ' if value else ''}NULL")
            values.append(path)
        case _:
            known = ", ".join(_OPERATORS)
            raise ApiError(
                f"Unknown operator '{operator[:40]}' in '{parameter}'. Expected one of {known}.",
                parameter=parameter,
                code="invalid_value",
            )


def _check_key(key: str, parameter: str) -> None:
    if _KEY.fullmatch(key) is None:
        raise invalid_request(
            f"Invalid key '{key[:64]}' in '{parameter}'. Use 1 to 64 letters, digits and _ . : -", parameter
        )


def _check_value(value: Any, parameter: str) -> None:
    if isinstance(value, str) and len(value) <= VALUE_CHARACTERS:
        return
    if isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 2**63):
        return
    raise invalid_request(
        f"'{parameter}' must be a text of at most {VALUE_CHARACTERS} characters, a number or a boolean.", parameter
    )
