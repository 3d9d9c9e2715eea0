"""QuestionTable: finds the text for a question, which must be one of the catalogue's, with any values in its slots.

A slot is written {name}. It takes up to 80 characters of one line, and the text has the same value in its place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from headrace.gateway.caches.catalogues.catalogue_file import MOST_CHARACTERS, CatalogueText
from headrace.gateway.folded_words import folded

SLOT: Final = re.compile(r"\{([a-z][a-z0-9_]{0,31})\}")
MOST_OPEN: Final = 200  # questions with slots, of a catalogue
MOST_SLOTS: Final = 2  # of one question
_VALUE: Final = r"([^\n\r\x00-\x1f]{1,80}?)"
_SPACES: Final = re.compile(r"\s+")
_END_MARKS: Final = " ?!.\u2026\u061f\u3002\uff01\uff1f"


class Found(NamedTuple):
    text: CatalogueText
    answer: str  # with the values of its slots


class QuestionTable:
    def __init__(self, texts: Iterable[CatalogueText], *, is_folded: bool) -> None:
        """Takes the approved texts. The first that has a question answers it."""
        self._is_folded = is_folded
        self._fixed: dict[str, CatalogueText] = {}
        self._open: list[tuple[re.Pattern[str], tuple[str, ...], CatalogueText]] = []
        for text in texts:
            for question in text.questions if text.approved else ():
                if (slots := SLOT.findall(question)) and len(self._open) < MOST_OPEN:
                    self._open.append((self._pattern(question), tuple(slots), text))
                elif not slots:
                    self._fixed.setdefault(self._key(question), text)

    def __len__(self) -> int:
        return len(self._fixed) + len(self._open)

    def find(self, question: str) -> Found | None:
        if len(question) > MOST_CHARACTERS + MOST_SLOTS * 80:
            return None
        text = self._fixed.get(self._key(question))
        if text is not None:
            return Found(text, text.text)
        plain = self._plain(question)
        for pattern, slots, text in self._open:
            if (match := pattern.fullmatch(plain)) is not None:
                values = dict(zip(slots, (value.strip() for value in match.groups()), strict=True))
                return Found(text, fill_slots(text.text, values))
        return None

    def _plain(self, question: str) -> str:
        question = question.strip()
        return _SPACES.sub(" ", question).rstrip(_END_MARKS) if self._is_folded else question

    def _key(self, question: str) -> str:
        plain = self._plain(question)
        return folded(plain) if self._is_folded else plain

    def _pattern(self, question: str) -> re.Pattern[str]:
        parts = SLOT.split(self._plain(question))
        expression = "".join(_VALUE if place % 2 else re.escape(part) for place, part in enumerate(parts))
        return re.compile(expression, re.IGNORECASE if self._is_folded else 0)


def fill_slots(text: str, values: Mapping[str, str]) -> str:
    """Return a text with the values in its slots. A slot without a value stays."""
    return SLOT.sub(lambda slot: values.get(slot[1], slot[0]), text)


def slot_problem(text: CatalogueText) -> str:
    """Return what is wrong with the slots of a text; empty if nothing is."""
    needed = set(SLOT.findall(text.text))
    for question in text.questions:
        slots = SLOT.findall(question)
        if len(slots) > MOST_SLOTS or len(set(slots)) < len(slots):
            return f"the question '{question[:60]}' has more than {MOST_SLOTS} open slots, or one twice"
        if missing := sorted(needed - set(slots)):
            return f"the text needs the slot {{{missing[0]}}}, which the question '{question[:60]}' does not have"
    return ""
