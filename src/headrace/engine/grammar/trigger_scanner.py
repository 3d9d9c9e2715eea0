"""Finds the place in an answer's bytes where a triggered grammar begins.

A scanner is immutable and a position is a value, so drafts are scanned without leaving a trace. Does not know tokens.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from headrace.engine.interface.grammar_spec import GrammarTrigger

_WHITESPACE: Final = b" \t\r\n"

# before: reasoning may begin; inside: the reasoning; start: only whitespace so far; search: any text; over: no marker
# counts any more.
Phase = Literal["before", "inside", "start", "search", "over"]


class ScanPosition(NamedTuple):
    phase: Phase
    tail: bytes = b""  # the end of the text that may be the beginning of a marker


class TriggerScanner:
    def __init__(self, trigger: GrammarTrigger) -> None:
        self.markers = tuple(marker.encode() for marker in trigger.markers)
        self._opening, self._closing = (marker.encode() for marker in trigger.reasoning or ("", ""))
        self._content: Phase = "start" if trigger.at_start else "search"
        if trigger.reasoning is None or trigger.reasoning_begins == "closed":
            self.beginning = ScanPosition(self._content)
        else:
            self.beginning = ScanPosition("inside" if trigger.reasoning_begins == "open" else "before")

    def tails(self) -> list[ScanPosition]:
        """Return every position from which one more piece of text may complete a marker."""
        parts = {marker[:length] for marker in self.markers for length in range(len(marker))}
        return [ScanPosition(self._content, part) for part in sorted(parts)]

    def push(self, position: ScanPosition, piece: bytes) -> tuple[ScanPosition, bytes | None]:
        """Return the position after the piece. If a marker is complete, return the text from its first byte on too."""
        phase, text = position.phase, position.tail + piece
        if phase == "before":
            begun = text.lstrip(_WHITESPACE)
            if begun.startswith(self._opening):
                phase, text = "inside", begun[len(self._opening) :]
            elif self._opening.startswith(begun):
                return ScanPosition(phase, begun), None
            else:
                phase = self._content
        if phase == "inside":
            at = text.find(self._closing)
            if at < 0:
                return ScanPosition(phase, _partial((self._closing,), text)), None
            phase, text = self._content, text[at + len(self._closing) :]
        if phase == "start":
            begun = text.lstrip(_WHITESPACE)
            if begun.startswith(self.markers):
                return ScanPosition("over"), begun
            waits = any(marker.startswith(begun) for marker in self.markers)
            return ScanPosition("start", begun) if waits else ScanPosition("over"), None
        if phase == "search":
            found = [at for marker in self.markers if (at := text.find(marker)) >= 0]
            if found:
                return ScanPosition("search"), text[min(found) :]
            return ScanPosition("search", _partial(self.markers, text)), None
        return position, None


def _partial(markers: tuple[bytes, ...], text: bytes) -> bytes:
    """Return the longest end of the text that begins a marker."""
    longest = max(map(len, markers)) - 1
    for start in range(max(0, len(text) - longest), len(text)):
        if any(marker.startswith(text[start:]) for marker in markers):
            return text[start:]
    return b""
