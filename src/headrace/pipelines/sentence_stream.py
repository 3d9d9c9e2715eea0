"""SentenceStream: cuts a streamed answer into pieces for a speech synthesiser.

The first piece is short, so that speech begins early. The others are whole sentences, several together if they are
short, and none longer than a bound. Pieces have no citation marks.
"""

from __future__ import annotations

import re
from typing import Final

from headrace.gateway.sentences import split_sentences

_CITATION: Final = re.compile(r" ?\[\d{1,4}\]")
_CLAUSE: Final = re.compile(r"[,;:\u2013\u2014][\"')\]]*\s")


class SentenceStream:
    def __init__(self, *, first_chars: int = 24, most_chars: int = 160) -> None:
        self._first = first_chars
        self._most = most_chars
        self._rest = ""
        self._count = 0

    def feed(self, text: str) -> list[str]:
        """Return the pieces that are complete."""
        self._rest += text
        pieces: list[str] = []
        while (cut := self._cut()) > 0:
            self._emit(self._rest[:cut], pieces)
            self._rest = self._rest[cut:]
        return pieces

    def finish(self) -> list[str]:
        """Return what is left."""
        rest, self._rest = self._rest, ""
        pieces: list[str] = []
        while len(rest) > self._most:
            cut = _word_end(rest, self._most)
            self._emit(rest[:cut], pieces)
            rest = rest[cut:]
        self._emit(rest, pieces)
        return pieces

    def _cut(self) -> int:
        """Return where a complete piece ends; 0 if none does yet."""
        rest = self._rest
        # The last span may go on, and the space after a sentence shows that it has ended.
        ends = [end for _, end in split_sentences(rest)[:-1]]
        best = max((end for end in ends if end <= self._most), default=0)
        if best:
            return best
        if not self._count and len(rest) > self._first:
            clause = next((mark.end() for mark in _CLAUSE.finditer(rest) if mark.end() >= self._first), 0)
            if clause:
                return clause
        return _word_end(rest, self._most) if len(rest) > self._most else 0

    def _emit(self, piece: str, pieces: list[str]) -> None:
        spoken = _CITATION.sub("", piece).strip()
        if spoken:
            self._count += 1
            pieces.append(spoken)


def _word_end(text: str, most: int) -> int:
    """Return the last clause's or word's end within `most` characters."""
    clauses = [mark.end() for mark in _CLAUSE.finditer(text, 0, most)]
    if clauses and clauses[-1] > most // 2:
        return clauses[-1]
    space = text.rfind(" ", 0, most)
    return space + 1 if space > 0 else most
