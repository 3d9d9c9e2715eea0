"""`/v1/chat/completions`: reads a request into a TextRequest and writes its answer, whole or as chunks.

Holds the endpoint's parameter table, the checks of messages, and the shapes of answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from headrace.config import RequestLimits
from headrace.engine.interface.grammar_spec import Grammar
from headrace.engine.interface.sampling import SamplingParams
from headrace.gateway.api_errors import ApiError, invalid_request
from headrace.gateway.requests.text_request import (
    Choice,
    ChoiceDelta,
    NoteDelta,
    RestartDelta,
    TextRequest,
    TokenLogprob,
    TokenUsage,
    Tool,
    ToolCallDelta,
    ToolChoiceMode,
    combine_usages,
)
from headrace.gateway.serving.exchange import Exchange
from headrace.server.api.common_parameters import (
    EXTRAS,
    MODEL,
    REASONING,
    SAMPLING,
    STREAM,
    TRUNCATION,
    build_sampling,
    check_count,
    check_min_tokens,
    check_stream_options,
    extra_fields,
    guided_parameter,
    json_schema_grammar,
    parse_stops,
    read_thinking,
    select_grammar,
)
from headrace.server.api.foreign_parameters import CHAT, with_foreign
from headrace.server.api.image_parts import MessageContent, chat_image
from headrace.server.api.text_endpoint import Dialect, text_route
from headrace.server.api.tool_parameters import (
    ToolName,
    check_allowed_tools,
    check_has_tools,
    check_named_tool,
    check_tools,
    decode_arguments,
)
from headrace.server.endpoint_context import EndpointContext
from headrace.server.http.body_parameters import Parameter, ParameterTable, parse_body
from headrace.server.http.route_table import Route
from headrace.server.http.unknown_fields import STRICT, UnknownFields


class ChatContentPart(Struct, forbid_unknown_fields=True):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    cache_control: Any = None


class ChatCalledFunction(Struct, forbid_unknown_fields=True):
    name: str
    arguments: str = "{}"


class ChatToolCall(Struct, forbid_unknown_fields=True):
    id: str
    function: ChatCalledFunction | None = None
    type: str = "function"
    index: int | None = None
    custom: Any = None


class ChatInputMessage(Struct, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ChatContentPart] | None = None
    name: str | None = None
    tool_calls: list[ChatToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    audio: Any = None
    annotations: list[Any] | None = None
    function_call: Any = None
    prefix: Literal[False] | None = None  # true would continue this message, which is not supported


class ChatFunction(Struct, forbid_unknown_fields=True):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: ChatFunction


class ChatFunctionName(Struct, forbid_unknown_fields=True):
    name: str


class ChatToolChoiceFunction(Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    function: ChatFunctionName


class ChatAllowedTool(Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: ChatFunctionName


class ChatAllowedTools(Struct, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: list[ChatAllowedTool]


class ChatToolChoiceAllowed(Struct, tag_field="type", tag="allowed_tools", forbid_unknown_fields=True):
    allowed_tools: ChatAllowedTools


ChatToolChoice = Literal["auto", "none", "required"] | ChatToolChoiceFunction | ChatToolChoiceAllowed


class ChatSchemaFormat(Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1, max_length=128)]
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class ChatResponseFormat(Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: ChatSchemaFormat | None = None
    schema: dict[str, Any] | None = None  # as llama.cpp and Together take it, with any type but text


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False


class Prediction(Struct, forbid_unknown_fields=True):
    type: Literal["content"]
    content: str | list[ChatContentPart]


_PARAMETERS: Final[ParameterTable] = {
    "model": MODEL,
    "messages": Parameter(
        "Messages of the conversation.",
        Annotated[list[ChatInputMessage], Meta(min_length=1)],
        required=True,
        limit="messages",
    ),
    "max_completion_tokens": Parameter("Maximum tokens of an answer, including reasoning.", Annotated[int, Meta(ge=1)]),
    "max_tokens": Parameter("Older name of max_completion_tokens.", Annotated[int, Meta(ge=1)]),
    **SAMPLING,
    "logprobs": Parameter("Returns the log-probabilities of the answer's tokens.", bool),
    "top_logprobs": Parameter("Number of most likely tokens to return at each position.", Annotated[int, Meta(ge=0)]),
    "tools": Parameter("Functions that the model may call.", list[ChatTool], limit="tools"),
    "tool_choice": Parameter(
        "auto, none, required, a function that the model must call, or allowed_tools: a subset of the tools.",
        ChatToolChoice,
    ),
    "parallel_tool_calls": Parameter("Allows several calls in one answer.", bool),
    "response_format": Parameter(
        "Format of the answer: text, a JSON object, or JSON that matches a schema.", ChatResponseFormat
    ),
    "stream": STREAM["stream"],
    "stream_options": Parameter("include_usage: sends a last chunk with the usage.", StreamOptions),
    **REASONING,
    "prediction": Parameter(
        "Text that much of the answer may repeat. The engine uses it as draft tokens; the answer stays the same.",
        Prediction,
    ),
    **EXTRAS,
    **CHAT,
    "truncation": TRUNCATION,
    "functions": Parameter("", unsupported="use `tools`"),
    "function_call": Parameter("", unsupported="use `tool_choice`"),
}
CHAT_PARAMETERS: Final = with_foreign(_PARAMETERS)


def read_chat_request(
    body: bytes, headers: Mapping[str, str], limits: RequestLimits, unknown: UnknownFields = STRICT
) -> TextRequest:
    return build_chat_request(parse_body(body, CHAT_PARAMETERS, limits, unknown), headers, limits)


def build_chat_request(given: dict[str, Any], headers: Mapping[str, str], limits: RequestLimits) -> TextRequest:
    """Build a request from parameters that the table has converted."""
    tools = _read_tools(given["tools"], limits) if "tools" in given else ()
    choosing, only, allowed = _read_tool_choice(given.get("tool_choice"), tools)
    check_stream_options(given)
    options: StreamOptions | None = given.get("stream_options")
    max_tokens = given.get("max_completion_tokens", given.get("max_tokens"))
    check_min_tokens(given, max_tokens)
    n = check_count("n", given.get("n", 1), limits.choices)
    think, hints = read_thinking(given)
    prediction: Prediction | None = given.get("prediction")
    return TextRequest(
        model=given.get("model", ""),
        messages=template_messages(given["messages"], limits),
        tools=tools,
        choosing=choosing,
        only_tool=only,
        allowed_tools=allowed,
        parallel_calls=given.get("parallel_tool_calls", True),
        grammar=_read_grammar(given),
        grammar_of=guided_parameter(given) or "response_format",
        think=think,
        show_reasoning=given.get("include_reasoning", True),
        template_hints=hints,
        prediction="" if prediction is None else join_content(prediction.content, "prediction"),
        sampling=read_sampling(given, limits),
        max_tokens=max_tokens,
        stop=parse_stops(given.get("stop"), limits),
        n=n,
        stream=given.get("stream", False),
        include_usage=options is not None and options.include_usage,
        continuous_usage=options is not None and options.continuous_usage_stats,
        **extra_fields(given, headers),
    )


def template_messages(messages: Sequence[ChatInputMessage], limits: RequestLimits) -> list[dict[str, Any]]:
    """Return messages in the shape that chat templates take."""
    check_count("messages", len(messages), limits.messages)
    return [_template_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _template_message(message: ChatInputMessage, where: str) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, **_content(message.content, role, where)}
    if message.role == "tool" and message.tool_call_id is None:
        raise invalid_request(f"'{where}' has the role tool but no tool_call_id.", f"{where}.tool_call_id")
    if message.content is None and message.role != "assistant":
        raise invalid_request(f"'{where}' has no content.", f"{where}.content")
    if message.content is None and message.refusal is not None:
        plain["content"] = message.refusal
    if message.function_call is not None or message.audio is not None:
        raise invalid_request(f"'{where}' has function_call or audio, which are not supported.", where)
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.reasoning_content or message.reasoning:
        plain["reasoning_content"] = message.reasoning_content or message.reasoning
    if message.tool_calls:
        if message.role != "assistant":
            raise invalid_request(f"'{where}' has tool_calls but is not an assistant message.", f"{where}.tool_calls")
        plain["tool_calls"] = [
            _template_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls)
        ]
    return plain


def _template_call(call: ChatToolCall, where: str) -> dict[str, Any]:
    if call.type != "function" or call.function is None:
        raise invalid_request(f"'{where}' is of type '{call.type[:100]}'. Expected a function call.", where)
    decoded = decode_arguments(call.function.arguments)  # most templates write the JSON themselves
    arguments = call.function.arguments if decoded is None else decoded
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def join_content(content: str | list[ChatContentPart] | None, where: str) -> str:
    return _content(content, "", where)["content"]


def _content(content: str | list[ChatContentPart] | None, role: str, where: str) -> dict[str, Any]:
    if content is None or isinstance(content, str):
        return {"content": content or ""}
    found = MessageContent()
    for index, part in enumerate(content):
        path = f"{where}.content[{index}]"
        if part.type == "image_url":
            found.add_image(chat_image(part.image_url, f"{path}.image_url"))
            continue
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in ("text", "refusal", "input_text", "output_text") or text is None:
            raise invalid_request(
                f"'{path}' is of type '{part.type[:100]}'. Expected text or, for a model that reads images, image_url.",
                path,
            )
        found.add_text(text, path)
    return found.fields(role, where)


def _read_tools(tools: Sequence[ChatTool], limits: RequestLimits) -> tuple[Tool, ...]:
    functions = [tool.function for tool in tools]
    return check_tools(
        [Tool(each.name, each.description, each.parameters, bool(each.strict)) for each in functions],
        limits,
        name_field="function.name",
    )


def _read_tool_choice(
    choice: ChatToolChoice | None, tools: Sequence[Tool]
) -> tuple[ToolChoiceMode, str | None, tuple[str, ...] | None]:
    """Return the mode, the tool that must be called if it must be a particular one, and those that may be called."""
    if choice is None or choice == "auto":
        return "auto", None, None
    if choice == "none":
        return "none", None, None
    check_has_tools(tools)
    if isinstance(choice, ChatToolChoiceFunction):
        return "required", check_named_tool(choice.function.name, tools), None
    if isinstance(choice, ChatToolChoiceAllowed):
        allowed = choice.allowed_tools
        return allowed.mode, None, check_allowed_tools([each.function.name for each in allowed.tools], tools)
    return "required", None, None


def _read_grammar(given: Mapping[str, Any]) -> Grammar | None:
    format: ChatResponseFormat | None = given.get("response_format")
    grammar: Grammar | None = None
    if format is not None and format.schema is not None and format.type != "text":
        grammar = json_schema_grammar(format.schema)
    elif format is not None and format.type == "json_object":
        grammar = Grammar("json_object")
    elif format is not None and format.type == "json_schema":
        if format.json_schema is None or format.json_schema.schema is None:
            raise invalid_request(
                "'response_format' of type json_schema has no schema. Add 'response_format.json_schema.schema'.",
                "response_format.json_schema.schema",
            )
        grammar = json_schema_grammar(format.json_schema.schema)
    return select_grammar(given, grammar, "response_format")


def read_sampling(given: Mapping[str, Any], limits: RequestLimits) -> SamplingParams:
    top = given.get("top_logprobs")
    if top is not None:
        if not given.get("logprobs"):
            raise invalid_request("'top_logprobs' requires `logprobs: true`.", "top_logprobs")
        check_count("top_logprobs", top, limits.logprobs, least=0)
    return build_sampling(given, logprobs=(top or 0) if given.get("logprobs") else None)


# Answers


def chat_body(exchange: Exchange, choices: Sequence[Choice]) -> dict[str, Any]:
    return {
        **_head(exchange, "chat.completion"),
        "choices": [_choice(choice) for choice in choices],
        "usage": chat_usage(combine_usages([choice.usage for choice in choices], exchange.text_request.n)),
        "headrace": exchange.report([choice.usage for choice in choices]),
        **metadata_field(exchange),
    }


def metadata_field(exchange: Exchange) -> dict[str, Any]:
    """Return the request's metadata as a field of the answer, if it has any."""
    return {"metadata": dict(exchange.text_request.metadata)} if exchange.text_request.metadata else {}


def _choice(choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.content, "refusal": None}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.calls:
        message["content"] = choice.content or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.calls
        ]
    return {
        "index": choice.index,
        "message": message,
        "logprobs": _logprobs(choice.logprobs),
        "finish_reason": choice.finish,
    }


def _head(exchange: Exchange, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{exchange.id}",
        "object": kind,
        "created": exchange.created,
        "model": exchange.model,
        "system_fingerprint": exchange.fingerprint,
    }


def chat_usage(usage: TokenUsage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "audio_tokens": 0,
            # The client does not pay for draft tokens, whether they come from `prediction` or from the engine.
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def _logprobs(logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
    if logprobs is None:
        return None
    return {"content": [logprob_json(each) for each in logprobs], "refusal": None}


def logprob_json(each: TokenLogprob) -> dict[str, Any]:
    """Return a token with the most likely ones, if they are requested, and itself among them: it may be one more."""
    top: list[dict[str, Any]] = [
        {"token": text, "logprob": logprob, "bytes": list(raw)} for text, raw, logprob in each.top
    ]
    if top and each.bytes not in [raw for _, raw, _ in each.top]:
        top.append({"token": each.text, "logprob": each.logprob, "bytes": list(each.bytes)})
    return {"token": each.text, "logprob": each.logprob, "bytes": list(each.bytes), "top_logprobs": top}


class ChunkStream:
    """The common part of chat and completion streams: the head of every chunk, the end, restarts and errors."""

    def __init__(self, exchange: Exchange, head: dict[str, Any]) -> None:
        self._exchange = exchange
        self._head = head
        self._encode = msgspec.json.Encoder().encode
        # The head is most of a chunk, so it is encoded once.
        usage = b',"usage":null' if exchange.text_request.include_usage else b""
        self._before = b"data: " + self._encode(head)[:-1] + b',"choices":['
        self._after = b"]" + usage + b"}\n\n"
        self._usages: dict[int, TokenUsage] = {}
        self._is_continuous = exchange.text_request.include_usage and exchange.text_request.continuous_usage
        self._output_tokens = 0

    def _count(self, piece: ChoiceDelta) -> None:
        """Put the usage so far into the chunks that follow."""
        self._output_tokens += piece.tokens
        usage = TokenUsage(self._exchange.prompt_tokens, self._output_tokens)
        self._after = b'],"usage":' + self._encode(chat_usage(usage)) + b"}\n\n"

    def end(self) -> bytes:
        exchange = self._exchange
        last = b""
        if exchange.text_request.include_usage:
            usages = [self._usages[index] for index in sorted(self._usages)]
            chunk: dict[str, Any] = {
                **self._head,
                "choices": [],
                "usage": chat_usage(combine_usages(usages, exchange.text_request.n)),
                "headrace": exchange.report(usages),
                **metadata_field(exchange),
            }
            last = b"data: " + self._encode(chunk) + b"\n\n"
        return last + b"data: [DONE]\n\n"

    def restart(self, piece: RestartDelta) -> bytes:
        """Write a chunk without choices that tells clients to discard what this choice has sent so far."""
        report = {"restart": {"index": piece.index, "model": piece.variant, "why": piece.why}}
        return b"data: " + self._encode({**self._head, "choices": [], "headrace": report}) + b"\n\n"

    def note(self, note: NoteDelta) -> bytes:
        """Write a chunk without text whose `headrace` field has the event. Clients expect a choice in every chunk."""
        choice: dict[str, Any] = {"index": note.index, "delta": {}, "logprobs": None, "finish_reason": None}
        chunk = {**self._head, "choices": [choice], "headrace": {note.event: note.data}}
        return b"data: " + self._encode(chunk) + b"\n\n"

    def error(self, error: ApiError) -> bytes:
        return b"data: " + self._encode(error.openai()) + b"\n\n"


_TEXT_END: Final = b'},"logprobs":null,"finish_reason":null}'


class ChatStream(ChunkStream):
    """Writes the chunks of one chat as server-sent events."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange, _head(exchange, "chat.completion.chunk"))
        self._text_prefixes: dict[int, bytes] = {}  # the bytes before a token's text, by choice

    def begin(self) -> bytes:
        first = {"role": "assistant", "content": "", "refusal": None}
        return b"".join(self._chunk(index, first) for index in range(self._exchange.text_request.n))

    def piece(self, piece: ChoiceDelta) -> bytes:
        if self._is_continuous:
            self._count(piece)
        if piece.content and not (piece.calls or piece.reasoning or piece.logprobs is not None or piece.finish):
            # Fast path for nearly every token: the same bytes as below, without building objects.
            before = self._text_prefixes.get(piece.index)
            if before is None:
                before = self._text_prefixes[piece.index] = (
                    self._before + b'{"index":%d,"delta":{"content":' % piece.index
                )
            return before + self._encode(piece.content) + _TEXT_END + self._after
        delta: dict[str, Any] = {}
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.content or piece.logprobs:
            delta["content"] = piece.content
        if piece.calls:
            delta["tool_calls"] = [_call_delta(call) for call in piece.calls]
        data = b""
        if delta:
            data = self._chunk(piece.index, delta, logprobs=_logprobs(piece.logprobs))
        if piece.finish is not None:
            data += self._chunk(piece.index, {}, finish=piece.finish)
            self._usages[piece.index] = piece.usage or TokenUsage()
        return data

    def _chunk(
        self, index: int, delta: dict[str, Any], *, logprobs: dict[str, Any] | None = None, finish: str | None = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return self._before + self._encode(choice) + self._after


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


CHAT_DIALECT: Final = Dialect("chat", CHAT_PARAMETERS, read_chat_request, chat_body, ChatStream, relays=True)


def routes(context: EndpointContext) -> tuple[Route, ...]:
    return (text_route(context, "/v1/chat/completions", CHAT_DIALECT, "Answer a chat."),)
