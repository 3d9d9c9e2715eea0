"""Retrieved sources: read from where they stand, chosen within caps, numbered, written into the prompt, cited back.

Owns Source and Selected. Sources come as a field of the request, as `<source id="...">` blocks in the text of messages,
or as messages whose name is `source` or `source:ID`. The number under which the model sees a source and its id are kept
together, so that a citation always finds its way back. Knows no ranking: the order is that of the scores given, then
the order in which they came.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from headrace.gateway.api_errors import invalid
from headrace.gateway.degradation.shaping.change_record import ShapingChange
from headrace.gateway.degradation.shaping.conversation import Message, find_turn_problem
from headrace.gateway.degradation.shaping.near_duplicates import find_repeats
from headrace.gateway.requests.text_request import SourceText

Place = Literal["user", "system"]

_TAG: Final = re.compile(r'<source((?:\s+[a-z]{1,16}="[^"<>\n]{0,256}")*)\s*>')
_ATTRIBUTE: Final = re.compile(r'([a-z]+)="([^"]*)"')
_CLOSE: Final = "</source>"
_NUMBERED: Final = re.compile(r"^[ \t]*\[(\d{1,3})\][ \t]+(?=\S)", re.MULTILINE)
_LABEL: Final = re.compile(
    r"^[ \t]*(?:sources?|passages?|context|documents?|question)[ \t]*:[ \t]*", re.I | re.MULTILINE
)
_EMPTY_LINE: Final = re.compile(r"\n[ \t]*\n")
_CITED: Final = re.compile(r"\[(\d{1,4})\]")
_TRIES: Final = 8  # at cutting a text to its tokens
_AROUND: Final = 6  # tokens of a number, its brackets and the end of a line, about


class SourceField(msgspec.Struct, forbid_unknown_fields=True):
    """A source as a request's field `sources` has it."""

    id: Annotated[str, Meta(min_length=1, max_length=256)]
    text: Annotated[str, Meta(min_length=1)]
    score: float | None = None


class SourceOptions(msgspec.Struct, frozen=True, kw_only=True):
    most: int = 32  # sources
    chunk_tokens: int = 512  # of each
    total_tokens: int = 2048
    least_tokens: int = 24  # a source that would be cut to less is left out
    jaccard: float = 0.8  # see duplicates.repeats
    contained: float = 0.9
    place: Place = "user"
    heading: str = "Sources:"
    question: str = "Question: "  # before the user's words, where sources stand before them


class SelectedSources(msgspec.Struct, frozen=True):
    """Sources by their numbers: the first is [1]."""

    sources: tuple[SourceText, ...]
    shaped: tuple[ShapingChange, ...] = ()
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
    """The sources of a request's field; ApiError for too many, an id that comes twice, or a score that is no number."""
    if len(given) > most:
        raise invalid(f"'{parameter}' may have {most} sources at most, not {len(given)}", parameter)
    seen: set[str] = set()
    for place, each in enumerate(given):
        if each.id in seen:
            raise invalid(f"'{parameter}': two sources have the id '{each.id[:100]}'", f"{parameter}[{place}].id")
        if each.score is not None and not math.isfinite(each.score):
            raise invalid(f"'{parameter}': a score must be finite", f"{parameter}[{place}].score")
        seen.add(each.id)
    return tuple(SourceText(each.id, each.text, each.score) for each in given)


def extract_tagged_sources(
    messages: Sequence[Message], *, most: int = 256
) -> tuple[list[Message], tuple[SourceText, ...]]:
    """The tagged sources of the system's and users' messages, and the conversation without them.

    The messages come back as they are where there are none, where nothing of the last user's turn would be left, or
    where roles would no longer take turns.
    """
    found: list[SourceText] = []
    rest: list[Message] = []
    names: set[str] = set()
    last = max((place for place, message in enumerate(messages) if message["role"] == "user"), default=-1)
    for place, message in enumerate(messages):
        content, blocks = _tagged(message)
        for id, score, block in blocks:
            found.append(SourceText(_unused(id or "source", names), block, score))
        if not blocks:
            rest.append(message)
        elif content:
            rest.append({**message, "content": content})
        elif place == last:
            return list(messages), ()
    if not found or len(found) > most or (find_turn_problem(rest) is not None and find_turn_problem(messages) is None):
        return list(messages), ()
    return rest, tuple(source for source in found if source.text)


_Block = tuple[str, float | None, str]  # id, score, text


def _tagged(message: Message) -> tuple[str, list[_Block]]:
    """What a message says beside its sources, and these."""
    content = message.get("content") or ""
    if message["role"] not in ("system", "user"):
        return content, []
    name = str(message.get("name") or "")
    if name == "source" or name.startswith("source:"):
        return "", [(name.partition(":")[2], None, content.strip())]
    return _blocks(content) if "<source" in content else (content, [])


def _blocks(text: str) -> tuple[str, list[_Block]]:
    """The text without its blocks, and these. One that does not end is none."""
    outside: list[str] = []
    blocks: list[_Block] = []
    at = 0
    while (tag := _TAG.search(text, at)) is not None:
        end = text.find(_CLOSE, tag.end())
        if end < 0:
            break
        outside.append(text[at : tag.start()])
        attributes = dict(_ATTRIBUTE.findall(tag[1]))
        blocks.append((attributes.get("id", ""), _score(attributes.get("score")), text[tag.end() : end].strip()))
        at = end + len(_CLOSE)
    outside.append(text[at:])
    return "".join(outside).strip(), blocks


def _score(text: str | None) -> float | None:
    try:
        score = float(text or "")
    except ValueError:
        return None
    return score if math.isfinite(score) else None


def _unused(id: str, names: set[str]) -> str:
    number = 2
    found = id
    while found in names:
        found, number = f"{id}-{number}", number + 1
    names.add(found)
    return found


def extract_numbered_passages(text: str) -> tuple[tuple[SourceText, ...], str]:
    """Passages that an application has numbered itself, a line that begins with [1] and so on, and the text beside
    them.

    Each goes on to the next number or an empty line. Their ids are their numbers. Fewer than two, or numbers that do
    not count up from 1, are none.
    """
    marks = list(_NUMBERED.finditer(text))
    marks = [mark for place, mark in enumerate(marks, start=1) if mark[1] == str(place)]
    if len(marks) < 2:
        return (), text
    found: list[SourceText] = []
    outside = [text[: marks[0].start()]]
    for place, mark in enumerate(marks):
        until = marks[place + 1].start() if place + 1 < len(marks) else len(text)
        empty = _EMPTY_LINE.search(text, mark.end(), until)
        end = empty.start() if empty is not None else until
        found.append(SourceText(mark[1], text[mark.end() : end].strip()))
        outside.append(text[end:until])
    return tuple(found), _LABEL.sub("", "\n".join(outside)).strip()


# Choosing


def select_sources(
    sources: Sequence[SourceText], options: SourceOptions, count: Callable[[str], int]
) -> SelectedSources:
    """The best of them within the caps, none twice, each with its number. `count`: tokens of a text."""
    shaped: list[ShapingChange] = []
    size = cache(count)
    order = sorted(range(len(sources)), key=lambda place: (_rank(sources[place]), place))
    chosen = [sources[place] for place in order]
    # What is cut is compared as it will be read, so that two texts that only differ further on are one.
    whole = [_cut(source, options.chunk_tokens, size) for source in chosen]
    if whole != chosen:
        shaped.append(ShapingChange("chunks", _tokens(chosen, size), _tokens(whole, size)))
    originals = find_repeats([each.text for each in whole], jaccard=options.jaccard, contained=options.contained)
    distinct = [each for each, original in zip(whole, originals, strict=True) if original is None]
    if len(distinct) < len(whole):
        shaped.append(ShapingChange("repeats", len(whole), len(distinct)))
    kept: list[SourceText] = []
    left = options.total_tokens
    for each in distinct[: options.most]:
        if size(each.text) > left:
            if left < options.least_tokens:
                break
            each = _cut(each, left, size)
        if each.text:
            kept.append(each)
            left -= size(each.text)
    if kept != distinct:
        shaped.append(ShapingChange("sources", _tokens(distinct, size), options.total_tokens - left))
    return SelectedSources(tuple(kept), tuple(shaped), options.total_tokens - left + _AROUND * (len(kept) + 1))


def _rank(source: SourceText) -> float:
    return math.inf if source.score is None else -source.score


def _tokens(sources: Sequence[SourceText], count: Callable[[str], int]) -> int:
    return sum(count(each.text) for each in sources)


def _cut(source: SourceText, most: int, count: Callable[[str], int]) -> SourceText:
    """The beginning of it, at most so many tokens, ending where a word ends."""
    size = count(source.text)
    if size <= most:
        return source
    length = len(source.text)
    for _ in range(_TRIES):
        length = min(int(length * most / size), length - 1)
        text = source.text[:length].rstrip()
        space = max(text.rfind(" "), text.rfind("\n"))
        # Scripts without spaces end anywhere.
        if space > 0.5 * length and not source.text[len(text) : len(text) + 1].isspace():
            text = text[:space].rstrip()
        size = count(text)
        if size <= most:
            return SourceText(source.id, text, source.score)
        length = len(text)
    return SourceText(source.id, "", source.score)


# Writing and citing


def insert_sources(messages: Sequence[Message], selected: SelectedSources, options: SourceOptions) -> list[Message]:
    """The conversation with the sources, numbered, in the last user's turn or in the system's."""
    found = list(messages)
    if not selected.sources:
        return found
    passages = "\n".join(
        f"[{number}] {plain_brackets(each.text)}" for number, each in enumerate(selected.sources, start=1)
    )
    block = f"{options.heading}\n{passages}"
    if options.place == "system":
        if found and found[0]["role"] == "system":
            found[0] = {**found[0], "content": f"{found[0].get('content') or ''}\n\n{block}".strip()}
        else:
            found.insert(0, {"role": "system", "content": block})
        return found
    last = max((place for place, message in enumerate(found) if message["role"] == "user"), default=None)
    if last is None:
        return found
    found[last] = {**found[last], "content": f"{block}\n\n{options.question}{found[last].get('content') or ''}"}
    return found


def plain_brackets(text: str) -> str:
    """A source's own notes, such as [12], are no citations of ours."""
    return _CITED.sub(r"(\1)", text)


def find_citations(answer: str, selected: SelectedSources) -> list[Citation]:
    """Where an answer names sources, with their ids. A number that no source has is none."""
    found: list[Citation] = []
    for mark in _CITED.finditer(answer):
        id = selected.id_of(int(mark[1]))
        if id is not None:
            found.append(Citation(int(mark[1]), id, mark.start(), mark.end()))
    return found
