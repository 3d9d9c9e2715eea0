"""Detects the script and the language of a text from its letters and most common words.

Cheap, and prefers no answer to a wrong one: a text that is too short, or in a language that is not listed, has no
language.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

_MAX_CHARS: Final = 600  # read from the beginning of a text
_MIN_WORDS: Final = 2  # common words of a language that a text must contain
_WORD: Final = re.compile(r"[^\W\d_]+")

# Script, the language most often written in it, and the first and last code point.
_SCRIPTS: Final = (
    ("kana", "ja", 0x3040, 0x30FF),  # before han, because Japanese uses both
    ("hangul", "ko", 0xAC00, 0xD7AF),
    ("han", "zh", 0x4E00, 0x9FFF),
    ("cyrillic", "ru", 0x0400, 0x04FF),
    ("greek", "el", 0x0370, 0x03FF),
    ("hebrew", "he", 0x0590, 0x05FF),
    ("arabic", "ar", 0x0600, 0x06FF),
    ("devanagari", "hi", 0x0900, 0x097F),
    ("thai", "th", 0x0E00, 0x0E7F),
)

# The most common words of each language, without those that several of them share.
_COMMON_WORDS: Final[dict[str, frozenset[str]]] = {
    "en": frozenset("the of and is you that was are with this have what how which does can from your it my".split()),
    "de": frozenset("der und ist das nicht ich wie ein eine wird mit auf für den dem sind kann wir sie auch".split()),
    "fr": frozenset("le les est des une pas pour dans vous je comment quel avec sur sont nous qui cette du au".split()),
    "es": frozenset("el los las es una por para con cómo está qué del más pero son puedo hay mi tiene cuál".split()),
    "it": frozenset("il gli è di che una per non sono come della con quale questo posso nel anche più ho dei".split()),
    "pt": frozenset("os é uma não para com como está você dos das meu mais qual são por isso tem eu seu".split()),
    "nl": frozenset("het een van niet ik en zijn hoe wat met voor op dat deze kan je wordt aan ook naar".split()),
    "pl": frozenset("jest nie się na jak że czy to dla co mogę jaki są od po przez który tego moje być".split()),
    "sv": frozenset("och är att det inte som jag hur vad med för på den kan ett har vilken till av om".split()),
    "tr": frozenset("bir ve bu için ne değil ile mi var olarak daha çok ben bana hangi kadar gibi en da".split()),
}
LANGUAGES: Final = frozenset(_COMMON_WORDS) | {language for _, language, _, _ in _SCRIPTS}


def script_of(text: str) -> str:
    """Return the script of most letters. Any kana makes a text Japanese rather than Chinese."""
    if text.isascii():
        return "latin"
    counts: dict[str, int] = {}
    for letter in text:
        if letter.isalpha():
            code = ord(letter)
            script = next((script for script, _, low, high in _SCRIPTS if low <= code <= high), "latin")
            counts[script] = counts.get(script, 0) + 1
    if counts.get("kana"):
        return "kana"
    return max(counts, key=lambda name: counts[name], default="")


def language_of(text: str) -> str:
    """Return a language code such as "en" or "de"; empty if the text is too short to tell."""
    text = text[:_MAX_CHARS]
    if not text.isascii() and (language := _language_by_script(text)):
        return language
    return language_by_words(text.lower(), _LANGUAGES_BY_WORD, least=_MIN_WORDS)


def index_words(vocabularies: Mapping[str, frozenset[str]]) -> dict[str, tuple[str, ...]]:
    """Map each word to the languages whose vocabulary has it."""
    return {
        word: tuple(language for language, words in vocabularies.items() if word in words)
        for word in frozenset[str]().union(*vocabularies.values())
    }


def language_by_words(lower: str, languages_by_word: Mapping[str, tuple[str, ...]], *, least: int = 1) -> str:
    """Return the language with the most words in a lower-case text; empty on a tie or below `least` words."""
    scores: dict[str, int] = {}
    for word in _WORD.findall(lower):
        for language in languages_by_word.get(word, ()):
            scores[language] = scores.get(language, 0) + 1
    if not scores:
        return ""
    (language, score), *others = sorted(scores.items(), key=lambda each: -each[1])
    return language if score >= least and all(other < score for _, other in others[:1]) else ""


def _language_by_script(text: str) -> str:
    """Return the language of the first script with at least a quarter of the letters, and at least two."""
    letters = [ord(each) for each in text if each.isalpha()]
    for _, language, low, high in _SCRIPTS:
        count = sum(low <= letter <= high for letter in letters)
        if count * 4 >= len(letters) > 0 and count >= 2:
            return language
    return ""


_LANGUAGES_BY_WORD: Final = index_words(_COMMON_WORDS)
