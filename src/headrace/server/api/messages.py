"""`/v1/messages`: reads Anthropic's requests into a TextRequest and writes their answers, whole or as events.

Content blocks become messages for chat templates, and choices become content blocks. Ignores the header
`anthropic-version`: every version reads the same. messages_parameters.py has the types and parameter tables.

    user        text, tool_result             ▶ tool messages, then a user message
    assistant   thinking, text, tool_use      ▶ one assistant message
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

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
from headrace.gateway.serving.prompt_length import prompt_tokens
from headrace.server.api.block_events import BlockEvent, BlockSplitter, restart_error
from headrace.server.api.common_parameters import (
    build_sampling,
    check_count,
    extra_fields,
    json_schema_grammar,
    read_thinking,
    select_grammar,
)
from headrace.server.api.image_parts import MessageContent, anthropic_image, joined
from headrace.server.api.messages_parameters import (
    COUNT_TOKENS_PARAMETERS,
    MESSAGE_PARAMETERS,
    AnthropicMessage,
    AnthropicMetadata,
    AnthropicTool,
    AnthropicToolChoice,
    AnthropicToolChoiceAuto,
    AnthropicToolChoiceNone,
    AnthropicToolChoiceTool,
    ContentBlock,
    DocumentBlock,
    ImageBlock,
    OutputConfig,
    OutputFormat,
    RedactedThinkingBlock,
    SearchResultBlock,
    TextBlock,
    ThinkingAdaptive,
    ThinkingBlock,
    ThinkingDisabled,
    ThinkingEnabled,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from headrace.server.api.text_endpoint import Dialect, text_route
from headrace.server.api.tool_parameters import (
    RAW_ARGUMENTS,
    arguments_object,
    check_has_tools,
    check_named_tool,
    check_tools,
    leave_out_hosted_tools,
    split_hosted_tools,
)
from headrace.server.endpoint_context import EndpointContext
from headrace.server.http.api_call import ANTHROPIC, ApiCall, Response
from headrace.server.http.body_parameters import convert_value, parse_body, unsupported_parameter
from headrace.server.http.route_table import Route
from headrace.server.http.unknown_fields import STRICT, UnknownFields

# Headrace returns reasoning in full and takes it back unchanged, so there is nothing to sign.
SIGNATURE: Final = "headrace"
_TOOL_USE_ID: Final = re.compile(r"[a-zA-Z0-9_-]{1,128}")  # after its prefix


def read_message_request(
    body: bytes, headers: Mapping[str, str], limits: RequestLimits, unknown: UnknownFields = STRICT
) -> TextRequest:
    given = parse_body(body, MESSAGE_PARAMETERS, limits, unknown)
    request = build_message_request(given, headers, limits, unknown)
    assert request.messages is not None
    if request.messages[-1]["role"] == "assistant":
        path = f"messages[{len(given['messages']) - 1}]"
        raise invalid_request(f"'{path}' is an assistant message. The last message must be the user's.", path)
    return request


def read_count_request(
    body: bytes, headers: Mapping[str, str], limits: RequestLimits, unknown: UnknownFields = STRICT
) -> TextRequest:
    """Read a request to `/v1/messages/count_tokens`, which has only a prompt."""
    return build_message_request(parse_body(body, COUNT_TOKENS_PARAMETERS, limits, unknown), headers, limits, unknown)


def build_message_request(
    given: dict[str, Any], headers: Mapping[str, str], limits: RequestLimits, unknown: UnknownFields = STRICT
) -> TextRequest:
    """Build a request from parameters that one of the tables has converted."""
    stops = check_count("stop_sequences", len(given.get("stop_sequences", ())), limits.stop, least=0)
    tools = _read_tools(given.get("tools", []), limits, unknown)
    choice: AnthropicToolChoice | None = given.get("tool_choice")
    choosing, only = _read_tool_choice(choice, tools)
    metadata: AnthropicMetadata | None = given.get("metadata")
    thinking: ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled | None = given.get("thinking")
    config: OutputConfig = given.get("output_config") or OutputConfig()
    is_omitted = isinstance(thinking, ThinkingEnabled | ThinkingAdaptive) and thinking.display == "omitted"
    think, hints = read_thinking({name: value for name, value in given.items() if name != "thinking"})
    extras = {**given, "metadata": None, "user": None if metadata is None else metadata.user_id}
    if given.get("speed") == "fast":
        extras.setdefault("profile", "fast")
    return TextRequest(
        model=given.get("model", ""),
        messages=_template_messages(given.get("system"), given["messages"], limits),
        tools=tools,
        choosing=choosing,
        only_tool=only,
        parallel_calls=choice is None
        or isinstance(choice, AnthropicToolChoiceNone)
        or not choice.disable_parallel_tool_use,
        grammar=_read_grammar(given, config),
        think=_read_thinking(thinking) if thinking is not None or think is None else think,
        template_hints=hints if config.effort is None else {**hints, "reasoning_effort": config.effort},
        show_reasoning=given.get("include_reasoning", not is_omitted),
        sampling=build_sampling(given, logprobs=None),
        max_tokens=given.get("max_tokens"),
        stop=tuple(given["stop_sequences"]) if stops else (),
        stream=given.get("stream", False),
        **extra_fields(extras, headers),
    )


def _read_thinking(thinking: ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled | None) -> bool | None:
    """Return whether the model reasons first. None leaves it to the model."""
    return None if isinstance(thinking, ThinkingAdaptive) else isinstance(thinking, ThinkingEnabled)


def _read_grammar(given: Mapping[str, Any], config: OutputConfig) -> Grammar | None:
    older: OutputFormat | None = given.get("output_format")
    if older is not None and config.format is not None:
        raise invalid_request(
            "'output_format' is the older name of output_config.format. Send only one of them.", "output_format"
        )
    format = config.format or older
    grammar = None if format is None else json_schema_grammar(format.schema)
    return select_grammar(given, grammar, "output_config.format")


def _read_tools(tools: Sequence[dict[str, Any]], limits: RequestLimits, unknown: UnknownFields) -> tuple[Tool, ...]:
    check_count("tools", len(tools), limits.tools, least=0)
    own, hosted = split_hosted_tools(tools, ("custom",))
    found = [_read_tool(tool, f"tools[{index}]", unknown) for index, tool in own]
    leave_out_hosted_tools(hosted, unknown, are_alone=not own, expected="a custom tool with a name and an input_schema")
    return check_tools(found, limits)


def _read_tool(given: dict[str, Any], where: str, unknown: UnknownFields) -> Tool:
    tool = convert_value(given, AnthropicTool, where, unknown)
    if tool.defer_loading:
        if unknown.strict:
            raise unsupported_parameter(f"{where}.defer_loading", "the model gets all tools at once")
        unknown.ignore(f"{where}.defer_loading")
    if tool.allowed_callers not in (None, ["direct"]):
        raise unsupported_parameter(f"{where}.allowed_callers", "the server runs no code")
    if tool.input_examples:
        raise unsupported_parameter(f"{where}.input_examples", "put the examples into the tool's description")
    return Tool(tool.name, tool.description, tool.input_schema, bool(tool.strict))


def _read_tool_choice(choice: AnthropicToolChoice | None, tools: Sequence[Tool]) -> tuple[ToolChoiceMode, str | None]:
    """Return the mode, and the tool that must be called if it must be a particular one."""
    if choice is None or isinstance(choice, AnthropicToolChoiceAuto):
        return "auto", None
    if isinstance(choice, AnthropicToolChoiceNone):
        return "none", None
    check_has_tools(tools)
    return "required", check_named_tool(choice.name, tools) if isinstance(choice, AnthropicToolChoiceTool) else None


# Messages


def _template_messages(
    system: str | list[TextBlock] | None, messages: Sequence[AnthropicMessage], limits: RequestLimits
) -> list[dict[str, Any]]:
    check_count("messages", len(messages), limits.messages)
    plain: list[dict[str, Any]] = []
    if system:
        _add(plain, {"role": "system", "content": system if isinstance(system, str) else _join_text(system, "system")})
    calls: dict[str, str] = {}  # names of the last assistant turn's calls without a result yet, by id
    previous_role = ""
    for index, message in enumerate(messages):
        where = f"messages[{index}].content"
        blocks = [TextBlock(message.content)] if isinstance(message.content, str) else message.content
        match message.role:
            case "assistant":
                turn = _assistant_message(blocks, where)
                if previous_role != "assistant":
                    calls = {}
                calls |= {call["id"]: call["function"]["name"] for call in turn.get("tool_calls", ())}
                _add(plain, turn)
            case "user":
                for each in _user_messages(blocks, where, calls):
                    _add(plain, each)
            case "system":
                _add(plain, {"role": "system", "content": _join_text(blocks, where)})
        previous_role = message.role
    return plain


def _add(plain: list[dict[str, Any]], turn: dict[str, Any]) -> None:
    """Append a turn, merging it into the last one if both have the same role: many templates require alternation."""
    last = plain[-1] if plain else turn
    if not plain or last["role"] != turn["role"] or turn["role"] == "tool":
        plain.append(turn)
        return
    last.update(joined(last, turn))
    if reasoning := turn.get("reasoning_content"):
        before = last.get("reasoning_content")
        last["reasoning_content"] = f"{before}\n{reasoning}" if before else reasoning
    if "tool_calls" in turn:
        last["tool_calls"] = last.get("tool_calls", []) + turn["tool_calls"]


def _user_messages(blocks: Sequence[ContentBlock], where: str, calls: dict[str, str]) -> list[dict[str, Any]]:
    if not blocks:
        raise invalid_request(f"'{where}' is empty. Add content.", where)
    results: list[dict[str, Any]] = []
    rest: list[ContentBlock] = []
    for index, block in enumerate(blocks):
        if not isinstance(block, ToolResultBlock):
            rest.append(block)
            continue
        path = f"{where}[{index}]"
        name = calls.pop(block.tool_use_id, None)
        if name is None:
            path = f"{path}.tool_use_id"
            given = block.tool_use_id[:100]
            raise invalid_request(f"'{path}' is '{given}'. Expected an unanswered call of the previous turn.", path)
        content = block.content or ""
        text = content if isinstance(content, str) else _join_text(content, f"{path}.content")
        if block.is_error:
            text = f"Error: {text}"  # chat templates have no field for it
        results.append({"role": "tool", "content": text, "tool_call_id": block.tool_use_id, "name": name})
    return [*results, {"role": "user", **_content(rest, where)}] if rest else results


def _content(blocks: Sequence[ContentBlock], where: str) -> dict[str, Any]:
    found = MessageContent()
    for index, block in enumerate(blocks):
        if isinstance(block, ImageBlock):
            found.add_image(anthropic_image(block.source, f"{where}[{index}]"))
        else:
            found.add_text(_join_text([block], where), where)
    return found.fields("user", where)


def _assistant_message(blocks: Sequence[ContentBlock], where: str) -> dict[str, Any]:
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
    turn: dict[str, Any] = {"role": "assistant", "content": _join_text(rest, where)}
    if any(reasoning):
        turn["reasoning_content"] = "\n".join(reasoning)
    if calls:
        turn["tool_calls"] = calls
    return turn


def _function(block: ToolUseBlock) -> dict[str, Any]:
    raw = block.input.get(RAW_ARGUMENTS)
    return {"name": block.name, "arguments": raw if isinstance(raw, str) and len(block.input) == 1 else block.input}


def _join_text(blocks: Sequence[ContentBlock | ToolReferenceBlock], where: str) -> str:
    texts: list[str] = []
    for block in blocks:
        if isinstance(block, ToolReferenceBlock):
            texts.append(block.tool_name)
            continue
        if not isinstance(block, TextBlock):
            kind = type(block).__struct_config__.tag
            if isinstance(block, ImageBlock):
                raise invalid_request(f"'{where}' has an image. Only a user's own content can have images.", where)
            if isinstance(block, (DocumentBlock, SearchResultBlock)):
                raise invalid_request(f"'{where}' has a block of type '{kind}'. Models read text and images.", where)
            raise invalid_request(f"'{where}' has a block of type '{kind}', which is not allowed here.", where)
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
        arguments = arguments_object(call.arguments)
        blocks.append({"type": "tool_use", "id": tool_use_id(call.id), "name": call.name, "input": arguments})
    return blocks


def tool_use_id(call_id: str) -> str:
    """Return a call's id in Anthropic's form, always the same for the same call."""
    own = call_id.removeprefix("toolu_").removeprefix("call_")
    if not _TOOL_USE_ID.fullmatch(own):  # some upstreams' ids have other characters
        own = hashlib.blake2b(own.encode(errors="surrogatepass"), digest_size=12).hexdigest()
    return f"toolu_{own}"


def _stop_reason(exchange: Exchange, finish: FinishReason, stop: str | None, called: bool, usage: TokenUsage) -> str:
    """Return Anthropic's name for the end of an answer. `deadline` is Headrace's extension."""
    max_tokens = exchange.text_request.max_tokens
    if stop is not None:
        return "stop_sequence"
    match finish:
        case "deadline":
            return "deadline"
        case "length":
            full = max_tokens is not None and usage.output_tokens < max_tokens and not exchange.cut_by
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
    """Writes the events of one message."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._encode = msgspec.json.Encoder().encode
        self._splitter = BlockSplitter()
        self._index = -1  # of the last block that began
        self._called = False
        self._last = ChoiceDelta(0, finish="stop")

    def begin(self) -> bytes:
        # The cached tokens are known only at the end; the last usage replaces this one.
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
        raise restart_error()

    def piece(self, piece: ChoiceDelta) -> bytes:
        self._called = self._called or bool(piece.calls)
        if piece.finish is not None:
            self._last = piece
        return b"".join([self._write(event) for event in self._splitter.split(piece)])

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

    def _write(self, event: BlockEvent) -> bytes:
        if event.action == "begin":
            self._index += 1
            return self._event("content_block_start", index=self._index, content_block=_empty_block(event))
        if event.action == "more":
            return self._delta(_block_delta(event))
        signed = self._delta({"type": "signature_delta", "signature": SIGNATURE}) if event.kind == "reasoning" else b""
        return signed + self._event("content_block_stop", index=self._index)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return self._event("content_block_delta", index=self._index, delta=delta)

    def _event(self, name: str, **fields: Any) -> bytes:
        return b"event: %b\ndata: %b\n\n" % (name.encode(), self._encode({"type": name, **fields}))


def _empty_block(event: BlockEvent) -> dict[str, Any]:
    match event.kind:
        case "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "text":
            return {"type": "text", "text": ""}
        case "call":
            call = event.call or ToolCallDelta(0)
            return {"type": "tool_use", "id": tool_use_id(call.id or ""), "name": call.name or "", "input": {}}


def _block_delta(event: BlockEvent) -> dict[str, Any]:
    match event.kind:
        case "reasoning":
            return {"type": "thinking_delta", "thinking": event.text}
        case "text":
            return {"type": "text_delta", "text": event.text}
        case "call":
            return {"type": "input_json_delta", "partial_json": event.text}


MESSAGES_DIALECT: Final = Dialect(
    "messages", MESSAGE_PARAMETERS, read_message_request, message_body, MessageStream, errors=ANTHROPIC
)


def routes(context: EndpointContext) -> tuple[Route, ...]:
    count_path = "/v1/messages/count_tokens"

    async def count_tokens(call: ApiCall) -> None:
        limits = context.config.limits
        request = await context.read(call, lambda body: read_count_request(body, call.headers, limits, call.unknown))
        exchange = context.exchange(call.caller, request, count_path)
        await context.reply(call, Response.json({"input_tokens": await prompt_tokens(exchange)}))

    return (
        text_route(context, "/v1/messages", MESSAGES_DIALECT, "Answer a chat in Anthropic's dialect."),
        Route(
            "POST",
            count_path,
            count_tokens,
            "Count a chat's tokens.",
            COUNT_TOKENS_PARAMETERS,
            errors=ANTHROPIC,
            lenient=True,
        ),
    )
