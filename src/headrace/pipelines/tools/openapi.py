"""Reads the operations of an OpenAPI 3 document, as far as tools need them.

Takes parameters in paths and queries, and JSON bodies; references within the document are resolved. Operations with
parameters in headers or cookies that are required, or with other bodies, are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from headrace.errors import HeadraceError

_METHODS: Final = ("get", "post", "put", "patch", "delete")
_NAME: Final = re.compile(r"[^A-Za-z0-9_-]+")
_DEPTH: Final = 12  # of references in references
_OPERATIONS: Final = 64
_FILE_BYTES: Final = 4 * 1024 * 1024
_ABOUT_CHARS: Final = 400


class OpenApiError(HeadraceError):
    """The document cannot be used."""


class Operation(msgspec.Struct, frozen=True):
    id: str
    method: str
    path: str
    about: str
    schema: Mapping[str, Any]
    in_path: tuple[str, ...]
    in_query: tuple[str, ...]
    has_body: bool


def read_operations(path: str, url: str | None = None) -> tuple[str, list[Operation]]:
    """Return the base URL and the operations. `url` replaces the document's server. OpenApiError if it is invalid."""
    try:
        raw = Path(path).expanduser().read_bytes()
        if len(raw) > _FILE_BYTES:
            raise OpenApiError(f"The OpenAPI document '{path}' is longer than {_FILE_BYTES} bytes.")
        document = msgspec.json.decode(raw, type=dict[str, Any])
    except OSError as error:
        raise OpenApiError(f"Cannot read the OpenAPI document '{path}': {error.strerror or error}.") from None
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        raise OpenApiError(f"The OpenAPI document '{path}' is not a JSON object. Convert YAML to JSON.") from None
    servers = cast(list[dict[str, Any]], document.get("servers") or [{}])
    named = servers[0].get("url") if isinstance(servers[0], dict) else None  # pyright: ignore[reportUnnecessaryIsInstance]
    base = (url or str(named or "")).rstrip("/")
    if not base.startswith(("http://", "https://")):
        raise OpenApiError(f"The OpenAPI document '{path}' names no server by an http(s) URL. Set `url`.")
    found: list[Operation] = []
    paths = cast(dict[str, dict[str, Any]], document.get("paths") or {})
    try:
        every = [(method, route, item) for route, item in paths.items() for method in _METHODS if method in item]
        found += [one for each in every if (one := _operation(document, *each)) is not None]
    except (AttributeError, TypeError, KeyError, RecursionError):
        raise OpenApiError(f"The OpenAPI document '{path}' is not in the format of OpenAPI 3.") from None
    if not found:
        raise OpenApiError(f"The OpenAPI document '{path}' has no operation that can be a tool.")
    return base, found[:_OPERATIONS]


def _operation(document: Mapping[str, Any], method: str, route: str, item: dict[str, Any]) -> Operation | None:
    given: dict[str, Any] = item[method]
    properties: dict[str, Any] = {}
    required: list[str] = []
    places: dict[str, list[str]] = {"path": [], "query": []}
    parameters = [*cast(list[Any], item.get("parameters") or []), *cast(list[Any], given.get("parameters") or [])]
    for raw in parameters:
        each: dict[str, Any] = resolve(document, raw)
        name, place = str(each.get("name")), each.get("in")
        if place not in places:
            if each.get("required"):
                return None
            continue
        if name not in places[place]:
            places[place].append(name)
        properties[name] = {
            **resolve(document, each.get("schema") or {"type": "string"}),
            **({"description": each["description"]} if each.get("description") else {}),
        }
        if (each.get("required") or place == "path") and name not in required:
            required.append(name)
    body: dict[str, Any] = resolve(document, given.get("requestBody") or {})
    content = cast(dict[str, dict[str, Any]], body.get("content") or {})
    if body and "application/json" not in content:
        return None
    if body:
        properties["body"] = resolve(document, content["application/json"].get("schema") or {"type": "object"})
        if body.get("required"):
            required.append("body")
    id = _NAME.sub("_", str(given.get("operationId") or f"{method}_{route}")).strip("_")[:48]
    about = str(given.get("summary") or given.get("description") or f"{method.upper()} {route}")
    schema = {"type": "object", "properties": properties, "required": required}
    in_path, in_query = tuple(places["path"]), tuple(places["query"])
    return Operation(id, method.upper(), route, about[:_ABOUT_CHARS], schema, in_path, in_query, bool(body))


def resolve(document: Mapping[str, Any], value: Any, depth: int = 0) -> Any:
    """Replace references within the document, to a bounded depth: a schema that contains itself ends as any object."""
    if isinstance(value, list):
        return [resolve(document, each, depth) for each in cast(list[Any], value)]
    if not isinstance(value, dict):
        return value
    table = cast(dict[str, Any], value)
    reference = table.get("$ref")
    if not isinstance(reference, str):
        return {key: resolve(document, each, depth) for key, each in table.items()}
    if depth >= _DEPTH or not reference.startswith("#/"):
        return {"type": "object"}
    target: Any = document
    for part in reference[2:].split("/"):
        part = part.replace("~1", "/").replace("~0", "~")
        target = cast(dict[str, Any], target).get(part) if isinstance(target, dict) else None
    return {"type": "object"} if target is None else resolve(document, target, depth + 1)
