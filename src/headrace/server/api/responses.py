"""`/v1/responses`: its parameters, its items, and its answers, whole and as events.

Owns the table of the endpoint and the shapes of the answers; the items are response_items's. What is asked comes out as
a ResponsesAsked; what is answered comes in as Pieces and Choices. Where responses are kept is the caller's: it gives
the items of an earlier one to `with_history`, and keeps an answer's `items` and body itself.

    earlier items  +  new items        ▶  messages     with_history
    choice         ▶  output items                     output_items; ResponseStream, while they are made
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct
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
    TokenLogprob,
    TokenUsage,
    Tool,
    ToolChoiceMode,
)
from headrace.gateway.serving.exchange import Exchange
from headrace.server.api.block_events import BlockEvent, BlockSplitter
from headrace.server.api.chat_completions import ToolName, check_named_tool
from headrace.server.api.common_parameters import (
    EXTRAS,
    HOSTED,
    SAMPLING,
    STREAM,
    build_sampling,
    check_count,
    extra_fields,
    guided_grammar,
    parse_stops,
)
from headrace.server.api.messages import check_unique_names
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
from headrace.server.http.body_parameters import Parameter, ParameterTable, convert_value, parse_body

_HOSTED_TOOLS: Final = "the server runs no tools itself"
_LOGPROBS: Final = "message.output_text.logprobs"
_CUT: Final[tuple[FinishReason, ...]] = ("length", "deadline")
_REASONS: Final = {"length": "max_output_tokens", "deadline": "deadline"}  # the second is ours
_FAILURES: Final = {"rate_limit_error": "rate_limit_exceeded", "invalid_request_error": "invalid_prompt"}


class ResponseTool(Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseToolChoiceFunction(Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    name: str


class ResponseToolChoiceAllowed(Struct, tag_field="type", tag="allowed_tools", forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: list[ResponseToolChoiceFunction]


ResponseToolChoice = Literal["auto", "none", "required"] | ResponseToolChoiceFunction | ResponseToolChoiceAllowed


class PlainTextFormat(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    pass


class JsonObjectFormat(Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    pass


class JsonSchemaFormat(Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True, omit_defaults=True):
    name: Annotated[str, Meta(min_length=1, max_length=128)]
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class ResponseTextConfig(Struct, forbid_unknown_fields=True):
    format: PlainTextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    verbosity: Literal["medium"] | None = None  # the models served here have no such setting


class ReasoningConfig(Struct, forbid_unknown_fields=True):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "all_turns"] | None = None
    mode: Literal["standard"] | None = None


class ResponseStreamOptions(Struct, forbid_unknown_fields=True):
    include_obfuscation: bool = False


RESPONSE_PARAMETERS: Final[ParameterTable] = {
    "model": Parameter("The model that answers; the configured one where none is named.", str),
    "input": Parameter(
        "A text, or items: message, function_call, function_call_output, reasoning.",
        str | list[dict[str, Any]],
        required=True,
    ),
    "instructions": Parameter("What stands before the conversation; of this response only.", str),
    "previous_response_id": Parameter("The stored response that this one goes on from.", str),
    "store": Parameter("Whether the response is kept; true where it is not given, and the server keeps any.", bool),
    "max_output_tokens": Parameter("Most tokens of the answer, reasoning included.", Annotated[int, Meta(ge=1)]),
    **{name: each for name, each in SAMPLING.items() if name != "n"},
    "top_logprobs": Parameter("How many likeliest tokens are reported at each place.", Annotated[int, Meta(ge=0)]),
    "include": Parameter(
        f"{_LOGPROBS}: the log-probabilities of the text's tokens. reasoning.encrypted_content is accepted: reasoning "
        "is told in the clear, in the content of its items, and is taken back so.",
        list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]],
    ),
    "tools": Parameter(
        "Functions that the model may call. Without strict: true none is held to its schema.", list[Any]
    ),
    "tool_choice": Parameter(
        "auto, none, required, a function that must be called, or allowed_tools: those that are offered.",
        ResponseToolChoice,
    ),
    "parallel_tool_calls": Parameter("Whether several calls may be made in one answer.", bool),
    "text": Parameter("format: text, a JSON object, or JSON of a schema.", ResponseTextConfig),
    "reasoning": Parameter(
        "effort: `none` asks a model that can reason first not to; others go to the chat template, as "
        "reasoning_effort. summary is accepted: reasoning is told as it is, not summed up.",
        ReasoningConfig,
    ),
    "stream": STREAM["stream"],
    "stream_options": Parameter("include_obfuscation is accepted; nothing is padded.", ResponseStreamOptions),
    **{name: each for name, each in EXTRAS.items() if name not in SAMPLING},
    "service_tier": HOSTED["service_tier"],
    "prompt_cache_key": HOSTED["prompt_cache_key"],
    "prompt_cache_retention": HOSTED["prompt_cache_retention"],
    "prompt_cache_options": Parameter(
        "", refused="common prefixes are found without them", harmless=({}, {"mode": "implicit"})
    ),
    "moderation": HOSTED["moderation"],
    "background": Parameter("", refused="use /v1/batches", harmless=(False,)),
    "background_options": Parameter("", refused="use /v1/batches"),
    "conversation": Parameter("", refused="use previous_response_id"),
    "context_management": Parameter("", refused="the conversation is taken as it is sent", harmless=([],)),
    "truncation": Parameter("", refused="what does not fit is an error", harmless=("disabled",)),
    "max_tool_calls": Parameter("", refused=_HOSTED_TOOLS),
    "prompt": Parameter("", refused="there are no stored prompts; use instructions"),
    "image": Parameter("", refused="models read text only"),
    "access_programs": Parameter("", refused="there are none", harmless=({},)),
}


class ResponseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`asked` has the messages of the new items alone until `with_history` puts the earlier ones before them."""

    asked: TextRequest
    store: bool
    previous: str | None
    items: list[dict[str, Any]]  # the conversation, each item with an id
    told: dict[str, Any]  # the parameters, as the answer repeats them
    most: int  # items


def read_response_request(body: bytes, headers: Mapping[str, str], limits: RequestLimits) -> ResponseRequest:
    return build_response_request(parse_body(body, RESPONSE_PARAMETERS), headers, limits)


def build_response_request(given: dict[str, Any], headers: Mapping[str, str], limits: RequestLimits) -> ResponseRequest:
    """`given`: converted by the table."""
    if "stream_options" in given and not given.get("stream"):
        raise invalid_request("'stream_options' goes with stream: true", "stream_options")
    tools = _tools(given.get("tools", []), limits)
    choice: ResponseToolChoice = given.get("tool_choice", "auto")
    choosing, only, offered = _choosing(choice, tools)
    previous: str | None = given.get("previous_response_id")
    items = parse_items(given["input"], limits, least=0 if previous is not None else 1)
    reasoning: ReasoningConfig = given.get("reasoning") or ReasoningConfig()
    text: ResponseTextConfig = given.get("text") or ResponseTextConfig()
    own = dict(given)
    if reasoning.effort not in (None, "none"):
        own["chat_template_kwargs"] = {"reasoning_effort": reasoning.effort, **given.get("chat_template_kwargs", {})}
    asked = TextRequest(
        model=given.get("model", ""),
        messages=items_to_messages(given.get("instructions"), items, whole=previous is None),
        tools=offered,
        choosing=choosing,
        only_tool=only,
        parallel_calls=given.get("parallel_tool_calls", True),
        grammar=_grammar(given, text),
        think=None if reasoning.effort is None else reasoning.effort != "none",
        sampling=build_sampling(given, logprobs=_logprobs_wanted(given, limits)),
        max_tokens=given.get("max_output_tokens"),
        stop=parse_stops(given.get("stop"), limits),
        stream=given.get("stream", False),
        **extra_fields(own, headers),
    )
    return ResponseRequest(
        asked=asked,
        store=given.get("store", True),
        previous=previous,
        items=items,
        told=_told(given, asked, tools, choice, reasoning, text),
        most=limits.messages,
    )


def with_history(found: ResponseRequest, earlier_items: Sequence[Any]) -> ResponseRequest:
    """Going on from an earlier response: its items, then its output. Its instructions are not carried over."""
    items = [*earlier_items, *found.items]
    check_count("input", len(items), found.most)
    messages = items_to_messages(found.told["instructions"], items, whole=True)
    return replace(found, items=items, asked=found.asked.but(messages=messages))


def _logprobs_wanted(given: Mapping[str, Any], limits: RequestLimits) -> int | None:
    top: int | None = given.get("top_logprobs")
    if top is not None:
        return check_count("top_logprobs", top, limits.logprobs, least=0)
    return 0 if _LOGPROBS in given.get("include", ()) else None


def _grammar(given: Mapping[str, Any], text: ResponseTextConfig) -> Grammar | None:
    other = guided_grammar(given)
    if text.format is None or isinstance(text.format, PlainTextFormat):
        return other
    if other is not None:
        raise invalid_request("'text.format' and a guided_* parameter cannot both hold an answer", "text.format")
    if isinstance(text.format, JsonObjectFormat):
        return Grammar("json_object")
    return Grammar("json_schema", msgspec.json.encode(text.format.schema).decode())


def _tools(tools: Sequence[Any], limits: RequestLimits) -> tuple[Tool, ...]:
    check_count("tools", len(tools), limits.tools, least=0)
    found = tuple(_tool(tool, f"tools[{place}]") for place, tool in enumerate(tools))
    check_unique_names(found)
    return found


def _tool(given: Any, where: str) -> Tool:
    given = drop_nulls(given)
    kind = given.get("type", "function") if isinstance(given, dict) else "function"  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    if kind != "function":
        message = f"'{where}': there is no tool '{str(kind)[:100]}' here, only functions"  # pyright: ignore[reportUnknownArgumentType]
        raise ApiError(message, parameter=f"{where}.type", code="unsupported_parameter")
    tool = convert_value(given, ResponseTool, where)
    return Tool(tool.name, tool.description, tool.parameters, bool(tool.strict))


def _choosing(
    choice: ResponseToolChoice, tools: tuple[Tool, ...]
) -> tuple[ToolChoiceMode, str | None, tuple[Tool, ...]]:
    """How to choose, the one function where it must be one, and the tools that are offered."""
    if choice in ("auto", "none"):
        return "auto" if choice == "auto" else "none", None, tools
    if not tools:
        raise invalid_request("'tool_choice' asks for a call, and there are no tools", "tool_choice")
    if isinstance(choice, ResponseToolChoiceFunction):
        return "required", check_named_tool(choice.name, tools), tools
    if isinstance(choice, ResponseToolChoiceAllowed):
        check_count("tool_choice.tools", len(choice.tools), len(tools))
        allowed = {check_named_tool(each.name, tools) for each in choice.tools}
        return choice.mode, None, tuple(tool for tool in tools if tool.name in allowed)
    return "required", None, tools


# Answers


def _told(
    given: Mapping[str, Any],
    asked: TextRequest,
    tools: Sequence[Tool],
    choice: ResponseToolChoice,
    reasoning: ReasoningConfig,
    text: ResponseTextConfig,
) -> dict[str, Any]:
    chosen = msgspec.to_builtins(choice)
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
        "tool_choice": chosen,
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
        # The tokens of the reasoning came first.
        logprobs = (choice.logprobs or [])[choice.usage.reasoning_tokens :]
        items.append(message_item(new_id("msg"), choice.content, [_logprob(each) for each in logprobs]))
    items += [function_call_item(new_id("fc"), call.id, call.name, call.arguments) for call in choice.calls]
    if items and choice.finish in _CUT:
        items[-1]["status"] = "incomplete"
    return items


def _logprob(each: TokenLogprob) -> dict[str, Any]:
    top = [{"token": text, "logprob": logprob, "bytes": list(raw)} for text, raw, logprob in each.top]
    return {"token": each.text, "logprob": each.logprob, "bytes": list(each.bytes), "top_logprobs": top}


def response_body(exchange: Exchange, choices: Sequence[Choice], found: ResponseRequest) -> dict[str, Any]:
    choice = choices[0]
    return _ended(exchange, found, output_items(choice), choice.finish, choice.usage)


def _ended(
    exchange: Exchange, found: ResponseRequest, output: list[dict[str, Any]], finish: FinishReason, usage: TokenUsage
) -> dict[str, Any]:
    cut = finish in _CUT
    return {
        **_response(exchange, found, "incomplete" if cut else "completed", output),
        "incomplete_details": {"reason": _REASONS[finish]} if cut else None,
        "completed_at": None if cut else int(time.time()),
        "usage": _usage(usage),
        "headrace": exchange.report([usage]),
    }


def _response(exchange: Exchange, found: ResponseRequest, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": f"resp_{exchange.id}",
        "object": "response",
        "created_at": exchange.created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "model": exchange.model,
        "output": output,
        **found.told,
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
    """The events of one exchange. After its end `response` is the final one and `items` its output."""

    def __init__(self, exchange: Exchange, found: ResponseRequest) -> None:
        self.response: dict[str, Any] | None = None
        self.items: list[dict[str, Any]] = []  # those that are finished
        self._exchange = exchange
        self._found = found
        self._encode = msgspec.json.Encoder().encode
        self._number = 0  # of the next event
        self._begun = False
        self._runs = BlockSplitter()
        self._open: dict[str, Any] = {}  # the item under way
        self._texts: list[str] = []  # its text, or its arguments
        self._logprobs: list[dict[str, Any]] = []  # of its text; those from `_unsent` on are not told yet
        self._unsent = 0
        self._last = ChoiceDelta(0, finish="stop")

    def begin(self) -> bytes:
        self._begun = True
        response = _response(self._exchange, self._found, "in_progress", [])
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def restart(self, piece: RestartDelta) -> bytes:
        """This dialect has no word for it, and a client that goes on as before would have two answers in one."""
        raise ApiError("the answer broke off", kind="server_error", code="generation_failed")

    def piece(self, piece: ChoiceDelta) -> bytes:
        if piece.finish is not None:
            self._last = piece
        steps = self._runs.take(piece)
        self._measure(piece)
        found = [self._step(step) for step in steps[:-1]]
        if steps:
            cut = piece.finish in _CUT and steps[-1].does == "end"
            found.append(self._step(steps[-1], status="incomplete" if cut else "completed"))
        return b"".join(found)

    def _measure(self, piece: ChoiceDelta) -> None:
        """Log-probabilities wait for the text of their tokens; those of reasoning and of calls are not told."""
        silent = bool(piece.reasoning) or self._open.get("type") in ("reasoning", "function_call")
        if piece.logprobs and (piece.content or not silent):
            self._logprobs += [_logprob(each) for each in piece.logprobs]

    def end(self) -> bytes:
        last = self._last
        self.response = _ended(
            self._exchange, self._found, self.items, last.finish or "stop", last.usage or TokenUsage()
        )
        return self._event(f"response.{self.response['status']}", response=self.response)

    def error(self, error: ApiError) -> bytes:
        if not self._begun:
            return self._event("error", code=error.code, message=error.message, param=error.parameter)
        failure = {"code": _FAILURES.get(error.kind, "server_error"), "message": error.message}
        self.response = {**_response(self._exchange, self._found, "failed", self.items), "error": failure}
        return self._event("response.failed", response=self.response)

    def _step(self, step: BlockEvent, *, status: str = "completed") -> bytes:
        match step.does:
            case "begin":
                return self._begin(step)
            case "more":
                self._texts.append(step.text)
                return self._more(step)
            case "end":
                return self._end(step, status)

    def _begin(self, step: BlockEvent) -> bytes:
        self._texts.clear()
        part: dict[str, Any] | None = None
        match step.kind:
            case "reasoning":
                self._open = {**reasoning_item(new_id("rs"), ""), "content": []}
                part = content_part("reasoning_text", "")
            case "text":
                self._open = {**message_item(new_id("msg"), "", []), "content": []}
                part = content_part("output_text", "")
            case "call":
                assert step.call is not None
                self._open = function_call_item(new_id("fc"), step.call.id or "", step.call.name or "", "")
        added = {**self._open, "status": "in_progress"}
        found = self._event("response.output_item.added", output_index=len(self.items), item=added)
        if part is not None:
            found += self._in_item("response.content_part.added", content_index=0, part=part)
        return found

    def _more(self, step: BlockEvent) -> bytes:
        match step.kind:
            case "reasoning":
                return self._in_item("response.reasoning_text.delta", content_index=0, delta=step.text)
            case "text":
                new = self._logprobs[self._unsent :]
                self._unsent = len(self._logprobs)
                return self._in_item("response.output_text.delta", content_index=0, delta=step.text, logprobs=new)
            case "call":
                return self._in_item("response.function_call_arguments.delta", delta=step.text)

    def _end(self, step: BlockEvent, status: str) -> bytes:
        text = "".join(self._texts)
        id = self._open["id"]
        match step.kind:
            case "reasoning":
                item = reasoning_item(id, text)
                found = self._in_item("response.reasoning_text.done", content_index=0, text=text)
            case "text":
                item = message_item(id, text, self._logprobs)
                told = self._logprobs
                found = self._in_item("response.output_text.done", content_index=0, text=text, logprobs=told)
            case "call":
                name = self._open["name"]
                item = function_call_item(id, self._open["call_id"], name, text)
                found = self._in_item("response.function_call_arguments.done", name=name, arguments=text)
        if step.kind != "call":
            found += self._in_item("response.content_part.done", content_index=0, part=item["content"][0])
        item["status"] = status
        found += self._event("response.output_item.done", output_index=len(self.items), item=item)
        self.items.append(item)
        self._open = {}
        if step.kind == "text":
            self._logprobs, self._unsent = [], 0
        return found

    def _in_item(self, name: str, /, **fields: Any) -> bytes:
        return self._event(name, item_id=self._open["id"], output_index=len(self.items), **fields)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        event = {"type": name, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (name.encode(), self._encode(event))
