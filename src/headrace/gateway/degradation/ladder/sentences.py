"""Where the sentences of a text begin and end, in any language that marks their ends.

Owns the cut. A sentence is a slice of the text, so that what is quoted is what stands there. Where nothing marks an
end, a text is cut at a bound all the same. Linear in the text.
"""

from __future__ import annotations

import re
from typing import Final

TextSpan = tuple[int, int]

# The end of a line, or marks with what closes after them. One set of characters first, so that the search is for those.
_MARK: Final = re.compile(
    r"""[\n.!?\u2026\u061f\u0964\u3002\uff01\uff1f\uff61][.!?\u2026\u061f\u0964\u3002\uff01\uff1f\uff61]*"""
    r"""["'\u201d\u2019\u00bb)\]\u300d\u300f\uff09]*"""
)
_SPACELESS: Final = "\u3002\uff01\uff1f\uff61"  # of scripts in which no space follows
_BLANK: Final = re.compile(r"[ \t]*\n")
_LISTED: Final = re.compile(
    r"[ \t]*(?:[-*\u2022\u2023\u2013|>]+|#{1,6}|\d{1,3}[.)])[ \t]"
)  # a line of a list, a heading
_WORD: Final = re.compile(r"[^\W_]")
_SHORT_LINE: Final = 60  # characters: lines of running text that was wrapped are longer
_ABBREVIATIONS: Final = frozenset(
    """
    dr mr mrs ms prof st no nr vs inc ltd co corp jr sr fig sec ca bzw z.b e.g i.e p.ex ej sra sig approx dept est
    """.split()
)
_LONGEST: Final = 8  # characters of an abbreviation, and what may stand before it


def split_sentences(text: str, most: int = 480) -> list[TextSpan]:
    """Places into the text, in order, none empty and none longer than `most` characters."""
    found: list[TextSpan] = []
    start, length = 0, len(text)
    for mark in _MARK.finditer(text):
        at, end = mark.span()
        char = text[at]
        if char == "\n":
            end = at + 1
            ends = _line_ends(text, start, at, end)
        elif char in _SPACELESS:
            ends = True
        elif end < length and not text[end].isspace():
            ends = False
        else:
            ends = end > at + 1 or char != "." or _full_stop(text, start, at, end)
        if ends:
            _add(found, text, start, end, most)
            start = end
    _add(found, text, start, length, most)
    return found


def _line_ends(text: str, start: int, at: int, end: int) -> bool:
    begins = max(text.rfind("\n", start, at) + 1, start)
    if at - begins < _SHORT_LINE:
        return True
    return _BLANK.match(text, end) is not None or _LISTED.match(text, end) is not None


def _full_stop(text: str, start: int, at: int, end: int) -> bool:
    """Whether it ends a sentence, and not an abbreviation or an initial."""
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


def _add(found: list[TextSpan], text: str, start: int, end: int, most: int) -> None:
    if not start or text[start - 1] == "\n":
        listed = _LISTED.match(text, start, end)
        if listed is not None:
            start = listed.end()
    start, end = _bare(text, start, end)
    while end - start > most:
        cut = max(text.rfind(mark, start + most // 2, start + most) for mark in ("; ", ", ", " ", "\n"))
        cut = cut + 1 if cut > start else start + most
        found.append(_bare(text, start, cut))
        start, end = _bare(text, cut, end)
    if _WORD.search(text, start, end) is not None:
        found.append((start, end))


def _bare(text: str, start: int, end: int) -> TextSpan:
    """Without the space around it."""
    inside = text[start:end]
    bare = inside.lstrip()
    start = end - len(bare)
    return start, start + len(bare.rstrip())
