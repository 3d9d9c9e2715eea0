"""`/v1/messages`, as Anthropic's clients speak it: its parameters, and its answers, whole and as events.

Owns the tables of the endpoint and of its counting of tokens, and the way of content blocks into messages for chat
templates and back. What is asked comes out as an TextRequest; what is answered comes in as Pieces and Choices. The
header `anthropic-version` is not looked at: every version reads the same.

    user        text, tool_result                      ▶ tool messages, then a user message
    assistant   thinking, text, tool_use               ▶ one assistant message
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

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
    Tool,
    ToolCallDelta,
    ToolChoiceMode,
)
from headrace.gateway.serving.exchange import Exchange
from headrace.server.api.block_events import BlockEvent, BlockSplitter
from headrace.server.api.chat_completions import ToolName, check_named_tool
from headrace.server.api.common_parameters import (
    EXTRAS,
    SAMPLING,
    STREAM,
    Stop,
    build_sampling,
    check_count,
    extra_fields,
    guided_grammar,
)
from headrace.server.http.body_parameters import Parameter, ParameterTable, convert_value, parse_body

# Of our thinking blocks. Reasoning is handed out whole and taken back as it comes, so there is nothing to sign.
SIGNATURE: Final = "headrace"
_RAW: Final = "_raw"  # in place of a call's input: arguments that are no JSON object, as the model wrote them


class TextBlock(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    text: str
    cache_control: Any = None  # of every block: prefixes are found without it
    citations: Any = None


class ToolUseBlock(Struct, tag_field="type", tag="tool_use", forbid_unknown_fields=True):
    id: str
    name: str
    input: dict[str, Any]
    cache_control: Any = None
    caller: Any = None


class ThinkingBlock(Struct, tag_field="type", tag="thinking", forbid_unknown_fields=True):
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(Struct, tag_field="type", tag="redacted_thinking", forbid_unknown_fields=True):
    data: str = ""  # another service's, and closed to us: nothing of it reaches the model


class ImageBlock(Struct, tag_field="type", tag="image"):
    pass


class DocumentBlock(Struct, tag_field="type", tag="document"):
    pass


class SearchResultBlock(Struct, tag_field="type", tag="search_result"):
    pass


ResultBlock = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock


class ToolResultBlock(Struct, tag_field="type", tag="tool_result", forbid_unknown_fields=True):
    tool_use_id: str
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = None
    cache_control: Any = None


ContentBlock = (
    TextBlock
    | ToolUseBlock
    | ToolResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
)


class AnthropicMessage(Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class AnthropicTool(Struct, forbid_unknown_fields=True):
    name: ToolName
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None  # arguments come as they are written in any case
    cache_control: Any = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None
    input_examples: list[Any] | None = None


class AnthropicToolChoiceAuto(Struct, tag_field="type", tag="auto", forbid_unknown_fields=True):
    disable_parallel_tool_use: bool = False


class AnthropicToolChoiceAny(Struct, tag_field="type", tag="any", forbid_unknown_fields=True):
    disable_parallel_tool_use: bool = False


class AnthropicToolChoiceTool(Struct, tag_field="type", tag="tool", forbid_unknown_fields=True):
    name: str
    disable_parallel_tool_use: bool = False


class AnthropicToolChoiceNone(Struct, tag_field="type", tag="none", forbid_unknown_fields=True):
    pass


AnthropicToolChoice = (
    AnthropicToolChoiceAuto | AnthropicToolChoiceAny | AnthropicToolChoiceTool | AnthropicToolChoiceNone
)
ThinkingDisplay = Literal["summarized"]  # what there is to show is shown; leaving it out ("omitted") is not offered


class ThinkingEnabled(Struct, tag_field="type", tag="enabled", forbid_unknown_fields=True):
    budget_tokens: Annotated[int, Meta(ge=1)]
    display: ThinkingDisplay | None = None


class ThinkingAdaptive(Struct, tag_field="type", tag="adaptive", forbid_unknown_fields=True):
    display: ThinkingDisplay | None = None


class ThinkingDisabled(Struct, tag_field="type", tag="disabled", forbid_unknown_fields=True):
    pass


class OutputFormat(Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    schema: dict[str, Any]


class OutputConfig(Struct, forbid_unknown_fields=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class AnthropicMetadata(Struct, forbid_unknown_fields=True):
    user_id: Annotated[str, Meta(max_length=512)] | None = None


# What a prompt follows from.
_PROMPT: Final = {
    "model": Parameter("The model that answers; the configured one where none is named.", str),
    "messages": Parameter(
        "The conversation so far.", Annotated[list[AnthropicMessage], Meta(min_length=1)], required=True
    ),
    "system": Parameter("What stands before the conversation.", str | list[TextBlock]),
    "tools": Parameter("Tools that the model may call: name, description and input_schema.", list[dict[str, Any]]),
    "tool_choice": Parameter("auto, any, tool (with its name) or none.", AnthropicToolChoice),
    "thinking": Parameter(
        "enabled, disabled or adaptive, for models that can reason first; disabled where it is not given. The budget "
        "is not held apart: reasoning counts toward max_tokens.",
        ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled,
    ),
    "output_config": Parameter(
        "format: holds the answer to a JSON schema. effort: goes to the chat template, as reasoning_effort.",
        OutputConfig,
    ),
    "output_format": Parameter("The older name of output_config.format.", OutputFormat),
    "cache_control": Parameter("Accepted for clients that send it; common prefixes are found without it.", Any),
    "speed": Parameter("fast: the same as profile: fast.", Literal["standard", "fast"]),
    "chat_template_kwargs": EXTRAS["chat_template_kwargs"],
    "container": Parameter("", refused="no code is run here"),
    "mcp_servers": Parameter("", refused="the server calls no tools itself", harmless=([],)),
    "context_management": Parameter(
        "", refused="the conversation is taken as it is sent", harmless=({}, {"edits": []})
    ),
    "compaction": Parameter("", refused="the conversation is taken as it is sent"),
    "user_profile_id": Parameter("", refused="there are no user profiles; use metadata.user_id"),
}

MESSAGE_PARAMETERS: Final[ParameterTable] = {
    **_PROMPT,
    "max_tokens": Parameter("Most tokens of the answer, thinking included.", Annotated[int, Meta(ge=1)], required=True),
    "stop_sequences": Parameter("Texts at which the answer ends, before them.", list[Stop]),
    "stream": STREAM["stream"],
    "temperature": SAMPLING["temperature"],
    "top_p": SAMPLING["top_p"],
    "metadata": Parameter("user_id: whom the request is for; kept in the log.", AnthropicMetadata),
    "service_tier": Parameter("", refused="use `priority` and `surface`", harmless=("auto", "standard_only")),
    "inference_geo": Parameter("", refused="it is answered where the server runs"),
    "diagnostics": Parameter("", refused="there are none"),
    "fallbacks": Parameter("", refused="the model that is named answers"),
    "fallback_credit_token": Parameter("", refused="there are no credits"),
    "billing_policy": Parameter("", refused="there is no billing"),
    "thread": Parameter("", refused="there are no threads; send the conversation"),
    # Headrace's own.
    **{name: SAMPLING[name] for name in ("seed", "frequency_penalty", "presence_penalty", "logit_bias")},
    **{name: each for name, each in EXTRAS.items() if name not in ("user", "safety_identifier", "metadata")},
}

COUNT_TOKENS_PARAMETERS: Final[ParameterTable] = _PROMPT


def read_message_request(body: bytes, headers: Mapping[str, str], limits: RequestLimits) -> TextRequest:
    given = parse_body(body, MESSAGE_PARAMETERS)
    asked = build_message_request(given, headers, limits)
    assert asked.messages is not None
    if asked.messages[-1]["role"] == "assistant":
        message = "the last message is the assistant's; an answer that is begun already cannot be gone on with"
        raise invalid_request(message, f"messages[{len(given['messages']) - 1}]")
    return asked


def read_count_request(body: bytes, headers: Mapping[str, str], limits: RequestLimits) -> TextRequest:
    """For `/v1/messages/count_tokens`: what is asked is only a prompt."""
    return build_message_request(parse_body(body, COUNT_TOKENS_PARAMETERS), headers, limits)


def build_message_request(given: dict[str, Any], headers: Mapping[str, str], limits: RequestLimits) -> TextRequest:
    """`given`: converted by one of the tables."""
    stops = check_count("stop_sequences", len(given.get("stop_sequences", ())), limits.stop, least=0)
    tools = _tools(given.get("tools", []), limits)
    choice: AnthropicToolChoice | None = given.get("tool_choice")
    choosing, only = _choosing(choice, tools)
    metadata: AnthropicMetadata | None = given.get("metadata")
    config: OutputConfig = given.get("output_config") or OutputConfig()
    own = {**given, "metadata": None, "user": None if metadata is None else metadata.user_id}
    if given.get("speed") == "fast":
        own.setdefault("profile", "fast")
    if config.effort is not None:
        own["chat_template_kwargs"] = {"reasoning_effort": config.effort, **given.get("chat_template_kwargs", {})}
    return TextRequest(
        model=given.get("model", ""),
        messages=_messages(given.get("system"), given["messages"], limits),
        tools=tools,
        choosing=choosing,
        only_tool=only,
        parallel_calls=choice is None
        or isinstance(choice, AnthropicToolChoiceNone)
        or not choice.disable_parallel_tool_use,
        grammar=_grammar(given, config),
        think=_think(given.get("thinking")),
        sampling=build_sampling(given, logprobs=None),
        max_tokens=given.get("max_tokens"),
        stop=tuple(given["stop_sequences"]) if stops else (),
        stream=given.get("stream", False),
        **extra_fields(own, headers),
    )


def _think(thinking: ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled | None) -> bool | None:
    if isinstance(thinking, ThinkingAdaptive):
        return None
    return isinstance(thinking, ThinkingEnabled)


def _grammar(given: Mapping[str, Any], config: OutputConfig) -> Grammar | None:
    other = guided_grammar(given)
    older: OutputFormat | None = given.get("output_format")
    if older is not None and config.format is not None:
        raise invalid_request(
            "'output_format' is the older name of output_config.format; send one of them", "output_format"
        )
    wanted = config.format or older
    if wanted is None:
        return other
    if other is not None:
        raise invalid_request(
            "an output format and a guided_* parameter cannot both hold an answer", "output_config.format"
        )
    return Grammar("json_schema", msgspec.json.encode(wanted.schema).decode())


def _tools(tools: Sequence[dict[str, Any]], limits: RequestLimits) -> tuple[Tool, ...]:
    check_count("tools", len(tools), limits.tools, least=0)
    found = tuple(_tool(tool, f"tools[{place}]") for place, tool in enumerate(tools))
    check_unique_names(found)
    return found


def _tool(given: dict[str, Any], where: str) -> Tool:
    kind = given.get("type")
    if kind is not None and kind != "custom":
        message = f"'{where}': there is no tool '{str(kind)[:100]}' here; a tool has a name and an input_schema"
        raise ApiError(message, parameter=f"{where}.type", code="unsupported_parameter")
    tool = convert_value(given, AnthropicTool, where)
    for name, asks in (
        ("defer_loading", tool.defer_loading),
        ("allowed_callers", tool.allowed_callers not in (None, ["direct"])),
        ("input_examples", tool.input_examples),
    ):
        if asks:
            path = f"{where}.{name}"
            raise ApiError(f"'{path}' is not supported", parameter=path, code="unsupported_parameter")
    return Tool(tool.name, tool.description, tool.input_schema, bool(tool.strict))


def check_unique_names(tools: Sequence[Tool]) -> None:
    names = [tool.name for tool in tools]
    for place, name in enumerate(names):
        if name in names[:place]:
            raise invalid_request(f"two tools are called '{name}'", f"tools[{place}].name")


def _choosing(choice: AnthropicToolChoice | None, tools: Sequence[Tool]) -> tuple[ToolChoiceMode, str | None]:
    if choice is None or isinstance(choice, AnthropicToolChoiceAuto):
        return "auto", None
    if isinstance(choice, AnthropicToolChoiceNone):
        return "none", None
    if not tools:
        raise invalid_request("'tool_choice' asks for a call, and there are no tools", "tool_choice")
    return "required", check_named_tool(choice.name, tools) if isinstance(choice, AnthropicToolChoiceTool) else None


# Messages


def _messages(
    system: str | list[TextBlock] | None, messages: Sequence[AnthropicMessage], limits: RequestLimits
) -> list[dict[str, Any]]:
    check_count("messages", len(messages), limits.messages)
    plain: list[dict[str, Any]] = []
    if system:
        _add(plain, {"role": "system", "content": system if isinstance(system, str) else _joined(system, "system")})
    calls: dict[str, str] = {}  # of the assistant's turn before: the names, by the ids that are not answered yet
    before = ""
    for place, message in enumerate(messages):
        where = f"messages[{place}].content"
        blocks = [TextBlock(message.content)] if isinstance(message.content, str) else message.content
        match message.role:
            case "assistant":
                turn = _assistant(blocks, where)
                if before != "assistant":
                    calls = {}
                calls |= {call["id"]: call["function"]["name"] for call in turn.get("tool_calls", ())}
                _add(plain, turn)
            case "user":
                for each in _user(blocks, where, calls):
                    _add(plain, each)
            case "system":
                _add(plain, {"role": "system", "content": _joined(blocks, where)})
        before = message.role
    return plain


def _add(plain: list[dict[str, Any]], turn: dict[str, Any]) -> None:
    """Turns of one role in a row are one turn; many templates know no other."""
    last = plain[-1] if plain else turn
    if not plain or last["role"] != turn["role"] or turn["role"] == "tool":
        plain.append(turn)
        return
    for name in ("content", "reasoning_content"):
        if turn.get(name):
            last[name] = f"{last[name]}\n{turn[name]}" if last.get(name) else turn[name]
    if "tool_calls" in turn:
        last["tool_calls"] = last.get("tool_calls", []) + turn["tool_calls"]


def _user(blocks: Sequence[ContentBlock], where: str, calls: dict[str, str]) -> list[dict[str, Any]]:
    if not blocks:
        raise invalid_request(f"'{where}': a message needs content", where)
    results: list[dict[str, Any]] = []
    rest: list[ContentBlock] = []
    for place, block in enumerate(blocks):
        if not isinstance(block, ToolResultBlock):
            rest.append(block)
            continue
        at = f"{where}[{place}]"
        name = calls.pop(block.tool_use_id, None)
        if name is None:
            message = f"'{at}': no call of the turn before has the id '{block.tool_use_id[:100]}' and no result yet"
            raise invalid_request(message, f"{at}.tool_use_id")
        content = block.content or ""
        text = content if isinstance(content, str) else _joined(content, f"{at}.content")
        if block.is_error:
            text = f"Error: {text}"  # templates have no other way to say so
        results.append({"role": "tool", "content": text, "tool_call_id": block.tool_use_id, "name": name})
    return [*results, {"role": "user", "content": _joined(rest, where)}] if rest else results


def _assistant(blocks: Sequence[ContentBlock], where: str) -> dict[str, Any]:
    rest: list[ContentBlock] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        match block:
            case ThinkingBlock():
                reasoning.append(block.thinking)
            case RedactedThinkingBlock():
                pass
            case ToolUseBlock():
                calls.append({"id": block.id, "type": "function", "function": _function(block)})
            case _:
                rest.append(block)
    turn: dict[str, Any] = {"role": "assistant", "content": _joined(rest, where)}
    if any(reasoning):
        turn["reasoning_content"] = "\n".join(reasoning)
    if calls:
        turn["tool_calls"] = calls
    return turn


def _function(block: ToolUseBlock) -> dict[str, Any]:
    raw = block.input.get(_RAW)
    return {"name": block.name, "arguments": raw if isinstance(raw, str) and len(block.input) == 1 else block.input}


def _joined(blocks: Sequence[ContentBlock], where: str) -> str:
    texts: list[str] = []
    for block in blocks:
        if not isinstance(block, TextBlock):
            kind = type(block).__struct_config__.tag
            if isinstance(block, (ImageBlock, DocumentBlock, SearchResultBlock)):
                raise invalid_request(f"'{where}': blocks of the type '{kind}' cannot be read, only text", where)
            raise invalid_request(f"'{where}': a block of the type '{kind}' does not belong here", where)
        texts.append(block.text)
    return "\n".join(texts)


# Answers


def message_body(exchange: Exchange, choices: Sequence[Choice]) -> dict[str, Any]:
    choice = choices[0]
    return {
        **_head(exchange),
        "content": _blocks(choice),
        "stop_reason": _stop_reason(exchange, choice.finish, choice.stop, bool(choice.calls), choice.usage),
        "stop_sequence": choice.stop,
        "usage": _usage(choice.usage),
        "headrace": exchange.report([choice.usage]),
    }


def _head(exchange: Exchange) -> dict[str, Any]:
    return {"id": f"msg_{exchange.id}", "type": "message", "role": "assistant", "model": exchange.model}


def _blocks(choice: Choice) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if choice.reasoning:
        blocks.append({"type": "thinking", "thinking": choice.reasoning, "signature": SIGNATURE})
    if choice.content:
        blocks.append({"type": "text", "text": choice.content})
    for call in choice.calls:
        found = decode_arguments(call.arguments)
        given = {_RAW: call.arguments} if found is None else found
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given})
    return blocks


def decode_arguments(arguments: str) -> dict[str, Any] | None:
    """A call's arguments; None where they are no JSON object. None at all are an empty one."""
    try:
        found: object = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        return None
    return found if isinstance(found, dict) else None  # pyright: ignore[reportUnknownVariableType]


def _stop_reason(exchange: Exchange, finish: FinishReason, stop: str | None, called: bool, usage: TokenUsage) -> str:
    """`deadline` is ours: neither the model nor max_tokens ended it."""
    most = exchange.asked.max_tokens
    if stop is not None:
        return "stop_sequence"
    match finish:
        case "deadline":
            return "deadline"
        case "length":
            full = most is not None and usage.output_tokens < most and not exchange.cut_by
            return "model_context_window_exceeded" if full else "max_tokens"
        case _:
            return "tool_use" if called else "end_turn"


def _usage(usage: TokenUsage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


class MessageStream:
    """The events of one exchange."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._encode = msgspec.json.Encoder().encode
        self._runs = BlockSplitter()
        self._index = -1  # of the block that is open, or was last
        self._called = False
        self._last = ChoiceDelta(0, finish="stop")

    def begin(self) -> bytes:
        # How much of the prompt was cached is known at the end; the last usage has it, and takes this one's place.
        usage = _usage(TokenUsage(prompt_tokens=self._exchange.prompt_tokens))
        head: dict[str, Any] = {
            **_head(self._exchange),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return self._event("message_start", message=head)

    def restart(self, piece: RestartDelta) -> bytes:
        """This dialect has no word for it, and a client that goes on as before would have two answers in one."""
        raise ApiError("the answer broke off", kind="server_error", code="generation_failed")

    def piece(self, piece: ChoiceDelta) -> bytes:
        self._called = self._called or bool(piece.calls)
        if piece.finish is not None:
            self._last = piece
        return b"".join([self._step(step) for step in self._runs.take(piece)])

    def end(self) -> bytes:
        last = self._last
        usage = last.usage or TokenUsage()
        reason = _stop_reason(self._exchange, last.finish or "stop", last.stop, self._called, usage)
        return self._event(
            "message_delta",
            delta={"stop_reason": reason, "stop_sequence": last.stop},
            usage=_usage(usage),
            headrace=self._exchange.report([usage]),
        ) + self._event("message_stop")

    def error(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + self._encode(error.anthropic()) + b"\n\n"

    def _step(self, step: BlockEvent) -> bytes:
        if step.does == "begin":
            self._index += 1
            return self._event("content_block_start", index=self._index, content_block=_empty(step))
        if step.does == "more":
            return self._delta(_delta(step))
        signed = self._delta({"type": "signature_delta", "signature": SIGNATURE}) if step.kind == "reasoning" else b""
        return signed + self._event("content_block_stop", index=self._index)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return self._event("content_block_delta", index=self._index, delta=delta)

    def _event(self, name: str, **fields: Any) -> bytes:
        return b"event: %b\ndata: %b\n\n" % (name.encode(), self._encode({"type": name, **fields}))


def _empty(step: BlockEvent) -> dict[str, Any]:
    """A block as it begins."""
    match step.kind:
        case "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "text":
            return {"type": "text", "text": ""}
        case "call":
            call = step.call or ToolCallDelta(0)
            return {"type": "tool_use", "id": call.id or "", "name": call.name or "", "input": {}}


def _delta(step: BlockEvent) -> dict[str, Any]:
    match step.kind:
        case "reasoning":
            return {"type": "thinking_delta", "thinking": step.text}
        case "text":
            return {"type": "text_delta", "text": step.text}
        case "call":
            return {"type": "input_json_delta", "partial_json": step.text}
