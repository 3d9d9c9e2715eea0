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

from headrace.gateway.upstreams import upstream_errors

_NONE: Final = Raw()  # the field is missing; `is_present` is False for it and for null


class FunctionFragment(Struct):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class ToolCallFragment(Struct):
    index: int | None = None
    id: str | None = None
    function: FunctionFragment | None = None


class UpstreamDelta(Struct):
    """The `delta` of a stream, or the `message` of a whole answer."""

    content: str | list[Any] | None = None  # some servers send a list of parts
    reasoning_content: str | None = None
    reasoning: Any = None  # another name for it; an unrelated object on some servers
    refusal: str | None = None
    tool_calls: list[ToolCallFragment] | None = None


class UpstreamChoice(Struct):
    """One choice's part of a chunk, or a choice of a whole answer."""

    index: int | None = None  # missing: 0
    delta: UpstreamDelta | None = None
    message: UpstreamDelta | None = None
    text: str | None = None  # in a completion
    finish_reason: str | None = None
    logprobs: Raw = _NONE
    stop_reason: Any = None  # vLLM: the stop text that ended it, or a token's id
    matched_stop: Any = None  # SGLang's name for it


class UpstreamChunk(Struct):
    choices: list[UpstreamChoice] | None = None
    usage: Raw = _NONE
    error: Raw = _NONE
    object: str | None = None
    message: str | None = None  # an error in vLLM's older shape


class UsageDetails(Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class ReportedUsage(Struct):
    """The usage that the upstream reports."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: UsageDetails | None = None
    completion_tokens_details: UsageDetails | None = None
    prompt_cache_hit_tokens: int | None = None  # DeepSeek's name for cached tokens


_chunks: Final = msgspec.json.Decoder(UpstreamChunk)
_usages: Final = msgspec.json.Decoder(ReportedUsage)


def read_chunk(data: bytes, name: str) -> UpstreamChunk:
    """Decode a chunk. Raises UpstreamError if it is not one."""
    try:
        return _chunks.decode(data)
    except msgspec.ValidationError:
        raise upstream_errors.invalid_answer(name, "sent JSON that is not an answer") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        return _chunks.decode(_repair(data))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise upstream_errors.invalid_answer(name, "sent something that is not JSON") from None


def _repair(data: bytes) -> bytes:
    """Replace broken characters: some servers split texts within a character's bytes or surrogates.
    Raises ValueError if the data is not JSON."""
    found: object = json.loads(data.decode("utf-8", "replace"))
    text = json.dumps(found, ensure_ascii=False)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def read_usage(raw: Raw) -> ReportedUsage | None:
    """Decode a usage; None if it is missing or malformed."""
    if not is_present(raw):
        return None
    try:
        return _usages.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def is_present(raw: Raw) -> bool:
    return bytes(raw) not in (b"", b"null")


_TEXT: Final = re.compile(rb'"(?:content|text)"\s*:\s*"((?:[^"\\]|\\.)*)"')
_USES: Final = 4  # chunks that must match before a new template is learned, so that varied streams cost nothing


class ChunkTemplate:
    """The bytes that a stream's chunks share before and after the text of their one choice.

    Nearly all chunks of nearly all servers differ in the text alone, and comparing the rest is much cheaper than
    decoding it.
    """

    def __init__(self) -> None:
        self.before = b""
        self.after = b""
        self.version = 0  # increases with each learned template
        self._length = 0
        self._uses = _USES

    def text(self, data: bytes) -> bytes | None:
        """Return the chunk's text as JSON without quotes; None if the chunk does not match."""
        before, after = self.before, self.after
        if len(data) <= self._length or not before or not data.startswith(before) or not data.endswith(after):
            return None
        text = data[len(before) : len(data) - len(after)]
        # A quote could end the text early, and a trailing backslash could escape the closing quote.
        if b'"' in text or text.endswith(b"\\"):
            return None
        self._uses += 1
        return text

    def learn(self, data: bytes, text: str) -> None:
        """Learn from a decoded chunk that has this text and nothing else."""
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
    """Decode a JSON string without its quotes; None if it is malformed."""
    try:
        return _texts.decode(b'"%b"' % raw) if b"\\" in raw else raw.decode()
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def join_texts(parts: Sequence[str | bytes]) -> str:
    """Join texts and JSON strings without quotes. Decodes adjacent JSON strings together: a character may be split
    between them."""
    found: list[str] = []
    for raw, group in itertools.groupby(parts, lambda part: isinstance(part, bytes)):
        if raw:
            data = b"".join(part for part in group if isinstance(part, bytes))
            text = decode_text(data)
            found.append(data.decode("utf-8", "replace") if text is None else text)
        else:
            found += [part for part in group if isinstance(part, str)]
    return "".join(found)
