"""Splits texts in any language into words for comparison, folded so that case, accents' forms and widths do not matter.

A number keeps the marks within it (2.1, 12,500, 09:30), so that versions and times differ as wholes. Scripts written
without spaces give one word per character. Every search is linear in the text.
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache
from typing import Final

# Thai, Lao, Myanmar, Khmer, kana, CJK ideographs.
_SPACELESS: Final = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
# Marks that belong to the letter before them and are no letters themselves: combining accents, Hebrew and Arabic
# points, and the blocks of the Indic scripts except their full stops.
_MARKS: Final = "\u0300-\u036f\u0591-\u05bd\u0610-\u061a\u064b-\u065f\u0670\u0900-\u0963\u0966-\u0dff"
_IN_NUMBER: Final = r"(?<=\d)[.,:](?=\d)"
_LETTER: Final = rf"(?:[^\W{_SPACELESS}]|[{_MARKS}])"
_ASCII: Final = re.compile(rf"\w+(?:{_IN_NUMBER}\w+)*", re.ASCII)


@cache
def any_word() -> re.Pattern[str]:
    """Return the expression of a word in any script. Compiling it takes milliseconds."""
    return re.compile(rf"[{_SPACELESS}]|{_LETTER}+(?:{_IN_NUMBER}{_LETTER}+)*")


def words(text: str) -> list[str]:
    if text.isascii():
        return _ASCII.findall(text.lower())
    return any_word().findall(folded(text))


def raw_words(text: str) -> list[str]:
    """Return the words as they stand, not folded."""
    return (_ASCII if text.isascii() else any_word()).findall(text)


def folded(text: str) -> str:
    return text.lower() if text.isascii() else unicodedata.normalize("NFKC", text).casefold()


def without_accents(text: str) -> str:
    """Drop accents and other combining marks."""
    if text.isascii():
        return text
    return "".join(char for char in unicodedata.normalize("NFKD", text) if not unicodedata.combining(char))
