"""Recognises in a sentence what a question asks for: a time, an amount of money, a name, a place.

Owns the patterns and the names of days and months (English, German, French, Spanish, Italian). Words that the question
itself contains are no answer, so only other words are looked at.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Final

from headrace.gateway.degradation.ladder.question_terms import AnswerKind, plain_form

NewWords = Sequence[tuple[int, str]]  # words of the sentence that the question does not have, with their positions

_DAYS: Final = frozenset(
    """
    january february march april june july august september october november december
    monday tuesday wednesday thursday friday saturday sunday
    mondays tuesdays wednesdays thursdays fridays saturdays sundays
    januar februar marz mai juni juli oktober dezember montag dienstag mittwoch donnerstag freitag samstag sonntag
    janvier fevrier mars avril juin juillet aout septembre octobre novembre decembre
    lundi mardi mercredi jeudi vendredi samedi dimanche
    enero febrero marzo abril mayo junio julio agosto septiembre octubre noviembre diciembre
    lunes martes miercoles jueves viernes sabado domingo
    gennaio febbraio aprile maggio giugno luglio settembre ottobre dicembre
    lunedi martedi mercoledi giovedi venerdi domenica
    """.split()
)
_CLOCK: Final = re.compile(r"\b\d{1,2}[.:]\d\d(?![.:]?\d)|\b\d{1,2} ?(?:a\.?m\b|p\.?m\b|h\b|uhr\b|o'clock)", re.I)
_DATE: Final = re.compile(r"\b\d{4}-\d\d?-\d\d?\b|\b\d\d?[./]\d\d?[./]\d{2,4}\b|\bMay \d|\d\.? May\b")
_YEAR: Final = re.compile(r"\b[12]\d{3}\b")
_MONEY: Final = re.compile(
    r"[$€£¥₹₽]|\b(?:euros?|dollars?|pounds?|francs?|cents?|yen|rupees?|eur|usd|gbp|chf|dolares|pesos|franken|reais)\b",
    re.I,
)
_PHONE: Final = re.compile(r"\+?\d(?:[\d ()/.-]{5,})\d")
_WHERE: Final = r"\b(?:in|at|near|to|from|a|à|en|em|im|am|bei|nach|chez|te|on|auf|van)"
_NAME: Final = r"[^\W\d_a-z][\w'\u2019-]*"
# A name after a preposition (in Porto, in hall B), a number after two words (on floor 15), an address (5 Mill Road).
_PLACED: Final = re.compile(rf"{_WHERE}(?: [^\W\d_]+){{0,2}} ({_NAME})|{_WHERE} [^\W\d_]+ \d|\b\d+ ({_NAME})")


def has_kind(kind: AnswerKind, text: str, new: NewWords) -> bool:
    has_number = any(char.isdigit() for _, word in new for char in word)
    match kind:
        case "time":
            return any(has_kind(each, text, new) for each in ("clock", "day", "year"))
        case "clock":
            return has_number and _CLOCK.search(text) is not None
        case "day":
            return _DATE.search(text) is not None or any(plain_form(word) in _DAYS for _, word in new)
        case "year":
            return any(_YEAR.fullmatch(word) for _, word in new)
        case "number":
            days = {place for place, word in new if plain_form(word) in _DAYS}
            return any(_is_number(word) and not days & {place - 1, place + 1} for place, word in new)
        case "money":
            return has_number and _MONEY.search(text) is not None
        case "phone":
            return _PHONE.search(text) is not None
        case "name":
            return _has_name(text, new)
        case "place":
            return any(plain_form(place[1] or place[2] or "") not in _DAYS for place in _PLACED.finditer(text))


def _is_number(word: str) -> bool:
    return ":" not in word and any(char.isdigit() for char in word)


def _has_name(text: str, new: NewWords) -> bool:
    """True if two capitalised words are adjacent, or one begins no sentence and follows no preposition of place."""
    capitals = [
        (place, word)
        for place, word in new
        if word[:1].isupper() and plain_form(word) not in _DAYS and not word.isdigit()
    ]
    if any(other[0] == one[0] + 1 for one, other in itertools.pairwise(capitals)):
        return True
    places = {found[1] or found[2] for found in _PLACED.finditer(text)}
    return any(place > 0 and word not in places for place, word in capitals)
