"""Writes answers of Ollama's API: one object, or a stream of objects, each on a line.

Durations are in nanoseconds. A tool call is written whole, when the model has ended it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from headrace.gateway.api_errors import ApiError
from headrace.gateway.requests.text_request import (
    Choice,
    ChoiceDelta,
    FinishReason,
    RestartDelta,
    TokenLogprob,
    TokenUsage,
    ToolCall,
    ToolCallDelta,
)
from headrace.gateway.serving.exchange import Exchange
from headrace.server.api.block_events import BlockSplitter, restart_error
from headrace.server.api.chat_completions import logprob_json
from headrace.server.api.ollama.conversation_context import encode_context
from headrace.server.api.ollama.model_tags import tag_of
from headrace.server.api.ollama.ollama_requests import OllamaRequest
from headrace.server.api.tool_parameters import arguments_object

# Returns the fields of a line that are the answer's: content, reasoning, calls.
AnswerFields = Callable[[str, str, list[dict[str, Any]]], dict[str, Any]]

_REASONS: Final = {"length": "length", "deadline": "deadline"}  # of the others, a client hears "stop"


def chat_fields(content: str, reasoning: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["thinking"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return {"message": message}


def generate_fields(content: str, reasoning: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    return {"response": content, "thinking": reasoning} if reasoning else {"response": content}


def answer_body(
    fields: AnswerFields, request: OllamaRequest, exchange: Exchange, choices: Sequence[Choice]
) -> dict[str, Any]:
    choice = choices[0]
    calls = [_call(index, call) for index, call in enumerate(choice.calls)]
    return {
        **_head(exchange),
        **fields(choice.content, choice.reasoning, calls),
        **_logprobs(choice.logprobs),
        **_ending(request, exchange, choice.finish, choice.usage, choice.content),
    }


def loaded_body(fields: AnswerFields, exchange: Exchange) -> dict[str, Any]:
    """Return the answer to a request without a prompt: the model is there."""
    return {**_head(exchange), **fields("", "", []), "done": True, "done_reason": "load"}


def _head(exchange: Exchange) -> dict[str, Any]:
    created = datetime.fromtimestamp(exchange.created, UTC)
    return {"model": tag_of(exchange.model, latest=False), "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ")}


def _call(index: int, call: ToolCall) -> dict[str, Any]:
    function = {"index": index, "name": call.name, "arguments": arguments_object(call.arguments)}
    return {"id": call.id, "function": function}


def _logprobs(logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any]:
    return {} if logprobs is None else {"logprobs": [logprob_json(each) for each in logprobs]}


def _ending(
    request: OllamaRequest, exchange: Exchange, finish: FinishReason, usage: TokenUsage, content: str
) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "done": True,
        "done_reason": _REASONS.get(finish, "stop"),
        "total_duration": nanoseconds(time.monotonic() - exchange.arrival),
        "load_duration": nanoseconds(usage.queue_s),
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": nanoseconds(usage.prefill_s),
        "eval_count": usage.output_tokens,
        # Clients divide by it, and an answer from a cache took no time.
        "eval_duration": max(nanoseconds(usage.decode_s), 1),
    }
    if request.conversation is not None:
        fields["context"] = encode_context([*request.conversation, {"role": "assistant", "content": content}])
    return {**fields, "headrace": exchange.report([usage])}


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


class AnswerLines:
    """Writes the lines of one answer."""

    def __init__(self, fields: AnswerFields, request: OllamaRequest, exchange: Exchange) -> None:
        self._fields = fields
        self._request = request
        self._exchange = exchange
        self._encode = msgspec.json.Encoder().encode
        self._head = _head(exchange)
        self._splitter = BlockSplitter()
        self._call: ToolCall | None = None  # that the model writes
        self._calls = 0  # written so far
        self._texts: list[str] = []
        self._last = ChoiceDelta(0, finish="stop")
        # The bytes around a token's text: nearly every line has nothing else.
        line = self._encode({**self._head, **fields("\0", "", []), "done": False}) + b"\n"
        self._before, self._after = line.split(b'"\\u0000"')

    def begin(self) -> bytes:
        return b""

    def restart(self, piece: RestartDelta) -> bytes:
        raise restart_error()

    def piece(self, piece: ChoiceDelta) -> bytes:
        if piece.content and self._request.conversation is not None:
            self._texts.append(piece.content)
        if piece.finish is not None:
            self._last = piece
        calls = self._ended_calls(piece) if piece.calls or self._call is not None else []
        if not (piece.reasoning or calls or piece.logprobs):
            return self._before + self._encode(piece.content) + self._after if piece.content else b""
        fields = self._fields(piece.content, piece.reasoning, calls)
        return self._encode({**self._head, **fields, **_logprobs(piece.logprobs), "done": False}) + b"\n"

    def _ended_calls(self, piece: ChoiceDelta) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for event in self._splitter.split(piece):
            if event.kind != "call":
                continue
            if event.action == "begin":
                begun = event.call or ToolCallDelta(0)
                self._call = ToolCall(begun.id or "", begun.name or "", "")
            elif self._call is None:
                continue
            elif event.action == "more":
                self._call.arguments += event.text
            else:
                call, self._call = self._call, None
                if not piece.cuts(call.arguments):
                    found.append(_call(self._calls, call))
                    self._calls += 1
        return found

    def end(self) -> bytes:
        last = self._last
        usage = last.usage or TokenUsage()
        ending = _ending(self._request, self._exchange, last.finish or "stop", usage, "".join(self._texts))
        return self._encode({**self._head, **self._fields("", "", []), **ending}) + b"\n"

    def error(self, error: ApiError) -> bytes:
        return self._encode(error.ollama()) + b"\n"
