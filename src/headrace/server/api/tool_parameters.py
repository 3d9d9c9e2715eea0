"""What the dialects share about tools: their names, the checks of a list of tools, and the arguments of a call.

Does not know the shape of any dialect's tools.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headrace.config import RequestLimits
from headrace.gateway.api_errors import invalid_request
from headrace.gateway.requests.text_request import Tool
from headrace.server.api.common_parameters import check_count

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


def check_has_tools(tools: Sequence[Tool]) -> None:
    """Raise ApiError if a tool choice that requires a call comes without tools."""
    if not tools:
        raise invalid_request("'tool_choice' requires a call, but 'tools' is empty. Add tools.", "tool_choice")


def check_named_tool(name: str, tools: Sequence[Tool]) -> str:
    if all(tool.name != name for tool in tools):
        raise invalid_request(f"'tool_choice' names '{name[:100]}', which is not in 'tools'.", "tool_choice")
    return name


def decode_arguments(arguments: str) -> dict[str, Any] | None:
    """Return a call's arguments, {} for an empty string. None if they are not a JSON object."""
    try:
        value: object = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None  # pyright: ignore[reportUnknownVariableType]
