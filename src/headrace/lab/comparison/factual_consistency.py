"""Checks an answer's facts against the texts that it should rest on: numbers, dates, times and names.

A fact is supported if a source or the prompt has it. This finds invented figures and names; it cannot find a sentence
that combines supported facts wrongly.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import msgspec

from headrace.gateway.folded_words import folded, words
from headrace.gateway.sentences import split_sentences

MOST_FACTS: Final = 200
_CITATION: Final = re.compile(r"\[[^\[\]\n]{1,60}\]")
_LISTED: Final = re.compile(r"^[ \t]*\d{1,3}[.)][ \t]", re.MULTILINE)
_NUMBER: Final = re.compile(r"(?<![\w.])\d+(?:[.,:]\d+)*")
_THOUSANDS: Final = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_NAME: Final = re.compile(r"[^\W\d_a-z][\w\u2019'-]+")
_COMMON: Final = frozenset(
    """
    i the a an it he she they we you this that these those there here however therefore also and but or so if when
    while for from with in on at by to of as is are was were be yes no not my our your their his her its what which who
    how why first second third finally overall please note january february march april may june july august september
    october november december monday tuesday wednesday thursday friday saturday sunday
    """.split()
)


class FactCheck(msgspec.Struct, frozen=True):
    facts: int
    unsupported: tuple[str, ...]

    @property
    def consistency(self) -> float:
        """The share of facts that a text supports; 1 for an answer without facts."""
        return 1.0 - len(self.unsupported) / self.facts if self.facts else 1.0


def check_facts(answer: str, texts: Iterable[str]) -> FactCheck:
    """`texts`: the sources, the prompt, or a reference answer."""
    numbers: set[str] = set()
    known: set[str] = set()
    for text in texts:
        numbers |= _numbers(text)
        known.update(words(text))
    found = facts_of(answer)
    unsupported = [fact for fact in found if not (fact in numbers if fact[0].isdigit() else _is_known(fact, known))]
    return FactCheck(len(found), tuple(unsupported))


def facts_of(answer: str) -> list[str]:
    """Return the numbers and names of an answer, each once, in order."""
    text = _LISTED.sub("", _CITATION.sub(" ", answer))
    found = dict.fromkeys(sorted(_numbers(text)))
    for start, end in split_sentences(text):
        sentence = text[start:end]
        for place, match in enumerate(re.finditer(r"[\w\u2019'-]+", sentence)):
            word = match[0]
            # Any word begins a sentence with a capital, so there it says nothing.
            if place and _NAME.fullmatch(word) and folded(word) not in _COMMON:
                found[word] = None
    return list(found)[:MOST_FACTS]


def _numbers(text: str) -> set[str]:
    return {_THOUSANDS.sub("", match[0]) for match in _NUMBER.finditer(text)}


def _is_known(name: str, known: set[str]) -> bool:
    return all(part in known for part in words(name.removesuffix("'s").removesuffix("\u2019s")))
