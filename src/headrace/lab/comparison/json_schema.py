"""Checks a JSON value against a JSON schema: the keywords that structured output uses.

Keywords that are not checked are listed by `unchecked_keywords`, so that a report can name them. Fetches nothing: a
`$ref` must point into the schema itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_CHECKED: Final = frozenset(
    """
    type properties required additionalProperties items enum const minimum maximum exclusiveMinimum exclusiveMaximum
    minLength maxLength pattern minItems maxItems anyOf oneOf allOf $ref $defs definitions
    """.split()
)
_NOTES: Final = frozenset("title description default examples $schema $id format deprecated readOnly strict".split())
MOST_PROBLEMS: Final = 50
_DEEPEST: Final = 64  # levels of a value, and of references


def problems(value: Any, schema: Any) -> list[str]:
    """Return what is wrong with a value, each with its path; empty if it satisfies the schema."""
    found: list[str] = []
    for problem in _check(value, schema, schema, "$", 0):
        found.append(problem)
        if len(found) == MOST_PROBLEMS:
            break
    return found


def unchecked_keywords(schema: Any) -> set[str]:
    """Return the keywords of a schema that `problems` ignores."""
    if not isinstance(schema, dict):
        return set()
    found: set[str] = set()
    for key, value in cast(dict[str, Any], schema).items():
        if key in ("properties", "$defs", "definitions") and isinstance(value, dict):
            for each in cast(dict[str, Any], value).values():
                found |= unchecked_keywords(each)
        elif key in ("anyOf", "oneOf", "allOf") and isinstance(value, list):
            for each in cast(list[Any], value):
                found |= unchecked_keywords(each)
        elif key in ("items", "additionalProperties"):
            found |= unchecked_keywords(value)
        elif key not in _CHECKED and key not in _NOTES:
            found.add(key)
    return found


def type_name(value: Any) -> str:
    """Return JSON's name of a value's type; `number` for integers and fractions."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def _check(value: Any, schema: Any, root: Any, path: str, depth: int) -> Iterator[str]:
    if schema is True or schema == {} or depth > _DEEPEST:
        return
    if not isinstance(schema, dict):
        yield f"{path}: not allowed"
        return
    rules = cast(dict[str, Any], schema)
    if "$ref" in rules:
        yield from _check(value, _resolve(str(rules["$ref"]), root), root, path, depth + 1)
    yield from _check_type(value, rules, path)
    if "enum" in rules and not any(equal(value, each) for each in rules["enum"]):
        yield f"{path}: not one of the allowed values"
    if "const" in rules and not equal(value, rules["const"]):
        yield f"{path}: not the required value"
    yield from _check_combined(value, rules, root, path, depth)
    if isinstance(value, dict):
        yield from _check_object(cast(dict[str, Any], value), rules, root, path, depth)
    elif isinstance(value, list):
        yield from _check_array(cast(list[Any], value), rules, root, path, depth)
    elif isinstance(value, str):
        yield from _check_string(value, rules, path)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield from _check_number(value, rules, path)


def _check_type(value: Any, rules: Mapping[str, Any], path: str) -> Iterator[str]:
    wanted = rules.get("type")
    if wanted is None:
        return
    names: Sequence[str] = [wanted] if isinstance(wanted, str) else wanted
    if not any(_has_type(value, name) for name in names):
        yield f"{path}: expected {' or '.join(names)}, found {type_name(value)}"


def _has_type(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES.get(name, ()))


def _check_combined(value: Any, rules: Mapping[str, Any], root: Any, path: str, depth: int) -> Iterator[str]:
    for each in rules.get("allOf", ()):
        yield from _check(value, each, root, path, depth + 1)
    for name in ("anyOf", "oneOf"):
        if name in rules:
            fitting = sum(next(_check(value, each, root, path, depth + 1), None) is None for each in rules[name])
            if not fitting or (name == "oneOf" and fitting > 1):
                yield f"{path}: satisfies {fitting} of the alternatives of {name}"


def _check_object(
    value: Mapping[str, Any], rules: Mapping[str, Any], root: Any, path: str, depth: int
) -> Iterator[str]:
    properties: Mapping[str, Any] = rules.get("properties", {})
    for name in rules.get("required", ()):
        if name not in value:
            yield f"{path}.{name}: missing"
    for name, each in value.items():
        if name in properties:
            yield from _check(each, properties[name], root, f"{path}.{name}", depth + 1)
        elif rules.get("additionalProperties") is False:
            yield f"{path}.{name}: not in the schema"
        elif isinstance(rules.get("additionalProperties"), dict):
            yield from _check(each, rules["additionalProperties"], root, f"{path}.{name}", depth + 1)


def _check_array(value: Sequence[Any], rules: Mapping[str, Any], root: Any, path: str, depth: int) -> Iterator[str]:
    if len(value) < rules.get("minItems", 0):
        yield f"{path}: {len(value)} items, at least {rules['minItems']} expected"
    if len(value) > rules.get("maxItems", len(value)):
        yield f"{path}: {len(value)} items, at most {rules['maxItems']} expected"
    if "items" in rules:
        for place, each in enumerate(value):
            yield from _check(each, rules["items"], root, f"{path}[{place}]", depth + 1)


def _check_string(value: str, rules: Mapping[str, Any], path: str) -> Iterator[str]:
    if not rules.get("minLength", 0) <= len(value) <= rules.get("maxLength", len(value)):
        yield f"{path}: {len(value)} characters are not within the schema's bounds"
    if "pattern" in rules and re.search(rules["pattern"], value) is None:
        yield f"{path}: does not match the pattern"


def _check_number(value: float, rules: Mapping[str, Any], path: str) -> Iterator[str]:
    outside = value < rules.get("minimum", value) or value > rules.get("maximum", value)
    outside = outside or ("exclusiveMinimum" in rules and value <= rules["exclusiveMinimum"])
    if outside or ("exclusiveMaximum" in rules and value >= rules["exclusiveMaximum"]):
        yield f"{path}: {value} is not within the schema's bounds"


def _resolve(pointer: str, root: Any) -> Any:
    """Return what a local reference points to; True, which allows everything, if it points nowhere."""
    found = root
    for part in pointer.removeprefix("#").strip("/").split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        if key:
            found = cast(dict[str, Any], found).get(key, True) if isinstance(found, dict) else True
    return found


def equal(one: Any, other: Any) -> bool:
    """Compare two JSON values: 1 and 1.0 are equal, true and 1 are not."""
    if type_name(one) != type_name(other):
        return False
    if isinstance(one, dict):
        first, second = cast(dict[str, Any], one), cast(dict[str, Any], other)
        return first.keys() == second.keys() and all(equal(value, second[key]) for key, value in first.items())
    if isinstance(one, list):
        items, others = cast(list[Any], one), cast(list[Any], other)
        return len(items) == len(others) and all(map(equal, items, others))
    return one == other
