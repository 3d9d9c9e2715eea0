"""Checks an answer's citations: every cited number or id must belong to a source of the request."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from headrace.gateway.requests.text_request import SourceText

# [3], [doc-7], [1, 2]; but not a link's text or an image: those are followed by a parenthesis.
_BRACKET: Final = re.compile(r"\[([^\[\]\n]{1,200})\](?!\()")
_NUMBER: Final = re.compile(r"\d{1,4}")


class CheckedCitations(msgspec.Struct, frozen=True):
    cited: tuple[str, ...]  # ids of sources, in order, each once
    unknown: tuple[str, ...]  # cited, but no source

    @property
    def correct(self) -> bool:
        return not self.unknown


def check_citations(answer: str, sources: Sequence[SourceText]) -> CheckedCitations | None:
    """Return None if the request has no sources. A number n stands for the n-th source; other marks for an id."""
    if not sources:
        return None
    ids = [source.id for source in sources]
    looks_like_id = _pattern_of(ids)
    cited: dict[str, None] = {}
    unknown: dict[str, None] = {}
    for bracket in _BRACKET.finditer(answer):
        for mark in (each.strip() for each in bracket[1].split(",")):
            if mark in ids:
                cited[mark] = None
            elif _NUMBER.fullmatch(mark):
                if 1 <= int(mark) <= len(ids):
                    cited[ids[int(mark) - 1]] = None
                else:
                    unknown[mark] = None
            elif looks_like_id.fullmatch(mark):
                unknown[mark] = None
    return CheckedCitations(tuple(cited), tuple(unknown))


def _pattern_of(ids: Sequence[str]) -> re.Pattern[str]:
    """Match what has the shape of an id: digits stand for digits, letters for themselves. So [doc-9] is a citation
    where the ids are doc-1 to doc-3, and [sic] is not."""
    shapes = {re.sub(r"\d+", r"\\d+", re.escape(id)) for id in ids if not id.isdigit()}
    return re.compile("|".join(sorted(shapes)) or r"(?!)")
