"""UnknownFields: rejects or ignores the fields of a request that the server does not honour.

A strict request is rejected for the first of them. Otherwise a field that cannot change the meaning of the answer is
ignored, and its name is kept for the response header `x-headrace-ignored`, the log and a metric. A name that looks like
a misspelled parameter is rejected in any case. Knows no endpoint and no table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, Final

from msgspec import inspect

from headrace.errors import similar_names
from headrace.gateway.api_errors import ApiError
from headrace.observe import metrics

IGNORED_HEADER: Final = "x-headrace-ignored"
STRICT_HEADER: Final = "x-headrace-strict-parameters"
OTHER: Final = "other"  # label of all names that no table has

_SUGGESTED: Final = 0.7  # of similar_names, from which on an error suggests a name
_MISSPELLED: Final = 0.85  # from which on a name is taken for a misspelled one
_LONGEST_NAME: Final = 100  # characters of a client's parameter name that an error or a header repeats
_MOST_NAMES: Final = 100  # different ignored names of one request
_HEADER_NAMES: Final = 16  # of which the header has the first
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_.\-]")
_INDEX: Final = re.compile(r"\[\d+\]")


class UnknownFields:
    """The policy of one request, and the names that it ignored."""

    __slots__ = ("_hide", "_names", "strict")

    def __init__(self, *, strict: bool, hide: Callable[[str], str] = str) -> None:
        """`hide` replaces secrets in a name: a client may send its key as a field."""
        self.strict = strict
        self._hide = hide
        self._names: dict[str, None] = {}  # in order

    def ignore(self, path: str, *, label: str = OTHER) -> None:
        """Note that a field is ignored. Indices do not count: the same field of every message is one name.

        `label` is its name in the metric: the name itself only if a table has it. ApiError for too many names.
        """
        name = _UNSAFE.sub("?", self._hide(_INDEX.sub("", path))[:_LONGEST_NAME])
        if name in self._names:
            return
        if len(self._names) >= _MOST_NAMES:
            raise ApiError(f"The body has more than {_MOST_NAMES} unknown parameters.", code="too_many_values")
        self._names[name] = None
        metrics.of(metrics.ignored_parameters, label).inc()

    def ignore_unknown(self, path: str, name: str, known: Iterable[str]) -> None:
        """Note a field that no table has. ApiError if the request is strict, or if the name looks misspelled."""
        if self.strict:
            raise unknown_parameter(path, known, name=name)
        if _INDEX.sub("", path) in self._names:
            return
        if len(name) <= _LONGEST_NAME and similar_names(name, list(known), cutoff=_MISSPELLED):
            raise unknown_parameter(path, known, name=name)
        self.ignore(path)

    @property
    def header(self) -> str:
        """Return the value of the response header: the first names, and `...` if there are more. Empty if none."""
        if not self._names:
            return ""
        names = list(self._names)
        return ", ".join([*names[:_HEADER_NAMES], *(["..."] if len(names) > _HEADER_NAMES else [])])


STRICT: Final = UnknownFields(strict=True)  # it keeps no names, so all requests may share it


def strict_by_header(text: str) -> bool:
    if text not in ("true", "false"):
        raise ApiError(
            f"'{STRICT_HEADER}' is '{text[:_LONGEST_NAME]}'. Expected true or false.",
            parameter=STRICT_HEADER,
            code="invalid_value",
        )
    return text == "true"


def unknown_parameter(
    path: str, known: Iterable[str] = (), *, what: str = "parameter", name: str | None = None
) -> ApiError:
    """Build the error for a name that is not among the known ones, with a suggestion if one of them is similar.

    `name` is the last part of the path; by default, the path is a name.
    """
    name = path if name is None else name
    before, name = path[: len(path) - len(name)], name[:_LONGEST_NAME]
    similar = similar_names(name, list(known), cutoff=_SUGGESTED)
    hint = f" Did you mean '{before}{similar[0]}'?" if similar else ""
    return ApiError(f"Unknown {what} '{before}{name}'.{hint}", parameter=before + name, code="unknown_parameter")


def drop_unknown(value: Any, type: Any, path: str, unknown: UnknownFields) -> Any:
    """Remove the fields that a type does not have from a value, at any depth. The value is changed in place.

    Anything else that is wrong with the value is left for its conversion to find.
    """
    _drop(value, _type_info(type), path, unknown)
    return value


@lru_cache(maxsize=256)
def _type_info(type: Any) -> inspect.Type:
    return inspect.type_info(type)


def _drop(value: Any, info: inspect.Type, path: str, unknown: UnknownFields) -> None:
    if isinstance(info, inspect.Metadata):
        info = info.type
    if isinstance(info, inspect.UnionType):
        for each in info.types:
            if _is_meant(value, each):
                _drop(value, each, path, unknown)
                return
    elif isinstance(info, inspect.ListType) and isinstance(value, list):
        for index, item in enumerate(value):  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
            if isinstance(item, dict | list):
                _drop(item, info.item_type, f"{path}[{index}]", unknown)
    elif isinstance(info, inspect.DictType) and isinstance(value, dict):
        for item in value.values():  # pyright: ignore[reportUnknownVariableType]
            if isinstance(item, dict | list):
                _drop(item, info.value_type, path, unknown)
    elif isinstance(info, inspect.StructType) and isinstance(value, dict):
        _drop_from_object(value, info, path, unknown)  # pyright: ignore[reportUnknownArgumentType]


def _is_meant(value: Any, info: inspect.Type) -> bool:
    """True if a value may be of this type of a union."""
    if isinstance(info, inspect.StructType):
        return isinstance(value, dict) and (info.tag_field is None or bool(value.get(info.tag_field) == info.tag))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    return isinstance(value, list if isinstance(info, inspect.ListType) else dict) and isinstance(
        info, inspect.ListType | inspect.DictType
    )


def _drop_from_object(value: dict[str, Any], info: inspect.StructType, path: str, unknown: UnknownFields) -> None:
    fields = {field.encode_name: field.type for field in info.fields}
    strange: list[str] = []
    for name, item in value.items():
        if name in fields:
            if isinstance(item, dict | list):
                _drop(item, fields[name], f"{path}.{name}", unknown)
        elif name != info.tag_field:
            strange.append(name)
    if not info.cls.__struct_config__.forbid_unknown_fields:
        return
    for name in strange:
        if value.pop(name) is not None:
            unknown.ignore_unknown(f"{path}.{name}", name, fields)
