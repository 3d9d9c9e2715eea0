"""The chunks and whole answers that upstreams write, decoded leniently because servers differ.

ChunkTemplate avoids decoding a chunk that differs from the previous one in its text alone. upstream_answer_reader.py
interprets the chunks.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from headrace.gateway.upstreams import upstream_errors as faults

_NONE: Final = Raw()  # what is not there; what is null is told from it by `present`


class FunctionFragment(Struct):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class ToolCallFragment(Struct):
    index: int | None = None
    id: str | None = None
    function: FunctionFragment | None = None


class UpstreamDelta(Struct):
    """Of a stream's `delta`, or of a whole answer's `message`."""

    content: str | list[Any] | None = None  # a list of parts, with some
    reasoning_content: str | None = None
    reasoning: Any = None  # the same by another name; with some an object that is none of ours
    refusal: str | None = None
    tool_calls: list[ToolCallFragment] | None = None


class UpstreamChoice(Struct):
    """One choice's part of a chunk, or a choice of a whole answer."""

    index: int | None = None  # 0 where it is not told
    delta: UpstreamDelta | None = None
    message: UpstreamDelta | None = None
    text: str | None = None  # of a completion
    finish_reason: str | None = None
    logprobs: Raw = _NONE
    stop_reason: Any = None  # vLLM: the stop text that ended it, or a token's id
    matched_stop: Any = None  # SGLang's name for it


class UpstreamChunk(Struct):
    choices: list[UpstreamChoice] | None = None
    usage: Raw = _NONE
    error: Raw = _NONE
    object: str | None = None
    message: str | None = None  # of an error in vLLM's older shape


class UsageDetails(Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class ReportedUsage(Struct):
    """A usage, as told."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: UsageDetails | None = None
    completion_tokens_details: UsageDetails | None = None
    prompt_cache_hit_tokens: int | None = None  # DeepSeek's name for the cached ones


_chunks: Final = msgspec.json.Decoder(UpstreamChunk)
_usages: Final = msgspec.json.Decoder(ReportedUsage)


def read_chunk(data: bytes, name: str) -> UpstreamChunk:
    """UpstreamError for what is none."""
    try:
        return _chunks.decode(data)
    except msgspec.ValidationError:
        raise faults.invalid_answer(name, "sent JSON that is not an answer") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        return _chunks.decode(_mended(data))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise faults.invalid_answer(name, "sent something that is not JSON") from None


def _mended(data: bytes) -> bytes:
    """Some cut their texts between the bytes of a character, or the halves of one: what is left of it is replaced.
    ValueError for what is no JSON all the same."""
    found: object = json.loads(data.decode("utf-8", "replace"))
    text = json.dumps(found, ensure_ascii=False)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def read_usage(raw: Raw) -> ReportedUsage | None:
    """None where there is none, or one that cannot be read."""
    if not is_present(raw):
        return None
    try:
        return _usages.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def is_present(raw: Raw) -> bool:
    return bytes(raw) not in (b"", b"null")


_TEXT: Final = re.compile(rb'"(?:content|text)"\s*:\s*"((?:[^"\\]|\\.)*)"')
_USES: Final = 4  # of a form, before another one is looked for: where every chunk is another, none is looked for


class ChunkTemplate:
    """What a stream's chunks have in common, around the text of its one choice.

    Two chunks with the same bytes before and after their texts say the same but for these. Nearly all chunks of nearly
    all servers are such, and to see that is much cheaper than to decode them.
    """

    def __init__(self) -> None:
        self.before = b""
        self.after = b""
        self.version = 0  # counts the forms that were found
        self._length = 0
        self._uses = _USES

    def text(self, data: bytes) -> bytes | None:
        """A chunk's text, as JSON has it between quotes; None where the chunk is of no known form."""
        before, after = self.before, self.after
        if len(data) <= self._length or not before or not data.startswith(before) or not data.endswith(after):
            return None
        text = data[len(before) : len(data) - len(after)]
        # A quote could end the text and begin something else, and a backslash hide the quote that ends it.
        if b'"' in text or text.endswith(b"\\"):
            return None
        self._uses += 1
        return text

    def learn(self, data: bytes, text: str) -> None:
        """Of a chunk that was decoded, and has this text and nothing else that is new."""
        if self._uses < _USES:
            self._uses += 1
            return
        found = [match for match in _TEXT.finditer(data) if decode_text(match[1]) == text]
        if len(found) != 1:
            return
        self.before, self.after = data[: found[0].start(1)], data[found[0].end(1) :]
        self._length = len(self.before) + len(self.after)
        self.version += 1
        self._uses = 0


_texts: Final = msgspec.json.Decoder(str)


def decode_text(raw: bytes) -> str | None:
    """Of a text as JSON has it between quotes; None for what is none."""
    try:
        return _texts.decode(b'"%b"' % raw) if b"\\" in raw else raw.decode()
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def join_texts(parts: Sequence[str | bytes]) -> str:
    """Of texts, and of texts as JSON has them between quotes: those that follow each other are one, because what is
    half a character in the first may be whole with the second."""
    found: list[str] = []
    for raw, group in itertools.groupby(parts, lambda part: isinstance(part, bytes)):
        if raw:
            data = b"".join(part for part in group if isinstance(part, bytes))
            text = decode_text(data)
            found.append(data.decode("utf-8", "replace") if text is None else text)
        else:
            found += [part for part in group if isinstance(part, str)]
    return "".join(found)
