"""Draws the values of slots: people, dates, times, prices, order numbers.

All tasks write a kind of value in the same way. `draw_of` turns a list in words/*.toml into a draw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from training.corpus.conversation import JSON
from training.corpus.words import lists

Value = tuple[str, JSON]  # as a sentence says it, as JSON has it
Draw = Callable[[Random], Value]

NUMBER_WORDS, MONTHS, WEEKDAYS = (lists()[name] for name in ("number_words", "months", "weekdays"))
MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def one(random: Random, name: str) -> str:
    """An entry of a list of words/names.toml."""
    return random.choice(lists()[name])


def person(random: Random) -> str:
    return f"{one(random, 'first_names')} {one(random, 'last_names')}"


def city(random: Random) -> str:
    return one(random, "cities")


def company(random: Random) -> str:
    return f"{one(random, 'companies')} {one(random, 'company_kinds')}"


def street(random: Random) -> str:
    return f"{one(random, 'streets')} {one(random, 'street_kinds')}"


def address(random: Random) -> str:
    return f"{random.randint(1, 99)} {street(random)}"


def date(random: Random) -> str:
    month = random.randrange(12)
    return f"{random.randint(1, MONTH_DAYS[month])} {MONTHS[month]}"


def iso_date(random: Random) -> str:
    month = random.randrange(12)
    return f"20{random.randint(24, 29)}-{month + 1:02d}-{random.randint(1, MONTH_DAYS[month]):02d}"


def weekday(random: Random) -> str:
    return random.choice(WEEKDAYS)


def clock(random: Random) -> str:
    """A time of the day between 7:00 and 20:55."""
    return f"{random.randint(7, 20)}:{random.choice((0, 0, 0, 30, 30, 15, 45, 5, 10, 20, 40, 50)):02d}"


def clock_pair(random: Random) -> tuple[str, str]:
    """A time in the morning and a later one in the afternoon or evening."""
    opens = f"{random.randint(6, 11)}:{random.choice((0, 15, 30, 45)):02d}"
    return opens, f"{random.randint(14, 22)}:{random.choice((0, 15, 30, 45)):02d}"


def cents(random: Random, *, low: int = 2, high: int = 400) -> str:
    """An amount of money such as 49.95 or 120. It never ends in a zero after the point: JSON would drop that."""
    whole = random.randint(low, high)
    return f"{whole}.{random.choice((15, 25, 45, 75, 95, 99))}" if random.random() < 0.6 else str(whole)


def phone(random: Random) -> str:
    return f"555-{random.randint(0, 9999):04d}"


def email_of(random: Random, name: str) -> str:
    first, last = name.lower().split(" ")
    account = random.choice((f"{first}.{last}", first, f"{first}{random.randint(1, 99)}"))
    return f"{account}@{one(random, 'mail_hosts')}"


def code(random: Random, prefix: str, digits: int = 4) -> str:
    """A reference such as A-4821."""
    return f"{prefix}{random.randint(10 ** (digits - 1), 10**digits - 1)}"


def version(random: Random) -> str:
    return f"{random.randint(1, 9)}.{random.randint(0, 12)}"


def text_of(draw: Callable[[Random], str]) -> Draw:
    def both(random: Random) -> Value:
        text = draw(random)
        return text, text

    return both


def one_of(choices: Sequence[str]) -> Draw:
    return text_of(lambda random: random.choice(choices))


def codes(digits: int, *prefixes: str) -> Draw:
    def draw(random: Random) -> str:
        return code(random, prefixes[0] if len(prefixes) == 1 else random.choice(prefixes), digits)

    return text_of(draw)


def decimal(low: int, high: int) -> Draw:
    """A number with one digit after the point, never a zero."""

    def draw(random: Random) -> Value:
        number = float(f"{random.randint(low, high)}.{random.randint(1, 9)}")
        return str(number), number

    return draw


def whole(low: int, high: int, *, words: bool = False, step: int = 1) -> Draw:
    """An integer, where `words` is set sometimes written as a word."""

    def draw(random: Random) -> Value:
        number = random.randint(low, high) * step
        if words and number < len(NUMBER_WORDS) and random.random() < 0.5:
            return NUMBER_WORDS[number], number
        return str(number), number

    return draw


def as_number(text: str) -> float | int:
    return float(text) if "." in text else int(text)


def money(low: int, high: int) -> Draw:
    def draw(random: Random) -> Value:
        text = cents(random, low=low, high=high)
        return text, as_number(text)

    return draw


def weight(random: Random) -> Value:
    text = f"{random.randint(1, 60)}.{random.randint(1, 9)}" if random.random() < 0.6 else str(random.randint(1, 90))
    return text, as_number(text)


def size(random: Random) -> Value:
    text = f"{random.randint(24, 160)}.5" if random.random() < 0.2 else str(random.randint(24, 160))
    return text, as_number(text)


def attendees(random: Random) -> Value:
    names = random.sample(lists()["first_names"], random.choice((2, 2, 3)))
    listed: list[JSON] = list(names)
    return ", ".join(names[:-1]) + f" and {names[-1]}", listed


def seat(random: Random) -> str:
    return f"{random.randint(1, 38)}{random.choice('ABCDEF')}"


def some_date(random: Random) -> str:
    return iso_date(random) if random.random() < 0.15 else date(random)


def email(random: Random) -> str:
    return email_of(random, person(random))


TEXTS: dict[str, Callable[[Random], str]] = {
    "city": city,
    "clock": clock,
    "company": company,
    "date": date,
    "email": email,
    "address": address,
    "late": lambda random: f"{random.randint(21, 23)}:30",
    "morning": lambda random: clock_pair(random)[0],
    "person": person,
    "phone": phone,
    "release": lambda random: f"{version(random)}.{random.randint(0, 9)}",
    "seat": seat,
    "some_date": some_date,
}


def _choice(name: str) -> Draw:
    return one_of(lists()[name])


def _count(low: int, high: int) -> Draw:
    return whole(low, high, words=True)


def _whole(low: int, high: int, step: int = 1) -> Draw:
    return whole(low, high, step=step)


DRAWS: dict[str, Callable[..., Draw]] = {
    "attendees": lambda: attendees,
    "choice": _choice,
    "code": codes,
    "count": _count,
    "decimal": decimal,
    "money": money,
    "of": lambda *choices: one_of(choices),
    "size": lambda: size,
    "weight": lambda: weight,
    "whole": _whole,
}


def draw_of(spec: Sequence[str | int]) -> Draw:
    """The draw that a list in words/*.toml describes: its kind, then its arguments."""
    kind, *arguments = spec
    return text_of(TEXTS[str(kind)]) if kind in TEXTS else DRAWS[str(kind)](*arguments)
