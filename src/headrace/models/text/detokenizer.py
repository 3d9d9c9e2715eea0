"""Turns generated tokens into text, one token at a time, and reads a tokenizer's decoder.

A Detokenizer emits text as soon as no later token can change it:

- byte-level decoders turn every token into bytes, and wait for the bytes that complete a character;
- SentencePiece-like decoders turn a token into text or, by byte fallback, into one byte;
- for any other decoder it decodes a short window again, which may differ from decoding the whole text.

`tokenizers` replaces every byte of a byte-fallback run by U+FFFD if the run as a whole is not UTF-8, so it can say
nothing about a run before its end. A Detokenizer keeps the complete characters of such a run and replaces only the
other bytes, so that a script written in bytes can be streamed.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any, Final, Literal, NamedTuple, Protocol, cast

import msgspec

_MAX_HELD_BACK: Final = 16  # tokens that the window decoder holds back while a character is incomplete


class DecoderKind(NamedTuple):
    """The part of a tokenizer's decoder that applies to one token at a time."""

    form: str  # "bytes", "pieces" or "window"
    replaces: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    first_without: str | None = None  # a character to drop from the first token
    strip: tuple[str, int] = ("", 0)  # a character, and how many to drop at the start of the text


class _ByteLevel(msgspec.Struct, tag_field="type", tag="ByteLevel"):
    pass


class _Pattern(msgspec.Struct, forbid_unknown_fields=True):  # regular expressions are not supported
    String: str


class _Replace(msgspec.Struct, tag_field="type", tag="Replace"):
    pattern: _Pattern
    content: str


class _ByteFallback(msgspec.Struct, tag_field="type", tag="ByteFallback"):
    pass


class _Metaspace(msgspec.Struct, tag_field="type", tag="Metaspace"):
    replacement: str
    prepend_scheme: Literal["always", "first", "never"]


class _Fuse(msgspec.Struct, tag_field="type", tag="Fuse"):
    pass


class _Strip(msgspec.Struct, tag_field="type", tag="Strip"):
    content: str
    start: int
    stop: int


_Step = _ByteLevel | _Replace | _ByteFallback | _Metaspace | _Fuse | _Strip


class _Sequence(msgspec.Struct, tag_field="type", tag="Sequence"):
    decoders: list[_Step]


# Steps must come in this order, because each depends on the output of the one before.
_ORDER: Final = (_Replace, _ByteFallback, _Metaspace, _Fuse, _Strip)


def read_decoder(source: bytes) -> DecoderKind:
    """Parse the `decoder` of a tokenizer.json."""
    try:
        decoder = msgspec.json.decode(source, type=_Step | _Sequence)
    except msgspec.MsgspecError:
        return DecoderKind("window")
    steps = decoder.decoders if isinstance(decoder, _Sequence) else [decoder]
    if len(steps) == 1 and isinstance(steps[0], _ByteLevel):
        return DecoderKind("bytes")
    return _read_pieces(steps) or DecoderKind("window")


def _read_pieces(steps: list[_Step]) -> DecoderKind | None:
    """Return the steps of a SentencePiece-like decoder, or None if a step or the order is unknown."""
    kind = DecoderKind("pieces")
    stage = 0
    for step in steps:
        if isinstance(step, _ByteLevel) or _ORDER.index(type(step)) < stage:
            return None
        # Only Replace may occur twice. Strip acts on the whole text only after Fuse.
        stage = _ORDER.index(type(step)) + (not isinstance(step, _Replace))
        match step:
            case _Replace(pattern=pattern, content=content):
                kind = kind._replace(replaces=(*kind.replaces, (pattern.String, content)))
            case _ByteFallback():
                kind = kind._replace(byte_fallback=True)
            case _Metaspace(replacement=mark, prepend_scheme=prepends):
                dropped = mark if prepends != "never" else None
                kind = kind._replace(replaces=(*kind.replaces, (mark, " ")), first_without=dropped)
            case _Strip(content=content, start=start, stop=stop):
                if stop or not any(isinstance(other, _Fuse) for other in steps):
                    return None
                kind = kind._replace(strip=(content, start))
            case _:
                pass
    return kind


class TokenLookup(Protocol):
    """Implemented by TokenTable and by the tokenizers of `tokenizers`."""

    def id_to_token(self, id: int) -> str | None: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class TokenPieces:
    """Caches each token's bytes or text for all detokenizers of one tokenizer."""

    def __init__(self, tokens: TokenLookup, kind: DecoderKind, special: Collection[int]) -> None:
        self.kind = kind
        self._tokens = tokens
        self._special = frozenset(special)
        self._known: dict[int, bytes | str] = {}

    def is_special(self, token: int) -> bool:
        return token in self._special

    def raw(self, token: int) -> bytes | str:
        """Return a token's bytes, which join those around them, or its text, before any first-token rule."""
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._find(self._tokens.id_to_token(token) or "")
        return known

    def window(self, tokens: list[int]) -> str:
        return self._tokens.decode(tokens, skip_special_tokens=False)

    def _find(self, text: str) -> bytes | str:
        if self.kind.form == "bytes":
            table = byte_of_character()
            mapped = [table.get(character) for character in text]
            return text.encode() if None in mapped else bytes(cast("list[int]", mapped))
        if self.kind.byte_fallback and (byte := _fallback_byte(text)) is not None:
            return byte
        return text


class HasPieces(Protocol):
    @property
    def pieces(self) -> TokenPieces: ...


class Detokenizer:
    """The text of one sequence: the results of `push` and `finish`, joined, are the text of all tokens."""

    def __init__(self, tokenizer: HasPieces, *, skip_special_tokens: bool = True, continues: bool = False) -> None:
        """Set `continues` if the text follows a prompt, so that the space before its first word stays."""
        self._pieces = pieces = tokenizer.pieces
        self._skip = skip_special_tokens
        self._first = not continues
        character, count = pieces.kind.strip
        self._strip_character = character
        self._strip = 0 if continues else count
        self._utf8: Any = codecs.getincrementaldecoder("utf-8")("replace")
        self._window: list[int] = []
        self._shown = 0  # tokens of the window whose text was emitted
        self.push: Callable[[int], str] = self._push_window if pieces.kind.form == "window" else self._push_piece

    def finish(self) -> str:
        """Return the held-back text; incomplete characters become U+FFFD."""
        if self._pieces.kind.form == "window":
            return self._window_text(force=True)
        return self._stripped(self._utf8.decode(b"", True))

    def _push_piece(self, token: int) -> str:
        if self._skip and self._pieces.is_special(token):
            return ""
        piece = self._pieces.raw(token)
        if isinstance(piece, bytes):
            if piece:
                self._first = False
            return self._stripped(self._utf8.decode(piece))
        kind = self._pieces.kind
        if self._first and piece:
            self._first = False
            if kind.first_without is not None:
                piece = piece.replace(kind.first_without, "")
        for old, new in kind.replaces:
            piece = piece.replace(old, new)
        # Text ends a run of bytes.
        return self._stripped(self._utf8.decode(b"", True) + piece)

    def _push_window(self, token: int) -> str:
        if self._skip and self._pieces.is_special(token):
            return ""
        self._window.append(token)
        return self._window_text(force=False)

    def _window_text(self, *, force: bool) -> str:
        before = self._pieces.window(self._window[: self._shown])
        after = self._pieces.window(self._window)
        held_back = len(self._window) - self._shown
        if after.endswith("\ufffd") and not force and held_back < _MAX_HELD_BACK:
            return ""
        # Keep the tokens just emitted as context for the next ones.
        self._window = self._window[self._shown :]
        self._shown = len(self._window)
        return after[len(before) :]

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if not text.startswith(self._strip_character):
                self._strip = 0
            else:
                text = text[1:]
                self._strip -= 1
        return text


def _fallback_byte(text: str) -> bytes | None:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        try:
            return bytes.fromhex(text[3:5])
        except ValueError:
            return None
    return None


@cache
def byte_of_character() -> dict[str, int]:
    """Map the printable characters of byte-level tokenizers (the byte itself, or from U+0100 on) to bytes."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in itself]
    return {chr(byte): byte for byte in itself} | {chr(0x100 + index): byte for index, byte in enumerate(others)}
