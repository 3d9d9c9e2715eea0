"""Draws arithmetic problems on small numbers and durations with a short written working.

Each function draws one problem: question, answer and a key of its numbers. Sums and differences are worked column by
column from the ones, as on paper, so that a small model can know every step by heart; those of one digit have no
working. The last sentence of an answer is the result.
"""

# ruff: noqa: RUF001, RUF002 (the multiplication sign is meant)
from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from training.corpus.conversation import Conversation, Question, Turn
from training.corpus.instances import (
    ALWAYS_TRAINED,
    Instance,
    held_out_questions,
    is_held_out,
    training_conversations,
)
from training.corpus.wording import as_typed
from training.corpus.words import PHRASES

TASK = "arithmetic"
SYSTEM, STAGES = PHRASES.arithmetic["system"], PHRASES.arithmetic["stages"]
SECONDS_IN = {"second": 1, "minute": 60, "hour": 3600}


@dataclass(frozen=True)
class Problem:
    question: str
    answer: str
    key: str


def column_sum(a: int, b: int) -> str:
    """The working of a + b, digit by digit from the ones: `7 + 5 = 12, 4 + 8 + 1 = 13, 3 + 2 + 1 = 6.`"""
    steps: list[str] = []
    carry, x, y = 0, a, b
    while x or y:
        total = x % 10 + y % 10 + carry
        steps.append(f"{x % 10} + {y % 10}{' + 1' if carry else ''} = {total}")
        carry, x, y = total // 10, x // 10, y // 10
    return ", ".join(steps) + "."


def column_difference(a: int, b: int) -> str:
    """The working of a - b for a >= b, from the ones, with ten borrowed where the upper digit is too small."""
    steps: list[str] = []
    borrow, x, y = 0, a, b
    while x or y:
        upper = x % 10
        next_borrow = 1 if upper < y % 10 + borrow else 0
        result = upper + 10 * next_borrow - y % 10 - borrow
        steps.append(f"{upper + 10 * next_borrow} - {y % 10}{' - 1' if borrow else ''} = {result}")
        borrow, x, y = next_borrow, x // 10, y // 10
    return ", ".join(steps) + "."


def worked_sum(a: int, b: int, said: str = "=") -> str:
    """The sum after its working, where it needs one: `7 + 5 = 12, 4 + 3 + 1 = 8. 47 + 35 = 82`."""
    working = "" if by_heart_sum(a, b) else f"{column_sum(a, b)} "
    return f"{working}{a} + {b} {said} {a + b}"


def worked_difference(a: int, b: int, said: str = "=") -> str:
    """The difference after its working, where it needs one."""
    working = "" if by_heart_difference(a, b) else f"{column_difference(a, b)} "
    return f"{working}{a} - {b} {said} {a - b}"


def by_heart_sum(a: int, b: int) -> bool:
    return a < 10 and b < 10


def by_heart_difference(a: int, b: int) -> bool:
    return a < 20 and b < 10


def pair_key(name: str, a: int, b: int) -> str:
    """The same key whichever number comes first."""
    return f"{name} {min(a, b)} {max(a, b)}"


def counted(number: int | str, unit: str) -> str:
    return f"{number} {unit}" if str(number) == "1" or unit == "ms" else f"{number} {unit}s"


def small_sum(random: Random) -> Problem:
    a, b = random.randint(2, 99), random.randint(2, 99)
    if random.random() < 0.25:
        a = random.randint(0, 9)
    question = random.choice(
        ("What is {} + {}?", "How much is {} + {}?", "{} + {}", "What is {} plus {}?", "Add {} and {}.")
    )
    basic = ALWAYS_TRAINED if by_heart_sum(a, b) else ""
    return Problem(question.format(a, b), f"{worked_sum(a, b, 'is')}.", basic + pair_key("sum", a, b))


def large_sum(random: Random) -> Problem:
    a, b = random.randint(100, 999), random.randint(1, 999)
    if random.random() < 0.5:
        a, b = b, a
    question = random.choice(
        ("What is {} + {}?", "How much is {} + {}?", "{} + {}", "What is {} plus {}?", "Add {} and {}.")
    )
    return Problem(question.format(a, b), f"{worked_sum(a, b, 'is')}.", pair_key("sum", a, b))


def small_difference(random: Random) -> Problem:
    a, b = random.randint(5, 99), random.randint(1, 99)
    a, b = max(a, b), min(a, b)
    question = random.choice(("What is {} - {}?", "How much is {} - {}?", "{} - {}", "What is {} minus {}?"))
    basic = ALWAYS_TRAINED if by_heart_difference(a, b) else ""
    return Problem(question.format(a, b), f"{worked_difference(a, b, 'is')}.", f"{basic}difference {a} {b}")


def large_difference(random: Random) -> Problem:
    a, b = random.randint(100, 999), random.randint(1, 999)
    a, b = max(a, b), min(a, b)
    question = random.choice(("What is {} - {}?", "How much is {} - {}?", "{} - {}", "What is {} minus {}?"))
    return Problem(question.format(a, b), f"{worked_difference(a, b, 'is')}.", f"difference {a} {b}")


TIMES = ("What is {} × {}?", "How much is {} × {}?", "{} × {}", "What is {} times {}?", "{} x {}", "Multiply {} by {}.")


def table_product(random: Random) -> Problem:
    a, b = random.randint(1, 12), random.randint(1, 12)
    return Problem(
        random.choice(TIMES).format(a, b), f"{a} × {b} is {a * b}.", ALWAYS_TRAINED + pair_key("product", a, b)
    )


def product_working(a: int, b: int) -> str:
    """The working of a × b for a of two digits and b of one: tens, ones, their sum."""
    tens, ones = a // 10 * 10, a % 10
    return f"{tens} × {b} = {tens * b}, {ones} × {b} = {ones * b}, {tens * b} + {ones * b} = {a * b}."


def large_product(random: Random) -> Problem:
    a, b = random.choice([n for n in range(13, 100) if n % 10]), random.randint(2, 9)
    question = random.choice(TIMES)
    asked = question.format(a, b) if random.random() < 0.6 else question.format(b, a)
    return Problem(asked, f"{product_working(a, b)} {a} × {b} is {a * b}.", pair_key("product", a, b))


def division(random: Random) -> Problem:
    a, b = random.randint(2, 12), random.randint(2, 12)
    question = random.choice(
        ("What is {} / {}?", "What is {} divided by {}?", "Divide {} by {}.", "How much is {} / {}?")
    )
    return Problem(question.format(a * b, b), f"{a * b} / {b} is {a}.", f"{ALWAYS_TRAINED}division {a * b} {b}")


def compared_numbers(random: Random) -> Problem:
    span = random.choice((30, 100, 1000, 1000, 1000))
    a, b = random.sample(range(1, span), 2)
    if random.random() < 0.3 and a > 100:  # the hard case: the first digits are equal
        b = a // 10 * 10 + (a % 10 + random.randint(1, 9)) % 10
    key = pair_key("compare", a, b)
    form = random.randrange(3)
    if form == 0:
        word = random.choice(("larger", "bigger", "greater"))
        return Problem(f"Which is {word}, {a} or {b}?", f"{max(a, b)} is {word}.", key)
    if form == 1:
        word = random.choice(("smaller", "less"))
        return Problem(f"Which is {word}, {a} or {b}?", f"{min(a, b)} is {word}.", key)
    word, holds = random.choice((("more", a > b), ("less", a < b)))
    other = "less" if word == "more" else "more"
    answer = f"Yes, {a} is {word} than {b}." if holds else f"No, {a} is {other} than {b}."
    return Problem(f"Is {a} {word} than {b}?", answer, key)


def compared_latencies(random: Random) -> Problem:
    names = random.choice((("A", "B"), ("mini", "draft"), ("int8", "int4"), ("X", "Y"), ("the old one", "the new one")))
    kind = "" if " " in names[0] else random.choice(("server ", "model ", "variant ")) if names[0] in "ABXY" else ""
    first, second = (f"{kind}{name}" for name in names)
    a, b = random.sample(range(20, 900), 2)
    if random.random() < 0.6:
        a, b = a // 10 * 10, b // 10 * 10
    if a == b:
        b += 10
    metric = random.choice(("takes", "has a p95 of", "has a TTFT of", "answers in", "needs"))
    faster = random.random() < 0.5
    low, high = min(a, b), max(a, b)
    winner = first if (a < b) == faster else second
    word = random.choice(("faster", "quicker")) if faster else "slower"
    compared = f"{low} is less than {high}" if faster else f"{high} is more than {low}"
    told = f"{first[0].upper() + first[1:]} {metric} {a} ms, {second} {metric} {b} ms."
    return Problem(
        f"{told} Which is {word}?", f"{compared}, so {winner} is {word}.", pair_key("compare latencies", a, b)
    )


def largest_of_three(random: Random) -> Problem:
    numbers = random.sample(range(1, random.choice((100, 1000))), 3)
    high = random.random() < 0.5
    word = random.choice(("largest", "highest", "biggest")) if high else random.choice(("smallest", "lowest"))
    result = max(numbers) if high else min(numbers)
    listed = f"{numbers[0]}, {numbers[1]} and {numbers[2]}"
    question = random.choice((f"Which is the {word} of {listed}?", f"Of {listed}, which is the {word}?"))
    return Problem(question, f"The {word} is {result}.", "three " + " ".join(str(n) for n in sorted(numbers)))


def written_duration(amount: int, unit: str) -> tuple[str, str]:
    """A duration in a larger unit as people write it, and its working in the smaller unit below it."""
    if unit == "second":  # amount is in milliseconds
        whole, part = divmod(amount, 1000)
        text = f"{whole}.{f'{part:03d}'.rstrip('0')}" if part else str(whole)
        return counted(text, "second"), f"{counted(text, 'second')} is {amount} ms."
    below = "second" if unit == "minute" else "minute"
    number = amount // 60
    return counted(number, unit), f"{number} × 60 = {amount}. {counted(number, unit)} is {counted(amount, below)}."


def compared_durations(random: Random) -> Problem:
    unit, below = random.choice((("second", "ms"), ("minute", "second"), ("hour", "minute")))
    step = 100 if unit == "second" else 60
    large = random.randint(3, 60) * step if unit == "second" else random.randint(1, 12) * step
    near = random.choice((5, 10, 15, 20, 30)) * (10 if unit == "second" else 1)
    small = large + random.choice((-1, 1)) * near * random.randint(1, 3)
    if random.random() < 0.06:
        small = large
    if small <= 0:
        small = large + near
    text, working = written_duration(large, unit)
    other = counted(small, below)
    longer = random.random() < 0.55
    word = "longer" if longer else "shorter"
    if small == large:
        result = "Both are equal."
    else:
        winner = text if (large > small) == longer else other
        better, worse = (max(large, small), min(large, small)) if longer else (min(large, small), max(large, small))
        result = f"{better} is {'more' if longer else 'less'} than {worse}, so {winner} is {word}."
    order = (text, other) if random.random() < 0.5 else (other, text)
    question = random.choice(("Which is {}, {} or {}?", "What is {}: {} or {}?"))
    return Problem(question.format(word, *order), f"{working} {result}", f"durations {large} {small} {below}")


def to_smaller_unit(random: Random) -> Problem:
    unit, below, asked = random.choice(
        (("second", "ms", "milliseconds"), ("minute", "second", "seconds"), ("hour", "minute", "minutes"))
    )
    amount = random.randint(1, 199) * 50 if unit == "second" else random.randint(1, 12) * 60
    text, working = written_duration(amount, unit)
    question = random.choice(
        (
            "How many {1} are in {0}?",
            "How many {1} is {0}?",
            "Convert {0} to {1}.",
            "What is {0} in {1}?",
            "{0} in {1}?",
        )
    )
    basic = "" if unit == "second" else ALWAYS_TRAINED
    return Problem(question.format(text, asked), working, f"{basic}convert {amount} {below}")


def mixed_to_small(random: Random) -> Problem:
    unit, below = random.choice((("minute", "second"), ("hour", "minute")))
    number, rest = random.randint(1, 12), random.randint(1, 59)
    total = number * 60 + rest
    text = f"{counted(number, unit)} {counted(rest, below)}"
    question = random.choice(("How many {1}s are in {0}?", "Convert {0} to {1}s.", "What is {0} in {1}s?"))
    answer = f"{number} × 60 = {number * 60}, {number * 60} + {rest} = {total}. {text} is {total} {below}s."
    return Problem(question.format(text, below), answer, f"mixed {total} {below}")


def small_to_mixed(random: Random) -> Problem:
    unit, below = random.choice((("minute", "second"), ("hour", "minute")))
    number, rest = random.randint(1, 9), random.randint(1, 59)
    total = number * 60 + rest
    question = random.choice(
        ("What is {0} {1}s in {2}s and {1}s?", "Write {0} {1}s in {2}s and {1}s.", "{0} {1}s in {2}s and {1}s?")
    )
    answer = (
        f"{number} × 60 = {number * 60}. {worked_difference(total, number * 60)}. "
        f"{total} {below}s is {counted(number, unit)} {counted(rest, below)}."
    )
    return Problem(question.format(total, below, unit), answer, f"parts {total} {below}")


def ms_to_seconds(random: Random) -> Problem:
    amount = random.randint(1, 199) * 50
    text, _ = written_duration(amount, "second")
    question = random.choice(
        ("How many seconds are {0} ms?", "Convert {0} ms to seconds.", "What is {0} ms in seconds?")
    )
    return Problem(question.format(amount), f"{amount} ms is {text}.", f"seconds {amount}")


def budget_sum(random: Random) -> Problem:
    stages = random.sample(STAGES, random.choice((2, 3, 3, 4)))
    times = [random.choice((random.randint(1, 19) * 5, random.randint(1, 40) * 10)) for _ in stages]
    listed = ", ".join(f"{stage} takes {time} ms" for stage, time in zip(stages, times, strict=True))
    steps: list[str] = []
    total = times[0]
    for time in times[1:]:
        steps.append(f"{worked_sum(total, time)}.")
        total += time
    key = "budget " + " ".join(str(time) for time in sorted(times))
    told = listed[0].upper() + listed[1:] + "."
    working = " ".join(steps)
    if random.random() < 0.6:
        ask = random.choice(
            ("How long is that in total?", "What is the total?", "How long does it all take?", "Sum it up.")
        )
        return Problem(f"{told} {ask}", f"{working} The total is {total} ms.", key)
    budget = (total // 100 + random.randint(1, 5)) * 100
    left = budget - total
    ask = random.choice((f"The budget is {budget} ms. How much is left?", f"How much of {budget} ms is left?"))
    answer = f"{working} {worked_difference(budget, total)}. {left} ms are left."
    return Problem(f"{told} {ask}", answer, f"{key} of {budget}")


def percentage(random: Random) -> Problem:
    percent = random.choice((1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 20, 25, 30, 35, 40, 45, 50, 60, 70, 75, 80, 90))
    hundreds = random.randint(1, 12)
    base = hundreds * 100
    result = percent * hundreds
    question = random.choice(
        ("What is {} % of {}?", "How much is {} % of {}?", "{}% of {}?", "What is {} percent of {}?")
    )
    answer = f"{base} / 100 = {hundreds}, {hundreds} × {percent} = {result}. {percent} % of {base} is {result}."
    return Problem(question.format(percent, base), answer, f"percent {percent} {base}")


def tokens_made(random: Random) -> Problem:
    rate, seconds = random.choice((*range(10, 100, 5), 110, 120, 150, 200)), random.randint(2, 12)
    total = rate * seconds
    key = f"rate {rate} {seconds}"
    thing = random.choice(("tokens", "tokens", "tokens", "requests"))
    if random.random() < 0.6:
        question = random.choice(
            (
                "How many {1} in {2} seconds at {0} {1} per second?",
                "A model makes {0} {1} per second. How many in {2} seconds?",
                "At {0} {1} per second, how many {1} in {2} seconds?",
                "{0} {1} per second for {2} seconds: how many {1}?",
            )
        )
        if thing == "requests":
            question = question.replace("A model makes", "A server answers")
        return Problem(
            question.format(rate, thing, seconds), f"{rate} × {seconds} = {total}. That is {total} {thing}.", key
        )
    question = random.choice(
        (
            "How long do {3} {1} take at {0} {1} per second?",
            "At {0} {1} per second, how long do {3} {1} take?",
            "{3} {1} at {0} {1} per second: how many seconds?",
        )
    )
    answer = f"{total} / {rate} = {seconds}. That takes {seconds} seconds."
    return Problem(question.format(rate, thing, seconds, total), answer, key)


def clock_after(random: Random) -> Problem:
    hour, minute, length = random.randint(6, 20), random.randrange(0, 60, 5), random.randrange(5, 60, 5)
    what = random.choice(("A job", "A meeting", "A backup", "A test", "A call", "A train ride", "The import", "A film"))
    question = random.choice(
        (
            f"{what} starts at {hour}:{minute:02d} and takes {length} minutes. When does it end?",
            f"{what} of {length} minutes starts at {hour}:{minute:02d}. When is it over?",
        )
    )
    total = minute + length
    if total < 60:
        answer = f"{minute} + {length} = {total}. It ends at {hour}:{total:02d}."
    else:
        answer = f"{minute} + {length} = {total}, {total} - 60 = {total - 60}. It ends at {hour + 1}:{total - 60:02d}."
    return Problem(question, answer, f"clock {hour}:{minute:02d} {length}")


def priced(random: Random) -> Problem:
    price, number = random.randint(2, 12), random.randint(2, 12)
    thing = random.choice(("ticket", "licence", "book", "cable", "lamp", "sandwich", "seat", "chair", "mug"))
    plural = "sandwiches" if thing == "sandwich" else f"{thing}s"
    coin = random.choice(("euros", "dollars", "pounds"))
    question = random.choice(
        (
            f"One {thing} costs {price} {coin}. What do {number} {plural} cost?",
            f"How much are {number} {plural} at {price} {coin} each?",
            f"We buy {number} {plural} at {price} {coin} each. What is the total?",
        )
    )
    total = price * number
    return Problem(
        question, f"{number} × {price} = {total}. That is {total} {coin}.", f"price {price} {number} {thing}"
    )


def told_sum(random: Random) -> Problem:
    a, b = random.randint(11, 99), random.randint(11, 99)
    if random.random() < 0.4:
        a, b = random.randint(100, 899), random.randint(100, 899)
    told, ending = random.choice(PHRASES.arithmetic["sums"])
    answer = f"{worked_sum(a, b)}. That is {a + b} {ending}."
    return Problem(told.format(a=a, b=b), answer, pair_key("sum", a, b))


def told_difference(random: Random) -> Problem:
    a, b = random.randint(20, 99), random.randint(3, 95)
    if random.random() < 0.4:
        a, b = random.randint(110, 990), random.randint(101, 990)
    if abs(a - b) < 2:
        a += 5
    a, b = max(a, b), min(a, b)
    told, ending = random.choice(PHRASES.arithmetic["differences"])
    answer = f"{worked_difference(a, b)}. {a - b} {ending}."
    return Problem(told.format(a=a, b=b), answer, f"difference {a} {b}")


def average(random: Random) -> Problem:
    number = random.choice((2, 3))
    step = random.choice((1, 5, 10))
    while True:
        values = [random.randint(1, 12) * step for _ in range(number)]
        if len(set(values)) > 1 and sum(values) % number == 0:
            break
    mean = sum(values) // number
    listed = ", ".join(str(value) for value in values[:-1]) + f" and {values[-1]}"
    steps: list[str] = []
    total = values[0]
    for value in values[1:]:
        steps.append(f"{worked_sum(total, value)}.")
        total += value
    question = random.choice(("What is the average of {}?", "What is the mean of {}?", "Average of {}?"))
    answer = f"{' '.join(steps)} {total} / {number} = {mean}. The average is {mean}."
    return Problem(question.format(listed), answer, "average " + " ".join(str(value) for value in sorted(values)))


KINDS: tuple[tuple[Callable[[Random], Problem], float], ...] = (
    (small_sum, 1.6),
    (large_sum, 1.2),
    (small_difference, 1.6),
    (large_difference, 1.4),
    (table_product, 0.7),
    (large_product, 1.0),
    (division, 0.5),
    (compared_numbers, 1.2),
    (compared_latencies, 1.0),
    (largest_of_three, 0.8),
    (compared_durations, 1.4),
    (to_smaller_unit, 1.0),
    (mixed_to_small, 0.8),
    (small_to_mixed, 0.8),
    (ms_to_seconds, 0.7),
    (budget_sum, 1.4),
    (percentage, 0.9),
    (tokens_made, 1.0),
    (clock_after, 0.8),
    (priced, 0.6),
    (told_sum, 1.0),
    (told_difference, 1.0),
    (average, 0.8),
)


def problem(random: Random) -> Problem:
    return random.choices([kind for kind, _ in KINDS], [weight for _, weight in KINDS])[0](random)


def instance(random: Random, problems_posed: Sequence[int] = (1, 1, 2, 2, 3, 4)) -> Instance:
    problems = [problem(random) for _ in range(random.choice(problems_posed))]
    turns: list[Turn] = []
    if random.random() < 0.2:
        turns.append(Turn("system", random.choice(SYSTEM)))
    for each in problems:
        turns.append(Turn("user", as_typed(random, each.question)))
        turns.append(Turn("assistant", each.answer))
    return Instance(tuple(turns), tuple(each.key for each in problems), ("exact",) * len(problems))


def by_heart(random: Random) -> str:
    """One of the small steps that every working is made of."""
    a, b, more = random.randint(0, 9), random.randint(0, 9), random.randint(0, 1)
    match random.randrange(8):
        case 0 | 1:
            return f"{a} + {b}{' + 1' * more} = {a + b + more}"
        case 2 | 3:  # a column's: what is left has one digit
            return f"{a + b + more} - {b}{' - 1' * more} = {a}"
        case 4:
            a, b = random.randint(1, 12), random.randint(1, 12)
            return f"{a} × {b} = {a * b}"
        case 5:
            a, b = random.randint(1, 12), random.randint(1, 12)
            return f"{a * b} / {b} = {a}"
        case 6:
            a = random.randint(1, 12)
            return f"{a} × 60 = {a * 60}"
        case _:
            while True:
                a, b = random.sample(range(random.choice((100, 1000))), 2)
                if not is_held_out(pair_key("compare", a, b)):
                    break
            return random.choice((f"greater of {a} and {b} = {max(a, b)}", f"smaller of {a} and {b} = {min(a, b)}"))


RESULT = re.compile(r"(?:= |\bis )(\d+)")
BY_HEART_SHARE = 0.5  # of the exercises


def exercises(random: Random, count: int) -> tuple[str, list[tuple[int, int]]]:
    """Answers one after the other, without their questions, or small steps alone, and where their results stand.

    A conversation spends most of its tokens on words; here nearly every second token is one to be calculated.
    """
    answers: list[str] = []
    if random.random() < BY_HEART_SHARE:
        answers = [f"{by_heart(random)}." for _ in range(3 * count)]
    while len(answers) < count:
        each = problem(random)
        if not is_held_out(each.key):
            answers.append(each.answer)
    text = " ".join(answers)
    return text, [found.span(1) for found in RESULT.finditer(text)]


def conversations(random: Random, count: int) -> Iterator[Conversation]:
    return training_conversations(TASK, partial(instance, problems_posed=(1, 2, 3, 4, 6, 8)), random, count)


def questions() -> list[Question]:
    return held_out_questions(TASK, instance, 6, 480)
