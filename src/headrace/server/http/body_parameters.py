"""Reads a request's body by an endpoint's parameter table, and turns the table into a JSON schema.

A table lists every documented parameter, supported or not. A parameter that is not in the table is an error that names
it: no parameter is dropped silently. Does not know any endpoint.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from headrace.gateway.api_errors import ApiError, invalid_request

_PATH: Final = re.compile(r" - at `\$(?P<path>[^`]*)`$")
# msgspec names an object's field in the message, not in the path.
_FIELD: Final = re.compile(r"^Object (?P<what>contains unknown|missing required) field `(?P<field>.*)`$", re.DOTALL)
_LONGEST_NAME: Final = 100  # characters of a client's parameter name that an error repeats
_SIMILARITY: Final = 0.7  # of difflib, from which on a name is suggested


class Parameter(msgspec.Struct, frozen=True):
    description: str
    type: Any = Any  # as msgspec takes it; null counts as absent
    required: bool = False
    unsupported: str | None = None  # the reason, for the error message; None if the parameter is supported
    no_op_values: tuple[Any, ...] = ()  # values of an unsupported parameter that change nothing and are accepted


ParameterTable = Mapping[str, Parameter]


def parse_body(body: bytes, table: ParameterTable) -> dict[str, Any]:
    """Return the parameters of a JSON body, converted to their types.

    ApiError for a body that is not a JSON object, and for the first parameter that is unknown, unsupported, missing or
    invalid.
    """
    return parse_parameters(parse_body_object(body), table)


def parse_body_object(body: bytes) -> dict[str, Any]:
    if not body:
        raise invalid_request("The body is empty. Send a JSON object.")
    try:
        value: object = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise invalid_request(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    except (RecursionError, UnicodeDecodeError):
        message = "The body is not valid JSON: it is nested too deeply or is not UTF-8."
        raise invalid_request(message, code="invalid_json") from None
    if not isinstance(value, dict):
        raise invalid_request("The body must be a JSON object.", code="invalid_json")
    return value  # pyright: ignore[reportUnknownVariableType]


def parse_parameters(values: Mapping[str, Any], table: ParameterTable) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in values.items():
        parameter = table.get(name)
        if parameter is None:
            raise unknown_parameter(name, (known for known, each in table.items() if each.unsupported is None))
        if value is None:
            continue
        if parameter.unsupported is None:
            result[name] = convert_value(value, parameter.type, name)
        elif value not in parameter.no_op_values:
            raise unsupported_parameter(name, parameter.unsupported)
    for name, parameter in table.items():
        if parameter.required and name not in result:
            raise _missing_parameter(name)
    return result


def unknown_parameter(name: str, known: Iterable[str] = (), *, what: str = "parameter") -> ApiError:
    """Build the error for a name that is not among the known ones, with a suggestion if one of them is similar."""
    name = name[:_LONGEST_NAME]
    similar = difflib.get_close_matches(name, list(known), n=1, cutoff=_SIMILARITY)
    hint = f" Did you mean '{similar[0]}'?" if similar else ""
    return ApiError(f"Unknown {what} '{name}'.{hint}", parameter=name, code="unknown_parameter")


def unsupported_parameter(name: str, reason: str) -> ApiError:
    return ApiError(f"'{name}' is not supported: {reason}.", parameter=name, code="unsupported_parameter")


def _missing_parameter(name: str) -> ApiError:
    return ApiError(f"Missing required parameter '{name}'.", parameter=name, code="missing_required_parameter")


def convert_value(value: Any, type: Any, name: str) -> Any:
    """Convert a value to a type. ApiError with the path of the part that is invalid."""
    try:
        return msgspec.convert(value, type)
    except (msgspec.ValidationError, ValueError, OverflowError) as error:
        raise _conversion_error(str(error), name) from None
    except RecursionError:
        raise ApiError(f"'{name}' is nested too deeply.", parameter=name, code="invalid_value") from None


def _conversion_error(message: str, name: str) -> ApiError:
    place = _PATH.search(message)
    path = name + (place["path"].partition("[...]")[0] if place else "")  # msgspec does not say which key it is
    reason = _PATH.sub("", message)
    field = _FIELD.match(reason)
    if field is None:
        return invalid_value(path, reason)
    path = f"{path}.{field['field'][:_LONGEST_NAME]}"
    if field["what"] == "contains unknown":
        return ApiError(f"Unknown parameter '{path}'.", parameter=path, code="unknown_parameter")
    return _missing_parameter(path)


def invalid_value(name: str, reason: str) -> ApiError:
    """Build the error for a value that msgspec rejected. `reason` is msgspec's message without the path."""
    return ApiError(f"'{name}': {reason[:1].lower()}{reason[1:]}.", parameter=name, code="invalid_value")


def body_schema(table: ParameterTable, name: str, components: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a body. Adds the types that it refers to, and itself, to `components`."""
    supported = {key: parameter for key, parameter in table.items() if parameter.unsupported is None}
    schemas, types = msgspec.json.schema_components(
        [parameter.type for parameter in supported.values()], ref_template="#/components/schemas/{name}"
    )
    components.update(types)
    properties: dict[str, Any] = {}
    for (key, parameter), schema in zip(supported.items(), schemas, strict=True):
        described: dict[str, Any] = {"description": parameter.description}
        properties[key] = {"allOf": [schema], **described} if "$ref" in schema else {**schema, **described}
    components[name] = {
        "type": "object",
        "properties": properties,
        "required": [key for key, parameter in supported.items() if parameter.required],
        "additionalProperties": False,
    }
    return {"$ref": f"#/components/schemas/{name}"}
