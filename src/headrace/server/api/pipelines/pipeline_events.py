"""The answers of `/v1/pipelines/NAME`: one JSON body, or named server-sent events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from headrace.gateway.api_errors import ApiError
from headrace.gateway.flow.answer_flow import PIPELINE_PREFIX
from headrace.gateway.requests.text_request import Choice, ChoiceDelta, NoteDelta, RestartDelta, TokenUsage
from headrace.gateway.serving.exchange import Exchange
from headrace.server.api.chat_completions import chat_usage, metadata_field

_RESULTS: Final = ("sources", "citations", "followups")  # fields of their own, not of `headrace`


def answer_body(exchange: Exchange, choices: Sequence[Choice]) -> dict[str, Any]:
    choice = choices[0]
    return {
        "id": f"pipe-{exchange.id}",
        "object": "pipeline.answer",
        "created": exchange.created,
        "pipeline": exchange.model.removeprefix(PIPELINE_PREFIX),
        "answer": choice.content,
        "finish_reason": choice.finish,
        **_outcome(exchange, choice.usage),
        **metadata_field(exchange),
    }


def _outcome(exchange: Exchange, usage: TokenUsage) -> dict[str, Any]:
    report = exchange.report([usage])
    results = {name: report.pop(name, []) for name in _RESULTS}
    return {**results, "usage": chat_usage(usage), "headrace": report}


class PipelineEvents:
    """Writes `started`, the pipeline's own events, `text`, and `done` with everything but the text."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._finish = "stop"
        self._usage = TokenUsage()

    def begin(self) -> bytes:
        name = self._exchange.model.removeprefix(PIPELINE_PREFIX)
        return _event("started", {"run": self._exchange.id, "pipeline": name, "created": self._exchange.created})

    def piece(self, piece: ChoiceDelta) -> bytes:
        if piece.finish is not None:
            self._finish, self._usage = piece.finish, piece.usage or TokenUsage()
        return _event("text", {"text": piece.content}) if piece.content else b""

    def restart(self, piece: RestartDelta) -> bytes:
        return _event("restart", {"model": piece.variant, "why": piece.why})

    def note(self, note: NoteDelta) -> bytes:
        return _event(note.event, note.data)

    def end(self) -> bytes:
        exchange = self._exchange
        return _event(
            "done",
            {
                "id": f"pipe-{exchange.id}",
                "finish_reason": self._finish,
                **_outcome(exchange, self._usage),
                **metadata_field(exchange),
            },
        )

    def error(self, error: ApiError) -> bytes:
        return _event("error", error.openai())


def _event(name: str, data: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"
