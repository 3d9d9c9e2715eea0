"""Reads an upstream's answer, streamed or whole, into the deltas of its choices, whichever server wrote it.

Holds back the end of a choice until the usage is known, because the last delta carries it. Does not open connections.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any, Final, cast

import msgspec
from msgspec import Raw

from headrace.gateway.requests.text_request import (
    Choice,
    ChoiceDelta,
    FinishReason,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
)
from headrace.gateway.serving.upstream_answers import upstream_usage as usage
from headrace.gateway.serving.upstream_answers.upstream_chunks import (
    ChunkTemplate,
    ReportedUsage,
    ToolCallFragment,
    UpstreamChoice,
    UpstreamChunk,
    UpstreamDelta,
    decode_text,
    is_present,
    join_texts,
    read_chunk,
    read_usage,
)
from headrace.gateway.serving.upstream_answers.upstream_request import UpstreamRequest
from headrace.gateway.upstreams import upstream_errors
from headrace.models.text.tokenizer import Tokenizer
from headrace.sse import DONE, ErrorEvent

_LEAST: Final = -9999.0  # log-probability; JSON has no minus infinity
_MOST_CALLS: Final = 128  # in one choice
_SEVERAL: Final = 16  # bytes; a longer text is rarely one token
_FINISH: Final[dict[str, FinishReason]] = {
    "stop": "stop",
    "eos": "stop",
    "eos_token": "stop",
    "stop_sequence": "stop",
    "end_turn": "stop",
    "length": "length",
    "max_tokens": "length",
    "model_length": "length",
    "tool_calls": "tool_calls",
    "tool_use": "tool_calls",
    "function_call": "tool_calls",
    "deadline": "deadline",
}
_FILTERED: Final = ("content_filter", "refusal", "safety")
_BROKEN: Final = ("abort", "error", "insufficient_system_resource", "cancelled")


class _ToolCallProgress(msgspec.Struct):
    index: int  # in our answer
    id: str
    name: str = ""  # empty until known
    arguments: list[str] = []


class _ChoiceProgress(msgspec.Struct):
    """The state of one choice."""

    content: list[str | bytes] = []  # bytes: a JSON string without its quotes
    reasoning: list[str] = []
    calls: list[_ToolCallProgress] = []
    places: dict[int, _ToolCallProgress] = {}  # calls by the upstream's index
    logprobs: list[TokenLogprob] = []
    chunks: int = 0  # chunks with output
    tokens: int = 0  # received, roughly; negative while the upstream still repeats the prompt
    reported: int = 0  # tokens already attributed to deltas
    echo: str = ""  # the prompt to put before the answer; empty once done
    finish: FinishReason | None = None
    stop: str | None = None

    def received(self) -> usage.ReceivedOutput:
        calls = [part for call in self.calls for part in (call.name, *call.arguments)]
        text = "".join([*self.reasoning, join_texts(self.content), *calls])
        return usage.ReceivedOutput(self.chunks, len(self.logprobs), text, bool(self.reasoning))

    def with_tokens(self, piece: ChoiceDelta) -> ChoiceDelta:
        """Return the delta with the tokens received since the previous one."""
        piece.tokens = max(0, self.tokens - self.reported)
        self.reported += piece.tokens
        return piece

    def choice(self, index: int) -> Choice:
        calls = [ToolCall(call.id, call.name, "".join(call.arguments)) for call in self.calls if call.name]
        logprobs = self.logprobs or None
        return Choice(index, join_texts(self.content), "".join(self.reasoning), calls, logprobs, self.finish or "stop")


class UpstreamAnswerReader:
    """Reads one answer with all its choices. Raises UpstreamError for data it cannot read."""

    def __init__(
        self,
        request: UpstreamRequest,
        *,
        name: str,
        n: int,
        prompt_tokens: int,
        prompt_bytes: int,
        tokenizer: Tokenizer | None = None,
        hidden: Sequence[str] = (),
    ) -> None:
        self.started = False  # some output has arrived
        self.complete = False  # every choice has ended
        self.over = False  # the answer has ended, usage included
        self.counted: usage.AnswerUsage | None = None  # set at the end
        self._request = request
        self._name = name
        self._n = n
        self._prompt = (prompt_tokens, prompt_bytes)
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._reported: ReportedUsage | None = None
        self._progress = [_ChoiceProgress() for _ in range(request.choices)]
        # Only for one choice: with several, the template would have to tell them apart.
        self._template = ChunkTemplate() if request.choices == 1 else None
        for place, progress in enumerate(self._progress):
            if request.echo:
                progress.echo = request.echo[place // n]
            if request.echoed:
                progress.tokens = -(prompt_tokens * n // len(self._progress))

    @property
    def template(self) -> ChunkTemplate | None:
        return self._template

    @property
    def output_tokens(self) -> int:
        """Tokens received so far over all choices; estimated until the end."""
        if self.counted is not None:
            return sum(used.output_tokens for used in self.counted.usages)
        return sum(max(0, progress.tokens) for progress in self._progress)

    # Input

    def event(self, data: bytes) -> list[ChoiceDelta]:
        if self._template is not None:
            raw = self._template.text(data)
            if raw is not None and (text := decode_text(raw)) is not None:
                return [self._plain(text)]  # nearly every chunk of nearly every answer
        if data == DONE:
            return self.finish()
        chunk = self._chunk(data)
        pieces = [piece for part in chunk.choices or () if (piece := self._piece(part, part.delta)) is not None]
        if self._template is not None and self._is_plain(chunk, pieces):
            self._template.learn(data, pieces[0].content)
        if self.complete and self._reported is not None and is_present(chunk.usage):
            pieces += self.finish()
        return pieces

    def _plain(self, text: str) -> ChoiceDelta:
        progress = self._progress[0]
        progress.content.append(text)
        progress.chunks += 1
        progress.tokens += self._estimated(text)
        return progress.with_tokens(ChoiceDelta(0, text))

    def _is_plain(self, chunk: UpstreamChunk, pieces: list[ChoiceDelta]) -> bool:
        """Return whether the chunk has text and nothing else; then its template fits other such chunks."""
        if len(pieces) != 1 or self.complete or is_present(chunk.usage):
            return False
        piece = pieces[0]
        return bool(piece.content) and not (piece.reasoning or piece.calls or piece.logprobs or self._request.echo)

    def note(self, data: bytes) -> bytes | None:
        """Record a chunk that has only text and return that text as JSON without quotes. None for any other chunk."""
        if self._template is None or (raw := self._template.text(data)) is None:
            return None
        progress = self._progress[0]
        progress.content.append(raw)
        progress.chunks += 1
        progress.tokens += len(raw) // usage.BYTES_PER_TOKEN or 1
        return raw

    def body(self, body: bytes) -> list[ChoiceDelta]:
        """Read an answer that was not streamed."""
        chunk = self._chunk(body)
        pieces = [piece for part in chunk.choices or () if (piece := self._piece(part, part.message)) is not None]
        return pieces + self.finish()

    def finish(self) -> list[ChoiceDelta]:
        """End the answer. Raises UpstreamError if a choice has no output."""
        if self.over:
            return []
        if not self.complete:
            for progress in self._progress:
                if progress.finish is None and not progress.chunks:
                    raise upstream_errors.invalid_answer(self._name, "ended its answer before it was complete")
                if progress.finish is None:
                    progress.finish = self._finish(progress, "stop")  # the upstream gave no reason
        return list(self._ends())

    def broken_off(self) -> list[ChoiceDelta]:
        """Handle a connection that closed without an end marker. Raises UpstreamError unless every choice has ended."""
        if not self.complete:
            raise upstream_errors.connection_lost(self._name)
        return self.finish()

    def cut(self) -> list[ChoiceDelta]:
        """End every choice at the deadline."""
        for progress in self._progress:
            progress.finish = progress.finish or "deadline"
        return list(self._ends())

    def merge(self, found: list[ChoiceDelta]) -> list[ChoiceDelta]:
        return found

    def delivered(self) -> tuple[list[Choice], list[int]]:
        """Return every choice so far, and the indices of the complete ones."""
        choices = [progress.choice(place) for place, progress in enumerate(self._progress)]
        return choices, [place for place, each in enumerate(self._progress) if each.finish is not None]

    def usage_so_far(self) -> usage.AnswerUsage:
        tokens, length = self._prompt
        return usage.measure_answer(
            [progress.received() for progress in self._progress],
            self._reported,
            n=self._n,
            prompt_tokens=tokens,
            prompt_bytes=length,
            tokenizer=self._tokenizer,
            echoed=self._request.echoed,
        )

    # Parsing

    def _chunk(self, data: bytes) -> UpstreamChunk:
        if isinstance(data, ErrorEvent):
            raise upstream_errors.error_for_event(
                upstream_errors.parse_error_body(data), name=self._name, hidden=self._hidden
            )
        chunk = read_chunk(data, self._name)
        if is_present(chunk.error) or chunk.object == "error" or (chunk.choices is None and chunk.message is not None):
            raise upstream_errors.error_for_event(
                upstream_errors.parse_error_body(data), name=self._name, hidden=self._hidden
            )
        if (reported := read_usage(chunk.usage)) is not None:
            self._reported = reported
        return chunk

    def _piece(self, part: UpstreamChoice, delta: UpstreamDelta | None) -> ChoiceDelta | None:
        """Return the delta for the client; None if it is empty."""
        index = part.index or 0
        if not 0 <= index < len(self._progress):
            raise upstream_errors.invalid_answer(self._name, "sent a choice that was not requested")
        progress = self._progress[index]
        if progress.finish is not None:
            return None  # it has ended
        piece = ChoiceDelta(index)
        if delta is not None:
            self._take(piece, progress, delta)
        elif part.text:
            piece.content = part.text
        if self._request.logprobs is not None and is_present(part.logprobs):
            piece.logprobs = self._logprobs(part.logprobs)
            progress.logprobs += piece.logprobs or ()
        if piece.content or piece.reasoning or piece.calls or piece.logprobs:
            progress.chunks += 1
            progress.tokens += self._tokens_of(piece)
            self.started = True
        if piece.content:
            progress.content.append(piece.content)
        if piece.reasoning:
            progress.reasoning.append(piece.reasoning)
            if self._request.hide_reasoning:
                piece.reasoning = ""
        new = bool(piece.content or piece.reasoning or piece.calls or piece.logprobs)
        if part.finish_reason is not None:
            self._end(progress, part)
        if new and progress.echo:
            piece.content, progress.echo = progress.echo + piece.content, ""
        return progress.with_tokens(piece) if new else None

    def _tokens_of(self, piece: ChoiceDelta) -> int:
        """Estimate the tokens of a chunk. Upstreams report only the sum at the end, and the last delta corrects it."""
        if piece.logprobs:
            return len(piece.logprobs)
        calls = [f"{call.name or ''}{call.arguments}" for call in piece.calls]
        return self._estimated("".join((piece.content, piece.reasoning, *calls)))

    def _estimated(self, text: str) -> int:
        length = len(text) if text.isascii() else len(text.encode(errors="replace"))
        # Most servers put one token into each chunk. Count only texts that may be several tokens.
        if self._tokenizer is not None and length > _SEVERAL:
            return usage.count_text_tokens(text, self._tokenizer) or 1
        return length // usage.BYTES_PER_TOKEN or 1

    def _take(self, piece: ChoiceDelta, progress: _ChoiceProgress, delta: UpstreamDelta) -> None:
        piece.content = delta.content if isinstance(delta.content, str) else _texts(delta.content)
        if delta.refusal:
            piece.content += delta.refusal
        if delta.reasoning_content:
            piece.reasoning = delta.reasoning_content
        elif isinstance(delta.reasoning, str):
            piece.reasoning = delta.reasoning
        for call in delta.tool_calls or ():
            self._call(piece, progress, call)

    def _call(self, piece: ChoiceDelta, progress: _ChoiceProgress, part: ToolCallFragment) -> None:
        """Add a fragment of a tool call. Indices and ids may be missing or repeated, and names late."""
        function = part.function
        name = (function.name if function is not None else None) or ""
        arguments = "" if function is None or function.arguments is None else function.arguments
        if not isinstance(arguments, str):
            arguments = msgspec.json.encode(arguments).decode()
        call = progress.places.get(part.index) if part.index is not None else None
        if part.index is None and not name and progress.calls:
            call = progress.calls[-1]
        if call is None or (part.id and name and call.name and part.id != call.id):
            if len(progress.calls) >= _MOST_CALLS:
                raise upstream_errors.invalid_answer(self._name, "called too many tools", again=False)
            call = _ToolCallProgress(len(progress.calls), part.id or f"call_{secrets.token_hex(12)}")
            progress.calls.append(call)
            if part.index is not None:
                progress.places[part.index] = call
        elif part.id and not call.name:
            call.id = part.id
        call.arguments.append(arguments)
        if self._request.one_call and call.index > 0:
            return
        if call.name:
            if arguments:
                piece.calls.append(ToolCallDelta(call.index, arguments=arguments))
        elif name:
            call.name = name
            piece.calls.append(ToolCallDelta(call.index, call.id, name, "".join(call.arguments)))

    def _end(self, progress: _ChoiceProgress, part: UpstreamChoice) -> None:
        reason = part.finish_reason or "stop"
        if reason in _FILTERED:
            raise upstream_errors.filtered(self._name)
        if reason in _BROKEN:
            raise upstream_errors.error_for_status(500, upstream_errors.ReportedError(), name=self._name)
        progress.finish = self._finish(progress, _FINISH.get(reason.lower(), "stop"))
        for stop in (part.stop_reason, part.matched_stop):
            if isinstance(stop, str) and stop in self._request.stop:
                progress.stop = stop
        self.complete = all(each.finish is not None for each in self._progress)
        if self.complete:
            self._template = None

    def _finish(self, progress: _ChoiceProgress, finish: FinishReason) -> FinishReason:
        """Return the reason as OpenAI's API names it: `tool_calls`, or `stop` if the request forced a named tool."""
        if finish in ("stop", "tool_calls"):
            called = any(call.name for call in progress.calls)
            return "tool_calls" if called and not self._request.named else "stop"
        return finish

    def _ends(self) -> Iterator[ChoiceDelta]:
        self.complete = self.over = True
        self.counted = self.usage_so_far()
        for place, (progress, used) in enumerate(zip(self._progress, self.counted.usages, strict=True)):
            piece = ChoiceDelta(place, content=progress.echo, finish=progress.finish, stop=progress.stop, usage=used)
            piece.tokens = used.output_tokens - progress.reported  # negative if too many were attributed
            progress.reported, progress.echo = used.output_tokens, ""
            if self._request.logprobs is not None:
                piece.logprobs = []
            yield piece

    # Log-probabilities

    def _logprobs(self, raw: Raw) -> list[TokenLogprob] | None:
        """Read log-probabilities in the shape of chats (`content`) or of completions (`tokens`)."""
        try:
            found: object = msgspec.json.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        if not isinstance(found, dict):
            return None
        table = cast("dict[str, Any]", found)
        try:
            if isinstance(table.get("content"), list):
                return [self._of_chat(each) for each in table["content"]]
            if isinstance(table.get("tokens"), list):
                return list(self._of_completion(table))
        except (TypeError, KeyError, ValueError, AttributeError):
            raise upstream_errors.invalid_answer(self._name, "sent log-probabilities that cannot be read") from None
        return None

    def _of_chat(self, each: dict[str, Any]) -> TokenLogprob:
        text: str = each["token"]
        top = [(other["token"], _raw(other), _bounded(other["logprob"])) for other in each.get("top_logprobs") or ()]
        return TokenLogprob(text, _raw(each), _bounded(each["logprob"]), top[: self._request.logprobs], text)

    def _of_completion(self, table: dict[str, Any]) -> Iterator[TokenLogprob]:
        tops: list[dict[str, float] | None] = table.get("top_logprobs") or []
        for place, text in enumerate(table["tokens"]):
            logprob = table["token_logprobs"][place]
            likeliest = (tops[place] if place < len(tops) else None) or {}
            ordered = sorted(likeliest.items(), key=lambda pair: -_bounded(pair[1]))
            top = [(other, other.encode(), _bounded(value)) for other, value in ordered]
            known = None if logprob is None else _bounded(logprob)  # a prompt's first token has none
            yield TokenLogprob(text, text.encode(errors="replace"), known, top, text)


def _raw(each: dict[str, Any]) -> bytes:
    given = each.get("bytes")
    return bytes(given) if given is not None else str(each["token"]).encode(errors="replace")


def _bounded(value: float | None) -> float:
    return _LEAST if value is None else max(float(value), _LEAST)


def _texts(parts: list[Any] | None) -> str:
    """Join the texts of a content that is a list of parts."""
    found: list[str] = []
    for part in parts or ():
        if isinstance(part, dict):
            text = cast("dict[str, Any]", part).get("text")
            if isinstance(text, str):
                found.append(text)
    return "".join(found)
