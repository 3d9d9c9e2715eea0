"""A configuration written down as TOML, and how keys and values are spelled in messages.

Owns the little of TOML's writing that this needs: the standard library only reads it. Secrets never leave here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Final, Union, cast, get_args, get_origin

import msgspec
from msgspec import Meta

from headrace.config import Config, Section

HIDDEN: Final = "***"  # what is shown in place of a secret

_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")


def config_toml(config: Config) -> str:
    """All of a configuration, defaults too, with secrets hidden. What is None is left out: TOML has no word for it."""
    return toml(_table(config))


def is_secret(kind: Any) -> bool:
    """Whether a field's type is marked as one whose value must not be shown."""
    if get_origin(kind) is Annotated:
        return any(isinstance(each, Meta) and "secret" in (each.extra or ()) for each in kind.__metadata__)
    return get_origin(kind) in (Union, UnionType) and any(map(is_secret, get_args(kind)))


def _table(section: Section) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for field in msgspec.structs.fields(section):
        value = getattr(section, field.name)
        if value is not None:
            table[field.name] = _hidden(value) if is_secret(field.type) else _plain(value)
    return table


def _hidden(value: Any) -> Any:
    """The names in a table stay, so that one sees what is set."""
    if isinstance(value, Mapping):
        return {str(key): HIDDEN for key in value}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return HIDDEN


def _plain(value: Any) -> Any:
    match value:
        case Section():
            return _table(value)
        case dict():
            return {key: _plain(each) for key, each in value.items()}  # pyright: ignore[reportUnknownVariableType]
        case list() | tuple():
            return [_plain(each) for each in value]  # pyright: ignore[reportUnknownVariableType]
        case str():
            return value.replace("${", "$${")  # so that reading it back gives the same
        case _:
            return value


def toml(table: Mapping[str, Any]) -> str:
    return "\n".join(_lines(table, ())).strip("\n") + "\n"


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    """First the plain values: whatever follows a table's heading belongs to it."""
    for key, value in table.items():
        if not _has_headings(value):
            yield f"{key_path(key)} = {toml_value(value)}"
    for key, value in table.items():
        here = (*path, key)
        if isinstance(value, Mapping):
            if not value or not all(map(_has_headings, value.values())):  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
                yield f"\n[{key_path(*here)}]"
            yield from _lines(value, here)  # pyright: ignore[reportUnknownArgumentType]
        elif _has_headings(value):
            for each in value:
                yield f"\n[[{key_path(*here)}]]"
                yield from _lines(each, here)


def _has_headings(value: Any) -> bool:
    if not isinstance(value, list):
        return isinstance(value, Mapping)
    items = cast(list[Any], value)
    return bool(items) and all(isinstance(each, Mapping) for each in items)


def toml_value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            return quoted(value)
        case list() | tuple():
            return f"[{', '.join(toml_value(each) for each in value)}]"  # pyright: ignore[reportUnknownVariableType]
        case dict():
            pairs = ", ".join(f"{key_path(str(key))} = {toml_value(each)}" for key, each in value.items())  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
            return f"{{{pairs}}}"
        case _:
            return str(value)  # dates and times


def quoted(text: str) -> str:
    """A TOML basic string: JSON's escapes are TOML's too, but for the one control character that JSON leaves alone."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def key_path(*keys: str) -> str:
    return ".".join(key if _BARE.fullmatch(key) else quoted(key) for key in keys)
