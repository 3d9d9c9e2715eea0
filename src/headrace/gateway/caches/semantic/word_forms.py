"""Turns an English text into comparable words: unifies spellings, contractions, short forms and inflections.

Owns Word, the way from a text to words with synonyms, and which words are opposites or alternatives. The lists are the
lexicon's. Words of other languages stay unchanged.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Final

import msgspec

from headrace.gateway.caches.semantic.lexicon import (
    ADJECTIVES,
    ALTERNATIVES,
    GRADED,
    IRREGULAR,
    OPPOSITES,
    PARTICLES,
    PHRASES,
    SHORT_FORMS,
    STOP,
    SYNONYMS,
)


class Word(msgspec.Struct, frozen=True):
    text: str  # lower case
    lemma: str  # without inflection: comparable, not always a word
    key: str  # what it means: the lemma of the first of its synonyms
    grade: str = ""  # "er" or "est" of an adjective
    ends: bool = False  # a clause ends after it
    asks: bool = False  # and it is a question

    @property
    def small(self) -> bool:
        """True if the word is a stop word."""
        return self.text in STOP or self.lemma in STOP or IRREGULAR.get(self.text) in STOP


_SPELLING: Final = (
    (re.compile(r"(?<=[a-z]{3})iz(?=(?:e|ed|es|er|ers|ing|ation|ations)\b)"), "is"),
    (re.compile(r"(?<=[a-z]{2})yz(?=(?:e|ed|es|er|ing)\b)"), "ys"),
    (re.compile(r"\b(col|behavi|fav|hon|lab|neighb|flav)or(?=(?:s|ed|ing|ite|ites|able|al)?\b)"), r"\1our"),
    (re.compile(r"\bcenter"), "centre"),
    (re.compile(r"\bgray\b"), "grey"),
    (re.compile(r"\b(cata|dia)log(?=s?\b)"), r"\1logue"),
    (re.compile(r"\blicense"), "licence"),
    (re.compile(r"\bmeter(?=s?\b)"), "metre"),
)
_CONTRACTIONS: Final = (
    (re.compile(r"\bwon't\b"), "will not"),
    (re.compile(r"\bcan't\b|\bcannot\b"), "can not"),
    (re.compile(r"\bshan't\b"), "shall not"),
    (re.compile(r"(?<=[a-z])n't\b"), " not"),
    (re.compile(r"\b(do|does|did|is|are|was|were|has|have|had|could|would|should|was)nt\b"), r"\1 not"),
    (re.compile(r"'re\b"), " are"),
    (re.compile(r"'ve\b"), " have"),
    (re.compile(r"'ll\b"), " will"),
    (re.compile(r"\bi'm\b"), "i am"),
    (re.compile(r"\bi'd like\b"), "i would like"),
    (re.compile(r"'d\b"), " would"),
    (re.compile(r"\b(what|where|who|how)s\b|\b(what|where|who|when|how|why|it|that|there|here)'s\b"), r"\1\2 is"),
    (re.compile(r"\blet's\b"), "let us"),
    (re.compile(r"\b(\w+)-(?:free|less)\b"), r"without \1"),
    (re.compile(r"\b(?:keep|stop|prevent|hinder)(?=(?: [\w']+){1,4} from \w+ing\b)"), "prevent"),
)
# A prefix that changes the meaning stays with its word: non-nullable, non nullable, pre-tax.
_PREFIXED: Final = re.compile(
    r"\bnon[- ](?=[a-z]{3})|\b(?:un|anti|pre|post|de|dis|re|sub|semi|inter|intra)-(?=[a-z]{3})"
)
_HYPHEN: Final = re.compile(r"(?<!\d)-|-(?!\d)")  # not those of dates
_CONTRACTED: Final = re.compile(r"'|-(?:free|less)\b|\b\w+nt\b|\bcannot\b|\b(?:what|where|who|how)s\b| from \w+ing\b")
_PHRASE: Final = re.compile(rf"\b(?:{'|'.join(sorted(map(re.escape, PHRASES), key=len, reverse=True))})\b")
_SHORT: Final = re.compile(rf"\b(?:{'|'.join(sorted(map(re.escape, SHORT_FORMS), key=len, reverse=True))})\b")
# A word, a possessive ending, or the end of a clause.
_TOKEN: Final = re.compile(r"\x00\d+\x00|[^\W\d]+(?:\d+)?|'s\b|(?<=s)'(?=\s)|[.?!;:,]")
_NOT_ENDINGS: Final = frozenset(
    """during morning evening nothing something anything everything string spring thing king ring bring ceiling sibling
    embed shed sled hundred biped red need feed seed speed bed exceed proceed succeed indeed this his its us is was has
    does yes plus minus always perhaps news less access process address express success status bus gas bias alias chaos
    kubernetes redis pandas canvas atlas series species analysis basis axis virus bonus campus focus menus ping sing
    pricing king being""".split()
)


def expanded(text: str) -> str:
    """Return the text in lower case, without contractions, short forms and spelling variants."""
    text = text.lower()
    for pattern, plain in _CONTRACTIONS if _CONTRACTED.search(text) else ():
        text = pattern.sub(plain, text)
    for pattern, plain in _SPELLING:
        text = pattern.sub(plain, text)
    text = _SHORT.sub(lambda match: SHORT_FORMS[match[0]], text)
    text = _PREFIXED.sub(lambda match: match[0][:-1], text)
    text = _HYPHEN.sub(" ", text)
    return _PHRASE.sub(lambda match: PHRASES[match[0]], text)


@cache
def _stem(word: str) -> str:
    """Strip endings, so that inflections of a word become equal; the result may be no word."""
    if word in IRREGULAR:
        word = IRREGULAR[word]
    if len(word) <= 3 or word in _NOT_ENDINGS or not word.isascii():
        return word
    stem = word
    if stem.endswith("ies") and len(stem) > 4:
        stem = stem[:-3] + "y"
    elif stem.endswith(("sses", "shes", "ches", "xes", "zes")):
        stem = stem[:-2]
    elif stem.endswith("s") and not stem.endswith(("ss", "us", "is")):
        stem = stem[:-1]
    if stem.endswith("ied") and len(stem) > 4:
        stem = stem[:-3] + "y"
    elif stem.endswith("ing") and len(stem) > 5 and stem not in _NOT_ENDINGS and _vowelled(stem[:-3]):
        stem = stem[:-3]
    elif stem.endswith("ed") and len(stem) > 4 and not stem.endswith("eed") and _vowelled(stem[:-2]):
        stem = stem[:-2]
    if stem.endswith("ation") and len(stem) > 7:
        stem = stem[:-5]
    elif stem.endswith("ion") and len(stem) > 6:
        stem = stem[:-3]
    elif stem.endswith("ment") and (len(stem) > 8 or stem in ("payment", "deployment", "shipment")):
        stem = stem[:-4]
    if stem.endswith("e") and len(stem) > 3:
        stem = stem[:-1]
    if stem.endswith("at") and len(stem) > 6:
        stem = stem[:-2]
    if len(stem) > 3 and stem[-1] == stem[-2] and stem[-1] not in "aeiou":
        stem = stem[:-1]
    return stem


def _vowelled(stem: str) -> bool:
    return any(letter in "aeiouy" for letter in stem)


@cache
def _graded(word: str) -> tuple[str, str]:
    """Return the adjective and its grade, "" if it has none."""
    if word in GRADED:
        return GRADED[word], "er" if word in ("better", "worse") else "est"
    for ending in ("est", "er"):
        if word.endswith(ending):
            base = word.removesuffix(ending)
            for each in (base, base + "e", base.removesuffix("i") + "y", base[:-1]):
                if each in ADJECTIVES:
                    return each, ending
    return word, ""


def _groups(text: str) -> list[list[str]]:
    return [group.split() for group in " ".join(text.split()).split(",")]


_KEYS: Final[dict[str, str]] = {}  # of words as they stand, and of their stems
for _group in _groups(SYNONYMS):
    for _word in _group:
        _KEYS.setdefault(_word, _stem(_group[0]))
for _group in _groups(SYNONYMS):
    for _word in _group:
        _KEYS.setdefault(_stem(_word), _stem(_group[0]))


@cache
def word(text: str) -> Word:
    if (key := _KEYS.get(text)) is not None:
        return Word(text, _stem(text), key)
    base, grade = _graded(text)
    lemma = _stem(base)
    return Word(text, lemma, _KEYS.get(base) or _KEYS.get(lemma) or lemma, grade)


def key_of(text: str) -> str:
    return word(text).key


def words(text: str) -> list[Word]:
    """Of a text that is `expanded`. `\\0...\\0` stands for something that is no word, and is kept as one."""
    tokens = _TOKEN.findall(text)
    found: list[Word] = []
    skipped: set[int] = set()
    for place, token in enumerate(tokens):
        if place in skipped or token in ("'s", "'") or token in ".?!;:,":
            if token in ".?!;:," and found:
                last = found[-1]
                found[-1] = Word(last.text, last.lemma, last.key, last.grade, True, last.asks or token == "?")
            continue
        merged, particle = _with_particle(tokens, place)
        if particle is not None:
            skipped.add(particle)
        each = word(merged)
        found.append(each)
    return found


_AFTER_PARTICLES: Final = frozenset(
    "for to by again without with and or from in on at when if before after while using via".split()
)


def _with_particle(tokens: list[str], place: int) -> tuple[str, int | None]:
    """Join a verb with the particle beside it or at the end of its clause."""
    base = _base_verb(tokens[place])
    particles = PARTICLES.get(base)
    if not particles:
        return tokens[place], None
    for step in range(1, 6):
        at = place + step
        if at >= len(tokens) or tokens[at] in ".?!;:,":
            break
        if tokens[at] in particles:
            after = tokens[at + 1] if at + 1 < len(tokens) else "."
            if step == 1 or after in ".?!;:," or after in _AFTER_PARTICLES:
                return f"{base}_{tokens[at]}", at
    return tokens[place], None


@cache
def _base_verb(token: str) -> str:
    stem = _stem(token)
    return next((verb for verb in PARTICLES if verb == token or _stem(verb) == stem), token)


def _related(text: str) -> dict[str, frozenset[str]]:
    """Map each key to the other keys of its groups."""
    found: dict[str, set[str]] = {}
    for group in _groups(text):
        keys = {key_of(each) for each in group}
        for key in keys:
            found.setdefault(key, set()).update(keys - {key})
    return {key: frozenset(others) for key, others in found.items()}


OPPOSED: Final = _related(OPPOSITES)
ALTERNATIVE: Final = _related(ALTERNATIVES)
_PREFIXES: Final = (
    *("un", "dis", "non", "in", "im", "ir", "de", "anti", "mis"),
    *("pre", "post", "re", "sub", "semi", "inter", "intra", "over", "under"),
)
_NO_PREFIX: Final = frozenset(
    """import inform input display discount discover distinct amount account about report repair require response
    result record retail review reset replace subject submit understand overview interest present press""".split()
)


@cache
def prefixed_form(lemma: str, other: str) -> bool:
    """True if one word is the other with a prefix that changes it: unhealthy, non-empty, deactivate, reopen."""
    if len(lemma) < len(other):
        lemma, other = other, lemma
    if len(other) < 4 or lemma in _NO_PREFIX:
        return False
    return any(lemma == prefix + other for prefix in _PREFIXES)
