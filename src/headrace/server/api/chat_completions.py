"""`/v1/chat/completions`: its parameters, and its answers, whole and as chunks.

Owns the table of the endpoint, the checking of messages, and the shapes of the answers. What is asked comes out as an
TextRequest; what is answered comes in as Pieces and Choices.
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
    AUDIO,
    EXTRAS,
    HOSTED,
    SAMPLING,
    STREAM,
    build_sampling,
    check_count,
    check_min_tokens,
    extra_fields,
    guided_grammar,
    guided_parameter,
    parse_stops,
)
from headrace.server.http.body_parameters import Parameter, ParameterTable, parse_body

ToolName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class ChatContentPart(Struct, forbid_unknown_fields=True):
    """A part of a message's content."""

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


class ChatMessage(Struct, forbid_unknown_fields=True):
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


class ChatToolChoice(Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: ChatFunctionName


class ChatSchemaFormat(Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1, max_length=128)]
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class ChatResponseFormat(Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: ChatSchemaFormat | None = None


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool = False


CHAT_PARAMETERS: Final[ParameterTable] = {
    "model": Parameter("The model that answers; the configured one where none is named.", str),
    "messages": Parameter("The conversation so far.", Annotated[list[ChatMessage], Meta(min_length=1)], required=True),
    "max_completion_tokens": Parameter("Most tokens of an answer, reasoning included.", Annotated[int, Meta(ge=1)]),
    "max_tokens": Parameter("The older name of max_completion_tokens.", Annotated[int, Meta(ge=1)]),
    **SAMPLING,
    "logprobs": Parameter("Whether the tokens' log-probabilities are reported.", bool),
    "top_logprobs": Parameter("How many likeliest tokens are reported at each place.", Annotated[int, Meta(ge=0)]),
    "tools": Parameter("Functions that the model may call.", list[ChatTool]),
    "tool_choice": Parameter(
        "auto, none, required, or a function that must be called.", Literal["auto", "none", "required"] | ChatToolChoice
    ),
    "parallel_tool_calls": Parameter("Whether several calls may be made in one answer.", bool),
    "response_format": Parameter("Text, a JSON object, or JSON of a schema.", ChatResponseFormat),
    "stream": STREAM["stream"],
    "stream_options": Parameter("include_usage: a last chunk with the usage.", StreamOptions),
    "reasoning_effort": Parameter(
        "`none` asks a model that can reason first not to; every other asks it to.",
        Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"],
    ),
    **EXTRAS,
    **HOSTED,
    **AUDIO,
    "functions": Parameter("", refused="it was replaced by tools"),
    "function_call": Parameter("", refused="it was replaced by tool_choice"),
}


def read_chat_request(body: bytes, headers: Mapping[str, str], limits: RequestLimits) -> TextRequest:
    return build_chat_request(parse_body(body, CHAT_PARAMETERS), headers, limits)


def build_chat_request(given: dict[str, Any], headers: Mapping[str, str], limits: RequestLimits) -> TextRequest:
    """`given`: converted by the table."""
    tools = _tools(given.get("tools") or [], limits)
    choosing, only = _choosing(given.get("tool_choice"), tools)
    options: StreamOptions | None = given.get("stream_options")
    if options is not None and not given.get("stream"):
        raise invalid_request("'stream_options' goes with stream: true", "stream_options")
    most = given.get("max_completion_tokens", given.get("max_tokens"))
    check_min_tokens(given, most)
    n = check_count("n", given.get("n", 1), limits.choices)
    effort = given.get("reasoning_effort")
    return TextRequest(
        model=given.get("model", ""),
        messages=template_messages(given["messages"], limits),
        tools=tools,
        choosing=choosing,
        only_tool=only,
        parallel_calls=given.get("parallel_tool_calls", True),
        grammar=_grammar(given),
        grammar_of=guided_parameter(given) or "response_format",
        think=None if effort is None else effort != "none",
        sampling=_sampling(given, limits),
        max_tokens=most,
        stop=parse_stops(given.get("stop"), limits),
        n=n,
        stream=given.get("stream", False),
        include_usage=options is not None and options.include_usage,
        **extra_fields(given, headers),
    )


def template_messages(messages: Sequence[ChatMessage], limits: RequestLimits) -> list[dict[str, Any]]:
    """As chat templates take them."""
    check_count("messages", len(messages), limits.messages)
    return [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _message(message: ChatMessage, where: str) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": join_content(message.content, where)}
    if message.role == "tool" and message.tool_call_id is None:
        raise invalid_request(
            f"'{where}': a tool's message has the id of the call that it answers", f"{where}.tool_call_id"
        )
    if message.content is None and not message.tool_calls and message.refusal is None:
        raise invalid_request(f"'{where}': a message needs content", f"{where}.content")
    if message.content is None and message.refusal is not None:
        plain["content"] = message.refusal
    if message.function_call is not None or message.audio is not None:
        raise invalid_request(f"'{where}': neither function_call nor audio can be read", where)
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.reasoning_content or message.reasoning:
        plain["reasoning_content"] = message.reasoning_content or message.reasoning
    if message.tool_calls:
        if message.role != "assistant":
            raise invalid_request(f"'{where}': only the assistant calls tools", f"{where}.tool_calls")
        plain["tool_calls"] = [_call(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(message.tool_calls)]
    return plain


def _call(call: ChatToolCall, where: str) -> dict[str, Any]:
    if call.type != "function" or call.function is None:
        raise invalid_request(f"'{where}': only calls of functions can be read", where)
    try:
        arguments: object = msgspec.json.decode(call.function.arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        arguments = call.function.arguments
    if not isinstance(arguments, dict):
        arguments = call.function.arguments
    # Most templates write the arguments as JSON themselves.
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def join_content(content: str | list[ChatContentPart] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for place, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in ("text", "refusal", "input_text", "output_text") or text is None:
            raise invalid_request(
                f"'{where}.content[{place}]': only parts of text can be read", f"{where}.content[{place}]"
            )
        texts.append(text)
    return "\n".join(texts)


def _tools(tools: Sequence[ChatTool], limits: RequestLimits) -> tuple[Tool, ...]:
    check_count("tools", len(tools), limits.tools, least=0)
    found = tuple(
        Tool(tool.function.name, tool.function.description, tool.function.parameters, bool(tool.function.strict))
        for tool in tools
    )
    check_unique_tools(found)
    return found


def check_unique_tools(tools: Sequence[Tool]) -> None:
    names = [tool.name for tool in tools]
    for place, name in enumerate(names):
        if name in names[:place]:
            raise invalid_request(f"two tools are called '{name}'", f"tools[{place}].function.name")


def _choosing(choice: str | ChatToolChoice | None, tools: Sequence[Tool]) -> tuple[ToolChoiceMode, str | None]:
    if choice is None or choice == "auto":
        return "auto", None
    if choice == "none":
        return "none", None
    if not tools:
        raise invalid_request("'tool_choice' asks for a call, and there are no tools", "tool_choice")
    if isinstance(choice, ChatToolChoice):
        return "required", check_named_tool(choice.function.name, tools)
    return "required", None


def check_named_tool(name: str, tools: Sequence[Tool]) -> str:
    if all(tool.name != name for tool in tools):
        raise invalid_request(f"'tool_choice' names '{name[:100]}', which is none of the tools", "tool_choice")
    return name


def _grammar(given: Mapping[str, Any]) -> Grammar | None:
    wanted: ChatResponseFormat | None = given.get("response_format")
    other = guided_grammar(given)
    if wanted is None or wanted.type == "text":
        return other
    if other is not None:
        raise invalid_request(
            "'response_format' and a guided_* parameter cannot both hold an answer", "response_format"
        )
    if wanted.type == "json_object":
        return Grammar("json_object")
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        raise invalid_request(
            "'response_format' of the type json_schema needs a schema", "response_format.json_schema.schema"
        )
    return Grammar("json_schema", msgspec.json.encode(wanted.json_schema.schema).decode())


def _sampling(given: Mapping[str, Any], limits: RequestLimits) -> SamplingParams:
    top = given.get("top_logprobs")
    if top is not None and not given.get("logprobs"):
        raise invalid_request("'top_logprobs' goes with logprobs: true", "top_logprobs")
    if top is not None:
        check_count("top_logprobs", top, limits.logprobs, least=0)
    return build_sampling(given, logprobs=(top or 0) if given.get("logprobs") else None)


# Answers


def chat_body(exchange: Exchange, choices: Sequence[Choice]) -> dict[str, Any]:
    return {
        **_head(exchange, "chat.completion"),
        "choices": [_choice(choice) for choice in choices],
        "usage": chat_usage(combine_usages([choice.usage for choice in choices], exchange.asked.n)),
        "headrace": exchange.report([choice.usage for choice in choices]),
        **metadata_field(exchange),
    }


def metadata_field(exchange: Exchange) -> dict[str, Any]:
    """Handed back where it was given."""
    return {"metadata": dict(exchange.asked.metadata)} if exchange.asked.metadata else {}


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
            # Of `prediction`, which is refused. The engine's own drafts are no part of what a client pays for.
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def usages_by_index(usages: Mapping[int, TokenUsage]) -> list[TokenUsage]:
    """Of choices that end in any order, by their places."""
    return [usages[index] for index in sorted(usages)]


def _logprobs(found: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {"content": [_logprob(each) for each in found], "refusal": None}


def _logprob(each: TokenLogprob) -> dict[str, Any]:
    top = [{"token": text, "logprob": logprob, "bytes": list(raw)} for text, raw, logprob in each.top]
    return {"token": each.text, "logprob": each.logprob, "bytes": list(each.bytes), "top_logprobs": top}


class ChunkStream:
    """What the streams of chats and of completions have in common: the head that all chunks begin with, and the end."""

    def __init__(self, exchange: Exchange, head: dict[str, Any]) -> None:
        self._exchange = exchange
        self._head = head
        self._encode = msgspec.json.Encoder().encode
        # What all chunks begin with is written once: it is most of a chunk.
        usage = b',"usage":null' if exchange.asked.include_usage else b""
        self._before = b"data: " + self._encode(head)[:-1] + b',"choices":['
        self._after = b"]" + usage + b"}\n\n"
        self._usages: dict[int, TokenUsage] = {}

    def end(self) -> bytes:
        exchange = self._exchange
        last = b""
        if exchange.asked.include_usage:
            usages = usages_by_index(self._usages)
            chunk: dict[str, Any] = {
                **self._head,
                "choices": [],
                "usage": chat_usage(combine_usages(usages, exchange.asked.n)),
                "headrace": exchange.report(usages),
                **metadata_field(exchange),
            }
            last = b"data: " + self._encode(chunk) + b"\n\n"
        return last + b"data: [DONE]\n\n"

    def restart(self, piece: RestartDelta) -> bytes:
        """A chunk without choices, for clients that know of it: what came of this choice before does not count."""
        told = {"restart": {"index": piece.index, "model": piece.variant, "why": piece.why}}
        return b"data: " + self._encode({**self._head, "choices": [], "headrace": told}) + b"\n\n"

    def error(self, error: ApiError) -> bytes:
        return b"data: " + self._encode(error.openai()) + b"\n\n"


class ChatStream(ChunkStream):
    """The chunks of one exchange, as server-sent events."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange, _head(exchange, "chat.completion.chunk"))
        # What is before and after a token's text, by the choice.
        self._plain: dict[int, bytes] = {}
        self._plain_after = b'},"logprobs":null,"finish_reason":null}' + self._after

    def begin(self) -> bytes:
        first = {"role": "assistant", "content": "", "refusal": None}
        return b"".join(self._chunk(index, first) for index in range(self._exchange.asked.n))

    def piece(self, piece: ChoiceDelta) -> bytes:
        if piece.content and not (piece.calls or piece.reasoning or piece.logprobs is not None or piece.finish):
            # A token's text, as nearly all pieces are: the same bytes as below, without the objects.
            before = self._plain.get(piece.index)
            if before is None:
                before = self._plain[piece.index] = self._before + b'{"index":%d,"delta":{"content":' % piece.index
            return before + self._encode(piece.content) + self._plain_after
        delta: dict[str, Any] = {}
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.content or piece.logprobs:
            delta["content"] = piece.content
        if piece.calls:
            delta["tool_calls"] = [_call_delta(call) for call in piece.calls]
        found = b""
        if delta:
            found = self._chunk(piece.index, delta, logprobs=_logprobs(piece.logprobs))
        if piece.finish is not None:
            found += self._chunk(piece.index, {}, finish=piece.finish)
            self._usages[piece.index] = piece.usage or TokenUsage()
        return found

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
