"""Normalises the numbers, units, dates and times of an English text.

Reads `5 GB`, `five gigabytes`, `$1,000`, `10k`, `1 May 2026`, `6 pm`, `next week`, `the third`. Keeps `1.10` apart from
`1.1`, because without a unit a number with a point is a version as often as an amount. Does not know questions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Final

import msgspec

_UNITS: Final = {
    "bytes": "1:byte bytes|1e3:kb kilobyte kilobytes|1e6:mb megabyte megabytes|1e9:gb gigabyte gigabytes|"
    "1e12:tb terabyte terabytes|1e15:pb petabyte petabytes",
    "time": "1e-9:ns nanosecond nanoseconds|1e-6:µs microsecond microseconds|1e-3:ms msec millisecond milliseconds|"
    "1:s sec secs second seconds|60:min mins minute minutes|3600:h hr hrs hour hours|86400:d day days|"
    "604800:week weeks",
    "months": "1:month months|3:quarter quarters|12:year years yr yrs",
    "metres": "1e-3:mm millimetre millimetres|1e-2:cm centimetre centimetres|1:metre metres meter meters|"
    "1000:km kilometre kilometres kilometer kilometers|1609.344:mile miles|0.0254:inch inches|0.3048:ft foot feet",
    "grams": "1e-3:mg|1:g gram grams|1000:kg kilo kilos kilogram kilograms|453.59237:lb lbs|"
    "28.349523125:oz ounce ounces|1000000:ton tons tonne tonnes",
    "bits": "1:bit bits|1e3:kbit|1e6:mbit|1e9:gbit",
    "bits/s": "1e3:kbps|1e6:mbps|1e9:gbps",
    "kib": "1:kib|1024:mib|1048576:gib|1073741824:tib",
    "celsius": "1:°c celsius",
    "fahrenheit": "1:°f fahrenheit",
    "kelvin": "1:kelvin",
    "percent": "1:% percent",
    "usd": "1:$ usd dollar dollars bucks",
    "eur": "1:€ eur euro euros",
    "gbp": "1:£ gbp pound pounds",
    "jpy": "1:¥ jpy yen",
    "chf": "1:chf",
    "degrees": "1:° degree degrees",
}


def _units() -> dict[str, tuple[str, Decimal]]:
    found: dict[str, tuple[str, Decimal]] = {}
    for dimension, groups in _UNITS.items():
        for group in groups.split("|"):
            factor, _, names = group.partition(":")
            for name in names.split():
                found[name] = dimension, Decimal(factor)
    return found


UNITS: Final = _units()
_SMALL: Final = {
    name: value
    for value, name in enumerate(
        """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
        seventeen eighteen nineteen""".split()
    )
}
_TENS: Final = {
    name: 10 * value
    for value, name in enumerate("twenty thirty forty fifty sixty seventy eighty ninety".split(), start=2)
}
_SCALES: Final = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "k": 1000, "bn": 10**9}
_OTHERS: Final = {"half": "0.5", "twice": "2", "dozen": "12", "thrice": "3", "a quarter": "0.25"}
_ORDINALS: Final = {
    name: value
    for value, name in enumerate(
        "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth".split(), start=1
    )
}
_MONTHS: Final = {
    name: number
    for number, names in enumerate(
        """january jan|february feb|march mar|april apr|may|june jun|july jul|august aug|september sept sep|october oct|
        november nov|december dec""".replace("\n", "").split("|"),
        start=1,
    )
    for name in names.split()
}
_WEEKDAYS: Final = "monday tuesday wednesday thursday friday saturday sunday".split()
_DAYS: Final = ("today", "tomorrow", "yesterday", "tonight", "noon", "midnight", "weekend", *_WEEKDAYS)
_EVERY: Final = {
    name: name
    for name in "hourly daily nightly weekly biweekly monthly quarterly yearly annually annual biannual".split()
} | {"annually": "yearly", "annual": "yearly", "nightly": "nightly"}
_PARTS: Final = "week weekend month quarter year night evening morning afternoon day sprint season decade".split()
_SEASONS: Final = ("spring", "summer", "autumn", "winter", "fall")

_NUMBER: Final = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?)"
_UNIT: Final = "|".join(re.escape(each) for each in sorted(UNITS, key=len, reverse=True))
_WORD: Final = "|".join((*_SMALL, *_TENS, "hundred", "thousand", "million", "billion"))
_MONTH: Final = "|".join(sorted(_MONTHS, key=len, reverse=True))
_LONG_MONTH: Final = "|".join(name for name in _MONTHS if len(name) > 3 and name not in ("march", "may"))


class Quantities(msgspec.Struct, frozen=True):
    numbers: tuple[str, ...]  # as they come: `16000000000 bytes`, `#3` of a third one, `3.11`
    dates: tuple[str, ...]  # as they come: `2026-05-01`, `month 3`, `next week`, `time 1080`
    rest: str  # the text without them; same length


def quantities(text: str) -> Quantities:
    """Parse a lower-case text."""
    numbers: list[tuple[int, str]] = []
    dates: list[tuple[int, str]] = []
    digits = _DIGIT.search(text) is not None
    for pattern, read, found, needs_digit in _READERS:
        if needs_digit and not digits:
            continue
        kept = dates if found == "dates" else numbers

        def take(
            match: re.Match[str],
            read: Callable[[re.Match[str]], str | None] = read,
            kept: list[tuple[int, str]] = kept,
        ) -> str:
            value = read(match)
            if value is None:
                return match[0]
            kept.append((match.start(), value))
            return " " * len(match[0])

        text = pattern.sub(take, text)
    return Quantities(tuple(each for _, each in sorted(numbers)), tuple(each for _, each in sorted(dates)), text)


def _plain(value: Decimal) -> str:
    return format(value.normalize(), "f")


def _valued(number: str, unit: str | None, rate: str | None = None) -> str:
    if unit is None:
        return number if "." in number else _plain(Decimal(number))
    dimension, factor = UNITS[unit]
    return f"{_plain(Decimal(number) * factor)} {dimension}{'/' + rate[0] if rate else ''}"


def _amount(match: re.Match[str]) -> str:
    number = match["number"].replace(",", "")
    if match["scale"]:
        number = _plain(Decimal(number) * _SCALES[match["scale"]])
    return _valued(number, match["before"] or match["unit"], match["rate"])


def _worded(match: re.Match[str]) -> str | None:
    total = part = 0
    for word in re.split(r"[\s-]+", match["words"]):
        if word in _SMALL:
            part += _SMALL[word]
        elif word in _TENS:
            part += _TENS[word]
        elif word != "and":
            scale = _SCALES[word]
            if scale == 100:
                part = (part or 1) * 100
            else:
                total, part = total + (part or 1) * scale, 0
    if match["words"] == "one" and not match["unit"]:
        return None  # as in "this one": no number
    return _valued(str(total + part), match["unit"])


def _ordinal(match: re.Match[str]) -> str:
    word = match[0]
    if word[0].isdigit():
        return f"#{int(word[:-2])}"
    return f"#{_ORDINALS[word]}"


def _date(match: re.Match[str]) -> str | None:
    named = match.groupdict()
    year, month, day = named.get("y"), named.get("m"), named.get("d")
    number = 0 if month is None else _MONTHS.get(month) or int(month)
    if not 0 <= number <= 12:
        return None
    if day is not None:
        return f"{year or ''}-{number:02d}-{int(day):02d}"
    return f"{year}-{number:02d}" if year else f"month {number}"


def _time(match: re.Match[str]) -> str | None:
    hour, minute, half = int(match["hour"]), int(match["minute"] or 0), (match["half"] or "").replace(".", "")
    if hour > 24 or minute > 59:
        return None
    if half:
        hour = hour % 12 + (12 if half == "pm" else 0)
    return f"time {60 * hour + minute}"


def _relative(match: re.Match[str]) -> str:
    which, part = re.split(r"\s+", match[0], maxsplit=1)
    return f"{'last' if which in ('past', 'previous') else which} {part}"


def _day(match: re.Match[str]) -> str:
    word = match[0].removesuffix("s") if match[0] not in _DAYS else match[0]
    return {"tonight": "this evening", "fall": "autumn"}.get(word, word)


def _itself(match: re.Match[str]) -> str:
    return match[0]


def _every(match: re.Match[str]) -> str:
    return _EVERY[match[0]]


def _other(match: re.Match[str]) -> str:
    return _OTHERS[match[0]]


_DIGIT: Final = re.compile(r"\d")
_READERS: Final[tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str | None], str, bool], ...]] = tuple(
    # A pattern with digits is skipped for texts without any.
    (re.compile(pattern), read, found, r"\d" in pattern)
    for pattern, read, found in (
        (r"\b(?P<y>\d{4})-(?P<m>\d{2})-(?P<d>\d{2})\b", _date, "dates"),
        (rf"\b(?P<d>\d{{1,2}})(?:st|nd|rd|th)?(?: of)? (?P<m>{_MONTH})\b\.?,?(?: (?P<y>\d{{4}}))?\b", _date, "dates"),
        (rf"\b(?P<m>{_MONTH})\b\.? (?P<d>\d{{1,2}})(?:st|nd|rd|th)?\b(?!:)(?:,? (?P<y>\d{{4}}))?\b", _date, "dates"),
        (rf"\b(?P<m>{_MONTH})\b\.?,? (?:of )?(?P<y>(?:19|20)\d{{2}})\b", _date, "dates"),
        (rf"\b(?P<m>{_LONG_MONTH})\b", _date, "dates"),
        (r"(?<=\b(?:in|by|of|to)\s)(?P<m>march|may)\b", _date, "dates"),
        (r"(?<=\b(?:for|and)\s)(?P<m>march|may)\b", _date, "dates"),
        (r"(?<=\b(?:since|until)\s)(?P<m>march|may)\b", _date, "dates"),
        (r"\b(?P<hour>\d{1,2}):(?P<minute>\d{2})\s*(?P<half>[ap]\.?m\b\.?)?", _time, "dates"),
        (r"\b(?P<hour>\d{1,2})(?P<minute>)\s*(?P<half>[ap]\.?m\b\.?)", _time, "dates"),
        (r"\bq[1-4]\b", _itself, "dates"),
        (
            rf"\b(?:this|next|last|past|previous|coming|current) (?:{'|'.join((*_PARTS, *_WEEKDAYS, *_SEASONS))})\b",
            _relative,
            "dates",
        ),
        (rf"\b(?:{'|'.join((*_DAYS, *_SEASONS[:-1]))})s?\b", _day, "dates"),
        (r"(?<=\bin )fall\b", _day, "dates"),
        (rf"\b(?:{'|'.join(_EVERY)})\b", _every, "dates"),
        (r"\b(?:nineties|eighties|seventies|sixties|fifties)\b", _itself, "dates"),
        (r"\b\d+(?:st|nd|rd|th)\b", _ordinal, "numbers"),
        (r"\b(?:v?\d+(?:\.\d+){2,}|\d+\.x)\b", _itself, "numbers"),
        (
            rf"(?<![\w.])(?P<before>[$€£¥])?\s?(?P<number>{_NUMBER})"
            r"(?:\s?(?P<scale>k|bn|thousand|million|billion)\b)?"
            rf"(?:[\s-]?(?P<unit>{_UNIT})(?![\w])(?:/(?P<rate>s|sec|h|min|day)\b)?)?",
            _amount,
            "numbers",
        ),
        (
            rf"\b(?P<words>(?:{_WORD})(?:(?:[\s-]|\sand\s)(?:{_WORD}))*)\b(?:[\s-](?P<unit>{_UNIT})(?!\w))?",
            _worded,
            "numbers",
        ),
        (r"\bfirst\b|\b(?<!per )(?<!a )second\b|\b(?<=a )second(?= \w)|\bthird\b", _ordinal, "numbers"),
        (rf"\b(?:{'|'.join([*_ORDINALS][3:])})\b", _ordinal, "numbers"),
        (rf"\b(?:{'|'.join([*_OTHERS][:-1])})\b", _other, "numbers"),
        (r"\ba quarter\b", _other, "numbers"),
    )
)


def places(text: str) -> Iterator[tuple[int, int]]:
    """Yield the spans of numbers with an attached unit, which look like identifiers: 16GB, 30s, 12th."""
    for match in re.finditer(rf"(?<![\w.]){_NUMBER}(?:{_UNIT}|k|bn|st|nd|rd|th|am|pm)\b", text):
        yield match.span()


_COUNT: Final = "one|two|three|four|five|six|seven|eight|nine|ten|twelve|twenty|thirty|fifty"
_AMOUNT: Final = (
    r"\s+(?:about |around |approximately |roughly )?[$€£¥]?"
    rf"(?=\d|(?:{_COUNT})\b|(?:(?:a|{_COUNT}) )?(?:hundred|thousand|million|dozen)\b)"
)
_LESS: Final = "less|fewer|under|below|cheaper|younger|smaller|shorter"
_MORE: Final = "more|over|above|older|greater|larger|longer"
_BELOW: Final = re.compile(
    r"(?:\b(?:under|below|(?:less|fewer|smaller|lower|shorter|cheaper|younger|lighter) than|at most|up to|within"
    rf"|(?:no|not) (?:more|longer|larger|greater|older) than|max(?:imum)?(?: of)?)|<=?|≤){_AMOUNT}"
    rf"|\d\S*(?: \w+)? (?:(?:or|and) (?:{_LESS})|max(?:imum)?|at most)\b"
)
_ABOVE: Final = re.compile(
    r"(?:\b(?:over|above|beyond|exceeding|(?:more|greater|larger|higher|longer|older|bigger|heavier) than|at least"
    rf"|(?:no|not) (?:less|fewer|smaller|shorter|younger) than|min(?:imum)?(?: of)?|starting at)|>=?|≥){_AMOUNT}"
    rf"|\d\S*(?: \w+)? (?:(?:or|and) (?:{_MORE}|up)|min(?:imum)?|at least)\b"
)


def bounds(text: str) -> frozenset[str]:
    """Return "<" if the text (lower case) has a number as an upper bound, ">" as a lower bound."""
    found = (("<", _BELOW), (">", _ABOVE))
    return frozenset(sign for sign, pattern in found if pattern.search(text))
