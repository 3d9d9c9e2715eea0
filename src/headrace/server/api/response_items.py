"""The items of `/v1/responses`: their types, their checks, and their conversion to messages for chat templates.

Does not know requests or answers.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from msgspec import Struct

from headrace.config import RequestLimits
from headrace.gateway.api_errors import ApiError, invalid_request
from headrace.server.api.common_parameters import check_count
from headrace.server.api.image_parts import MessageContent, responses_image
from headrace.server.api.response_tools import custom_arguments, qualified_name
from headrace.server.api.tool_parameters import decode_arguments
from headrace.server.http.body_parameters import convert_value, drop_nulls
from headrace.server.http.unknown_fields import STRICT, UnknownFields

_TEXTS: Final = ("input_text", "output_text", "reasoning_text", "summary_text", "text")


class MessageItem(Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]]
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class FunctionCallItem(Struct, forbid_unknown_fields=True):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None
    namespace: str | None = None  # of a function in a namespace
    parsed_arguments: Any = None  # added by clients


class CustomCallItem(Struct, forbid_unknown_fields=True):
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    id: str | None = None
    status: str | None = None
    namespace: str | None = None


class FunctionOutputItem(Struct, forbid_unknown_fields=True):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str | list[dict[str, Any]]
    id: str | None = None
    status: str | None = None
    name: str | None = None


class ReasoningItem(Struct, forbid_unknown_fields=True):
    type: Literal["reasoning"]
    id: str | None = None
    summary: list[dict[str, Any]] = []
    content: list[dict[str, Any]] = []
    encrypted_content: str | None = None  # encrypted by another service, so the model does not see it
    status: str | None = None


class ItemContentPart(Struct, forbid_unknown_fields=True):
    """A part of an item's content, other than a refusal."""

    type: str
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None  # added by clients
    prompt_cache_breakpoint: Any = None  # ignored: the prefix cache works without it


def parse_items(
    given: str | list[dict[str, Any]],
    limits: RequestLimits,
    *,
    least: int,
    name: str = "input",
    unknown: UnknownFields = STRICT,
) -> list[dict[str, Any]]:
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    check_count(name, len(given), limits.messages, least=least)
    return [_item(item, f"{name}[{place}]", unknown) for place, item in enumerate(given)]


def _item(given: dict[str, Any], where: str, unknown: UnknownFields) -> dict[str, Any]:
    """Check an item and complete it with its type, an id and its content as parts."""
    given = drop_nulls(given)
    kind = given.get("type", "message")
    match kind:
        case "message":
            message: MessageItem = convert_value(given, MessageItem, where, unknown)
            own = "output_text" if message.role == "assistant" else "input_text"
            content = message.content
            parts = (
                [content_part(own, content)]
                if isinstance(content, str)
                else _parts(content, f"{where}.content", unknown, images=message.role == "user")
            )
            found = {"id": message.id or new_id("msg"), "role": message.role, "content": parts}
            return {"type": kind, "status": message.status or "completed", **found}
        case "function_call":
            call: FunctionCallItem = convert_value(given, FunctionCallItem, where, unknown)
            found = {"id": call.id or new_id("fc"), "call_id": call.call_id, "name": call.name}
            if call.namespace is not None:
                found["namespace"] = call.namespace
            return {"type": kind, "status": call.status or "completed", **found, "arguments": call.arguments}
        case "custom_tool_call":
            custom: CustomCallItem = convert_value(given, CustomCallItem, where, unknown)
            found = {"id": custom.id or new_id("ctc"), "call_id": custom.call_id, "name": custom.name}
            if custom.namespace is not None:
                found["namespace"] = custom.namespace
            return {"type": kind, "status": custom.status or "completed", **found, "input": custom.input}
        case "function_call_output" | "custom_tool_call_output":
            result: FunctionOutputItem = convert_value(given, FunctionOutputItem, where, unknown)
            output = result.output
            output = output if isinstance(output, str) else _parts(output, f"{where}.output", unknown)
            found = {"id": result.id or new_id("fco"), "call_id": result.call_id, "output": output}
            return {"type": kind, "status": result.status or "completed", **found}
        case "reasoning":
            reasoning: ReasoningItem = convert_value(given, ReasoningItem, where, unknown)
            parts = _parts(reasoning.content, f"{where}.content", unknown)
            summary = _parts(reasoning.summary, f"{where}.summary", unknown)
            return {"type": kind, "id": reasoning.id or new_id("rs"), "summary": summary, "content": parts}
        case "item_reference":
            why = (
                f"'{where}' is an item_reference, which is not supported. Send the item, or use `previous_response_id`."
            )
            raise ApiError(why, parameter=where, code="unsupported_parameter")
        case _:
            why = f"'{where}' is of type '{str(kind)[:100]}', which is not supported."
            raise ApiError(why, parameter=f"{where}.type", code="unsupported_parameter")


def _parts(
    given: Sequence[dict[str, Any]], where: str, unknown: UnknownFields, *, images: bool = False
) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for place, each in enumerate(given):
        at = f"{where}[{place}]"
        part = drop_nulls(each)
        kind = part.get("type")
        if kind == "refusal" and isinstance(part.get("refusal"), str):
            parts.append(content_part("output_text", part["refusal"]))
            continue
        if kind == "input_image" and images:
            image = responses_image(part, at)
            parts.append({"type": kind, "image_url": image["url"], "detail": image.get("detail", "auto")})
            continue
        if kind not in _TEXTS:
            accepted = "input_text or, for a model that reads images, input_image" if images else "a text"
            raise invalid_request(f"'{at}' is of type '{str(kind)[:100]}'. Expected {accepted}.", f"{at}.type")
        parts.append(content_part(kind, convert_value(part, ItemContentPart, at, unknown).text))
    return parts


def content_part(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, "text": text, **({"annotations": [], "logprobs": []} if kind == "output_text" else {})}


def new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"


def items_to_messages(instructions: str | None, items: Sequence[Any], *, whole: bool) -> list[dict[str, Any]]:
    """Convert items to messages. `whole`: these are all items, so every output must belong to one of their calls."""
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    calls: dict[str, str] = {}
    for item in items:
        match item["type"]:
            case "message" if item["role"] == "assistant":
                _append(_assistant(messages), "content", _text_of(item["content"]))
            case "message":
                role = "user" if item["role"] == "user" else "system"
                if role == "system" and messages and messages[-1]["role"] == "system":
                    _append(messages[-1], "content", _text_of(item["content"]))  # many templates allow only one
                else:
                    messages.append({"role": role, **_content_of(item["content"], role)})
            case "reasoning":
                if text := _text_of(item["content"] or item["summary"]):
                    _append(_assistant(messages), "reasoning_content", text)
            case "function_call" | "custom_tool_call":
                is_function = item["type"] == "function_call"
                arguments = item["arguments"] if is_function else custom_arguments(item["input"])
                decoded = decode_arguments(arguments)
                function: dict[str, Any] = {
                    "name": qualified_name(item["name"], item.get("namespace")),
                    "arguments": arguments if decoded is None else decoded,
                }
                calls[item["call_id"]] = function["name"]
                call = {"id": item["call_id"], "type": "function", "function": function}
                _assistant(messages).setdefault("tool_calls", []).append(call)
            case _:
                messages.append(_result(item, calls, whole=whole))
    return messages


def _result(item: Mapping[str, Any], calls: Mapping[str, str], *, whole: bool) -> dict[str, Any]:
    id, output = item["call_id"], item["output"]
    if whole and id not in calls:
        raise invalid_request(
            f"'input' has an output for the call_id '{id[:100]}', but no such function call.", "input"
        )
    content = output if isinstance(output, str) else _text_of(output)
    named = {"name": calls[id]} if id in calls else {}
    return {"role": "tool", "content": content, "tool_call_id": id, **named}


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the assistant's turn for the next item: consecutive text, reasoning and calls are one turn."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _append(message: dict[str, Any], name: str, text: str) -> None:
    message[name] = f"{message[name]}\n{text}" if message.get(name) else text


def _content_of(parts: Sequence[Mapping[str, Any]], role: str) -> dict[str, Any]:
    found = MessageContent()
    for part in parts:
        if part["type"] == "input_image":
            found.add_image({"url": part["image_url"], "detail": part["detail"]})
        else:
            found.add_text(part["text"], "input")
    return found.fields(role, "input")


def _text_of(parts: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(part["text"] for part in parts)


def reasoning_item(id: str, text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": id, "type": "reasoning", "status": "completed", "summary": [], "content": content}


def message_item(id: str, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    content = [{**content_part("output_text", text), "logprobs": logprobs}]
    return {"id": id, "type": "message", "status": "completed", "role": "assistant", "content": content}
