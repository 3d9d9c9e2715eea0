"""Finds the values that a type allows at a place of a JSON document, for the error that names them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec
from msgspec import inspect

_STEPS: Final = re.compile(r"\.(?P<field>[^.\[]+)|\[[^\]]*\]")


def allowed_values(type: Any, path: str) -> tuple[Any, ...]:
    """Return the literals allowed at `path`, which is msgspec's without the `$`: `.format.type`, `[0].role`.

    Empty where the type has none there. In a union, of every member that has the path.
    """
    found: list[inspect.Type] = [inspect.type_info(type)]
    for step in _STEPS.finditer(path):
        found = list(_inside(_members(found), step["field"]))
    values: dict[Any, None] = {}
    for each in _members(found):
        if isinstance(each, inspect.LiteralType):
            values |= dict.fromkeys(each.values)
        elif isinstance(each, inspect.EnumType):
            values |= dict.fromkeys(member.value for member in each.cls)
    return tuple(values)


def _members(types: Iterable[inspect.Type]) -> Iterator[inspect.Type]:
    for each in types:
        if isinstance(each, inspect.UnionType):
            yield from _members(each.types)
        elif isinstance(each, inspect.Metadata):
            yield from _members([each.type])
        else:
            yield each


def _inside(types: Iterable[inspect.Type], field: str | None) -> Iterator[inspect.Type]:
    for each in types:
        if isinstance(each, inspect.StructType | inspect.TypedDictType):
            yield from (one.type for one in each.fields if one.encode_name == field)
        elif isinstance(each, inspect.DictType):
            yield each.value_type
        elif field is None and isinstance(each, inspect.CollectionType):
            yield each.item_type


def value_list(values: tuple[Any, ...]) -> str:
    """Return values as text: 'a', 'b' or 'c'."""
    names = [f"'{each}'" if isinstance(each, str) else msgspec.json.encode(each).decode() for each in values]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
