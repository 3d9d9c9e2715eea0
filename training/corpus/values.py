"""The values that the slots of sentences are filled with: people, dates, times, prices, numbers of orders.

Every function draws one value from the random numbers it is given. Owns how a value is written, so that all tasks write
it alike. Knows no sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from training.corpus.conversation import JSON
from training.corpus.words.people import FIRST_NAMES, LAST_NAMES
from training.corpus.words.places import CITIES, STREET_KINDS, STREETS
from training.corpus.words.things import COMPANIES, COMPANY_KINDS

Value = tuple[str, JSON]  # as a sentence says it, as JSON has it
Draw = Callable[[Random], Value]

NUMBER_WORDS = "zero one two three four five six seven eight nine ten eleven twelve".split()
MONTHS = "January February March April May June July August September October November December".split()
MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MAIL_HOSTS = ("example.com", "example.org", "mail.example", "post.example")
CURRENCIES = ("EUR", "USD", "GBP", "CHF")


def person(random: Random) -> str:
    return f"{random.choice(FIRST_NAMES)} {random.choice(LAST_NAMES)}"


def city(random: Random) -> str:
    return random.choice(CITIES)


def company(random: Random) -> str:
    return f"{random.choice(COMPANIES)} {random.choice(COMPANY_KINDS)}"


def street(random: Random) -> str:
    return f"{random.choice(STREETS)} {random.choice(STREET_KINDS)}"


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
    return f"{account}@{random.choice(MAIL_HOSTS)}"


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
