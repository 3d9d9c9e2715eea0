"""The parts of tools that dialects share: their names, the checks of a list of tools, and the arguments of a call.

Does not know the shape of any dialect's tools.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from headrace.config import RequestLimits
from headrace.errors import similar_names
from headrace.gateway.api_errors import ApiError, invalid_request
from headrace.gateway.requests.text_request import Tool
from headrace.server.api.common_parameters import check_count
from headrace.server.http.unknown_fields import UnknownFields

RAW_ARGUMENTS: Final = "_raw"  # key that holds a call's arguments if the model did not write a JSON object
ToolName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


def check_tools(tools: Sequence[Tool], limits: RequestLimits, *, name_field: str = "name") -> tuple[Tool, ...]:
    """Return the tools. ApiError for too many, and for a name that is used twice."""
    check_count("tools", len(tools), limits.tools, least=0)
    names: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in names:
            raise invalid_request(
                f"'tools' repeats the name '{tool.name}'. Expected unique names.", f"tools[{index}].{name_field}"
            )
        names.add(tool.name)
    return tuple(tools)


def split_hosted_tools(tools: Sequence[Any], own: Sequence[str]) -> tuple[list[tuple[int, Any]], list[tuple[int, str]]]:
    """Return the tools of these types or without a type, and the types of the others, each with its index."""
    ours: list[tuple[int, Any]] = []
    hosted: list[tuple[int, str]] = []
    for index, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else None  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        # A misspelled type is not a hosted tool: it is rejected when the tool is converted.
        if not isinstance(kind, str) or kind in own or similar_names(kind[:64], own):
            ours.append((index, tool))  # pyright: ignore[reportUnknownArgumentType]
        else:
            hosted.append((index, kind[:100]))
    return ours, hosted


def leave_out_hosted_tools(
    hosted: Sequence[tuple[int, str]], unknown: UnknownFields, *, are_alone: bool, expected: str
) -> None:
    """Leave out tools that a service runs itself, such as web search: this server runs none, and the model may do
    without one. ApiError if the request is strict, or has no other tool that the model could call."""
    for index, kind in hosted:
        if unknown.strict or are_alone:
            raise ApiError(
                f"'tools[{index}]' is of type '{kind}'. Expected {expected}: the server runs no tools itself.",
                parameter=f"tools[{index}].type",
                code="unsupported_parameter",
            )
        unknown.ignore(f"tools.{kind}")


def check_has_tools(tools: Sequence[Tool]) -> None:
    """Raise ApiError if a tool choice that requires a call comes without tools."""
    if not tools:
        raise invalid_request("'tool_choice' requires a call, but 'tools' is empty. Add tools.", "tool_choice")


def check_named_tool(name: str, tools: Sequence[Tool]) -> str:
    if all(tool.name != name for tool in tools):
        raise invalid_request(f"'tool_choice' names '{name[:100]}', which is not in 'tools'.", "tool_choice")
    return name


def check_allowed_tools(names: Sequence[str], tools: Sequence[Tool]) -> tuple[str, ...] | None:
    """Return the tools that may be called, in the order of `tools`; None if they are all."""
    check_count("tool_choice.tools", len(names), len(tools))
    allowed = {check_named_tool(name, tools) for name in names}
    return None if len(allowed) == len(tools) else tuple(tool.name for tool in tools if tool.name in allowed)


def decode_arguments(arguments: str) -> dict[str, Any] | None:
    """Return a call's arguments, {} for an empty string. None if they are not a JSON object."""
    try:
        value: object = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None  # pyright: ignore[reportUnknownVariableType]


def arguments_object(arguments: str) -> dict[str, Any]:
    """Return a call's arguments for dialects that have an object there. What is no object stands under a key."""
    decoded = decode_arguments(arguments)
    return {RAW_ARGUMENTS: arguments} if decoded is None else decoded
