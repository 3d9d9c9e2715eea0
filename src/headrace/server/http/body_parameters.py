"""What an endpoint takes: every documented parameter, honoured or refused, in one table for each endpoint.

Owns Parameter, the reading of a body by such a table, and the JSON schema that follows from it. A parameter that is not
in the table is an error that names it: nothing is dropped in silence. Knows no endpoint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from headrace.gateway.api_errors import ApiError, invalid_request

_PATH: Final = re.compile(r" - at `\$(?P<path>[^`]*)`$")
# What msgspec says of an object's field, which it does not count as a part of the path.
_FIELD: Final = re.compile(r"^Object (?P<what>contains unknown|missing required) field `(?P<field>.*)`$", re.DOTALL)


class Parameter(msgspec.Struct, frozen=True):
    about: str
    type: Any = Any  # as msgspec takes it; a body's null is the same as an absent parameter
    required: bool = False
    refused: str | None = None  # why it is not honoured; None where it is
    harmless: tuple[Any, ...] = ()  # values of a refused parameter that ask for nothing, and so pass


ParameterTable = Mapping[str, Parameter]


def parse_body(body: bytes, table: ParameterTable) -> dict[str, Any]:
    """The parameters that are there, converted. ApiError for a body that is no JSON object, and for the first parameter
    that is unknown, refused, missing or wrong."""
    return parse_parameters(parse_json_object(body), table)


def parse_json_object(body: bytes) -> dict[str, Any]:
    if not body:
        raise invalid_request("the body is empty; it must be a JSON object")
    try:
        found: object = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise invalid_request(f"the body is not JSON: {error}", code="invalid_json") from None
    except (RecursionError, UnicodeDecodeError):
        raise invalid_request(
            "the body is not JSON: it is nested too deep, or not UTF-8", code="invalid_json"
        ) from None
    if not isinstance(found, dict):
        raise invalid_request("the body must be a JSON object", code="invalid_json")
    return found  # pyright: ignore[reportUnknownVariableType]


def parse_parameters(values: Mapping[str, Any], table: ParameterTable) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in values.items():
        parameter = table.get(name)
        if parameter is None:
            raise ApiError(f"there is no parameter '{name[:100]}'", parameter=name[:100], code="unknown_parameter")
        if value is None:
            continue
        if parameter.refused is not None:
            if value not in parameter.harmless:
                raise ApiError(
                    f"'{name}' is not supported: {parameter.refused}", parameter=name, code="unsupported_parameter"
                )
            continue
        result[name] = convert_value(value, parameter.type, name)
    for name, parameter in table.items():
        if parameter.required and name not in result:
            raise ApiError(f"'{name}' is missing", parameter=name, code="missing_required_parameter")
    return result


def convert_value(value: Any, wanted: Any, name: str) -> Any:
    """A value of a type; ApiError that says where in it the mistake is."""
    try:
        return msgspec.convert(value, wanted)
    except (msgspec.ValidationError, ValueError, OverflowError) as error:
        raise _wrong(str(error), name) from None
    except RecursionError:
        raise ApiError(f"'{name}' is nested too deep", parameter=name, code="invalid_value") from None


def _wrong(message: str, name: str) -> ApiError:
    place = _PATH.search(message)
    path = name + (place["path"].partition("[...]")[0] if place else "")  # which key it is, msgspec does not say
    reason = _PATH.sub("", message)
    field = _FIELD.match(reason)
    if field is None:
        return ApiError(f"'{path}': {lower_first(reason)}", parameter=path, code="invalid_value")
    path = f"{path}.{field['field'][:100]}"
    if field["what"] == "contains unknown":
        return ApiError(f"there is no parameter '{path}'", parameter=path, code="unknown_parameter")
    return ApiError(f"'{path}' is missing", parameter=path, code="missing_required_parameter")


def lower_first(reason: str) -> str:
    return reason[:1].lower() + reason[1:]


def body_schema(table: ParameterTable, name: str, components: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of a body; the types that it refers to are added to `components`."""
    honoured = {key: parameter for key, parameter in table.items() if parameter.refused is None}
    schemas, found = msgspec.json.schema_components(
        [parameter.type for parameter in honoured.values()], ref_template="#/components/schemas/{name}"
    )
    components.update(found)
    properties: dict[str, Any] = {}
    for (key, parameter), each in zip(honoured.items(), schemas, strict=True):
        described: dict[str, Any] = {"description": parameter.about}
        properties[key] = {"allOf": [each], **described} if "$ref" in each else {**each, **described}
    components[name] = {
        "type": "object",
        "properties": properties,
        "required": [key for key, parameter in honoured.items() if parameter.required],
        "additionalProperties": False,
    }
    return {"$ref": f"#/components/schemas/{name}"}
