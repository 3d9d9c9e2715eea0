"""Reads the texts to evaluate on and cuts them into windows of tokens. Does not run models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.bench.simulation.synthetic_traffic import trace_lines
from headrace.errors import RequestError
from headrace.models.text.tokenizer import Tokenizer

MOST_TEXT: Final = 256 * 1024 * 1024  # bytes of a text file
MOST_LINE: Final = 8 * 1024 * 1024  # bytes of a line of a prompts file


class Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A text, or a line of a prompts file: a prompt with or without the completion to score, or a chat."""

    prompt: str = ""
    completion: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None  # that the chat's template declares


class DocumentTokens(msgspec.Struct, frozen=True):
    """A document's tokens."""

    prefix: list[int]  # tokens that the model expects before every text; they are in every window
    body: list[int]
    score_from: int = 0  # tokens of the body before this one are context only


class Window(msgspec.Struct, frozen=True):
    """What is computed in one piece. Each token from `first` on is predicted from those before it."""

    tokens: list[int]
    first: int
    chunk: int  # windows with the same number are resampled together

    @property
    def scored(self) -> int:
        return len(self.tokens) - self.first


def read_documents(path: Path) -> list[Document]:
    """Read prompts of a JSONL file, or any other file as one text."""
    return read_prompts(path) if path.suffix == ".jsonl" else read_text(path)


def read_text(path: Path) -> list[Document]:
    _check_exists(path, "text")
    if path.stat().st_size > MOST_TEXT:
        raise RequestError(f"{path} has more than {MOST_TEXT >> 20} MiB. Pass a part of it.", parameter="text")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{path} is not UTF-8 text: {error.reason} at byte {error.start}.", parameter="text"
        ) from None
    return [Document(prompt=text)]


def read_prompts(path: Path) -> list[Document]:
    """Read a JSONL file. Each line has `prompt`, with or without `completion`, or `messages`, with or without
    `tools`."""
    _check_exists(path, "prompts")
    decoder = msgspec.json.Decoder(Document)
    found: list[Document] = []
    for number, raw in trace_lines(path, MOST_LINE):
        try:
            document = decoder.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestError(f"{path}, line {number}: {error}", parameter="prompts") from None
        if bool(document.prompt) == bool(document.messages) or (document.messages and document.completion is not None):
            raise RequestError(
                f"{path}, line {number}: expected either 'prompt', with or without 'completion', or 'messages'.",
                parameter="prompts",
            )
        found.append(document)
    if not found:
        raise RequestError(f"{path} has no prompts. Write one JSON object on each line.", parameter="prompts")
    return found


def _check_exists(path: Path, parameter: str) -> None:
    if not path.is_file():
        raise RequestError(f"There is no file {path}.", parameter=parameter)


def tokenise(document: Document, tokenizer: Tokenizer) -> DocumentTokens:
    """Tokenise a document. Of a completion, or of an answer at the end of a chat, only that part is scored."""
    if document.messages is not None:
        return _tokenise_chat(document.messages, document.tools, tokenizer)
    text = document.prompt + (document.completion or "")
    before, _ = tokenizer.frame
    body = tokenizer.encode(text, add_special_tokens=False)
    if document.completion is None:
        return DocumentTokens(before, body)
    context = tokenizer.encode(document.prompt, add_special_tokens=False)
    return DocumentTokens(before, body, _common(context, body))


def _tokenise_chat(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None, tokenizer: Tokenizer
) -> DocumentTokens:
    def encoded(some: Sequence[dict[str, Any]], *, asks: bool) -> list[int]:
        text = tokenizer.apply_template(some, tools=tools, add_generation_prompt=asks)
        return tokenizer.encode(text, add_special_tokens=False)

    body = encoded(messages, asks=False)
    if messages[-1].get("role") != "assistant" or len(messages) == 1:
        return DocumentTokens([], body)
    return DocumentTokens([], body, _common(encoded(messages[:-1], asks=True), body))


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens both begin with: the end of a prompt may be tokenised otherwise before its completion."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))


def cut(documents: Iterable[DocumentTokens], *, window: int, stride: int, most: int | None = None) -> list[Window]:
    """Cut documents into windows of at most `window` tokens that begin `stride` tokens apart.

    Every token is scored once, in the first window that holds it, so each window but a document's first scores its
    last `stride` tokens. At most `most` tokens are scored. A chunk is a document if there are several, otherwise a
    window.
    """
    texts = list(documents)
    windows: list[Window] = []
    left = most
    for number, text in enumerate(texts):
        for tokens, first in _windows(text, window, stride):
            if left is not None:
                if left <= 0:
                    return windows
                tokens = tokens[: first + left]
                left -= len(tokens) - first
            windows.append(Window(tokens, first, number if len(texts) > 1 else len(windows)))
    return windows


def _windows(text: DocumentTokens, window: int, stride: int) -> Iterator[tuple[list[int], int]]:
    room = window - len(text.prefix)
    stride = min(stride, room if text.prefix else room - 1)  # the first token that a window scores has one before it
    done = 0 if text.prefix else 1  # tokens scored, or that nothing can predict
    end = 0
    while end < len(text.body):
        end = min(room if end == 0 else end + stride, len(text.body))
        start = max(0, end - room)
        done = max(done, text.score_from)
        if done < end:
            yield [*text.prefix, *text.body[start:end]], len(text.prefix) + done - start
            done = end
