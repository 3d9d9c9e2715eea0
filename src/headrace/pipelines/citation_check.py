"""CitationCheck: checks an answer's citations, such as [2], against its sources while the text streams.

A citation of a source that does not exist is left out of the text or reported. A citation is supported if the source
has enough of its sentence's words; that is a check of words, not of meaning.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

from headrace.gateway.degradation.ladder.question_terms import STOP
from headrace.gateway.folded_words import words
from headrace.gateway.requests.text_request import SourceText

_CITATION: Final = re.compile(r" ?\[(\d{1,4})\]")
_BEGUN: Final = re.compile(r" ?(?:\[\d{0,4})?$")  # the end of a text that may go on as a citation
_SENTENCE_END: Final = re.compile(r"[.!?\n]")
_LONGEST_SENTENCE: Final = 480  # characters before a citation that are compared


class CheckedCitation(msgspec.Struct, frozen=True):
    number: int
    id: str
    start: int  # characters into the answer, as it is delivered
    end: int
    support: float  # share of the sentence's words that the source has

    def described(self, least: float) -> dict[str, Any]:
        return {
            "number": self.number,
            "id": self.id,
            "start": self.start,
            "end": self.end,
            "support": round(self.support, 3),
            "supported": self.support >= least,
        }


class CitationCheck:
    def __init__(self, sources: Sequence[SourceText], *, unknown: Literal["drop", "mark"] = "drop") -> None:
        self.citations: list[CheckedCitation] = []
        self.unknown: list[int] = []  # cited numbers without a source
        self.text = ""  # what was delivered
        self._sources = sources
        self._words = [set[str]() for _ in sources]
        self._drops = unknown == "drop"
        self._held = ""

    def feed(self, text: str) -> tuple[str, list[CheckedCitation]]:
        """Return the text that may be delivered, and the citations in it. Holds back what may become a citation."""
        text = self._held + text
        begun = _BEGUN.search(text)
        cut = len(text) if begun is None else begun.start()
        self._held = text[cut:]
        return self._take(text[:cut])

    def finish(self) -> tuple[str, list[CheckedCitation]]:
        """Return what was held back."""
        held, self._held = self._held, ""
        return self._take(held)

    def _take(self, text: str) -> tuple[str, list[CheckedCitation]]:
        found: list[CheckedCitation] = []
        at = 0
        delivered: list[str] = []

        def deliver(piece: str) -> None:
            delivered.append(piece)
            self.text += piece

        for mark in _CITATION.finditer(text):
            deliver(text[at : mark.start()])
            at = mark.end()
            number = int(mark[1])
            if 1 <= number <= len(self._sources):
                bracket = len(self.text) + mark[0].index("[")
                support = self._support(number)
                deliver(mark[0])
                found.append(CheckedCitation(number, self._sources[number - 1].id, bracket, len(self.text), support))
            else:
                self.unknown.append(number)
                if not self._drops:
                    deliver(mark[0])
        deliver(text[at:])
        self.citations += found
        return "".join(delivered), found

    def _support(self, number: int) -> float:
        """Return the share of the last sentence's words that a source has. 1 if the sentence has none."""
        before = _CITATION.sub("", self.text[-_LONGEST_SENTENCE:]).rstrip()
        body = before.rstrip(".!?")
        ends = [mark.end() for mark in _SENTENCE_END.finditer(body)]
        sentence = body[ends[-1] :] if ends else body
        said = {word for word in words(sentence) if word not in STOP}
        if not said:
            return 1.0
        known = self._words[number - 1]
        if not known:
            known |= set(words(self._sources[number - 1].text))
        return len(said & known) / len(said)
