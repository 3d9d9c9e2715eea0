"""One response, filled in as its bytes arrive: output times, content, usage and errors.

Reads OpenAI's chunks and whole responses. Times come from the caller's monotonic clock.
"""

from __future__ import annotations

from array import array
from typing import Any, Final, TypeVar, cast

import msgspec

from headrace.sse import EventReader, EventTooLongError

MOST_EVENT: Final = 16 * 1024 * 1024  # bytes of a server-sent event: 16 MiB
MOST_BODY: Final = 256 * 1024 * 1024  # bytes of a body, streamed or not: 256 MiB
MOST_WHY: Final = 300  # characters of an error message


_NONE: Final = msgspec.Raw()
_EMPTY: Final = (b"", b"null", b"[]", b"{}", b'""')


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _CallDelta(msgspec.Struct):
    index: int = 0
    function: _Function = msgspec.field(default_factory=_Function)


class _Delta(msgspec.Struct):
    """A delta of a stream, or the message of a whole response."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: msgspec.Raw = _NONE
    refusal: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    message: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _HeadraceTimings(msgspec.Struct):
    """Headrace's `headrace` field."""

    queue_ms: float | None = None
    prefill_ms: float | None = None
    decode_ms: float | None = None


class _LlamaTimings(msgspec.Struct):
    """llama.cpp's `timings` field."""

    prompt_ms: float | None = None
    predicted_ms: float | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    headrace: _HeadraceTimings | None = None
    timings: _LlamaTimings | None = None
    error: msgspec.Raw = _NONE


_T = TypeVar("_T")
_CHUNK: Final = msgspec.json.Decoder(_Chunk)
_CALLS: Final = msgspec.json.Decoder(list[_CallDelta])


class OutputTally:
    """Counts the outputs of all responses, for the live display."""

    __slots__ = ("outputs",)

    def __init__(self) -> None:
        self.outputs = 0


class TimedResponse:
    """Times are seconds of the caller's clock. A response ends with `complete` or `fail`, which sets `error`."""

    __slots__ = (
        "_calls",
        "_done",
        "_events",
        "_last",
        "_size",
        "_stream",
        "_tally",
        "body",
        "cached_tokens",
        "connect",
        "content_parts",
        "decode_ms",
        "end",
        "error",
        "finish",
        "first_content",
        "keep_text",
        "output_times",
        "output_tokens",
        "prefill_ms",
        "prompt_tokens",
        "queue_ms",
        "reasoning_parts",
        "start",
        "status",
        "together",
        "tools",
        "why",
    )

    def __init__(self, *, stream: bool, keep_text: bool = False, tally: OutputTally | None = None) -> None:
        self.start = 0.0  # when it was sent, before a connection is opened
        self.connect = 0.0  # seconds to open a connection
        self.end = 0.0
        self.status = 0
        self.error = ""  # the kind of error
        self.why = ""
        self.output_times: array[float] = array("d")  # of chunks with content, reasoning or a tool call
        self.together = 0  # outputs read together with the previous one
        self.first_content: float | None = None  # time of the first output other than reasoning
        self.finish = ""
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.queue_ms: float | None = None
        self.prefill_ms: float | None = None
        self.decode_ms: float | None = None
        self.content_parts: list[str] = []  # kept if `keep_text`
        self.reasoning_parts: list[str] = []
        self._calls: dict[int, list[str]] = {}  # by index: names and arguments of tool calls, kept if `keep_text`
        self.tools = False  # the model called tools, whose tokens are in no text
        self.keep_text = keep_text
        self.body = bytearray()  # of a response that is not streamed
        self._stream = stream
        self._events: EventReader | None = None
        self._done = False
        self._last = -1.0  # time of the latest output
        self._size = 0
        self._tally = tally

    def head(self, status: int, content_type: str) -> None:
        self.status = status
        if self._stream and status == 200:
            if content_type.startswith("text/event-stream"):
                self._events = EventReader(MOST_EVENT)
            else:
                self.fail("malformed", f"expected an event stream, got '{content_type}'")

    def data(self, piece: bytes, now: float) -> None:
        """Take a part of the body."""
        self._size += len(piece)
        if self._size > MOST_BODY:
            self.fail("malformed", f"the response is longer than {MOST_BODY} bytes")
        elif self._events is None:
            self.body += piece
        else:
            try:
                events = self._events.feed(piece)
            except EventTooLongError:
                self.fail("malformed", f"an event is longer than {MOST_EVENT} bytes")
                return
            for event in events:
                self._event(event, now)

    def complete(self, now: float) -> None:
        """End the response: its body is complete."""
        self.end = now
        if self.error:
            return
        if self.status != 200:
            self.fail(f"http {self.status}", _error_message(bytes(self.body)))
        elif self._events is not None:
            for event in self._events.finish():
                self._event(event, now)
            if not self.error and not self._done and not self.finish:
                self.fail("cut", "the stream ended without [DONE] and without a finish_reason")
            elif not self.error and not self.output_times:
                self.fail("empty", "the stream contained no output")

    def read_whole(self) -> None:
        """Read the body of a complete response that was not streamed."""
        if not self.error:
            self._chunk(bytes(self.body), self.end)
            if not self.error and not self.finish:
                self.fail("malformed", "the response has no choice with a finish_reason")

    def fail(self, kind: str, why: str) -> None:
        if not self.error:
            self.error, self.why = kind, " ".join(why.split())[:MOST_WHY]

    def _event(self, event: bytes, now: float) -> None:
        if event == b"[DONE]":
            self._done = True
        elif not self.error:
            self._chunk(event, now)

    def _chunk(self, raw: bytes, now: float) -> None:
        try:
            chunk = _CHUNK.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            # Another server may use a field of ours with another type: read what can be read.
            loose = _decode_loosely(raw)
            if loose is None:
                self.fail("malformed", f"not an OpenAI JSON object: {error}: {raw[:80]!r}")
                return
            chunk = loose
        if bytes(chunk.error) not in _EMPTY:
            self.fail("stream", _error_message(raw))
            return
        if chunk.usage is not None:
            usage = chunk.usage
            self.prompt_tokens, self.output_tokens = usage.prompt_tokens, usage.completion_tokens
            if usage.prompt_tokens_details is not None:
                self.cached_tokens = usage.prompt_tokens_details.cached_tokens
        if chunk.headrace is not None:
            timings = chunk.headrace
            self.queue_ms, self.prefill_ms, self.decode_ms = timings.queue_ms, timings.prefill_ms, timings.decode_ms
        elif chunk.timings is not None:
            self.prefill_ms, self.decode_ms = chunk.timings.prompt_ms, chunk.timings.predicted_ms
        if chunk.choices:
            self._choices(chunk.choices, now)

    def _choices(self, choices: list[_Choice], now: float) -> None:
        output = answered = False
        for choice in choices:
            if choice.finish_reason:
                self.finish = choice.finish_reason
            piece = choice.delta or choice.message
            content = choice.text or (piece is not None and (piece.content or piece.refusal)) or ""
            reasoning = (piece is not None and (piece.reasoning_content or piece.reasoning)) or ""
            tools = piece is not None and bytes(piece.tool_calls) not in _EMPTY
            if tools:
                self.tools = True
            if content or tools:
                answered = output = True
            if reasoning:
                output = True
            if self.keep_text:
                if tools and piece is not None:
                    self._keep_calls(bytes(piece.tool_calls))
                if content:
                    self.content_parts.append(content)
                if reasoning:
                    self.reasoning_parts.append(reasoning)
        if not output or self._events is None:
            return
        if answered and self.first_content is None:
            self.first_content = now
        if now == self._last:
            self.together += 1
        self._last = now
        self.output_times.append(now)
        if self._tally is not None:
            self._tally.outputs += 1

    def _keep_calls(self, raw: bytes) -> None:
        try:
            deltas = _CALLS.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return  # not in OpenAI's form, so there is no name to keep
        for delta in deltas:
            parts = self._calls.setdefault(delta.index, ["", ""])
            parts[0] += delta.function.name or ""
            parts[1] += delta.function.arguments or ""

    def calls(self) -> list[tuple[str, str]]:
        """Return the name and the arguments of each tool call, in order. Only with `keep_text`."""
        return [(self._calls[index][0], self._calls[index][1]) for index in sorted(self._calls)]


def _decode_loosely(raw: bytes) -> _Chunk | None:
    """Decode the fields that have the expected type; None if this is not a JSON object."""
    try:
        found: object = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if not isinstance(found, dict):
        return None
    fields = cast("dict[str, Any]", found)
    chunk = _Chunk()
    choices: object = fields.get("choices")
    if isinstance(choices, list):
        chunk.choices = [_loose_choice(each) for each in cast("list[object]", choices)]
    chunk.usage = _typed(fields.get("usage"), _Usage)
    chunk.headrace = _typed(fields.get("headrace"), _HeadraceTimings)
    chunk.timings = _typed(fields.get("timings"), _LlamaTimings)
    if fields.get("error"):
        chunk.error = msgspec.Raw(msgspec.json.encode(fields["error"]))
    return chunk


def _loose_choice(found: object) -> _Choice:
    if not isinstance(found, dict):
        return _Choice()
    fields = cast("dict[str, Any]", found)
    delta = fields.get("delta") or fields.get("message")
    piece = _typed(delta, _Delta)
    if piece is None and isinstance(delta, dict):
        # Content as a list of parts: join their texts.
        parts: object = cast("dict[str, Any]", delta).get("content")
        texts = [_text_of(part) for part in cast("list[object]", parts)] if isinstance(parts, list) else []
        piece = _Delta(content="".join(texts))
    text, finish = fields.get("text"), fields.get("finish_reason")
    return _Choice(
        delta=piece,
        text=text if isinstance(text, str) else None,
        finish_reason=finish if isinstance(finish, str) else None,
    )


def _text_of(part: object) -> str:
    text: object = cast("dict[str, Any]", part).get("text") if isinstance(part, dict) else None
    return text if isinstance(text, str) else ""


def _typed(value: object, kind: type[_T]) -> _T | None:
    if value is None:
        return None
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return None


def _error_message(body: bytes) -> str:
    """Return OpenAI's error message, or the start of the body."""
    try:
        found: Any = msgspec.json.decode(body)
        error = found.get("error", found)
        message = error if isinstance(error, str) else error["message"]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
        return body[:MOST_WHY].decode("utf-8", "replace")
    return str(message)
