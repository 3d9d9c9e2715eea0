"""The tools of /v1/responses: custom tools and namespaces become functions, and calls of them their own items."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.config import RequestLimits
from headrace.gateway.api_errors import ApiError
from headrace.gateway.requests.text_request import Choice, ToolCall
from headrace.server.api.response_tools import ResponseTools, read_tools
from headrace.server.api.responses.responses import output_items, read_response_request
from headrace.server.http.unknown_fields import STRICT, UnknownFields

GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"+'}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": GRAMMAR}
CLOCK = {"type": "function", "name": "clock", "parameters": {"type": "object", "properties": {}}, "strict": False}
AGENTS = {"type": "namespace", "name": "agents", "description": "", "tools": [{**CLOCK, "name": "stop"}]}
SEARCH = {"type": "web_search", "external_web_access": True}


def tools_of(*tools: Any) -> tuple[ResponseTools, str]:
    unknown = UnknownFields(strict=False)
    return read_tools(list(tools), RequestLimits(), unknown), unknown.header


def items_of(tools: ResponseTools, name: str, arguments: str) -> dict[str, Any]:
    call = ToolCall("call_1", name, arguments)
    (item,) = output_items(Choice(0, calls=[call], finish="tool_calls"), tools)
    return item


def request_of(items: list[Any], *tools: Any) -> Any:
    body = json.dumps({"input": items, "tools": tools}).encode()
    return read_response_request(body, {}, RequestLimits(), UnknownFields(strict=False))


def test_a_custom_tool_is_a_function_with_one_text_and_its_grammar_is_shown() -> None:
    found, ignored = tools_of(PATCH)
    (tool,) = found.tools
    assert (tool.name, tool.strict) == ("apply_patch", False)
    assert tool.description is not None
    assert tool.description.startswith("Edits files.")
    assert GRAMMAR["definition"] in tool.description
    assert tool.parameters is not None
    assert tool.parameters["required"] == ["input"]
    assert ignored == "tools.format"  # it is not enforced
    assert tools_of({"type": "custom", "name": "say", "format": {"type": "text"}})[1] == ""


def test_a_regex_format_of_a_custom_tool_is_enforced() -> None:
    pattern = {"type": "grammar", "syntax": "regex", "definition": "[a-c]{3}|x"}
    found, ignored = tools_of({**PATCH, "format": pattern})
    (tool,) = found.tools
    assert (tool.strict, ignored) == (True, "")
    assert tool.parameters is not None
    assert tool.parameters["properties"]["input"]["pattern"] == "^(?:[a-c]{3}|x)$"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (json.dumps({"input": "*** Begin\n+é"}), "*** Begin\n+é"),
        ("*** Begin\n+é", "*** Begin\n+é"),  # the model did not write JSON
        ('{"patch": "x"}', '{"patch": "x"}'),
        ('{"input": 5}', '{"input": 5}'),
    ],
)
def test_a_call_of_a_custom_tool_passes_its_text(arguments: str, text: str) -> None:
    item = items_of(tools_of(PATCH)[0], "apply_patch", arguments)
    assert item.pop("id").startswith("ctc_")
    assert item == {
        "type": "custom_tool_call",
        "status": "completed",
        "call_id": "call_1",
        "name": "apply_patch",
        "input": text,
    }


def test_a_function_of_a_namespace_is_called_by_its_own_name() -> None:
    found, ignored = tools_of(CLOCK, AGENTS)
    assert ([tool.name for tool in found.tools], ignored) == (["clock", "agents__stop"], "")
    item = items_of(found, "agents__stop", "{}")
    assert (item["type"], item["namespace"], item["name"], item["arguments"]) == (
        "function_call",
        "agents",
        "stop",
        "{}",
    )
    assert "namespace" not in items_of(found, "clock", "{}")


def test_tools_that_a_service_runs_are_left_out_beside_others() -> None:
    found, ignored = tools_of(CLOCK, SEARCH, {"type": "tool_search"})
    assert ([tool.name for tool in found.tools], ignored) == (["clock"], "tools.web_search, tools.tool_search")
    assert found.echoed == [{**CLOCK, "description": None}]


def test_tools_that_a_service_runs_are_rejected_alone_and_in_strict_requests() -> None:
    for tools, unknown in (([SEARCH], UnknownFields(strict=False)), ([CLOCK, SEARCH], STRICT)):
        with pytest.raises(ApiError) as raised:
            read_tools(tools, RequestLimits(), unknown)
        assert raised.value.parameter == f"tools[{len(tools) - 1}].type"


@pytest.mark.parametrize("kind", ["functon", "customs", 5])
def test_a_misspelled_type_of_a_tool_is_rejected(kind: object) -> None:
    with pytest.raises(ApiError) as raised:
        tools_of(CLOCK, {**CLOCK, "name": "other", "type": kind})
    assert raised.value.parameter == "tools[1].type"


def test_calls_in_the_history_are_what_the_model_wrote() -> None:
    call = {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": 'a "b"'}
    output = {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done."}
    spaced = {"type": "function_call", "call_id": "c2", "name": "stop", "namespace": "agents", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c2", "output": "Stopped."}
    found = request_of(["Hi", call, output, spaced, result][1:], PATCH, AGENTS)
    first, done, second, stopped = found.text_request.messages
    assert first["tool_calls"][0]["function"] == {"name": "apply_patch", "arguments": {"input": 'a "b"'}}
    assert (done["role"], done["content"], done["name"]) == ("tool", "Done.", "apply_patch")
    assert second["tool_calls"][0]["function"] == {"name": "agents__stop", "arguments": {}}
    assert stopped["name"] == "agents__stop"
    assert [item["type"] for item in found.items] == [each["type"] for each in (call, output, spaced, result)]
    assert found.items[2]["namespace"] == "agents"


def test_a_custom_tool_can_be_required() -> None:
    body = {"input": "Hi", "tools": [PATCH, CLOCK], "tool_choice": {"type": "custom", "name": "apply_patch"}}
    asked = read_response_request(
        json.dumps(body).encode(), {}, RequestLimits(), UnknownFields(strict=False)
    ).text_request
    assert (asked.choosing, asked.only_tool) == ("required", "apply_patch")


def test_an_output_without_its_call_is_rejected() -> None:
    with pytest.raises(ApiError, match="'nowhere'"):
        request_of([{"type": "custom_tool_call_output", "call_id": "nowhere", "output": "x"}], PATCH)
