"""Varies how people type a question: polite, hurried, without capitals or question mark."""

from __future__ import annotations

from functools import cache
from random import Random
from string import Formatter

from training.corpus.words import PHRASES

GREETINGS, AFTER = PHRASES.typing["greetings"], PHRASES.typing["after"]
BEFORE = (*GREETINGS, *PHRASES.typing["before"])


@cache
def slots(text: str) -> tuple[str, ...]:
    """The names of the slots of a sentence."""
    return tuple(name for _, name, _, _ in Formatter().parse(text) if name)


def lower_first(text: str) -> str:
    """The text with a small first letter, unless its first word is `I`. Whether it is a name, the caller knows."""
    return text if text.startswith("I ") else text[0].lower() + text[1:]


def as_typed(random: Random, question: str, *, starts_with_name: bool = False, lower: bool = True) -> str:
    """The question as one of many users would type it. Names inside keep their capitals unless `lower` allows."""
    text = question
    chance = random.random()
    if chance < 0.12:
        before = random.choice(BEFORE if question.endswith("?") else GREETINGS)
        text = before + (text if starts_with_name or before[-2] in "?!" else lower_first(text))
    elif chance < 0.22 and not starts_with_name:
        text = lower_first(text)
    elif chance < 0.26 and lower:
        text = text.lower()
    if text.endswith("?") and random.random() < 0.1:
        text = text[:-1]
    elif text[-1] in "?." and random.random() < 0.05:
        text += random.choice(AFTER)
    return text
