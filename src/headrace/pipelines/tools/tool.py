"""ToolSpec: one tool as a model may call it. ToolSource: where tools come from, such as a server that lists them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Literal, Protocol

import msgspec

from headrace.config.tool_section import ToolConfig

# Takes the arguments and the tenant. ToolError where the call fails.
ToolCallable = Callable[[Mapping[str, Any], str], Coroutine[Any, Any, str]]


class ToolError(Exception):
    """A call that failed, with a message that the model and the client may read: no secrets, paths or traces."""


class ToolSpec(msgspec.Struct, frozen=True):
    name: str
    description: str
    schema: Mapping[str, Any]  # JSON schema of the arguments
    call: ToolCallable
    effects: bool = False
    timeout_s: float = 10.0
    cache_s: float = 0.0
    result_bytes: int = 64 * 1024
    kind: Literal["http", "sql", "tool"] = "tool"  # of its cached results
    tags: tuple[str, ...] = ()  # of its cached results


class ToolSource(Protocol):
    async def tools(self) -> list[ToolSpec]:
        """Return the tools. ToolError if they cannot be listed now."""
        ...

    async def close(self) -> None: ...


class FixedTools:
    """A source whose tools are known from the configuration."""

    def __init__(self, *specs: ToolSpec) -> None:
        self._specs = list(specs)

    async def tools(self) -> list[ToolSpec]:
        return self._specs

    async def close(self) -> None:
        """Nothing is open."""


def make_spec(
    config: ToolConfig,
    name: str,
    call: ToolCallable,
    schema: Mapping[str, Any],
    *,
    description: str = "",
    operation: str = "",
) -> ToolSpec:
    """`operation`: its name within a source of several tools."""
    return ToolSpec(
        name=f"{name}__{operation}" if operation else name,
        description=(description or config.description) if operation else (config.description or description),
        schema=schema,
        call=call,
        effects=config.effects and operation not in config.safe,
        timeout_s=config.timeout_s,
        cache_s=config.cache_s,
        result_bytes=config.result_bytes,
        kind=config.kind if config.kind in ("http", "sql") else "tool",
        tags=config.tags,
    )


def text_schema(parameters: Mapping[str, str]) -> dict[str, Any]:
    """Return the schema of arguments that are all texts and required."""
    return {
        "type": "object",
        "properties": {name: {"type": "string", "description": about} for name, about in parameters.items()},
        "required": list(parameters),
        "additionalProperties": False,
    }


def text_argument(arguments: Mapping[str, Any], name: str) -> str:
    """Return an argument as a text. ToolError if it is missing or has parts."""
    value = arguments.get(name)
    match value:
        case bool():
            return "true" if value else "false"
        case str() | int() | float():
            return str(value)
        case None:
            raise ToolError(f"Missing argument '{name}'.")
        case _:
            raise ToolError(f"The argument '{name}' must be a text or a number.")
