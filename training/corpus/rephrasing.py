"""Rephrases a question by its form or word by word: `How do I lower TTFT?` is also `How can I cut TTFT?`.

A small model learns from these which wordings mean the same. The forms and the synonyms are in words/rephrasing.toml.
Does not know which wordings are held out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from random import Random
from typing import Final

import msgspec

from training.corpus.wording import lower_first
from training.corpus.words import read


class Form(msgspec.Struct):
    pattern: str
    wordings: tuple[str, ...]


class RephrasingFile(msgspec.Struct):
    synonyms: tuple[str, ...]
    forms: tuple[Form, ...]


FILE = read("rephrasing", RephrasingFile)
FORMS = [(re.compile(form.pattern), form.wordings) for form in FILE.forms]
PLACE = re.compile(r"(.+) in (Headrace|headrace \S+)\?")  # where it is asked about may be said first


def rephrased(question: str) -> Iterator[str]:
    """Other wordings of the question, as far as its form is known."""
    for form, wordings in FORMS:
        found = form.fullmatch(question)
        if found:
            for wording in wordings:
                text = wording.format(*found.groups())
                yield text[0].upper() + text[1:] if wording[0] != "{" else text
            break
    found = PLACE.fullmatch(question)
    if found and not found[1].startswith("In "):
        yield f"In {found[2]}, {lower_first(found[1])}?"


SYNONYMS: Final = {word: line.split() for line in FILE.synonyms for word in line.split()}
SWAPPED: Final = 0.5  # of the words that have synonyms
MARKS: Final = ",.;:?!()"  # a word that begins or ends with another sign is a name
COMMANDS: Final = frozenset(("headrace", "make"))  # what follows is the name of a command


def with_synonyms(random: Random, question: str) -> str:
    """The question with other words in place of some of its own."""
    words = question.split(" ")
    found: list[str] = []
    for before, word in zip(("", *words), words, strict=False):
        stem = word.strip(MARKS)
        others = [other for other in SYNONYMS.get(stem, ()) if other != stem]
        if others and before.casefold() not in COMMANDS and random.random() < SWAPPED:
            word = word.replace(stem, random.choice(others))
        found.append(word)
    return " ".join(found)
