"""Splits a text into sentences, in any language that marks their ends.

A sentence is a slice of the text, so that quotes are exact. A text without such marks is cut at a maximum length.
Linear in the text.
"""

from __future__ import annotations

import re
from typing import Final

TextSpan = tuple[int, int]

# A line end, or punctuation with closing quotes and brackets. Starts with one character set, which is fast to search.
_MARK: Final = re.compile(
    r"""[\n.!?\u2026\u061f\u0964\u3002\uff01\uff1f\uff61][.!?\u2026\u061f\u0964\u3002\uff01\uff1f\uff61]*"""
    r"""["'\u201d\u2019\u00bb)\]\u300d\u300f\uff09]*"""
)
_SPACELESS: Final = "\u3002\uff01\uff1f\uff61"  # from scripts in which no space follows
_BLANK: Final = re.compile(r"[ \t]*\n")
_LISTED: Final = re.compile(r"[ \t]*(?:[-*\u2022\u2023\u2013|>]+|#{1,6}|\d{1,3}[.)])[ \t]")  # a list item or a heading
_WORD: Final = re.compile(r"[^\W_]")
_SHORT_LINE: Final = 60  # characters: wrapped lines of running text are longer
_ABBREVIATIONS: Final = frozenset(
    """
    dr mr mrs ms prof st no nr vs inc ltd co corp jr sr fig sec ca bzw z.b e.g i.e p.ex ej sra sig approx dept est
    """.split()
)
_LONGEST: Final = 8  # characters of an abbreviation with its opening quotes


def split_sentences(text: str, most: int = 480) -> list[TextSpan]:
    """Return the spans of the sentences in order, none empty and none longer than `most` characters."""
    spans: list[TextSpan] = []
    start, length = 0, len(text)
    for mark in _MARK.finditer(text):
        at, end = mark.span()
        char = text[at]
        if char == "\n":
            end = at + 1
            ends = _is_sentence_end(text, start, at, end)
        elif char in _SPACELESS:
            ends = True
        elif end < length and not text[end].isspace():
            ends = False
        else:
            ends = end > at + 1 or char != "." or _is_full_stop(text, start, at, end)
        if ends:
            _add(spans, text, start, end, most)
            start = end
    _add(spans, text, start, length, most)
    return spans


def _is_sentence_end(text: str, start: int, at: int, end: int) -> bool:
    """True if the line end at `at` ends a sentence, rather than wraps a long line."""
    begins = max(text.rfind("\n", start, at) + 1, start)
    if at - begins < _SHORT_LINE:
        return True
    return _BLANK.match(text, end) is not None or _LISTED.match(text, end) is not None


def _is_full_stop(text: str, start: int, at: int, end: int) -> bool:
    """True if a dot ends a sentence rather than an abbreviation or an initial."""
    after = text[end : end + 3].lstrip()[:1]
    if after.islower():
        return False
    if at - text.rfind(" ", start, at) > _LONGEST:
        return True
    before = text[max(start, at - 24) : at].split()
    word = before[-1].lstrip("([\"'\u201c\u2018\u00ab") if before else ""
    if word.lower() in _ABBREVIATIONS:
        return False
    # `J. Smith`, `Ada K. Lund`; but `in hall A. It ...`.
    is_initial = len(word) == 1 and word.isupper() and after.isupper()
    return not (is_initial and (len(before) < 2 or before[-2][:1].isupper()))


def _add(spans: list[TextSpan], text: str, start: int, end: int, most: int) -> None:
    if not start or text[start - 1] == "\n":
        listed = _LISTED.match(text, start, end)
        if listed is not None:
            start = listed.end()
    start, end = _strip(text, start, end)
    while end - start > most:
        cut = max(text.rfind(mark, start + most // 2, start + most) for mark in ("; ", ", ", " ", "\n"))
        cut = cut + 1 if cut > start else start + most
        spans.append(_strip(text, start, cut))
        start, end = _strip(text, cut, end)
    if _WORD.search(text, start, end) is not None:
        spans.append((start, end))


def _strip(text: str, start: int, end: int) -> TextSpan:
    """Shrink a span to exclude the whitespace around it."""
    inside = text[start:end]
    stripped = inside.lstrip()
    start = end - len(stripped)
    return start, start + len(stripped.rstrip())
