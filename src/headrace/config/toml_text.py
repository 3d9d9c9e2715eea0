"""Writes a configuration as TOML, and formats keys and values for error messages.

The standard library only reads TOML. Secrets are replaced by a placeholder.
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

HIDDEN: Final = "***"  # printed instead of a secret

_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")


def config_toml(config: Config) -> str:
    """Write the whole configuration with defaults and hidden secrets. None is left out, because TOML has no null."""
    return toml(_table(config))


def is_secret(kind: Any) -> bool:
    """Return whether a field's type is marked as secret."""
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
    """Hide a secret; of a table, hide the values and keep the keys."""
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
            return value.replace("${", "$${")  # so that it reads back unchanged
        case _:
            return value


def toml(table: Mapping[str, Any]) -> str:
    return "\n".join(_lines(table, ())).strip("\n") + "\n"


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    """Yield plain values before sub-tables: every line after a heading belongs to that table."""
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
    """Return a TOML basic string: JSON's escapes, plus DEL, which JSON does not escape."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def key_path(*keys: str) -> str:
    return ".".join(key if _BARE.fullmatch(key) else quoted(key) for key in keys)
