"""Exchanges and pieces made by hand, and clients that get given bytes, for the tests of dialects."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from typing import Any

import anthropic
import httpx2
import openai

from headrace.gateway.requests.event_writer import EventWriter
from headrace.gateway.requests.text_request import Choice, ChoiceDelta, TextRequest, TokenUsage, ToolCallDelta
from headrace.gateway.serving.exchange import Caller, Exchange
from headrace.gateway.serving.served_variant import ServedVariant
from headrace.models.model_folder import BUNDLED, open_model
from headrace.models.text.tokenizer import Tokenizer

USAGE = TokenUsage(prompt_tokens=20, output_tokens=7, cached_tokens=16, reasoning_tokens=2)


class NoEngine:
    def stream(self, request: Any) -> Any:
        raise AssertionError("no dialect runs anything")

    async def stats(self) -> list[dict[str, Any]]:
        return []


@functools.cache
def tokenizer() -> Tokenizer:
    return open_model(BUNDLED / "mini").tokenizer


def exchange_for(asked: TextRequest) -> Exchange:
    served = ServedVariant(name="mini", engine=NoEngine(), tokenizer=tokenizer(), context=2048, fingerprint="fp_1")
    return Exchange(caller=Caller(), text_request=asked, served=served, id="one", prompt_tokens=20)


def whole(pieces: Iterable[ChoiceDelta]) -> list[Choice]:
    choice = Choice(0)
    for piece in pieces:
        choice.add(piece)
    return [choice]


def called(index: int, name: str, *arguments: str) -> list[ChoiceDelta]:
    """A call, its arguments in pieces."""
    begins = ChoiceDelta(0, calls=[ToolCallDelta(index, f"call_{index}", name)])
    return [begins, *(ChoiceDelta(0, calls=[ToolCallDelta(index, arguments=each)]) for each in arguments)]


def streamed(events: EventWriter, pieces: Iterable[ChoiceDelta]) -> bytes:
    return events.begin() + b"".join([events.piece(piece) for piece in pieces]) + events.end()


def events_of(stream: bytes) -> list[dict[str, Any]]:
    """Its events' data; each event is named as its data says."""
    found: list[dict[str, Any]] = []
    for block in stream.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        found.append(value)
    return found


class Wire:
    """In a client's network's place: keeps the bodies that are sent, and answers with the same bytes every time."""

    def __init__(self, answer: bytes | Mapping[str, Any]) -> None:
        self.sent: list[bytes] = []
        self._answer = answer

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.sent.append(request.content)
        if isinstance(self._answer, bytes):
            return httpx2.Response(200, content=self._answer, headers={"content-type": "text/event-stream"})
        return httpx2.Response(200, json=self._answer)

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(api_key="none", base_url="http://headrace/v1", http_client=self._client(), max_retries=0)

    def anthropic(self) -> anthropic.Anthropic:
        return anthropic.Anthropic(
            api_key="none", base_url="http://headrace", http_client=self._client(), max_retries=0
        )

    def _client(self) -> httpx2.Client:
        return httpx2.Client(transport=httpx2.MockTransport(self))
