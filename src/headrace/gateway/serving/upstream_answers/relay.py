"""Relays an upstream's events as bytes, replacing only the model's name and the id.

Decides which answers can be relayed, and reads enough of them to know the usage, the end and what was delivered.
Does not open connections.
"""

from __future__ import annotations

import json
import re
from typing import Final

import msgspec

from headrace.config.upstream_section import UpstreamFeatures
from headrace.gateway.requests.event_writer import EventWriter
from headrace.gateway.requests.text_request import Choice, ChoiceDelta
from headrace.gateway.serving.exchange import Exchange
from headrace.gateway.serving.upstream_answers import upstream_usage as usage
from headrace.gateway.serving.upstream_answers.upstream_answer_reader import UpstreamAnswerReader
from headrace.gateway.serving.upstream_answers.upstream_request import UpstreamRequest
from headrace.sse import DONE


def can_relay(exchange: Exchange, request: UpstreamRequest, takes: UpstreamFeatures) -> bool:
    """Return whether Headrace would change nothing in the answer. The caller checks that the client
    speaks the same dialect and that no stage reads the answer."""
    return bool(exchange.text_request.stream and takes.stream and request.plain)


_NO_CHOICES: Final = re.compile(rb'"choices"\s*:\s*\[\s*\]')  # in a text the quotes would be escaped
_MARK: Final = b"\x00"  # placeholder for the text


class RelayReader:
    """Passes an answer's chunks on as bytes, and writes the end and the usage itself, as in every other answer."""

    def __init__(
        self,
        exchange: Exchange,
        request: UpstreamRequest,
        inner: UpstreamAnswerReader,
        own: EventWriter,
        *,
        rename: bool,
    ) -> None:
        """`own` writes the end, the usage and the end of an answer cut at its deadline."""
        self._inner = inner
        self._own = own
        self._written = False  # a chunk of the upstream was passed on
        self._version = 0  # of the chunk template that `_before` and `_after` belong to
        self._before = self._after = b""
        self._renamed = None
        if rename:
            prefix = "chatcmpl" if request.chat else "cmpl"
            self._renamed = ChunkRenamer(f"{prefix}-{exchange.id}", exchange.model)

    @property
    def started(self) -> bool:
        return self._inner.started

    @property
    def complete(self) -> bool:
        return self._inner.complete

    @property
    def over(self) -> bool:
        return self._inner.over

    def event(self, data: bytes) -> list[bytes]:
        inner = self._inner
        raw = inner.note(data)
        if raw is not None:
            return [self._from_template(raw)]  # nearly every chunk of nearly every answer
        pieces = inner.event(data)
        found: list[bytes] = []
        if data != DONE and not _NO_CHOICES.search(data):
            found.append(self._as_ours(data))
        if inner.over:
            found.append(self._end(pieces))
        return found

    def _from_template(self, raw: bytes) -> bytes:
        """Return a chunk of the known template. The bytes around its text are renamed once for all such chunks."""
        template = self._inner.template
        if template is not None and template.version != self._version:
            self._version = template.version
            # Neither part can contain the mark, because it is not valid in JSON.
            ours = self._as_ours(template.before + _MARK + template.after)
            self._before, _, self._after = ours.partition(_MARK)
        return b"".join((self._before, raw, self._after))

    def _as_ours(self, data: bytes) -> bytes:
        self._written = True
        if self._renamed is not None:
            data = self._renamed.take(data)
        if b"\n" in data:
            data = data.replace(b"\n", b"\ndata: ")
        return b"data: %b\n\n" % data

    def body(self, body: bytes) -> list[bytes]:
        """Return the events of an answer that the upstream did not stream."""
        pieces = self._inner.body(body)
        texts = [piece for piece in pieces if piece.finish is None]
        found = [self._own.begin(), *map(self._own.piece, texts)]
        ends = [self._own.piece(piece) for piece in pieces if piece.finish is not None]
        return [b"".join([*found, *ends, self._own.end()])]

    def finish(self) -> list[bytes]:
        pieces = self._inner.finish()
        return [self._end(pieces)] if pieces else []

    def broken_off(self) -> list[bytes]:
        pieces = self._inner.broken_off()
        return [self._end(pieces)] if pieces else []

    def cut(self) -> list[bytes]:
        _, whole = self._inner.delivered()
        pieces = self._inner.cut()
        begin = b"" if self._written else self._own.begin()
        ends = [self._own.piece(piece) for piece in pieces]
        missing = [end for piece, end in zip(pieces, ends, strict=True) if piece.index not in whole]
        return [b"".join([begin, *missing, self._own.end()])]

    def _end(self, pieces: list[ChoiceDelta]) -> bytes:
        """Return the usage, if requested, and `[DONE]`. The ends of the choices were passed on already."""
        for piece in pieces:
            if piece.finish is not None:
                self._own.piece(piece)
        return self._own.end()

    @property
    def counted(self) -> usage.AnswerUsage | None:
        return self._inner.counted

    @property
    def output_tokens(self) -> int:
        return self._inner.output_tokens

    def merge(self, found: list[bytes]) -> list[bytes]:
        """Join events that arrived together into one write."""
        return [b"".join(found)] if len(found) > 1 else found

    def delivered(self) -> tuple[list[Choice], list[int]]:
        return self._inner.delivered()

    def usage_so_far(self) -> usage.AnswerUsage:
        return self._inner.usage_so_far()


class _ChunkHead(msgspec.Struct):
    id: str | None = None
    model: str | None = None


_heads: Final = msgspec.json.Decoder(_ChunkHead)
_FIELD: Final = re.compile(rb'"(id|model)"\s*:\s*("(?:[^"\\]|\\.)*")')


class ChunkRenamer:
    """Replaces the id and the model's name in chunks.

    Nearly every chunk has the same bytes there as the one before it, and an answer's text cannot contain them, because
    quotes within a text are escaped.
    """

    def __init__(self, id: str, model: str) -> None:
        self._ours = {b"id": json.dumps(id).encode(), b"model": json.dumps(model).encode()}
        self._changes: list[tuple[bytes, bytes]] = []

    def take(self, data: bytes) -> bytes:
        if not self._changes or not all(old in data for old, _ in self._changes):
            self._learn(data)
        return self._changed(data)

    def _changed(self, data: bytes) -> bytes:
        for old, new in self._changes:
            data = data.replace(old, new)
        # Use our field's name; within a text the quotes would be escaped.
        if b'"reasoning":' in data and b'"reasoning_content":' not in data:
            data = data.replace(b'"reasoning":', b'"reasoning_content":')
        return data

    def _learn(self, data: bytes) -> None:
        try:
            head = _heads.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return  # the reader reports or repairs it
        known = {b"id": head.id, b"model": head.model}
        changes: dict[bytes, bytes] = {}
        for found in _FIELD.finditer(data):
            name, value = found[1], found[2]
            if known[name] is not None and _is_json_of(value, known[name]):
                ours = self._ours[name]
                changes[found[0]] = found[0][: -len(value)] + ours
        self._changes = list(changes.items())


def _is_json_of(value: bytes, text: str | None) -> bool:
    try:
        return msgspec.json.decode(value) == text
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
