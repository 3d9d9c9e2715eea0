"""Reads requests of Ollama's API into a TextRequest. ollama_parameters.py has the types and parameter tables.

Ollama's calls and results of tools need no ids, but chat templates and upstreams do: missing ids are numbered, and a
result belongs to the first unanswered call of its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from headrace.config import RequestLimits
from headrace.engine.interface.grammar_spec import Grammar
from headrace.gateway.api_errors import invalid_request
from headrace.gateway.requests.text_request import TextRequest, Tool
from headrace.server.api.chat_completions import read_sampling
from headrace.server.api.common_parameters import (
    check_count,
    check_min_tokens,
    extra_fields,
    guided_parameter,
    json_schema_grammar,
    parse_stops,
    select_grammar,
)
from headrace.server.api.image_parts import MessageContent, ollama_image
from headrace.server.api.ollama.conversation_context import decode_context
from headrace.server.api.ollama.ollama_parameters import (
    CHAT_PARAMETERS,
    GENERATE_PARAMETERS,
    OPTION_PARAMETERS,
    OllamaMessage,
    OllamaTool,
    OllamaToolCall,
)
from headrace.server.api.tool_parameters import check_tools, decode_arguments
from headrace.server.http.body_parameters import parse_body, parse_parameters
from headrace.server.http.unknown_fields import STRICT, UnknownFields

# Ollama's defaults, as far as every upstream takes the parameter.
_TEMPERATURE: Final = 0.8
_TOP_P: Final = 0.9
_SENT_AS: Final = {"repeat_penalty": "repetition_penalty"}  # options under their name in the other dialects


class OllamaRequest(msgspec.Struct, frozen=True):
    text_request: TextRequest
    conversation: list[dict[str, Any]] | None = None  # what the answer's `context` begins with; None: it has none

    @property
    def is_empty(self) -> bool:
        """True if the request has no prompt: it only asks Ollama to load the model."""
        return self.text_request.messages is None and self.text_request.prompts is None


def read_chat_request(
    body: bytes, headers: Mapping[str, str], limits: RequestLimits, unknown: UnknownFields = STRICT
) -> OllamaRequest:
    given = parse_body(body, CHAT_PARAMETERS, limits, unknown)
    messages: list[OllamaMessage] = given.get("messages", [])
    check_count("messages", len(messages), limits.messages, least=0)
    return OllamaRequest(
        _build_request(
            given,
            headers,
            limits,
            unknown,
            messages=_template_messages(messages) or None,
            tools=_read_tools(given.get("tools", []), limits),
        )
    )


def read_generate_request(
    body: bytes, headers: Mapping[str, str], limits: RequestLimits, unknown: UnknownFields = STRICT
) -> OllamaRequest:
    given = parse_body(body, GENERATE_PARAMETERS, limits, unknown)
    prompt: str = given.get("prompt", "")
    if given.get("raw"):
        for name in ("system", "context"):
            if given.get(name):
                raise invalid_request(f"'{name}' cannot be combined with 'raw'. Make it a part of the prompt.", name)
        return OllamaRequest(_build_request(given, headers, limits, unknown, prompts=[prompt] if prompt else None))
    if not prompt:
        return OllamaRequest(_build_request(given, headers, limits, unknown))
    conversation = decode_context(given["context"]) if given.get("context") else []
    if given.get("system"):
        if conversation and conversation[0]["role"] == "system":
            del conversation[0]
        conversation.insert(0, {"role": "system", "content": given["system"]})
    conversation.append({"role": "user", "content": prompt})
    check_count("context", len(conversation), limits.messages)
    messages = [dict(message) for message in conversation]
    text_request = _build_request(given, headers, limits, unknown, messages=messages)
    return OllamaRequest(text_request, conversation)


def _build_request(
    given: Mapping[str, Any], headers: Mapping[str, str], limits: RequestLimits, unknown: UnknownFields, **fields: Any
) -> TextRequest:
    options = _read_options(given.get("options", {}), unknown)
    max_tokens = options.pop("num_predict", None)
    merged = {**given, **options}
    think: bool | str | None = given.get("think")
    if isinstance(think, str):
        merged["chat_template_kwargs"] = {"reasoning_effort": think, **given.get("chat_template_kwargs", {})}
    if "truncate" in given:
        merged["overflow"] = "drop" if given["truncate"] else "refuse"
    check_min_tokens(merged, max_tokens)
    return TextRequest(
        model=given.get("model", ""),
        grammar=_read_grammar(given),
        grammar_of=guided_parameter(given) or "format",
        think=None if think is None else bool(think),
        sampling=read_sampling(merged, limits),
        max_tokens=max_tokens,
        stop=parse_stops(merged.get("stop"), limits),
        stream=given.get("stream", True),
        **fields,
        **extra_fields(merged, headers),
    )


def _read_grammar(given: Mapping[str, Any]) -> Grammar | None:
    format: str | dict[str, Any] = given.get("format", "")
    grammar: Grammar | None = None
    if format == "json":
        grammar = Grammar("json_object")
    elif isinstance(format, dict):
        grammar = json_schema_grammar(format)
    return select_grammar(given, grammar, "format")


def _read_options(options: Mapping[str, Any], unknown: UnknownFields) -> dict[str, Any]:
    """Return the options that this server honours, under their names in the other dialects."""
    # Some clients write every number as a float.
    whole = {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in options.items()
    }
    given = parse_parameters(whole, OPTION_PARAMETERS, unknown, within="options")
    if given.get("repeat_last_n") == 0:
        given.pop("repeat_penalty", None)
    if given.get("num_predict", 1) <= 0:
        del given["num_predict"]
    if given.get("seed", 0) < 0:
        del given["seed"]
    honoured = ("num_predict", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "repeat_penalty")
    return {
        "temperature": _TEMPERATURE,
        "top_p": _TOP_P,
        **{
            _SENT_AS.get(name, name): given[name]
            for name in (*honoured, "presence_penalty", "frequency_penalty")
            if name in given
        },
    }


def _read_tools(tools: Sequence[OllamaTool], limits: RequestLimits) -> tuple[Tool, ...]:
    functions = [tool.function for tool in tools]
    return check_tools(
        [Tool(each.name, each.description, each.parameters) for each in functions], limits, name_field="function.name"
    )


# Messages


def _template_messages(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """Return messages in the shape that chat templates take."""
    plain: list[dict[str, Any]] = []
    open_calls: dict[str, str] = {}  # names of the last assistant message's unanswered calls, by id
    numbered = 0
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        turn: dict[str, Any] = {"role": message.role, **_content(message, where)}
        if message.tool_calls and message.role != "assistant":
            raise invalid_request(f"'{where}' has tool_calls but is not an assistant message.", f"{where}.tool_calls")
        if message.role == "assistant":
            if message.thinking:
                turn["reasoning_content"] = message.thinking
            open_calls = {}
            calls: list[dict[str, Any]] = []
            for call in message.tool_calls or ():
                id = call.id or f"call_{numbered}"
                numbered += 1
                open_calls[id] = call.function.name
                calls.append({"id": id, "type": "function", "function": _called_function(call)})
            if calls:
                turn["tool_calls"] = calls
        elif message.role == "tool":
            id = message.tool_call_id or _answered_call(message.tool_name, open_calls)
            if id is None:
                id = f"call_{numbered}"
                numbered += 1
            name = open_calls.pop(id, None) or message.tool_name
            turn["tool_call_id"] = id
            if name is not None:
                turn["name"] = name
        plain.append(turn)
    return plain


def _content(message: OllamaMessage, where: str) -> dict[str, Any]:
    """Return the content with the images before the text, as Ollama puts them."""
    found = MessageContent()
    for index, image in enumerate(message.images or ()):
        found.add_image(ollama_image(image, f"{where}.images[{index}]"))
    found.add_text(message.content or "", f"{where}.content")
    return found.fields(message.role, where)


def _called_function(call: OllamaToolCall) -> dict[str, Any]:
    arguments = call.function.arguments
    if isinstance(arguments, str):
        decoded = decode_arguments(arguments)
        arguments = arguments if decoded is None else decoded
    return {"name": call.function.name, "arguments": arguments}


def _answered_call(name: str | None, open_calls: Mapping[str, str]) -> str | None:
    """Return the id of the first unanswered call, of this name if the result has one."""
    return next((id for id, called in open_calls.items() if name is None or called == name), None)
