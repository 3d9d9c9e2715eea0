"""The tools of `/v1/responses`: functions, namespaces of functions, and custom tools, which take plain text.

A model knows functions only. A function of a namespace gets the namespace as a prefix, and a custom tool becomes a
function with the one parameter `input`. ResponseTools turns calls back into the items that the client expects. Tools
that OpenAI runs itself are left out, because the model may do without them. Does not know requests or answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from headrace.config import RequestLimits
from headrace.gateway.requests.text_request import Tool, ToolChoiceMode
from headrace.server.api.common_parameters import check_count
from headrace.server.api.tool_parameters import (
    ToolName,
    check_allowed_tools,
    check_has_tools,
    check_named_tool,
    check_tools,
    decode_arguments,
    leave_out_hosted_tools,
    split_hosted_tools,
)
from headrace.server.http.body_parameters import convert_value, drop_nulls
from headrace.server.http.unknown_fields import UnknownFields

_EXPECTED: Final = "a function, a custom tool or a namespace of functions"
_FUNCTION_DEFAULTS: Final = {"description": None, "parameters": None, "strict": False}
_INPUT: Final = "input"  # the parameter of a custom tool's function


class ResponseTool(Struct, forbid_unknown_fields=True):
    name: ToolName
    type: Literal["function"] = "function"
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomTextFormat(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    pass


class CustomGrammarFormat(Struct, tag_field="type", tag="grammar", forbid_unknown_fields=True):
    syntax: Literal["lark", "regex"]
    definition: str


class CustomTool(Struct, forbid_unknown_fields=True):
    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: CustomTextFormat | CustomGrammarFormat | None = None


class ToolNamespace(Struct, forbid_unknown_fields=True):
    type: Literal["namespace"]
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    tools: list[dict[str, Any]]
    description: str | None = None


class ToolChoiceFunction(Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    name: str
    namespace: str | None = None


class ToolChoiceCustom(Struct, tag_field="type", tag="custom", forbid_unknown_fields=True):
    name: str


class ToolChoiceAllowed(Struct, tag_field="type", tag="allowed_tools", forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: list[ToolChoiceFunction | ToolChoiceCustom]


ResponseToolChoice = Literal["auto", "none", "required"] | ToolChoiceFunction | ToolChoiceCustom | ToolChoiceAllowed


class ResponseTools(Struct, frozen=True):
    """The tools of one request, and how to read the model's calls of them."""

    tools: tuple[Tool, ...] = ()
    custom: frozenset[str] = frozenset()  # names of the custom tools
    namespaces: Mapping[str, tuple[str, str]] = {}  # namespace and name of a function, by the name that the model knows
    echoed: Sequence[Any] = ()  # the tools as a response repeats them

    def call_item(self, id: str, call_id: str, name: str, arguments: str) -> dict[str, Any]:
        """Return the output item of a call."""
        head = {"id": id, "status": "completed", "call_id": call_id}
        if name in self.custom:
            return {**head, "type": "custom_tool_call", "name": name, "input": custom_input(arguments)}
        namespace, own = self.namespaces.get(name, (None, name))
        item = {**head, "type": "function_call", "name": own, "arguments": arguments}
        return item if namespace is None else {**item, "namespace": namespace}


def custom_input(arguments: str) -> str:
    """Return the text that a call passes to a custom tool: what a model wrote that did not keep to JSON, as it is."""
    decoded = decode_arguments(arguments)
    text = None if decoded is None else decoded.get(_INPUT)
    return text if isinstance(text, str) else arguments


def custom_arguments(text: str) -> str:
    return msgspec.json.encode({_INPUT: text}).decode()


def qualified_name(name: str, namespace: str | None) -> str:
    """Return the name that the model knows a function by."""
    return name if namespace is None else f"{namespace}__{name}"


def read_tools(given: Sequence[Any], limits: RequestLimits, unknown: UnknownFields) -> ResponseTools:
    check_count("tools", len(given), limits.tools, least=0)
    own, hosted = split_hosted_tools(given, ("function", "custom", "namespace"))
    tools: list[Tool] = []
    echoed: list[Any] = []
    custom: set[str] = set()
    namespaces: dict[str, tuple[str, str]] = {}
    for index, each in own:
        where, each = f"tools[{index}]", drop_nulls(each)
        kind = each.get("type") if isinstance(each, dict) else None  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        if kind == "custom":
            tool = _read_custom(convert_value(each, CustomTool, where, unknown), where, unknown)
            custom.add(tool.name)
            echoed.append(each)
            tools.append(tool)
        elif kind == "namespace":
            space = convert_value(each, ToolNamespace, where, unknown)
            check_count(f"{where}.tools", len(space.tools), limits.tools, least=0)
            echoed.append(each)
            for place, inner in enumerate(space.tools):
                function = convert_value(drop_nulls(inner), ResponseTool, f"{where}.tools[{place}]", unknown)
                name = qualified_name(function.name, space.name)
                namespaces[name] = (space.name, function.name)
                tools.append(_as_tool(function, name))
        else:
            function = convert_value(each, ResponseTool, where, unknown)
            tools.append(_as_tool(function, function.name))
            echoed.append({"type": "function", **_FUNCTION_DEFAULTS, **each})
    leave_out_hosted_tools(hosted, unknown, are_alone=not own, expected=_EXPECTED)
    return ResponseTools(check_tools(tools, limits), frozenset(custom), namespaces, echoed)


def _as_tool(function: ResponseTool, name: str) -> Tool:
    return Tool(name, function.description, function.parameters, bool(function.strict))


def _read_custom(tool: CustomTool, where: str, unknown: UnknownFields) -> Tool:
    about = [tool.description] if tool.description else []
    text: dict[str, Any] = {"type": "string", "description": "The whole input of the tool, as plain text."}
    if isinstance(tool.format, CustomGrammarFormat):
        about.append(f"`{_INPUT}` must match this grammar ({tool.format.syntax}):\n{tool.format.definition}")
        if tool.format.syntax == "regex":
            text["pattern"] = f"^(?:{tool.format.definition})$"
        else:
            # The text is inside a JSON string, which the client's grammar does not describe. The model is shown it.
            unknown.ignore(f"{where}.format")
    schema = {"type": "object", "properties": {_INPUT: text}, "required": [_INPUT], "additionalProperties": False}
    # With a pattern it is strict: one that does not compile is an error of the request.
    return Tool(tool.name, "\n\n".join(about) or None, schema, "pattern" in text)


def read_tool_choice(
    choice: ResponseToolChoice, tools: tuple[Tool, ...]
) -> tuple[ToolChoiceMode, str | None, tuple[str, ...] | None]:
    """Return the mode, the tool that must be called if it must be a particular one, and those that may be called."""
    if choice in ("auto", "none"):
        return "auto" if choice == "auto" else "none", None, None
    check_has_tools(tools)
    if isinstance(choice, ToolChoiceFunction | ToolChoiceCustom):
        return "required", check_named_tool(_chosen_name(choice), tools), None
    if isinstance(choice, ToolChoiceAllowed):
        return choice.mode, None, check_allowed_tools([_chosen_name(each) for each in choice.tools], tools)
    return "required", None, None


def _chosen_name(choice: ToolChoiceFunction | ToolChoiceCustom) -> str:
    return qualified_name(choice.name, choice.namespace if isinstance(choice, ToolChoiceFunction) else None)
