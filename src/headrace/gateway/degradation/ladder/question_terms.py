"""Parses a question: the words that matter, which of them are names, and what kind of thing would answer it.

Owns the small word lists that this takes (English, German, French, Spanish, Italian, Portuguese, Dutch). In other
languages every word matters and no kind is known, which gives worse answers but no wrong ones. Does not look at
sources.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Final, Literal

import msgspec

from headrace.gateway.folded_words import folded, raw_words, without_accents

AnswerKind = Literal["time", "clock", "day", "year", "number", "money", "phone", "name", "place"]

CARRIED_OVER: Final = 0.5  # weight of a term taken from the previous question
MAX_QUESTIONS: Final = 3  # answered in one turn
_MAX_TERMS: Final = 24
_MAX_TEXT: Final = 1200  # characters read of a turn, from its end

# Without accents, so that it does not matter whether they were typed.
STOP: Final = frozenset(
    """
    a an the is are was were be been being am do does did done has have had having can could will would shall should may
    might must i you he she it we they me him her us them my your his its our their this that these those there here of
    to in on at by for from with about into onto up off over under and or but if so than then as not no nor any some all
    what which who whom whose when where why how please tell hi hello hey thanks thank could help know want get let also
    just only very too much many more most such one ones s t re ve ll d m next quick question brief good morning
    der das dem des ein eine einen einem einer ist sind wurde wird werden haben kann ich du sie wir ihr mein dein und
    oder aber nicht auch von zu zum zur im am auf fur mit aus bei nach uber was wer wem wen wann wo wie warum welche
    welcher welches bitte
    le la les un une des du est sont ete etre je tu il elle nous vous ils elles mon ma mes et ou mais pas ne que qui
    quoi quand comment pourquoi quel quelle quels quelles dans pour avec au aux ce cette ces
    el los las uno una unos unas es esta estan ser fue yo ella nosotros ellos mi su sus y o pero que quien quienes
    cuando donde como porque cual cuales del al para por con se lo
    gli e sono era io lui lei noi loro di da in con non che chi quando dove perche quale quali
    os um uma do dos na nos nas em para com nao que quem quando onde como qual quais
    de het een zijn ik jij hij wij zij mijn en niet van naar met voor wat wie wanneer waar waarom welke hoe
    """.split()
)
_KINDS: Final[dict[str, AnswerKind]] = {
    **dict.fromkeys("when wann quand cuando quando wanneer".split(), "time"),
    **dict.fromkeys(
        "combien cuanto cuanta cuantos cuantas quanto quanta quanti quante quantos quantas hoeveel wieviel".split(),
        "number",
    ),
    **dict.fromkeys("who whom whose wer wem wen qui quien quienes chi quem".split(), "name"),
    **dict.fromkeys("where wo ou donde dove onde waar".split(), "place"),
}
_AFTER_HOW: Final[dict[str, AnswerKind]] = dict.fromkeys(
    """
    many much large big heavy long old far tall high deep wide fast often small thick strong hot cold loud
    viel viele lange lang gross hoch alt weit schwer breit tief oft schnell veel groot zwaar oud ver hoog
    """.split(),
    "number",
)
_ASKING: Final = frozenset(_KINDS) | frozenset(
    "what which how why was welche que quel quelle cual che qual wat welke".split()
)
_HOW: Final = frozenset("how wie hoe".split())
# Nouns that name the kind of answer if no question word does.
_NOUNS: Final[dict[str, AnswerKind]] = {
    **dict.fromkeys("time hour hours uhrzeit heure hora ora tijd".split(), "clock"),
    **dict.fromkeys("date day weekday deadline datum tag jour fecha dia data giorno dag".split(), "day"),
    **dict.fromkeys("year jahr annee ano anno jaar".split(), "year"),
    **dict.fromkeys(
        """
        price cost costs pay fee expensive cheap money euros dollars preis kostet prix coute precio cuesta prezzo costa
        preco custa prijs
        """.split(),
        "money",
    ),
    **dict.fromkeys("phone telephone call telefon telefono telefone telefoon".split(), "phone"),
    **dict.fromkeys(
        """
        number floor amount weight size width height length age percentage share rate score total count kilometres
        miles minutes kg gb nummer numero
        """.split(),
        "number",
    ),
    **dict.fromkeys("name person company author head manager owner nom nombre nome naam firma".split(), "name"),
    **dict.fromkeys(
        "address street city town country place adresse direccion indirizzo adres stadt ville".split(), "place"
    ),
}
_ALSO: Final = re.compile(r"^\W*(?:and|und|et|y|e|en|what about|how about|was ist mit|et pour)\b[ ,]*", re.IGNORECASE)
_PART: Final = re.compile(r"(?<=[?\uff1f\u061f])\s*")


class QuestionTerm(msgspec.Struct, frozen=True):
    stem: str
    named: bool  # a name or a number: what the question is about, rather than what it asks
    weight: float = 1.0


class QuestionTerms(msgspec.Struct, frozen=True):
    terms: tuple[QuestionTerm, ...]
    kind: AnswerKind | None
    words: frozenset[str]  # the stems of all words: what the question says is no answer to it
    pairs: tuple[tuple[str, str], ...] = ()  # adjacent terms: `security policy`


@lru_cache(maxsize=16_384)
def stem(word: str) -> str:
    """Return a folded word without accents and common endings. Words with the same stem count as the same."""
    word = without_accents(word) or word
    if len(word) < 4 or not word.isalpha():
        return word
    if word[-1] == "s" and word[-2] != "s":
        word = word[:-1]
    for ending in ("ing", "ed", "er"):
        if len(word) >= len(ending) + 3 and word.endswith(ending):
            word = word[: -len(ending)]
            break
    if word[-1] == "e" and len(word) > 3:
        word = word[:-1]
    return word[:-1] + "i" if word[-1] == "y" and len(word) > 3 else word


def parse_questions(
    text: str, before: Sequence[str] = (), *, is_name: Callable[[str], bool] = lambda _word: False
) -> list[QuestionTerms]:
    """Parse the questions of a user's turn, one for each question mark.

    `before`: the user's earlier turns, oldest first, which complete a short question such as `And Porto?`. `is_name`:
    whether the sources use a word as a name.
    """
    parts = [part for part in _PART.split(text[-_MAX_TEXT:]) if any(char.isalnum() for char in part)]
    asking = [part for part in parts if part[-1] in "?\uff1f\u061f"]
    if parts and (not asking or _is_parse(parts[-1])) and parts[-1] not in asking:
        asking.append(parts[-1])  # without its question mark
    parsed: list[QuestionTerms] = []
    for part in asking[:MAX_QUESTIONS]:
        one = _parse(part, is_name)
        earlier = [*before, *asking[: asking.index(part)]]
        if _is_incomplete(part, one) and earlier:
            one = _complete(one, earlier, is_name)
        if one.terms:
            parsed.append(one)
    return parsed


def _is_parse(text: str) -> bool:
    return any(plain_form(word) in _ASKING for word in raw_words(text)[:4])


def _is_incomplete(text: str, one: QuestionTerms) -> bool:
    return one.kind is None and (_ALSO.match(text) is not None or len(one.terms) < 2) and len(one.terms) <= 5


def _complete(one: QuestionTerms, before: Iterable[str], is_name: Callable[[str], bool]) -> QuestionTerms:
    for text in reversed(list(before)[-4:]):
        for part in reversed([part for part in _PART.split(text[-_MAX_TEXT:]) if part.strip()]):
            other = _parse(part, is_name)
            if _is_incomplete(part, other):
                continue
            mine = tuple(QuestionTerm(term.stem, True) for term in one.terms)
            kept = tuple(
                QuestionTerm(term.stem, False, CARRIED_OVER)
                for term in other.terms
                if not term.named and all(term.stem != each.stem for each in mine)
            )
            words = one.words | {term.stem for term in kept}
            return QuestionTerms((*mine, *kept)[:_MAX_TERMS], other.kind, words, one.pairs)
    return one


def _parse(text: str, is_name: Callable[[str], bool]) -> QuestionTerms:
    raw = raw_words(text)
    plain = [plain_form(word) for word in raw]
    terms: dict[str, QuestionTerm] = {}
    pairs: list[tuple[str, str]] = []
    previous = ""  # the term directly before
    first = True  # in a sentence, where a capital means nothing
    for word, low in zip(raw, plain, strict=True):
        is_upper = word[:1].isupper() and not first and word != "I"
        has_digit = any(char.isdigit() for char in word)
        if low not in STOP and (len(word) > 1 or has_digit or is_upper or not word.isascii()):
            key = stem(folded(word))
            named = is_upper or has_digit or is_name(word)
            if len(terms) < _MAX_TERMS or key in terms:
                terms[key] = QuestionTerm(key, named or (key in terms and terms[key].named))
                if previous:
                    pairs.append((previous, key))
            previous = key
        else:
            previous = ""
        first = False
    words = frozenset(stem(folded(word)) for word in raw)
    # In an unknown language, adjacent words need not belong together.
    known = any(word in STOP for word in plain)
    return QuestionTerms(tuple(terms.values()), _kind(plain), words, tuple(pairs) if known else ())


@lru_cache(maxsize=16_384)
def plain_form(word: str) -> str:
    """Return a word folded and without accents."""
    return without_accents(folded(word))


def _kind(plain: Sequence[str]) -> AnswerKind | None:
    for place, (word, following) in enumerate(zip(plain, [*plain[1:], ""], strict=True)):
        if word in _HOW and following in _AFTER_HOW:
            kind = _AFTER_HOW[following]
            return "money" if any(_NOUNS.get(each) == "money" for each in plain) else kind
        if word in _KINDS and (word != "ou" or not place):  # within a French sentence, `ou` means `or`
            return _KINDS[word]
    return next((_NOUNS[word] for word in plain if word in _NOUNS), None)
