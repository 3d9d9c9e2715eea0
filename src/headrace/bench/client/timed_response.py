"""One answer of a server, filled in as its bytes come: when each output came, what it told of itself, what went wrong.

Owns Answer and what is read of OpenAI's chunks and whole answers. Knows neither sockets nor schedules; times are of a
monotonic clock that the caller reads.
"""

from __future__ import annotations

from array import array
from typing import Any, Final, TypeVar, cast

import msgspec

from headrace.bench.client.event_stream import MOST_EVENT, EventStreamReader, EventTooLongError

MOST_BODY: Final = 256 * 1024 * 1024  # bytes of an answer that is not streamed, or of all its events: 256 MiB
MOST_WHY: Final = 300  # characters of an error's text


_NONE: Final = msgspec.Raw()
_EMPTY: Final = (b"", b"null", b"[]", b"{}", b'""')


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Piece(msgspec.Struct):
    """A delta of a stream, or the message of a whole answer."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: msgspec.Raw = _NONE
    refusal: str | None = None


class _Choice(msgspec.Struct):
    delta: _Piece | None = None
    message: _Piece | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Told(msgspec.Struct):
    """Headrace's own field."""

    queue_ms: float | None = None
    prefill_ms: float | None = None
    decode_ms: float | None = None


class _Timings(msgspec.Struct):
    """llama.cpp's."""

    prompt_ms: float | None = None
    predicted_ms: float | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    headrace: _Told | None = None
    timings: _Timings | None = None
    error: msgspec.Raw = _NONE


_T = TypeVar("_T")
_CHUNK: Final = msgspec.json.Decoder(_Chunk)


class OutputTally:
    """Outputs of all answers so far, for a view of the run."""

    __slots__ = ("outputs",)

    def __init__(self) -> None:
        self.outputs = 0


class TimedResponse:
    """Seconds of the caller's clock. `error` is empty while all is well; an answer ends with `over` or `fail`."""

    __slots__ = (
        "_done",
        "_events",
        "_last",
        "_size",
        "_stream",
        "_tally",
        "body",
        "cached_tokens",
        "connect",
        "decode_ms",
        "end",
        "error",
        "finish",
        "first_said",
        "keep_text",
        "output_tokens",
        "prefill_ms",
        "prompt_tokens",
        "queue_ms",
        "said",
        "stamps",
        "start",
        "status",
        "thought",
        "together",
        "tools",
        "why",
    )

    def __init__(self, *, stream: bool, keep_text: bool = False, tally: OutputTally | None = None) -> None:
        self.start = 0.0  # when it was asked, before a connection is made
        self.connect = 0.0  # seconds that making one took
        self.end = 0.0
        self.status = 0
        self.error = ""  # its kind
        self.why = ""
        self.stamps: array[float] = array("d")  # of the outputs: chunks with content, reasoning or a tool call
        self.together = 0  # outputs that came in one read with the one before
        self.first_said: float | None = None  # the first that is no reasoning
        self.finish = ""
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.queue_ms: float | None = None
        self.prefill_ms: float | None = None
        self.decode_ms: float | None = None
        self.said: list[str] = []  # content; kept where `keep_text`
        self.thought: list[str] = []  # reasoning
        self.tools = False  # it called tools, which are in neither text
        self.keep_text = keep_text
        self.body = bytearray()  # of an answer that is not streamed
        self._stream = stream
        self._events: EventStreamReader | None = None
        self._done = False
        self._last = -1.0  # stamp of the latest output
        self._size = 0
        self._tally = tally

    def head(self, status: int, content_type: str) -> None:
        self.status = status
        if self._stream and status == 200:
            if content_type.startswith("text/event-stream"):
                self._events = EventStreamReader(MOST_EVENT)
            else:
                self.fail("malformed", f"a stream was asked, and '{content_type}' came")

    def data(self, piece: bytes, now: float) -> None:
        """A part of the body."""
        self._size += len(piece)
        if self._size > MOST_BODY:
            self.fail("malformed", f"the answer is longer than {MOST_BODY} bytes")
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

    def over(self, now: float) -> None:
        """The body is whole."""
        self.end = now
        if self.error:
            return
        if self.status != 200:
            self.fail(f"http {self.status}", _reason(bytes(self.body)))
        elif self._events is not None:
            for event in self._events.finish():
                self._event(event, now)
            if not self.error and not self._done and not self.finish:
                self.fail("cut", "the stream ended without [DONE] and without a finish_reason")
            elif not self.error and not self.stamps:
                self.fail("empty", "the stream held no output")

    def whole(self) -> None:
        """Reads the body of an answer that was not streamed, once it is over."""
        if not self.error:
            self._chunk(bytes(self.body), self.end)
            if not self.error and not self.finish:
                self.fail("malformed", "the answer has no choice with a finish_reason")

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
            # A peer's field of a name that we read may be of another type: what can be read of it is read.
            loose = _loosely(raw)
            if loose is None:
                self.fail("malformed", f"no JSON object of OpenAI's: {error}: {raw[:80]!r}")
                return
            chunk = loose
        if bytes(chunk.error) not in _EMPTY:
            self.fail("stream", _reason(raw))
            return
        if chunk.usage is not None:
            usage = chunk.usage
            self.prompt_tokens, self.output_tokens = usage.prompt_tokens, usage.completion_tokens
            if usage.prompt_tokens_details is not None:
                self.cached_tokens = usage.prompt_tokens_details.cached_tokens
        if chunk.headrace is not None:
            told = chunk.headrace
            self.queue_ms, self.prefill_ms, self.decode_ms = told.queue_ms, told.prefill_ms, told.decode_ms
        elif chunk.timings is not None:
            self.prefill_ms, self.decode_ms = chunk.timings.prompt_ms, chunk.timings.predicted_ms
        if chunk.choices:
            self._choices(chunk.choices, now)

    def _choices(self, choices: list[_Choice], now: float) -> None:
        output = said = False
        for choice in choices:
            if choice.finish_reason:
                self.finish = choice.finish_reason
            piece = choice.delta or choice.message
            content = choice.text or (piece is not None and (piece.content or piece.refusal)) or ""
            thought = (piece is not None and (piece.reasoning_content or piece.reasoning)) or ""
            tools = piece is not None and bytes(piece.tool_calls) not in _EMPTY
            if tools:
                self.tools = True
            if content or tools:
                said = output = True
            if thought:
                output = True
            if self.keep_text:
                if content:
                    self.said.append(content)
                if thought:
                    self.thought.append(thought)
        if not output or self._events is None:
            return
        if said and self.first_said is None:
            self.first_said = now
        if now == self._last:
            self.together += 1
        self._last = now
        self.stamps.append(now)
        if self._tally is not None:
            self._tally.outputs += 1


def _loosely(raw: bytes) -> _Chunk | None:
    """The same fields, each left out where its type is not the expected one; None where this is no JSON object."""
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
    chunk.headrace = _typed(fields.get("headrace"), _Told)
    chunk.timings = _typed(fields.get("timings"), _Timings)
    if fields.get("error"):
        chunk.error = msgspec.Raw(msgspec.json.encode(fields["error"]))
    return chunk


def _loose_choice(found: object) -> _Choice:
    if not isinstance(found, dict):
        return _Choice()
    fields = cast("dict[str, Any]", found)
    delta = fields.get("delta") or fields.get("message")
    piece = _typed(delta, _Piece)
    if piece is None and isinstance(delta, dict):
        # Content as a list of parts: their texts are what it says.
        parts: object = cast("dict[str, Any]", delta).get("content")
        texts = [_text_of(part) for part in cast("list[object]", parts)] if isinstance(parts, list) else []
        piece = _Piece(content="".join(texts))
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


def _reason(body: bytes) -> str:
    """OpenAI's error message, or how the body begins."""
    try:
        found: Any = msgspec.json.decode(body)
        error = found.get("error", found)
        message = error if isinstance(error, str) else error["message"]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
        return body[:MOST_WHY].decode("utf-8", "replace")
    return str(message)
