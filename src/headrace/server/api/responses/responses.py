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
from headrace.gateway.api_errors import ApiError, invalid_request
from headrace.gateway.requests.text_request import (
    Choice,
    ChoiceDelta,
    FinishReason,
    RestartDelta,
    TextRequest,
    TokenUsage,
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
    read_thinking,
    select_grammar,
)
from headrace.server.api.response_items import (
    content_part,
    items_to_messages,
    message_item,
    new_id,
    parse_items,
    reasoning_item,
)
from headrace.server.api.response_tools import ResponseToolChoice, ResponseTools, read_tool_choice, read_tools
from headrace.server.api.responses.responses_parameters import (
    LOGPROBS,
    RESPONSE_PARAMETERS,
    ConversationReference,
    JsonObjectFormat,
    JsonSchemaFormat,
    PlainTextFormat,
    ReasoningConfig,
    ResponseTextConfig,
)
from headrace.server.http.body_parameters import parse_body
from headrace.server.http.unknown_fields import STRICT, UnknownFields

UNFINISHED: Final = ("queued", "in_progress")  # statuses
_CUT: Final[tuple[FinishReason, ...]] = ("length", "deadline")
_REASONS: Final = {"length": "max_output_tokens", "deadline": "deadline"}  # "deadline" is Headrace's extension
_FAILURES: Final = {"rate_limit_error": "rate_limit_exceeded", "invalid_request_error": "invalid_prompt"}


class ResponseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to generate a response. `with_history` puts the messages of earlier items before the new ones."""

    text_request: TextRequest
    store: bool
    previous: str | None
    conversation: str | None
    background: bool
    new_items: list[dict[str, Any]]  # that this request adds
    items: list[dict[str, Any]]  # all of them, each with an id: earlier ones, then the new ones
    tools: ResponseTools
    echoed: dict[str, Any]  # parameters that the answer repeats
    max_items: int


def read_response_request(
    body: bytes, headers: Mapping[str, str], limits: RequestLimits, unknown: UnknownFields = STRICT
) -> ResponseRequest:
    return build_response_request(parse_body(body, RESPONSE_PARAMETERS, limits, unknown), headers, limits, unknown)


def build_response_request(
    given: dict[str, Any], headers: Mapping[str, str], limits: RequestLimits, unknown: UnknownFields = STRICT
) -> ResponseRequest:
    """Build a request from parameters that the table has converted."""
    check_stream_options(given)
    tools = read_tools(given.get("tools", []), limits, unknown)
    choice: ResponseToolChoice = given.get("tool_choice", "auto")
    choosing, only, allowed = read_tool_choice(choice, tools.tools)
    previous: str | None = given.get("previous_response_id")
    conversation = _read_conversation(given)
    continues = previous is not None or conversation is not None
    items = parse_items(given["input"], limits, least=0 if continues else 1, unknown=unknown)
    store, background = given.get("store", True), given.get("background", False)
    if background and not store:
        raise invalid_request("'background' requires `store: true`, because you retrieve the response.", "background")
    reasoning: ReasoningConfig = given.get("reasoning") or ReasoningConfig()
    text: ResponseTextConfig = given.get("text") or ResponseTextConfig()
    own = {"reasoning_effort": reasoning.effort, "verbosity": text.verbosity}
    think, hints = read_thinking({**given, **{name: value for name, value in own.items() if value is not None}})
    text_request = TextRequest(
        model=given.get("model", ""),
        messages=items_to_messages(given.get("instructions"), items, whole=not continues),
        tools=tools.tools,
        choosing=choosing,
        only_tool=only,
        allowed_tools=allowed,
        parallel_calls=given.get("parallel_tool_calls", True),
        grammar=_read_grammar(given, text),
        think=think,
        template_hints=hints,
        show_reasoning=given.get("include_reasoning", True),
        sampling=build_sampling(given, logprobs=_read_logprobs(given, limits)),
        max_tokens=given.get("max_output_tokens"),
        stop=parse_stops(given.get("stop"), limits),
        stream=given.get("stream", False),
        **extra_fields(given, headers),
    )
    return ResponseRequest(
        text_request=text_request,
        store=store,
        previous=previous,
        conversation=conversation,
        background=background,
        new_items=items,
        items=items,
        tools=tools,
        echoed=_echo_parameters(given, text_request, tools, choice, reasoning, text),
        max_items=limits.messages,
    )


def with_history(request: ResponseRequest, earlier_items: Sequence[Any]) -> ResponseRequest:
    """Continue a response or a conversation: its items come before the new ones. Instructions are not carried over."""
    items = [*earlier_items, *request.items]
    check_count("input", len(items), request.max_items)
    messages = items_to_messages(request.echoed["instructions"], items, whole=True)
    return replace(request, items=items, text_request=request.text_request.but(messages=messages))


def _read_conversation(given: Mapping[str, Any]) -> str | None:
    conversation: str | ConversationReference | None = given.get("conversation")
    if conversation is None:
        return None
    if given.get("previous_response_id") is not None:
        raise invalid_request("Send 'conversation' or 'previous_response_id', not both.", "conversation")
    return conversation if isinstance(conversation, str) else conversation.id


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


# Answers


def _echo_parameters(
    given: Mapping[str, Any],
    text_request: TextRequest,
    tools: ResponseTools,
    choice: ResponseToolChoice,
    reasoning: ReasoningConfig,
    text: ResponseTextConfig,
) -> dict[str, Any]:
    return {
        "background": given.get("background", False),
        "conversation": None if (id := _read_conversation(given)) is None else {"id": id},
        "instructions": given.get("instructions"),
        "max_output_tokens": text_request.max_tokens,
        "max_tool_calls": None,
        "metadata": dict(text_request.metadata),
        "parallel_tool_calls": text_request.parallel_calls,
        "previous_response_id": given.get("previous_response_id"),
        "prompt_cache_key": given.get("prompt_cache_key"),
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary or reasoning.generate_summary},
        "safety_identifier": given.get("safety_identifier"),
        "service_tier": "default",
        "store": given.get("store", True),
        "temperature": text_request.sampling.temperature,
        "text": {
            "format": msgspec.to_builtins(text.format or PlainTextFormat()),
            "verbosity": text.verbosity or "medium",
        },
        "tool_choice": msgspec.to_builtins(choice),
        "tools": tools.echoed,
        "top_logprobs": text_request.sampling.logprobs or 0,
        "top_p": given.get("top_p", 1.0),
        "truncation": given.get("truncation", "disabled"),
        "user": given.get("user"),
    }


def output_items(choice: Choice, tools: ResponseTools) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if choice.reasoning:
        items.append(reasoning_item(new_id("rs"), choice.reasoning))
    if choice.content:
        # The tokens of the reasoning come first.
        logprobs = (choice.logprobs or [])[choice.usage.reasoning_tokens :]
        items.append(message_item(new_id("msg"), choice.content, [logprob_json(each) for each in logprobs]))
    items += [
        tools.call_item(_call_item_id(call.name, tools), call.id, call.name, call.arguments) for call in choice.calls
    ]
    # A call that was cut is left out, so the calls that are here are complete.
    if items and choice.finish in _CUT and not items[-1]["type"].endswith("_call"):
        items[-1]["status"] = "incomplete"
    return items


def unfinished_items(choice: Choice, tools: ResponseTools) -> list[dict[str, Any]]:
    """Return the items of an answer that was stopped in between. The last text is incomplete."""
    choice.add(ChoiceDelta(choice.index, finish="length"))  # leaves out a call without all its arguments
    return output_items(choice, tools)


def _call_item_id(name: str, tools: ResponseTools) -> str:
    return new_id("ctc" if name in tools.custom else "fc")


def response_body(exchange: Exchange, choices: Sequence[Choice], request: ResponseRequest) -> dict[str, Any]:
    choice = choices[0]
    return _ended(exchange, request, output_items(choice, request.tools), choice.finish, choice.usage)


def _ended(
    exchange: Exchange, request: ResponseRequest, output: list[dict[str, Any]], finish: FinishReason, usage: TokenUsage
) -> dict[str, Any]:
    cut = finish in _CUT
    return {
        **response_shell(exchange, request, "incomplete" if cut else "completed", output),
        "incomplete_details": {"reason": _REASONS[finish]} if cut else None,
        "completed_at": None if cut else int(time.time()),
        "usage": _usage(usage),
        "headrace": exchange.report([usage]),
    }


def failed_response(
    exchange: Exchange, request: ResponseRequest, error: ApiError, output: list[dict[str, Any]]
) -> dict[str, Any]:
    failure = {"code": _FAILURES.get(error.kind, "server_error"), "message": error.message}
    return {**response_shell(exchange, request, "failed", output), "error": failure}


def response_shell(
    exchange: Exchange, request: ResponseRequest, status: str, output: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return a response without usage, details or an error."""
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
        self._call = ""  # the name of its function, as the model knows it
        self._texts: list[str] = []  # its text or arguments
        self._logprobs: list[dict[str, Any]] = []  # of its text; those from `_unsent` on are not sent yet
        self._unsent = 0
        self._last = ChoiceDelta(0, finish="stop")

    def begin(self) -> bytes:
        self._began = True
        response = response_shell(self._exchange, self._request, "in_progress", [])
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
        silent = bool(piece.reasoning) or self._item.get("type") in ("reasoning", "function_call", "custom_tool_call")
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
        self.response = failed_response(self._exchange, self._request, error, self.items)
        return self._event("response.failed", response=self.response)

    def unfinished_items(self) -> list[dict[str, Any]]:
        """Return the output so far: the finished items, and the text of an open one, which is incomplete."""
        open, text = self._item, "".join(self._texts)
        if open.get("type") == "reasoning" and text:
            return [*self.items, {**reasoning_item(open["id"], text), "status": "incomplete"}]
        if open.get("type") == "message" and text:
            return [*self.items, {**message_item(open["id"], text, self._logprobs), "status": "incomplete"}]
        return list(self.items)  # an open call is left out: clients parse its arguments

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
                tools, name = self._request.tools, event.call.name or ""
                self._call = name
                self._item = tools.call_item(_call_item_id(name, tools), event.call.id or "", name, "")
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
            case "call" if self._call in self._request.tools.custom:
                return b""  # the text is known when its JSON string is complete
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
                item = self._request.tools.call_item(id, self._item["call_id"], self._call, text)
                if "input" in item:
                    data = self._in_item("response.custom_tool_call_input.delta", delta=item["input"])
                    data += self._in_item("response.custom_tool_call_input.done", input=item["input"])
                else:
                    data = self._in_item("response.function_call_arguments.done", name=item["name"], arguments=text)
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
