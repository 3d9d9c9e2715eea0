"""An answer as bytes: the pieces that it came in, compact, sealed for one key.

Owns the form of an entry, the check that it is whole and meant for this very key, and what may become one. Anything
wrong with an entry makes it none, which is a miss. Knows no store and no clock.

    3 bytes   what this is, with its version
    16 bytes  seal: keyed BLAKE2b of the rest; its key is the entry's own, with the operator's secret
    the rest  msgpack: when it was made, and the pieces

The seal notices damage and an entry that lies under another's key. With a secret it also notices entries that somebody
else wrote, who can reach the store but has no secret.
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
_KEEPING: Final = frozenset(("stop", "length", "tool_calls"))  # ends of answers that are worth keeping


class _Call(msgspec.Struct, array_like=True, frozen=True):
    index: int
    id: str | None
    name: str | None
    arguments: str


class _Top(msgspec.Struct, array_like=True, frozen=True):
    raw: bytes
    logprob: float
    text: str | None  # None: what the bytes say


class _Token(msgspec.Struct, array_like=True, frozen=True):
    raw: bytes
    logprob: float | None
    top: list[_Top]
    text: str | None  # None: what the bytes say
    shown: str | None  # None: the text


class _Usage(msgspec.Struct, array_like=True, frozen=True):
    """Without times: whoever gets the entry waited for no engine."""

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


class _Body(msgspec.Struct, array_like=True, frozen=True):
    made: float
    # A text alone is a piece of the first choice that has nothing else, as nearly all are.
    pieces: list[str | _Piece]
    machine_s: float = 0.0


class ExactEntry(msgspec.Struct, frozen=True):
    made: float  # seconds since 1970
    pieces: list[ChoiceDelta]
    machine_s: float = 0.0  # that it took to make


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(_Body)


def pack(pieces: Sequence[ChoiceDelta], *, key: bytes, made: float, secret: bytes = b"") -> bytes:
    """ValueError for a text that is none, such as half a character."""
    usages = [piece.usage for piece in pieces if piece.usage is not None]
    prefill = max((usage.prefill_s for usage in usages), default=0.0)
    decode = max((usage.decode_s for usage in usages), default=0.0)
    body = _encode(_Body(made, [_packed(piece) for piece in pieces], prefill + decode))
    return b"".join((_MAGIC, _seal(body, key, secret), body))


def unpack(data: bytes, *, key: bytes, secret: bytes = b"") -> ExactEntry | None:
    """None for anything but a whole entry of this key."""
    start = len(_MAGIC) + _SEAL
    body = data[start:]
    if data[: len(_MAGIC)] != _MAGIC or not hmac.compare_digest(data[len(_MAGIC) : start], _seal(body, key, secret)):
        return None
    try:
        found = _decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    # The empty list is given because the field's own default takes longer than all the rest of a piece.
    return ExactEntry(
        found.made,
        [ChoiceDelta(0, each, "", []) if isinstance(each, str) else _unpacked(each) for each in found.pieces],
        found.machine_s,
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
        None
        if usage is None
        else TokenUsage(usage.prompt_tokens, usage.output_tokens, usage.cached_tokens, usage.reasoning_tokens),
    )


def _packed_token(token: TokenLogprob) -> _Token:
    top = [_Top(raw, logprob, None if text == _said(raw) else text) for text, raw, logprob in token.top]
    text = None if token.text == _said(token.bytes) else token.text
    return _Token(token.bytes, token.logprob, top, text, None if token.shown == token.text else token.shown)


def _unpacked_token(token: _Token) -> TokenLogprob:
    top = [(_said(each.raw) if each.text is None else each.text, each.raw, each.logprob) for each in token.top]
    text = _said(token.raw) if token.text is None else token.text
    return TokenLogprob(text, token.raw, token.logprob, top, text if token.shown is None else token.shown)


def _said(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def is_complete(pieces: Sequence[ChoiceDelta], choices: int) -> bool:
    """Whether every choice has come to an end of its own. What a deadline cut, failed or was cancelled has not, and
    what began anew says something else than its pieces do."""
    ended: set[int] = set()
    for piece in pieces:
        if isinstance(piece, RestartDelta):
            return False
        if piece.finish is not None:
            if piece.finish not in _KEEPING or piece.index in ended:
                return False
            ended.add(piece.index)
    return ended == set(range(choices))


def is_same_answer(one: Sequence[ChoiceDelta], other: Sequence[ChoiceDelta]) -> bool:
    """Whether two answers do, however they are cut into pieces. The ids of calls are random."""
    return _said_by(one) == _said_by(other)


def _said_by(pieces: Sequence[ChoiceDelta]) -> dict[int, tuple[object, ...]]:
    choices: dict[int, Choice] = {}
    for piece in pieces:
        choices.setdefault(piece.index, Choice(piece.index)).add(piece)
    return {
        index: (choice.content, choice.reasoning, choice.finish, [(each.name, each.arguments) for each in choice.calls])
        for index, choice in choices.items()
    }
