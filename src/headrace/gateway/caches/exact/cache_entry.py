"""Encodes an answer as bytes: its deltas, compact, sealed for one cache key.

Owns the format of an entry, the check that it is intact and belongs to the key, and which answers may be stored. An
invalid entry is a miss. Does not know stores or clocks.

    3 bytes   magic with the version
    16 bytes  seal: keyed BLAKE2b of the rest; its key is the cache key with the operator's secret
    the rest  msgpack: when it was made, and the deltas

The seal detects damage and an entry stored under another key. With a secret it also detects entries written by someone
who can reach the store but does not have the secret.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Final

import msgspec

from headrace.gateway.requests.text_request import (
    Choice,
    ChoiceDelta,
    FinishReason,
    RestartDelta,
    TokenLogprob,
    TokenUsage,
    ToolCallDelta,
)

_MAGIC: Final = b"mx1"
_SEAL: Final = 16  # bytes
_STORABLE: Final = frozenset(("stop", "length", "tool_calls"))  # finish reasons of complete answers


class _Call(msgspec.Struct, array_like=True, frozen=True):
    index: int
    id: str | None
    name: str | None
    arguments: str


class _Top(msgspec.Struct, array_like=True, frozen=True):
    raw: bytes
    logprob: float
    text: str | None  # None: the decoded bytes


class _Token(msgspec.Struct, array_like=True, frozen=True):
    raw: bytes
    logprob: float | None
    top: list[_Top]
    text: str | None  # None: the decoded bytes
    shown: str | None  # None: as `text`


class _Usage(msgspec.Struct, array_like=True, frozen=True):
    """Usage without times, because a hit waits for no engine."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    reasoning_tokens: int


class _Piece(msgspec.Struct, array_like=True, frozen=True):
    index: int
    content: str
    reasoning: str
    calls: list[_Call]
    logprobs: list[_Token] | None
    finish: FinishReason | None
    stop: str | None
    usage: _Usage | None
    half_call: bool = False


class _Body(msgspec.Struct, array_like=True, frozen=True):
    made: float
    # A plain text is a delta of the first choice with nothing but content, as nearly all are.
    pieces: list[str | _Piece]
    machine_s: float = 0.0


class ExactEntry(msgspec.Struct, frozen=True):
    made: float  # seconds since 1970
    pieces: list[ChoiceDelta]
    machine_s: float = 0.0  # compute time of the generation


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(_Body)


def pack(pieces: Sequence[ChoiceDelta], *, key: bytes, made: float, secret: bytes = b"") -> bytes:
    """Encode an answer. ValueError for invalid text, such as half a surrogate pair."""
    usages = [piece.usage for piece in pieces if piece.usage is not None]
    prefill = max((usage.prefill_s for usage in usages), default=0.0)
    decode = max((usage.decode_s for usage in usages), default=0.0)
    body = _encode(_Body(made, [_packed(piece) for piece in pieces], prefill + decode))
    return b"".join((_MAGIC, _seal(body, key, secret), body))


def unpack(data: bytes, *, key: bytes, secret: bytes = b"") -> ExactEntry | None:
    """Decode an entry; None unless it is intact and belongs to this key."""
    start = len(_MAGIC) + _SEAL
    body = data[start:]
    if data[: len(_MAGIC)] != _MAGIC or not hmac.compare_digest(data[len(_MAGIC) : start], _seal(body, key, secret)):
        return None
    try:
        decoded = _decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    # Passing the empty list is faster than the field's default factory.
    return ExactEntry(
        decoded.made,
        [ChoiceDelta(0, each, "", []) if isinstance(each, str) else _unpacked(each) for each in decoded.pieces],
        decoded.machine_s,
    )


def _seal(body: bytes, key: bytes, secret: bytes) -> bytes:
    with_secret = key + hashlib.sha256(secret).digest() if secret else key
    return hashlib.blake2b(body, digest_size=_SEAL, key=with_secret[:64]).digest()


def _packed(piece: ChoiceDelta) -> str | _Piece:
    bare = piece.logprobs is None and piece.finish is None and not piece.reasoning and not piece.calls
    if bare and piece.index == 0 and piece.stop is None and piece.usage is None:
        return piece.content
    usage = piece.usage
    return _Piece(
        piece.index,
        piece.content,
        piece.reasoning,
        [_Call(call.index, call.id, call.name, call.arguments) for call in piece.calls],
        None if piece.logprobs is None else [_packed_token(each) for each in piece.logprobs],
        piece.finish,
        piece.stop,
        None
        if usage is None
        else _Usage(usage.prompt_tokens, usage.output_tokens, usage.cached_tokens, usage.reasoning_tokens),
        piece.half_call,
    )


def _unpacked(piece: _Piece) -> ChoiceDelta:
    usage = piece.usage
    return ChoiceDelta(
        piece.index,
        piece.content,
        piece.reasoning,
        [ToolCallDelta(call.index, call.id, call.name, call.arguments) for call in piece.calls],
        None if piece.logprobs is None else [_unpacked_token(each) for each in piece.logprobs],
        piece.finish,
        piece.stop,
        piece.half_call,
        None
        if usage is None
        else TokenUsage(usage.prompt_tokens, usage.output_tokens, usage.cached_tokens, usage.reasoning_tokens),
    )


def _packed_token(token: TokenLogprob) -> _Token:
    top = [_Top(raw, logprob, None if text == _decode_text(raw) else text) for text, raw, logprob in token.top]
    text = None if token.text == _decode_text(token.bytes) else token.text
    return _Token(token.bytes, token.logprob, top, text, None if token.shown == token.text else token.shown)


def _unpacked_token(token: _Token) -> TokenLogprob:
    top = [(_decode_text(each.raw) if each.text is None else each.text, each.raw, each.logprob) for each in token.top]
    text = _decode_text(token.raw) if token.text is None else token.text
    return TokenLogprob(text, token.raw, token.logprob, top, text if token.shown is None else token.shown)


def _decode_text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def is_complete(pieces: Sequence[ChoiceDelta], choices: int) -> bool:
    """True if every choice ended by itself: not by a deadline, a failure or a cancellation, and without a restart."""
    ended: set[int] = set()
    for piece in pieces:
        if isinstance(piece, RestartDelta):
            return False
        if piece.finish is not None:
            if piece.finish not in _STORABLE or piece.index in ended:
                return False
            ended.add(piece.index)
    return ended == set(range(choices))


def is_same_answer(one: Sequence[ChoiceDelta], other: Sequence[ChoiceDelta]) -> bool:
    """True if two answers have the same content, however they are split. Call ids are random and do not count."""
    return _content_by_choice(one) == _content_by_choice(other)


def _content_by_choice(pieces: Sequence[ChoiceDelta]) -> dict[int, tuple[object, ...]]:
    choices: dict[int, Choice] = {}
    for piece in pieces:
        choices.setdefault(piece.index, Choice(piece.index)).add(piece)
    return {
        index: (choice.content, choice.reasoning, choice.finish, [(each.name, each.arguments) for each in choice.calls])
        for index, choice in choices.items()
    }
