"""Reads a request's body by an endpoint's parameter table, and turns the table into a JSON schema.

A table lists every parameter that clients are known to send, in one of three kinds: honoured; rejected by name, because
ignoring it would change the meaning of the answer; or a hint, which may be ignored. UnknownFields decides about
hints and about parameters that no table has. No parameter is dropped silently. Does not know any endpoint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any, Final

import msgspec

from headrace.config import RequestLimits
from headrace.gateway.api_errors import ApiError, invalid_request
from headrace.observe import metrics
from headrace.server.http.allowed_values import allowed_values, value_list
from headrace.server.http.bounded_json import BodyShape, decode_body, is_small
from headrace.server.http.json_structure import TooManyValuesError
from headrace.server.http.unknown_fields import STRICT, UnknownFields, drop_unknown

_PATH: Final = re.compile(r" - at `\$(?P<path>[^`]*)`$")
# msgspec names an object's field in the message, not in the path.
_FIELD: Final = re.compile(r"^Object (?P<what>contains unknown|missing required) field `(?P<field>.*)`$", re.DOTALL)
_UNKNOWN_FIELD: Final = "Object contains unknown field "  # msgspec's words
_INVALID_ENUM: Final = "Invalid enum value "
_LONGEST_NAME: Final = 100  # characters of a client's parameter name that an error repeats
_FIRST_INDEX: Final = re.compile(r"( - at `\$)\[(\d+)\]")  # of msgspec's path
_CONVERTED_AT_ONCE: Final = 1024  # items of a list


class Parameter(msgspec.Struct, frozen=True):
    description: str
    type: Any = Any  # as msgspec takes it; null counts as absent
    required: bool = False
    unsupported: str | None = None  # the reason, for the error message; None if the parameter is supported
    no_op_values: tuple[Any, ...] = ()  # values of an unsupported parameter that change nothing and are accepted
    hint: bool = False  # of an unsupported parameter: it cannot change the meaning of an answer, so it may be ignored
    limit: str | None = None  # field of RequestLimits that bounds the items of a list


ParameterTable = Mapping[str, Parameter]


def parse_body(
    body: bytes, table: ParameterTable, limits: RequestLimits, unknown: UnknownFields = STRICT
) -> dict[str, Any]:
    """Return the parameters of a JSON body, converted to their types.

    ApiError for a body that is not a JSON object or exceeds a limit, and for the first parameter that is unsupported,
    missing or invalid, or unknown if the request is strict.
    """
    values = parse_body_object(body, limits, table)
    if is_small(body) and (found := _convert_at_once(values, table)) is not None:
        return found
    return parse_parameters(values, table, unknown)


def _convert_at_once(values: dict[str, Any], table: ParameterTable) -> dict[str, Any] | None:
    """Return what `parse_parameters` would, in a quarter of the time. None if it has anything to ignore or reject."""
    try:
        converted = msgspec.convert(values, _object_type(table))
    except (msgspec.ValidationError, ValueError, OverflowError, RecursionError):
        return None
    return {name: getattr(converted, name) for name, value in values.items() if value is not None}


_object_types: Final[dict[int, tuple[ParameterTable, type[msgspec.Struct]]]] = {}  # by the identity of the table
_MOST_TYPES: Final = 256


def _object_type(table: ParameterTable) -> type[msgspec.Struct]:
    """Return a type with a table's parameters as its fields; null is absent."""
    known = _object_types.get(id(table))
    if known is not None and known[0] is table:
        return known[1]
    fields: list[Any] = [
        (name, each.type) if each.required else (name, None if each.unsupported else each.type | None, None)
        for name, each in table.items()
    ]
    made = msgspec.defstruct("Body", fields, kw_only=True, forbid_unknown_fields=True)
    if len(_object_types) >= _MOST_TYPES:
        _object_types.clear()
    _object_types[id(table)] = table, made  # with the table, so that its identity stays its own
    return made


def parse_body_object(body: bytes, limits: RequestLimits, table: ParameterTable | None = None) -> dict[str, Any]:
    """Decode a body. The size of a large one is checked before it is decoded: the number of its values, and the items
    of each parameter."""
    if not body:
        raise invalid_request("The body is empty. Send a JSON object.")

    def check(shape: BodyShape) -> None:
        _check_shape(shape, limits, table)

    try:
        value: object = decode_body(body, most_values=limits.values, check=check)
    except TooManyValuesError:
        raise _too_many("values", f"The body has more than {limits.values} values") from None
    except msgspec.DecodeError as error:
        raise invalid_request(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    except (RecursionError, UnicodeDecodeError):
        message = "The body is not valid JSON: it is nested too deeply or is not UTF-8."
        raise invalid_request(message, code="invalid_json") from None
    if not isinstance(value, dict):
        raise invalid_request("The body must be a JSON object.", code="invalid_json")
    found: dict[str, Any] = value  # pyright: ignore[reportUnknownVariableType]
    if len(found) > limits.fields:
        raise _too_many_fields(len(found), limits)
    return found


def _check_shape(shape: BodyShape, limits: RequestLimits, table: ParameterTable | None) -> None:
    if shape.fields > limits.fields:
        raise _too_many_fields(shape.fields, limits)
    if table is None:
        return
    for name, items in shape.items():
        parameter = table.get(name)
        most = None if parameter is None else most_items(parameter, limits)
        if most is not None and items > most:
            found = f"'{name}' has {items} items. Expected at most {most}"
            raise _too_many(name, found, parameter=name)


def most_items(parameter: Parameter, limits: RequestLimits) -> int | None:
    """Return how many items a list or an object may have; None if only the body as a whole is limited."""
    return _longest(parameter.type) if parameter.limit is None else getattr(limits, parameter.limit)


@lru_cache(maxsize=1024)
def _longest(type: Any) -> int | None:
    """Return the max_length of a type that is a list or an object, also among other types."""
    info = msgspec.inspect.type_info(type)
    each = info.types if isinstance(info, msgspec.inspect.UnionType) else (info,)
    lengths = [one.max_length for one in each if isinstance(one, msgspec.inspect.ListType | msgspec.inspect.DictType)]
    return lengths[0] if lengths else None


def _too_many_fields(found: int, limits: RequestLimits) -> ApiError:
    return _too_many("fields", f"The body has {found} fields. Expected at most {limits.fields}")


def _too_many(what: str, found: str, *, parameter: str | None = None) -> ApiError:
    metrics.of(metrics.bodies_refused, what).inc()
    return ApiError(f"{found}.", parameter=parameter, code="too_many_values")


def parse_parameters(
    values: Mapping[str, Any], table: ParameterTable, unknown: UnknownFields = STRICT, *, within: str = ""
) -> dict[str, Any]:
    """Return the parameters of an object, converted to their types. `within`: the object's own path in the body."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        parameter = table.get(name)
        path = f"{within}.{name}" if within else name
        if parameter is None:
            if value is not None or unknown.strict:
                unknown.ignore_unknown(path, name, supported_names(table))
        elif value is None:
            continue
        elif parameter.unsupported is None:
            result[name] = convert_value(value, parameter.type, path, unknown)
        elif not is_no_op(value, parameter):
            if unknown.strict or not parameter.hint:
                raise unsupported_parameter(path, parameter.unsupported)
            unknown.ignore(path, label=name)
    for name, parameter in table.items():
        if parameter.required and name not in result:
            raise _missing_parameter(f"{within}.{name}" if within else name)
    return result


def supported_names(table: ParameterTable) -> list[str]:
    return [name for name, parameter in table.items() if parameter.unsupported is None]


def is_no_op(value: Any, parameter: Parameter) -> bool:
    """True if a value of an unsupported parameter changes nothing. True is not the number 1."""
    return any(value == each and (type(value) is bool) == (type(each) is bool) for each in parameter.no_op_values)


def unsupported_parameter(name: str, reason: str) -> ApiError:
    return ApiError(f"'{name}' is not supported: {reason}.", parameter=name, code="unsupported_parameter")


def _missing_parameter(name: str) -> ApiError:
    return ApiError(f"Missing required parameter '{name}'.", parameter=name, code="missing_required_parameter")


def convert_value(value: Any, type: Any, name: str, unknown: UnknownFields = STRICT) -> Any:
    """Convert a value to a type. ApiError with the path of the part that is invalid.

    A long list is converted in slices: one step must not hold the interpreter lock for long.
    """
    try:
        try:
            return _convert(value, type)
        except msgspec.ValidationError as error:
            if unknown.strict or _UNKNOWN_FIELD not in str(error):
                raise
        # Only now, because looking for all unknown fields takes much longer than converting.
        return _convert(drop_unknown(value, type, name, unknown), type)
    except (msgspec.ValidationError, ValueError, OverflowError) as error:
        raise _conversion_error(str(error), name, type) from None
    except RecursionError:
        raise ApiError(f"'{name}' is nested too deeply.", parameter=name, code="invalid_value") from None


def _convert(value: Any, type: Any) -> Any:
    if not isinstance(value, list) or len(value) <= _CONVERTED_AT_ONCE:  # pyright: ignore[reportUnknownArgumentType]
        return msgspec.convert(value, type)
    return _convert_list(value, type)  # pyright: ignore[reportUnknownArgumentType]


def _convert_list(value: list[Any], type: Any) -> Any:
    longest = _longest(type)
    if longest is not None and len(value) > longest:
        return msgspec.convert(value, type)  # raises the error
    found: list[Any] = []
    for start in range(0, len(value), _CONVERTED_AT_ONCE):
        try:
            piece = msgspec.convert(value[start : start + _CONVERTED_AT_ONCE], type)
        except msgspec.ValidationError as error:
            raise msgspec.ValidationError(_FIRST_INDEX.sub(partial(_later_index, start), str(error), 1)) from None
        if not isinstance(piece, list):
            return msgspec.convert(value, type)
        found += piece
    return found


def _later_index(start: int, found: re.Match[str]) -> str:
    return f"{found[1]}[{start + int(found[2])}]"


def drop_nulls(given: Any) -> Any:
    """Drop null fields: clients that send items back include every field."""
    if not isinstance(given, dict):
        return given
    values: dict[str, Any] = given  # pyright: ignore[reportUnknownVariableType]
    return {name: value for name, value in values.items() if value is not None}


def _conversion_error(message: str, name: str, type: Any) -> ApiError:
    place = _PATH.search(message)
    path = name + (place["path"].partition("[...]")[0] if place else "")  # msgspec does not say which key it is
    reason = _PATH.sub("", message)
    field = _FIELD.match(reason)
    if field is None:
        if reason.startswith(_INVALID_ENUM) and (values := allowed_values(type, place["path"] if place else "")):
            reason = f"{reason}. Expected {value_list(values)}"
        return invalid_value(path, reason)
    path = f"{path}.{field['field'][:_LONGEST_NAME]}"
    if field["what"] == "contains unknown":
        return ApiError(f"Unknown parameter '{path}'.", parameter=path, code="unknown_parameter")
    return _missing_parameter(path)


def invalid_value(name: str, reason: str) -> ApiError:
    """Build the error for a value that msgspec rejected. `reason` is msgspec's message without the path."""
    return ApiError(f"'{name}': {reason[:1].lower()}{reason[1:]}.", parameter=name, code="invalid_value")


def body_schema(
    table: ParameterTable, name: str, components: dict[str, Any], *, lenient: bool = False
) -> dict[str, Any]:
    """Return the JSON schema of a body. Adds the types that it refers to, and itself, to `components`. `lenient`: a
    body may have further fields, which are ignored."""
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
        "additionalProperties": lenient,
    }
    return {"$ref": f"#/components/schemas/{name}"}
