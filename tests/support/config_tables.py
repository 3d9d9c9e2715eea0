"""The tables that a configuration is made of, by its types."""

from __future__ import annotations

from collections.abc import Iterator
from types import UnionType
from typing import Any, Union, get_args, get_origin

import msgspec

from headrace.config import Section


def parts_of(kind: Any) -> Iterator[Any]:
    """What a type is made of: of an optional one what it is when it is there, of a container what is in it."""
    if get_origin(kind) in (Union, UnionType):
        yield from (each for each in get_args(kind) if each is not type(None))
    elif get_origin(kind) is dict:
        yield get_args(kind)[1]
    elif get_origin(kind) is tuple:
        yield get_args(kind)[0]


def sections_in(kind: Any) -> Iterator[type[Section]]:
    """Every kind of table within a type, itself too."""
    if isinstance(kind, type) and issubclass(kind, Section):
        yield kind
        for field in msgspec.structs.fields(kind):
            yield from sections_in(field.type)
    for part in parts_of(kind):
        yield from sections_in(part)


def tables_in(kind: Any, given: Any) -> Iterator[tuple[type[Section], dict[str, Any]]]:
    """Every table in what is given for a type, with its kind."""
    if isinstance(kind, type) and issubclass(kind, Section):
        yield kind, given
        for field in msgspec.structs.fields(kind):
            if field.name in given:
                yield from tables_in(field.type, given[field.name])
    for part in parts_of(kind):
        shape = get_origin(kind)
        for each in given.values() if shape is dict else given if shape is tuple else (given,):
            yield from tables_in(part, each)


def without_default(field: msgspec.structs.FieldInfo) -> bool:
    """Whether nothing that could be written in a file stands for its default."""
    return field.default in (None, msgspec.NODEFAULT) or isinstance(field.default, Section)
