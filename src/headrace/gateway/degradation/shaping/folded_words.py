"""Words of a text in any language, for comparing texts: folded, numbers whole, nothing thrown away.

Owns what counts as a word here. A number keeps what binds its digits (2.1, 12,500, 09:30), so that versions and times
differ as wholes. Scripts that are written without spaces give one word for each character. Every search is linear in
the text, whatever it is.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final

# Thai, Lao, Myanmar, Khmer, kana, CJK ideographs.
_SPACELESS: Final = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
# Signs that belong to the letter before them and are no letters themselves: combining accents, Hebrew and Arabic
# points, and the blocks of the Indic scripts but for their full stops.
_MARKS: Final = "\u0300-\u036f\u0591-\u05bd\u0610-\u061a\u064b-\u065f\u0670\u0900-\u0963\u0966-\u0dff"
_IN_NUMBER: Final = r"(?<=\d)[.,:](?=\d)"
_LETTER: Final = rf"(?:[^\W{_SPACELESS}]|[{_MARKS}])"
_ASCII: Final = re.compile(rf"\w+(?:{_IN_NUMBER}\w+)*", re.ASCII)
ANY_WORD: Final = re.compile(rf"[{_SPACELESS}]|{_LETTER}+(?:{_IN_NUMBER}{_LETTER}+)*")


def words(text: str) -> list[str]:
    """Folded: capitals, accents' forms and widths make no difference."""
    if text.isascii():
        return _ASCII.findall(text.lower())
    return ANY_WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def raw_words(text: str) -> list[str]:
    """As they stand."""
    return (_ASCII if text.isascii() else ANY_WORD).findall(text)


def folded(word: str) -> str:
    return word.lower() if word.isascii() else unicodedata.normalize("NFKC", word).casefold()
