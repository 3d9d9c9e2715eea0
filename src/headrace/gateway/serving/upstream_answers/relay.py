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
    """Whether nothing of the answer would be changed here. The caller knows whether the client speaks the same dialect,
    and whether anybody else wants to read along."""
    return bool(exchange.asked.stream and takes.stream and request.plain)


_NO_CHOICES: Final = re.compile(rb'"choices"\s*:\s*\[\s*\]')  # in a text the quotes would be escaped
_MARK: Final = b"\x00"  # stands for a text


class RelayReader:
    """One answer as bytes. Chunks go out as they came; the end, the usage and what is cut are written here, so that a
    client finds them as with any other answer."""

    def __init__(
        self,
        exchange: Exchange,
        request: UpstreamRequest,
        inner: UpstreamAnswerReader,
        own: EventWriter,
        *,
        rename: bool,
    ) -> None:
        """`own` writes what the upstream does not: the end, the usage, and what is cut."""
        self._inner = inner
        self._own = own
        self._written = False  # something of the upstream's went out
        self._version = 0  # of the form that these are for
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
            return [self._same(raw)]  # nearly every chunk of nearly every answer
        pieces = inner.event(data)
        found: list[bytes] = []
        if data != DONE and not _NO_CHOICES.search(data):
            found.append(self._as_ours(data))
        if inner.over:
            found.append(self._end(pieces))
        return found

    def _same(self, raw: bytes) -> bytes:
        """A chunk of the form that is known: what is around its text is replaced once for all of them."""
        form = self._inner.form
        if form is not None and form.version != self._version:
            self._version = form.version
            # The mark cannot be in either: what is not JSON is no chunk.
            ours = self._as_ours(form.before + _MARK + form.after)
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
        """It did not stream after all."""
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
        """The usage where it is asked for, and the mark of the end. That the choices ended was said already."""
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

    def together(self, found: list[bytes]) -> list[bytes]:
        """One write for all that came at once."""
        return [b"".join(found)] if len(found) > 1 else found

    def delivered(self) -> tuple[list[Choice], list[int]]:
        return self._inner.delivered()

    def spent(self) -> usage.AnswerUsage:
        return self._inner.spent()


class _ChunkHead(msgspec.Struct):
    id: str | None = None
    model: str | None = None


_heads: Final = msgspec.json.Decoder(_ChunkHead)
_FIELD: Final = re.compile(rb'"(id|model)"\s*:\s*("(?:[^"\\]|\\.)*")')


class ChunkRenamer:
    """Chunks with our id and our model's name. Nearly all have the same bytes in these places as the one before, and
    no text of an answer can have them: within a text, quotes are escaped."""

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
        # The name that our answers have for it; within a text the quotes would be escaped.
        if b'"reasoning":' in data and b'"reasoning_content":' not in data:
            data = data.replace(b'"reasoning":', b'"reasoning_content":')
        return data

    def _learn(self, data: bytes) -> None:
        try:
            head = _heads.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return  # what can be read of it is read elsewhere; neither name is a text there
        known = {b"id": head.id, b"model": head.model}
        changes: dict[bytes, bytes] = {}
        for found in _FIELD.finditer(data):
            name, value = found[1], found[2]
            if known[name] is not None and _same(value, known[name]):
                ours = self._ours[name]
                changes[found[0]] = found[0][: -len(value)] + ours
        self._changes = list(changes.items())


def _same(value: bytes, text: str | None) -> bool:
    try:
        return msgspec.json.decode(value) == text
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
