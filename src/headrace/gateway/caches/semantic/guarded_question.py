"""Parses a question for the guards: what it names, counts, negates and asks for.

Owns ParsedQuestion and its parser. Does not compare questions: that is for `guards`. Parsing is deterministic, takes a
fraction of a millisecond, and the last few thousand results are cached.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from itertools import pairwise
from typing import Final

import msgspec

from headrace.gateway.caches.semantic.answer_types import question_kind
from headrace.gateway.caches.semantic.lexicon import ALL, COURTESY, LANGUAGES, NEGATIONS, ONE, SHORT_FORMS
from headrace.gateway.caches.semantic.quantities import bounds, places, quantities
from headrace.gateway.caches.semantic.word_forms import Word, expanded, key_of, words
from headrace.gateway.language_detection import index_words, language_by_words, script_of

_LONGEST: Final = 1500  # characters read; the cache accepts no longer questions
_KEPT: Final = 4096  # parsed questions that are cached
_LANGUAGES_BY_WORD: Final = index_words(LANGUAGES)


class ParsedQuestion(msgspec.Struct, frozen=True):
    text: str
    words: tuple[Word, ...]  # without courtesies, numbers and dates
    content: tuple[str, ...]  # keys of the meaningful words in order, without numbers and dates
    plain: frozenset[str]  # every word verbatim, with its lemma and key
    numbers: tuple[str, ...]
    dates: tuple[str, ...]
    names: frozenset[str]  # capitalised words, lower case
    identifiers: frozenset[str]  # flags, paths, code, versions with letters, quoted texts
    affirmed: tuple[str, ...]  # keys that are not negated, stop words included
    denied: tuple[str, ...]  # what each negation negates; "" if unclear
    kind: str  # how, why, who, ...; "" if unclear
    roles: tuple[tuple[str, frozenset[str]], ...]  # from, to, over, ...: with the keys of what follows
    conditions: frozenset[str]  # keys after if, when, unless, while, for, that ...
    superlatives: frozenset[str]
    extent: str  # "all", "one" or ""
    every: frozenset[str]  # keys that "all", "every" or "each" counts
    single: frozenset[str]  # keys after "a", "an", "this", "that" or "the"
    bounds: frozenset[str]  # "<" and ">" of numbers: under 200, at least 5
    letters: tuple[str, ...]  # single letters that are names, in order: a and b, x and y
    modality: str  # of a yes/no question: "must", "may" or ""
    fronted: bool  # it begins with where, when or how, and a comma
    passive: bool  # with its agent
    script: str
    language: str  # "" if unclear


@lru_cache(_KEPT)
def parse_question(text: str) -> ParsedQuestion:
    given = unicodedata.normalize("NFKC", text[:_LONGEST]).translate(_QUOTES).strip()
    identifiers, names, masked = _named(given)
    lower = expanded(masked)
    for pattern in _COURTESIES if _COURTEOUS.search(lower) else ():
        lower = _SPACE.sub(" ", pattern.sub(" ", lower)).strip()
    found = quantities(lower)
    all_words = words(found.rest)
    affirmed, denied = _polarity(all_words)
    content = tuple(word.key for word in all_words if not word.small and len(word.text) > 1)
    plain = frozenset(part for word in all_words for part in (word.text, word.lemma, word.key))
    return ParsedQuestion(
        text=text,
        words=tuple(all_words),
        content=_genitives(all_words, content),
        plain=plain | {each.lower() for each in re.findall(r"[\w.+#/-]+", given)},
        numbers=found.numbers,
        dates=found.dates,
        names=names,
        identifiers=identifiers,
        affirmed=affirmed,
        denied=denied,
        kind=question_kind(lower),
        roles=_roles(all_words),
        conditions=_conditions(all_words),
        superlatives=_superlatives(all_words),
        extent=_extent(all_words),
        every=_counted(all_words, ALL),
        single=_counted(all_words, _SINGLE),
        bounds=bounds(given.lower()),
        letters=tuple(
            word.text for at, word in enumerate(all_words) if len(word.text) == 1 and _is_letter(all_words, at)
        ),
        modality=_modality(lower),
        fronted=bool(_FRONTED.match(lower)),
        passive=bool(_PASSIVE.search(lower)),
        script=script_of(given),
        language=language_by_words(lower, _LANGUAGES_BY_WORD),
    )


_QUOTES: Final = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "`": "`", "\u2013": "-"})
_SPACE: Final = re.compile(r"\s+")
_COURTEOUS: Final = re.compile(
    r"\b(?:hi|hello|hey|dear|good|thanks|thank|thx|cheers|regards|please|kindly|pls|sorry|quick|sure|new|hearing|wondering"
    r"|you|ask|know|understand|find|learn|point|tell|me|help)\b"
)
_COURTESIES: Final = tuple(re.compile(each) for each in COURTESY)
_QUOTED: Final = re.compile(r'"([^"]{1,200})"|`([^`]{1,200})`|(?<!\w)\'([^\']{2,200})\'(?!\w)')
_IDENTIFIER: Final = re.compile(
    r"""(?<!\S)--?[A-Za-z][\w-]*                     # a flag
    | (?<![\w/])/[\w.-]+(?:/[\w.-]+)*                # a path
    | \b\w+(?:::\w+)+                                # of C++ or Rust
    | \b[A-Za-z]\w*(?:\.\w+)+(?:\(\))? | \b\w+\(\)   # a file, a method
    | \b\w+_\w+\b                                    # a setting
    | \b[A-Za-z]+/\d[\w.]*                           # HTTP/2
    | \b[A-Za-z]\+\+\d* | \b[CF]\#                   # a language
    | \b(?=[\w-]{0,40}\d)(?=[\w-]{0,40}[A-Za-z])\w[\w-]{0,60}\w     # with digits: OPS-1182, 0x80070005, IPv6, v2
    """,
    re.VERBOSE,
)
_NO_IDENTIFIERS: Final = frozenset("e.g i.e etc a.m p.m and/or".split())
_NAME: Final = re.compile(r"[^\W\d_][\w']*")


def _named(text: str) -> tuple[frozenset[str], frozenset[str], str]:
    """Return identifiers, names, and the text with the digits of identifiers masked."""
    identifiers: set[str] = set()
    for match in _QUOTED.finditer(text):
        identifiers.add(next(group for group in match.groups() if group).strip().lower())
    numbers = set(places(text.lower()))

    def hide(match: re.Match[str]) -> str:
        token = match[0]
        lower = token.lower()
        if lower in _NO_IDENTIFIERS or lower in SHORT_FORMS or match.span() in numbers or _is_date(token):
            return token
        if re.fullmatch(r"[Qq][1-4]|\d+-\w+", token):
            return token
        # A flag's letter is case sensitive.
        identifiers.add(token if token.startswith("-") and len(token) == 2 else lower)
        return re.sub(r"\d", "\x1a", token)  # digits would be read as numbers; any other sign does

    masked = _IDENTIFIER.sub(hide, text)
    return frozenset(identifiers), _names(text), masked.replace("\x1a", "z")


def _is_date(token: str) -> bool:
    return bool(re.fullmatch(r"\d{1,2}(?:st|nd|rd|th|am|pm)", token.lower()))


def _names(text: str) -> frozenset[str]:
    """Return capitalised words that do not begin a sentence; none in a text of capitals or titles."""
    found = list(_NAME.finditer(text))
    upper = sum(match[0][0].isupper() for match in found)
    if len(found) > 2 and upper > 0.6 * len(found):
        return frozenset(match[0].lower() for match in found if _CAMEL.search(match[0]))
    names: set[str] = set()
    for match in found:
        token = match[0].removesuffix("'s")
        before = text[: match.start()].rstrip(" \"'(`")
        starts = not before or before[-1] in ".?!:" or "\n" in text[len(before) : match.start()]
        inner = any(letter.isupper() for letter in token[1:])
        if (token[0].isupper() and (not starts or inner) and token not in _NEVER_NAMES and len(token) > 1) or (
            inner and token not in _NEVER_NAMES
        ):
            names.add(token.lower())
    return frozenset(names)


_CAMEL: Final = re.compile(r"[a-z][A-Z]")
_NEVER_NAMES: Final = frozenset(
    """I'm I'd I've I'll OK Ok Hi Hello Dear Thanks Thank Please     Monday Tuesday Wednesday Thursday Friday Saturday
    Sunday January February March April May June July August September October November December Sat Sun Mon Tue Wed
    Thu Fri     Jan Feb Mar Apr Jun Jul Aug Sep Sept Oct Nov Dec AM PM GB MB TB KB GiB MiB KiB TiB USD EUR GBP JPY
    CHF Celsius     Fahrenheit Kelvin Mbit Gbit Kbit""".split()
)


_FRONTED: Final = re.compile(
    r"(?:in|on|at|for|with|without|using|under|since|from|after|before|when|if|while|once|during|by)\b[^,?.!]{1,80},"
)
_PASSIVE: Final = re.compile(r"\b(?:is|are|was|were|be|been|being)\b(?: \w+){0,4} \w+(?:ed|en|own|ent|ept)\b.* by\b")


# Negation

_BEYOND: Final = 6  # words after a negation in which its target is searched
_AUXILIARY: Final = frozenset("is are do does did can could would will should has have was were am".split())


def _polarity(found: list[Word]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the affirmed and the negated keys."""
    denied: list[str] = []
    taken: set[int] = set()
    starts = True
    for place, word in enumerate(found):
        began, starts = starts, word.ends
        text = word.text
        if text == "not" and place and (place == 1 or found[place - 2].ends) and found[place - 1].text in _AUXILIARY:
            continue  # "Isn't there ...?" asks the same as "Is there ...?"
        if text == "no" and began and word.ends:
            continue
        if text in NEGATIONS or word.lemma == "lack":
            _deny(found, place, denied, taken, inverted=text == "not" and _inverted(found, place))
        elif text == "prevent" and (at := _from_doing(found, place)) is not None:
            taken.add(place)
            taken.add(at + 1)
            denied.append(found[at + 1].key)
    affirmed = tuple(word.key for place, word in enumerate(found) if place not in taken)
    return affirmed, tuple(denied)


def _inverted(found: list[Word], place: int) -> bool:
    """True if the subject follows the negation: why does not the container start."""
    return place > 1 and found[place - 1].text in _AUXILIARY and found[place - 2].text in _QUESTION_WORDS


_QUESTION_WORDS: Final = frozenset("why how when where what who which if".split())


def _deny(found: list[Word], place: int, denied: list[str], taken: set[int], *, inverted: bool = False) -> None:
    first: int | None = None
    for at in range(place + 1, min(place + 1 + _BEYOND, len(found))):
        word = found[at]
        if not word.small or word.key in _SMALL_BUT_DENIED:
            first = at
            if not inverted or word.ends:
                break
            inverted = False
        if word.ends:
            break
    if first is not None:
        taken.add(first)
    denied.append("" if first is None else found[first].key)


_SMALL_BUT_DENIED: Final = frozenset(key_of(each) for each in "use good same possible able".split())


def _from_doing(found: list[Word], place: int) -> int | None:
    """Return the position of `from` in "keep it from running"."""
    for at in range(place + 1, min(place + 6, len(found) - 1)):
        if found[at].text == "from" and ("ing" in found[at + 1].text or "_" in found[at + 1].text):
            return at
    return None


# Directions and conditions

_PREPOSITIONS: Final = {
    "to": "to",
    "into": "to",
    "onto": "to",
    "towards": "to",
    "from": "from",
    "over": "over",
    "than": "over",
    "with": "with",
    "before": "before",
    "preceding": "before",
    "after": "after",
    "following": "after",
    "on": "on",
    "by": "by",
}
_STOPS_ROLE: Final = frozenset("and or but if when while so because".split())
_CONDITIONS: Final = frozenset(
    """if when unless while during until that which who across abroad inside outside except without after before for of
    on from between whenever once and""".split()
)


def _roles(found: list[Word]) -> tuple[tuple[str, frozenset[str]], ...]:
    roles: list[tuple[str, frozenset[str]]] = []
    for place, word in enumerate(found):
        role = _PREPOSITIONS.get(word.text)
        if role is None or word.ends:
            continue
        keys: set[str] = set()
        for at, each in enumerate(found[place + 1 :], start=place + 1):
            if each.text in _PREPOSITIONS or each.text in _STOPS_ROLE:
                break
            if not each.small or (len(each.text) == 1 and _is_letter(found, at)):
                keys.add(each.key)
            if each.ends:
                break
        if keys:
            roles.append((role, frozenset(keys)))
    return tuple(roles)


def _is_letter(found: list[Word], place: int) -> bool:
    """True if a single letter is a name rather than an article or a pronoun."""
    if found[place].text not in ("a", "i"):
        return True
    if found[place].text == "i":
        return False
    return found[place].ends or place + 1 == len(found) or found[place + 1].text in _AFTER_LETTERS


_AFTER_LETTERS: Final = frozenset(_PREPOSITIONS) | frozenset(
    "in at for of and or under minus plus times using via if when is are be equals divided".split()
)


def _conditions(found: list[Word]) -> frozenset[str]:
    keys: set[str] = set()
    under = False
    for place, word in enumerate(found):
        if word.text in _CONDITIONS and place:
            under = True
        elif under and not word.small:
            keys.add(word.key)
        if word.ends:
            under = False
    return frozenset(keys)


# Grades and extent

_VAGUE: Final = frozenset(key_of(each) for each in "good easy simple way".split())


def _superlatives(found: list[Word]) -> frozenset[str]:
    result: set[str] = set()
    for place, word in enumerate(found):
        after = found[place + 1] if place + 1 < len(found) else None
        if word.grade == "est" and word.key not in _VAGUE:
            result.add(word.key)
        elif word.text in ("most", "least") and after is not None and not after.small and after.text != "of":
            result.add(f"{word.text} {after.key}")
    return frozenset(result)


def _extent(found: list[Word]) -> str:
    texts = {word.text for word in found}
    if texts & ALL:
        return "all"
    some = any(word.text == "some" and after.text == "of" for word, after in pairwise(found))
    return "one" if some or texts & ONE else ""


_SINGLE: Final = frozenset("a an this that the single one".split())
_BETWEEN: Final = frozenset("of the my our your their its these those single one".split())


def _counted(found: list[Word], quantifiers: frozenset[str]) -> frozenset[str]:
    """Return the keys of the words that a quantifier counts: of "every active user" both."""
    keys: set[str] = set()
    for place, word in enumerate(found):
        if word.text not in quantifiers or word.ends:
            continue
        for each in found[place + 1 : place + 5]:
            if not each.small:
                keys.add(each.key)
            elif each.text not in _BETWEEN:
                break
            if each.ends:
                break
    return frozenset(keys) - _PERIODS


_PERIODS: Final = frozenset(map(key_of, "second minute hour day night week month quarter year time".split()))  # a day
_YES_NO: Final = re.compile(r"^(?:do|does|did|must|should|shall|am|is|are|can|may|could|might)\b")
_MUST: Final = re.compile(r"\b(?:must|shall|have to|has to|need to|needs to|required|obliged|mandatory|compulsory)\b")
_MAY: Final = re.compile(r"\b(?:can|may|could|might|allowed|permitted|possible|able|optional)\b")


def _modality(lower: str) -> str:
    """Return whether a yes/no question asks for a duty or for a permission."""
    if not _YES_NO.match(lower):
        return ""
    must, may = bool(_MUST.search(lower)), bool(_MAY.search(lower))
    return "" if must == may else "must" if must else "may"


def _genitives(found: list[Word], content: tuple[str, ...]) -> tuple[str, ...]:
    """Reorder `size of the file` like `file size`, so that both parse alike."""
    keys = list(content)
    for place, word in enumerate(found):
        if word.text != "of" or not place or word.ends or found[place - 1].small:
            continue
        after = next((each for each in found[place + 1 : place + 4] if not each.small), None)
        start = place
        while start > 0 and not found[start - 1].small:
            start -= 1
        head = found[start]
        if (
            after is not None
            and after.key in keys
            and head.key in keys
            and keys.index(after.key) > keys.index(head.key)
        ):
            keys.remove(after.key)
            keys.insert(keys.index(head.key), after.key)
    return tuple(keys)
