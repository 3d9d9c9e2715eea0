"""`/v1/responses`: reads requests into a TextRequest and writes their answers, whole or as events.

responses_parameters.py has the types and the parameter table, response_items.py the items. Does not store responses:
the caller passes the items of an earlier response to `with_history`.

    earlier items + new items   ▶  messages        with_history
    choice                      ▶  output items    output_items; ResponseStream while they are generated
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from headrace.config import RequestLimits
from headrace.engine.interface.grammar_spec import Grammar
from headrace.gateway.api_errors import ApiError
from headrace.gateway.requests.text_request import (
    Choice,
    ChoiceDelta,
    FinishReason,
    RestartDelta,
    TextRequest,
    TokenUsage,
    Tool,
    ToolChoiceMode,
)
from headrace.gateway.serving.exchange import Exchange
from headrace.server.api.block_events import BlockEvent, BlockSplitter, restart_error
from headrace.server.api.chat_completions import logprob_json
from headrace.server.api.common_parameters import (
    build_sampling,
    check_count,
    check_stream_options,
    extra_fields,
    json_schema_grammar,
    parse_stops,
    select_grammar,
)
from headrace.server.api.response_items import (
    content_part,
    drop_nulls,
    function_call_item,
    items_to_messages,
    message_item,
    new_id,
    parse_items,
    reasoning_item,
)
from headrace.server.api.responses_parameters import (
    LOGPROBS,
    RESPONSE_PARAMETERS,
    JsonObjectFormat,
    JsonSchemaFormat,
    PlainTextFormat,
    ReasoningConfig,
    ResponseTextConfig,
    ResponseTool,
    ResponseToolChoice,
    ResponseToolChoiceAllowed,
    ResponseToolChoiceFunction,
)
from headrace.server.api.tool_parameters import check_has_tools, check_named_tool, check_tools
from headrace.server.http.body_parameters import convert_value, parse_body

_CUT: Final[tuple[FinishReason, ...]] = ("length", "deadline")
_REASONS: Final = {"length": "max_output_tokens", "deadline": "deadline"}  # "deadline" is Headrace's extension
_FAILURES: Final = {"rate_limit_error": "rate_limit_exceeded", "invalid_request_error": "invalid_prompt"}


class ResponseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to generate a response. `with_history` puts the messages of earlier items before the new ones."""

    asked: TextRequest
    store: bool
    previous: str | None
    items: list[dict[str, Any]]  # the conversation, each item with an id
    echoed: dict[str, Any]  # parameters that the answer repeats
    max_items: int


def read_response_request(body: bytes, headers: Mapping[str, str], limits: RequestLimits) -> ResponseRequest:
    return build_response_request(parse_body(body, RESPONSE_PARAMETERS), headers, limits)


def build_response_request(given: dict[str, Any], headers: Mapping[str, str], limits: RequestLimits) -> ResponseRequest:
    """Build a request from parameters that the table has converted."""
    check_stream_options(given)
    tools = _read_tools(given.get("tools", []), limits)
    choice: ResponseToolChoice = given.get("tool_choice", "auto")
    choosing, only, offered = _read_tool_choice(choice, tools)
    previous: str | None = given.get("previous_response_id")
    items = parse_items(given["input"], limits, least=0 if previous is not None else 1)
    reasoning: ReasoningConfig = given.get("reasoning") or ReasoningConfig()
    text: ResponseTextConfig = given.get("text") or ResponseTextConfig()
    extras = dict(given)
    if reasoning.effort not in (None, "none"):
        extras["chat_template_kwargs"] = {"reasoning_effort": reasoning.effort, **given.get("chat_template_kwargs", {})}
    asked = TextRequest(
        model=given.get("model", ""),
        messages=items_to_messages(given.get("instructions"), items, whole=previous is None),
        tools=offered,
        choosing=choosing,
        only_tool=only,
        parallel_calls=given.get("parallel_tool_calls", True),
        grammar=_read_grammar(given, text),
        think=None if reasoning.effort is None else reasoning.effort != "none",
        sampling=build_sampling(given, logprobs=_read_logprobs(given, limits)),
        max_tokens=given.get("max_output_tokens"),
        stop=parse_stops(given.get("stop"), limits),
        stream=given.get("stream", False),
        **extra_fields(extras, headers),
    )
    return ResponseRequest(
        asked=asked,
        store=given.get("store", True),
        previous=previous,
        items=items,
        echoed=_echo_parameters(given, asked, tools, choice, reasoning, text),
        max_items=limits.messages,
    )


def with_history(request: ResponseRequest, earlier_items: Sequence[Any]) -> ResponseRequest:
    """Continue an earlier response: its items come before the new ones. Its instructions are not carried over."""
    items = [*earlier_items, *request.items]
    check_count("input", len(items), request.max_items)
    messages = items_to_messages(request.echoed["instructions"], items, whole=True)
    return replace(request, items=items, asked=request.asked.but(messages=messages))


def _read_logprobs(given: Mapping[str, Any], limits: RequestLimits) -> int | None:
    top: int | None = given.get("top_logprobs")
    if top is not None:
        return check_count("top_logprobs", top, limits.logprobs, least=0)
    return 0 if LOGPROBS in given.get("include", ()) else None


def _read_grammar(given: Mapping[str, Any], text: ResponseTextConfig) -> Grammar | None:
    grammar: Grammar | None = None
    if isinstance(text.format, JsonObjectFormat):
        grammar = Grammar("json_object")
    elif isinstance(text.format, JsonSchemaFormat):
        grammar = json_schema_grammar(text.format.schema)
    return select_grammar(given, grammar, "text.format")


def _read_tools(tools: Sequence[Any], limits: RequestLimits) -> tuple[Tool, ...]:
    check_count("tools", len(tools), limits.tools, least=0)
    return check_tools([_read_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)], limits)


def _read_tool(given: Any, where: str) -> Tool:
    given = drop_nulls(given)
    kind = given.get("type", "function") if isinstance(given, dict) else "function"  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    if kind != "function":
        message = f"'{where}' is of type '{str(kind)[:100]}'. Expected a function: the server runs no tools itself."  # pyright: ignore[reportUnknownArgumentType]
        raise ApiError(message, parameter=f"{where}.type", code="unsupported_parameter")
    tool = convert_value(given, ResponseTool, where)
    return Tool(tool.name, tool.description, tool.parameters, bool(tool.strict))


def _read_tool_choice(
    choice: ResponseToolChoice, tools: tuple[Tool, ...]
) -> tuple[ToolChoiceMode, str | None, tuple[Tool, ...]]:
    """Return the mode, the tool that must be called if it must be a particular one, and the tools to offer."""
    if choice in ("auto", "none"):
        return "auto" if choice == "auto" else "none", None, tools
    check_has_tools(tools)
    if isinstance(choice, ResponseToolChoiceFunction):
        return "required", check_named_tool(choice.name, tools), tools
    if isinstance(choice, ResponseToolChoiceAllowed):
        check_count("tool_choice.tools", len(choice.tools), len(tools))
        allowed = {check_named_tool(each.name, tools) for each in choice.tools}
        return choice.mode, None, tuple(tool for tool in tools if tool.name in allowed)
    return "required", None, tools


# Answers


def _echo_parameters(
    given: Mapping[str, Any],
    asked: TextRequest,
    tools: Sequence[Tool],
    choice: ResponseToolChoice,
    reasoning: ReasoningConfig,
    text: ResponseTextConfig,
) -> dict[str, Any]:
    return {
        "background": False,
        "instructions": given.get("instructions"),
        "max_output_tokens": asked.max_tokens,
        "max_tool_calls": None,
        "metadata": dict(asked.metadata),
        "parallel_tool_calls": asked.parallel_calls,
        "previous_response_id": given.get("previous_response_id"),
        "prompt_cache_key": given.get("prompt_cache_key"),
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary or reasoning.generate_summary},
        "safety_identifier": given.get("safety_identifier"),
        "service_tier": "default",
        "store": given.get("store", True),
        "temperature": asked.sampling.temperature,
        "text": {"format": msgspec.to_builtins(text.format or PlainTextFormat()), "verbosity": "medium"},
        "tool_choice": msgspec.to_builtins(choice),
        "tools": [
            {
                "type": "function",
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
                "strict": tool.strict,
            }
            for tool in tools
        ],
        "top_logprobs": asked.sampling.logprobs or 0,
        "top_p": given.get("top_p", 1.0),
        "truncation": "disabled",
        "user": given.get("user"),
    }


def output_items(choice: Choice) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if choice.reasoning:
        items.append(reasoning_item(new_id("rs"), choice.reasoning))
    if choice.content:
        # The tokens of the reasoning come first.
        logprobs = (choice.logprobs or [])[choice.usage.reasoning_tokens :]
        items.append(message_item(new_id("msg"), choice.content, [logprob_json(each) for each in logprobs]))
    items += [function_call_item(new_id("fc"), call.id, call.name, call.arguments) for call in choice.calls]
    if items and choice.finish in _CUT:
        items[-1]["status"] = "incomplete"
    return items


def response_body(exchange: Exchange, choices: Sequence[Choice], request: ResponseRequest) -> dict[str, Any]:
    choice = choices[0]
    return _ended(exchange, request, output_items(choice), choice.finish, choice.usage)


def _ended(
    exchange: Exchange, request: ResponseRequest, output: list[dict[str, Any]], finish: FinishReason, usage: TokenUsage
) -> dict[str, Any]:
    cut = finish in _CUT
    return {
        **_response(exchange, request, "incomplete" if cut else "completed", output),
        "incomplete_details": {"reason": _REASONS[finish]} if cut else None,
        "completed_at": None if cut else int(time.time()),
        "usage": _usage(usage),
        "headrace": exchange.report([usage]),
    }


def _response(
    exchange: Exchange, request: ResponseRequest, status: str, output: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "id": f"resp_{exchange.id}",
        "object": "response",
        "created_at": exchange.created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "model": exchange.model,
        "output": output,
        **request.echoed,
        "usage": None,
    }


def _usage(usage: TokenUsage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }


class ResponseStream:
    """Writes the events of one response. At the end, `response` is the final response and `items` its output."""

    def __init__(self, exchange: Exchange, request: ResponseRequest) -> None:
        self.response: dict[str, Any] | None = None
        self.items: list[dict[str, Any]] = []  # finished items
        self._exchange = exchange
        self._request = request
        self._encode = msgspec.json.Encoder().encode
        self._sequence_number = 0  # of the next event
        self._began = False
        self._splitter = BlockSplitter()
        self._item: dict[str, Any] = {}  # the open item
        self._texts: list[str] = []  # its text or arguments
        self._logprobs: list[dict[str, Any]] = []  # of its text; those from `_unsent` on are not sent yet
        self._unsent = 0
        self._last = ChoiceDelta(0, finish="stop")

    def begin(self) -> bytes:
        self._began = True
        response = _response(self._exchange, self._request, "in_progress", [])
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def restart(self, piece: RestartDelta) -> bytes:
        raise restart_error()

    def piece(self, piece: ChoiceDelta) -> bytes:
        if piece.finish is not None:
            self._last = piece
        events = self._splitter.split(piece)
        self._hold_logprobs(piece)
        data = [self._write(event) for event in events[:-1]]
        if events:
            cut = piece.finish in _CUT and events[-1].action == "end"
            data.append(self._write(events[-1], status="incomplete" if cut else "completed"))
        return b"".join(data)

    def _hold_logprobs(self, piece: ChoiceDelta) -> None:
        """Hold log-probabilities back until the text of their tokens. Those of reasoning and calls are dropped."""
        silent = bool(piece.reasoning) or self._item.get("type") in ("reasoning", "function_call")
        if piece.logprobs and (piece.content or not silent):
            self._logprobs += [logprob_json(each) for each in piece.logprobs]

    def end(self) -> bytes:
        last = self._last
        self.response = _ended(
            self._exchange, self._request, self.items, last.finish or "stop", last.usage or TokenUsage()
        )
        return self._event(f"response.{self.response['status']}", response=self.response)

    def error(self, error: ApiError) -> bytes:
        if not self._began:
            return self._event("error", code=error.code, message=error.message, param=error.parameter)
        failure = {"code": _FAILURES.get(error.kind, "server_error"), "message": error.message}
        self.response = {**_response(self._exchange, self._request, "failed", self.items), "error": failure}
        return self._event("response.failed", response=self.response)

    def _write(self, event: BlockEvent, *, status: str = "completed") -> bytes:
        match event.action:
            case "begin":
                return self._begin_item(event)
            case "more":
                self._texts.append(event.text)
                return self._continue_item(event)
            case "end":
                return self._end_item(event, status)

    def _begin_item(self, event: BlockEvent) -> bytes:
        self._texts.clear()
        part: dict[str, Any] | None = None
        match event.kind:
            case "reasoning":
                self._item = {**reasoning_item(new_id("rs"), ""), "content": []}
                part = content_part("reasoning_text", "")
            case "text":
                self._item = {**message_item(new_id("msg"), "", []), "content": []}
                part = content_part("output_text", "")
            case "call":
                assert event.call is not None
                self._item = function_call_item(new_id("fc"), event.call.id or "", event.call.name or "", "")
        added = {**self._item, "status": "in_progress"}
        data = self._event("response.output_item.added", output_index=len(self.items), item=added)
        if part is not None:
            data += self._in_item("response.content_part.added", content_index=0, part=part)
        return data

    def _continue_item(self, event: BlockEvent) -> bytes:
        match event.kind:
            case "reasoning":
                return self._in_item("response.reasoning_text.delta", content_index=0, delta=event.text)
            case "text":
                new = self._logprobs[self._unsent :]
                self._unsent = len(self._logprobs)
                return self._in_item("response.output_text.delta", content_index=0, delta=event.text, logprobs=new)
            case "call":
                return self._in_item("response.function_call_arguments.delta", delta=event.text)

    def _end_item(self, event: BlockEvent, status: str) -> bytes:
        text = "".join(self._texts)
        id = self._item["id"]
        match event.kind:
            case "reasoning":
                item = reasoning_item(id, text)
                data = self._in_item("response.reasoning_text.done", content_index=0, text=text)
            case "text":
                item = message_item(id, text, self._logprobs)
                data = self._in_item("response.output_text.done", content_index=0, text=text, logprobs=self._logprobs)
            case "call":
                name = self._item["name"]
                item = function_call_item(id, self._item["call_id"], name, text)
                data = self._in_item("response.function_call_arguments.done", name=name, arguments=text)
        if event.kind != "call":
            data += self._in_item("response.content_part.done", content_index=0, part=item["content"][0])
        item["status"] = status
        data += self._event("response.output_item.done", output_index=len(self.items), item=item)
        self.items.append(item)
        self._item = {}
        if event.kind == "text":
            self._logprobs, self._unsent = [], 0
        return data

    def _in_item(self, name: str, /, **fields: Any) -> bytes:
        return self._event(name, item_id=self._item["id"], output_index=len(self.items), **fields)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        data = self._encode({"type": name, "sequence_number": self._sequence_number, **fields})
        self._sequence_number += 1
        return b"event: %b\ndata: %b\n\n" % (name.encode(), data)
