"""`Generate`: reads its request as the body of a chat or a completion, and writes the answer's pieces as messages.

So a parameter means the same as over HTTP, and is checked by the same table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from headrace.config import RequestLimits
from headrace.gateway.api_errors import ApiError, invalid_request
from headrace.gateway.requests.text_request import (
    ChoiceDelta,
    NoteDelta,
    RestartDelta,
    TextRequest,
    TokenLogprob,
    TokenUsage,
    combine_usages,
)
from headrace.gateway.serving.exchange import Exchange
from headrace.server.api.chat_completions import chat_body, read_chat_request
from headrace.server.api.common_parameters import HEADER_PREFIX
from headrace.server.api.completions import read_completion_request
from headrace.server.api.text_endpoint import Dialect
from headrace.server.grpc.frames import error_frame, message_frame
from headrace.server.grpc.messages import DecodeError, GenerateRequest, GenerateResponse, fill, plain_struct
from headrace.server.http.unknown_fields import STRICT, UnknownFields

DEADLINE_HEADER: Final = HEADER_PREFIX + "deadline-ms"
_OPTIONAL: Final = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "n",
    "surface",
    "profile",
    "deadline_ms",
)
_STREAMING: Final = ("stream", "stream_options")


def read_generate(
    body: bytes, headers: Mapping[str, str], limits: RequestLimits, unknown: UnknownFields = STRICT
) -> TextRequest:
    try:
        message = GenerateRequest.FromString(body)
    except DecodeError:
        raise invalid_request("The message is not a headrace.v1.GenerateRequest.", code="invalid_message") from None
    given = _parameters(message, headers)
    read = read_completion_request if "prompt" in given else read_chat_request
    return read(msgspec.json.encode(given), headers, limits, unknown)


def _parameters(message: Any, headers: Mapping[str, str]) -> dict[str, Any]:
    """Return the parameters of a message under their names of the HTTP API."""
    given: dict[str, Any] = {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)}
    if message.model:
        given["model"] = message.model
    if message.stop:
        given["stop"] = list(message.stop)
    if message.HasField("prompt"):
        if message.messages:
            raise invalid_request("Set either 'messages' or 'prompt', not both.", "prompt")
        given["prompt"] = message.prompt
    elif message.messages:
        given["messages"] = [_message(each) for each in message.messages]
    given = merge_parameters(given, plain_struct(message.parameters), ("messages", "prompt", *_STREAMING))
    remaining = headers.get(DEADLINE_HEADER)
    if remaining is not None and isinstance(given.get("deadline_ms"), int | float):
        try:
            given["deadline_ms"] = min(given["deadline_ms"], float(remaining))  # the earlier of both
        except ValueError:
            del given["deadline_ms"]  # the error of the header names what is wrong with it
    return given | {"stream": True}


def merge_parameters(given: dict[str, Any], others: dict[str, Any], own: tuple[str, ...]) -> dict[str, Any]:
    """Return both. ApiError for a parameter that is in both, or that `parameters` must not have."""
    for name in others:
        if name in given or name in own:
            why = "it is a field of the message" if name not in _STREAMING else "this call always streams"
            raise invalid_request(f"'parameters.{name}' is not allowed: {why}.", f"parameters.{name}")
    return {**given, **others}


def _message(message: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        plain["name"] = message.name
    if message.tool_call_id:
        plain["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        plain["reasoning_content"] = message.reasoning
    if message.tool_calls:
        plain["content"] = message.content or None
        plain["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments or "{}"}}
            for call in message.tool_calls
        ]
    return plain


class GenerateEvents:
    """Writes one answer as frames."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._usages: dict[int, TokenUsage] = {}

    def begin(self) -> bytes:
        exchange = self._exchange
        response = GenerateResponse()
        response.started.id = exchange.id
        response.started.model = exchange.model
        response.started.created = exchange.created
        response.started.fingerprint = exchange.fingerprint
        return _frame(response)

    def piece(self, piece: ChoiceDelta) -> bytes:
        data = b""
        if piece.content or piece.reasoning or piece.calls or piece.logprobs:
            response = GenerateResponse()
            delta = response.delta
            delta.index = piece.index
            delta.text = piece.content
            if piece.reasoning:
                delta.reasoning = piece.reasoning
            for call in piece.calls:
                delta.tool_calls.add(index=call.index, id=call.id or "", name=call.name or "", arguments=call.arguments)
            for each in piece.logprobs or ():
                _add_logprob(delta.logprobs.add(), each)
            data = _frame(response)
        if piece.finish is not None:
            self._usages[piece.index] = piece.usage or TokenUsage()
            response = GenerateResponse()
            response.finished.index = piece.index
            response.finished.reason = piece.finish
            if piece.stop is not None:
                response.finished.stop = piece.stop
            data += _frame(response)
        return data

    def restart(self, piece: RestartDelta) -> bytes:
        response = GenerateResponse()
        response.restarted.index = piece.index
        response.restarted.model = piece.variant
        response.restarted.why = piece.why
        return _frame(response)

    def note(self, note: NoteDelta) -> bytes:
        response = GenerateResponse()
        response.note.index = note.index
        response.note.event = note.event
        fill(response.note.data, msgspec.to_builtins(note.data))
        return _frame(response)

    def end(self) -> bytes:
        usages = [self._usages[index] for index in sorted(self._usages)]
        response = GenerateResponse()
        fill_usage(response.summary.usage, combine_usages(usages, max(self._exchange.text_request.n, 1)))
        fill(response.summary.report, msgspec.to_builtins(self._exchange.report(usages)))
        return _frame(response)

    def error(self, error: ApiError) -> bytes:
        return error_frame(error.status, msgspec.json.encode(error.openai()))


def fill_usage(message: Any, usage: TokenUsage) -> None:
    message.prompt_tokens = usage.prompt_tokens
    message.output_tokens = usage.output_tokens
    message.cached_tokens = usage.cached_tokens
    message.reasoning_tokens = usage.reasoning_tokens


def _add_logprob(message: Any, each: TokenLogprob) -> None:
    message.token, message.bytes = each.text, each.bytes
    if each.logprob is not None:
        message.logprob = each.logprob
    for text, raw, logprob in each.top:
        message.top.add(token=text, bytes=raw, logprob=logprob)


def _frame(response: Any) -> bytes:
    return message_frame(response.SerializeToString())


GENERATE_DIALECT: Final = Dialect("grpc", {}, read_generate, chat_body, GenerateEvents, stream_type=b"application/grpc")
