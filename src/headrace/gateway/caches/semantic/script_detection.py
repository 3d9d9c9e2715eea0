"""In which script and in which language a text is written, as far as a few letters and small words tell.

Owns the ranges of letters and the count of small words; the words are the lexicon's.
"""

from __future__ import annotations

import re
from typing import Final

from headrace.gateway.caches.semantic.lexicon import LANGUAGES

_SCRIPTS: Final = (
    ("kana", 0x3040, 0x30FF),
    ("han", 0x4E00, 0x9FFF),
    ("hangul", 0xAC00, 0xD7AF),
    ("cyrillic", 0x0400, 0x04FF),
    ("arabic", 0x0600, 0x06FF),
    ("hebrew", 0x0590, 0x05FF),
    ("devanagari", 0x0900, 0x097F),
    ("greek", 0x0370, 0x03FF),
    ("thai", 0x0E00, 0x0E7F),
)


def script_of(text: str) -> str:
    """That of most letters; Japanese is told from Chinese by any kana."""
    if text.isascii():
        return "latin"
    counts: dict[str, int] = {}
    for letter in text:
        if letter.isalpha():
            code = ord(letter)
            name = next((name for name, low, high in _SCRIPTS if low <= code <= high), "latin")
            counts[name] = counts.get(name, 0) + 1
    if counts.get("kana"):
        return "kana"
    return max(counts, key=lambda name: counts[name], default="")


def language_of(lower: str) -> str:
    tokens = re.findall(r"[^\W\d_]+", lower)
    scores = {name: sum(token in small for token in tokens) for name, small in LANGUAGES.items()}
    best, second = sorted(scores.values())[:-3:-1]
    return max(scores, key=lambda name: scores[name]) if best > second else ""
