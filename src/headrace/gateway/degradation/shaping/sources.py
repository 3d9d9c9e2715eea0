"""Reads retrieved sources, selects and numbers them, writes them into the prompt and finds citations of them.

Sources come as a field of the request, as `<source id="...">` blocks in messages, or as messages named `source` or
`source:ID`. The number that the model sees stays paired with the source's id, so that every citation finds its source.
Does not rank: the order is that of the given scores, then of arrival.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from headrace.config.shaping_section import ShapingConfig
from headrace.gateway.api_errors import invalid_request
from headrace.gateway.degradation.shaping.change_record import ShapingChange
from headrace.gateway.degradation.shaping.conversation import ChatMessage, find_turn_problem
from headrace.gateway.degradation.shaping.near_duplicates import find_repeats
from headrace.gateway.requests.text_request import SourceText

_TAG: Final = re.compile(r'<source((?:\s+[a-z]{1,16}="[^"<>\n]{0,256}")*)\s*>')
_ATTRIBUTE: Final = re.compile(r'([a-z]+)="([^"]*)"')
_CLOSE: Final = "</source>"
_NUMBERED: Final = re.compile(r"^[ \t]*\[(\d{1,3})\][ \t]+(?=\S)", re.MULTILINE)
_LABEL: Final = re.compile(
    r"^[ \t]*(?:sources?|passages?|context|documents?|question)[ \t]*:[ \t]*", re.I | re.MULTILINE
)
_EMPTY_LINE: Final = re.compile(r"\n[ \t]*\n")
_CITATION: Final = re.compile(r"\[(\d{1,4})\]")
_CUT_ATTEMPTS: Final = 8  # at cutting a text to a number of tokens
_LABEL_TOKENS: Final = 6  # of a number, its brackets and the end of a line, about
_MIN_TOKENS: Final = 24  # a source that would be cut to less is left out
_HEADING: Final = "Sources:"
_QUESTION: Final = "Question: "  # before the user's words if sources stand before them


class SourceField(msgspec.Struct, forbid_unknown_fields=True):
    """One source in a request's field `sources`."""

    id: Annotated[str, Meta(min_length=1, max_length=256)]
    text: Annotated[str, Meta(min_length=1)]
    score: float | None = None


class SelectedSources(msgspec.Struct, frozen=True):
    """Sources by their numbers: the first is [1]."""

    sources: tuple[SourceText, ...]
    changes: tuple[ShapingChange, ...] = ()
    tokens: int = 0  # of all of them in the prompt, about

    def id_of(self, number: int) -> str | None:
        return self.sources[number - 1].id if 1 <= number <= len(self.sources) else None


class Citation(msgspec.Struct, frozen=True):
    """A place in an answer that names a source."""

    number: int
    id: str
    start: int  # characters into the answer
    end: int


# Reading


def parse_sources(given: Sequence[SourceField], *, most: int, parameter: str = "sources") -> tuple[SourceText, ...]:
    """Return the sources of a request's field. ApiError for too many, a repeated id or a score that is not finite."""
    if len(given) > most:
        raise invalid_request(f"'{parameter}' has {len(given)} sources. Expected at most {most}.", parameter)
    seen: set[str] = set()
    for place, each in enumerate(given):
        if each.id in seen:
            raise invalid_request(
                f"'{parameter}' repeats the id '{each.id[:100]}'. Expected unique ids.", f"{parameter}[{place}].id"
            )
        if each.score is not None and not math.isfinite(each.score):
            raise invalid_request(
                f"'{parameter}' has a score that is not a finite number.", f"{parameter}[{place}].score"
            )
        seen.add(each.id)
    return tuple(SourceText(each.id, each.text, each.score) for each in given)


def extract_tagged_sources(
    messages: Sequence[ChatMessage], *, most: int = 256
) -> tuple[list[ChatMessage], tuple[SourceText, ...]]:
    """Split off the tagged sources of the system's and users' messages.

    Returns the messages unchanged if there are none, if nothing of the last user's turn would be left, or if roles
    would no longer alternate.
    """
    sources: list[SourceText] = []
    rest: list[ChatMessage] = []
    names: set[str] = set()
    last = max((place for place, message in enumerate(messages) if message["role"] == "user"), default=-1)
    for place, message in enumerate(messages):
        content, blocks = _split_message(message)
        for id, score, block in blocks:
            sources.append(SourceText(_unique_id(id or "source", names), block, score))
        if not blocks:
            rest.append(message)
        elif content:
            rest.append({**message, "content": content})
        elif place == last:
            return list(messages), ()
    breaks_turns = find_turn_problem(rest) is not None and find_turn_problem(messages) is None
    if not sources or len(sources) > most or breaks_turns:
        return list(messages), ()
    return rest, tuple(source for source in sources if source.text)


_Block = tuple[str, float | None, str]  # id, score, text


def _split_message(message: ChatMessage) -> tuple[str, list[_Block]]:
    """Split a message into its text without sources, and its sources."""
    content = message.get("content") or ""
    if message["role"] not in ("system", "user"):
        return content, []
    name = str(message.get("name") or "")
    if name == "source" or name.startswith("source:"):
        return "", [(name.partition(":")[2], None, content.strip())]
    return _split_blocks(content) if "<source" in content else (content, [])


def _split_blocks(text: str) -> tuple[str, list[_Block]]:
    """Split a text into what is outside its blocks, and the blocks. An unclosed block stays text."""
    outside: list[str] = []
    blocks: list[_Block] = []
    at = 0
    while (tag := _TAG.search(text, at)) is not None:
        end = text.find(_CLOSE, tag.end())
        if end < 0:
            break
        outside.append(text[at : tag.start()])
        attributes = dict(_ATTRIBUTE.findall(tag[1]))
        blocks.append((attributes.get("id", ""), _parse_score(attributes.get("score")), text[tag.end() : end].strip()))
        at = end + len(_CLOSE)
    outside.append(text[at:])
    return "".join(outside).strip(), blocks


def _parse_score(text: str | None) -> float | None:
    try:
        score = float(text or "")
    except ValueError:
        return None
    return score if math.isfinite(score) else None


def _unique_id(id: str, taken: set[str]) -> str:
    number = 2
    unique = id
    while unique in taken:
        unique, number = f"{id}-{number}", number + 1
    taken.add(unique)
    return unique


def extract_numbered_passages(text: str) -> tuple[tuple[SourceText, ...], str]:
    """Split off passages that an application has numbered itself, on lines that begin with [1] and so on.

    Each passage ends at the next number or an empty line, and its number is its id. Fewer than two passages, or numbers
    that do not count up from 1, are left in the text.
    """
    marks = list(_NUMBERED.finditer(text))
    marks = [mark for place, mark in enumerate(marks, start=1) if mark[1] == str(place)]
    if len(marks) < 2:
        return (), text
    sources: list[SourceText] = []
    outside = [text[: marks[0].start()]]
    for place, mark in enumerate(marks):
        until = marks[place + 1].start() if place + 1 < len(marks) else len(text)
        empty = _EMPTY_LINE.search(text, mark.end(), until)
        end = empty.start() if empty is not None else until
        sources.append(SourceText(mark[1], text[mark.end() : end].strip()))
        outside.append(text[end:until])
    return tuple(sources), _LABEL.sub("", "\n".join(outside)).strip()


# Choosing


def select_sources(
    sources: Sequence[SourceText],
    config: ShapingConfig,
    count: Callable[[str], int],
    *,
    total_tokens: int | None = None,  # in place of the configuration's
    least_tokens: int = _MIN_TOKENS,
) -> SelectedSources:
    """Select the best sources within the caps, without repeats. `count` returns the tokens of a text."""
    changes: list[ShapingChange] = []
    size = cache(count)
    total_tokens = config.sources_tokens if total_tokens is None else total_tokens
    order = sorted(range(len(sources)), key=lambda index: (_rank(sources[index]), index))
    ranked = [sources[index] for index in order]
    # Texts are compared as the model will read them, so that two that differ only beyond the cut are one.
    chunks = [_cut(source, config.source_tokens, size) for source in ranked]
    if chunks != ranked:
        changes.append(ShapingChange("chunks", _tokens(ranked, size), _tokens(chunks, size)))
    originals = find_repeats([each.text for each in chunks])
    distinct = [each for each, original in zip(chunks, originals, strict=True) if original is None]
    if len(distinct) < len(chunks):
        changes.append(ShapingChange("repeats", len(chunks), len(distinct)))
    kept: list[SourceText] = []
    left = total_tokens
    for each in distinct[: config.sources]:
        if size(each.text) > left:
            if left < least_tokens:
                break
            each = _cut(each, left, size)
        if each.text:
            kept.append(each)
            left -= size(each.text)
    if kept != distinct:
        changes.append(ShapingChange("sources", _tokens(distinct, size), total_tokens - left))
    return SelectedSources(tuple(kept), tuple(changes), total_tokens - left + _LABEL_TOKENS * (len(kept) + 1))


def _rank(source: SourceText) -> float:
    return math.inf if source.score is None else -source.score


def _tokens(sources: Sequence[SourceText], count: Callable[[str], int]) -> int:
    return sum(count(each.text) for each in sources)


def _cut(source: SourceText, most: int, count: Callable[[str], int]) -> SourceText:
    """Cut a source to at most `most` tokens, at the end of a word."""
    size = count(source.text)
    if size <= most:
        return source
    length = len(source.text)
    for _ in range(_CUT_ATTEMPTS):
        length = min(int(length * most / size), length - 1)
        text = source.text[:length].rstrip()
        space = max(text.rfind(" "), text.rfind("\n"))
        # Scripts without spaces may end anywhere.
        if space > 0.5 * length and not source.text[len(text) : len(text) + 1].isspace():
            text = text[:space].rstrip()
        size = count(text)
        if size <= most:
            return SourceText(source.id, text, source.score)
        length = len(text)
    return SourceText(source.id, "", source.score)


# Writing and citing


def insert_sources(
    messages: Sequence[ChatMessage], selected: SelectedSources, place: Literal["user", "system"] = "user"
) -> list[ChatMessage]:
    """Write the numbered sources into the last user's turn or the system's."""
    result = list(messages)
    if not selected.sources:
        return result
    passages = "\n".join(
        f"[{number}] {plain_brackets(each.text)}" for number, each in enumerate(selected.sources, start=1)
    )
    block = f"{_HEADING}\n{passages}"
    if place == "system":
        if result and result[0]["role"] == "system":
            result[0] = {**result[0], "content": f"{result[0].get('content') or ''}\n\n{block}".strip()}
        else:
            result.insert(0, {"role": "system", "content": block})
        return result
    last = max((index for index, message in enumerate(result) if message["role"] == "user"), default=None)
    if last is not None:
        content = f"{block}\n\n{_QUESTION}{result[last].get('content') or ''}"
        result[last] = {**result[last], "content": content}
    return result


def plain_brackets(text: str) -> str:
    """Replace a source's own notes, such as [12], so that they do not look like citations."""
    return _CITATION.sub(r"(\1)", text)


def find_citations(answer: str, selected: SelectedSources) -> list[Citation]:
    """Find where an answer names sources. Numbers without a source are ignored."""
    found: list[Citation] = []
    for mark in _CITATION.finditer(answer):
        id = selected.id_of(int(mark[1]))
        if id is not None:
            found.append(Citation(int(mark[1]), id, mark.start(), mark.end()))
    return found
