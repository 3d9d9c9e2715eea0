"""Which language a text is in, as far as its script and its commonest words say.

Owns the scripts and the words. For rules, so it is cheap and would rather say nothing: a text that is too short, or in
a language that is not here, has none.
"""

from __future__ import annotations

import re
from typing import Final

LOOKED: Final = 600  # characters from the beginning
_LEAST_WORDS: Final = 2  # of a language's own that a text must have
_WORD: Final = re.compile(r"[^\W\d_]+")

# The commonest words of each, without those that several of them share.
_WORDS: Final[dict[str, frozenset[str]]] = {
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
_LANGUAGES_OF: Final = {
    word: tuple(language for language, words in _WORDS.items() if word in words)
    for word in frozenset[str]().union(*_WORDS.values())
}

# First and last character of a script that stands for a language, or for the one most often written in it.
_SCRIPTS: Final = (
    ("ja", 0x3040, 0x30FF),  # before Chinese: Japanese has its characters too
    ("ko", 0xAC00, 0xD7AF),
    ("zh", 0x4E00, 0x9FFF),
    ("ru", 0x0400, 0x04FF),
    ("el", 0x0370, 0x03FF),
    ("he", 0x0590, 0x05FF),
    ("ar", 0x0600, 0x06FF),
    ("hi", 0x0900, 0x097F),
    ("th", 0x0E00, 0x0E7F),
)
LANGUAGES: Final = frozenset(_WORDS) | {language for language, _, _ in _SCRIPTS}


def language_of(text: str) -> str:
    """ "en", "de", ...; empty where it cannot be told."""
    looked = text[:LOOKED]
    if not looked.isascii():
        by_script = _by_script(looked)
        if by_script:
            return by_script
    scores: dict[str, int] = {}
    for word in _WORD.findall(looked.lower()):
        for language in _LANGUAGES_OF.get(word, ()):
            scores[language] = scores.get(language, 0) + 1
    if not scores:
        return ""
    first, *others = sorted(scores.items(), key=lambda each: -each[1])
    if first[1] < _LEAST_WORDS or (others and others[0][1] == first[1]):
        return ""
    return first[0]


def _by_script(text: str) -> str:
    """Where at least a quarter of the letters are of one script."""
    letters = [ord(each) for each in text if each.isalpha()]
    for language, low, high in _SCRIPTS:
        count = sum(low <= letter <= high for letter in letters)
        if count * 4 >= len(letters) > 0 and count >= 2:
            return language
    return ""
