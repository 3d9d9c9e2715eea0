"""Finds markers in streamed text, and holds back the whitespace beside them.

Does not know what markers mean. The joined output never depends on how the text was cut.
"""

from __future__ import annotations

from typing import Final

WHITESPACE: Final = " \t\r\n"
MOST_WAITING: Final = 4096  # characters of whitespace held back


def partial_marker_start(marker: str, text: str, start: int = 0) -> int:
    """Return where, from `start`, a marker begins that later text may complete; the text's length if none does."""
    for length in range(min(len(marker) - 1, len(text) - start), 0, -1):
        if text.endswith(marker[:length]):
            return len(text) - length
    return len(text)


class ContentBuffer:
    """Passes text on. Whitespace waits for more text: call `drop` before a marker, and `after_marker` after it."""

    def __init__(self) -> None:
        self._out: list[str] = []
        self._waiting = ""
        self._spilt = False  # this run of whitespace was too long to wait
        self._dropping = False  # whitespace directly after a marker

    def say(self, text: str) -> None:
        if self._dropping:
            text = text.lstrip(WHITESPACE)
            if not text:
                return
            self._dropping = False
        said = text.rstrip(WHITESPACE)
        if said:
            self._out += (self._waiting, said)
            self._waiting = ""
            self._spilt = False
        self._waiting += text[len(said) :]
        if self._spilt or len(self._waiting) > MOST_WAITING:
            self._out.append(self._waiting)
            self._waiting = ""
            self._spilt = True

    def drop(self) -> None:
        """Drop the whitespace held back."""
        self._waiting = ""

    def after_marker(self) -> None:
        """Drop the whitespace before and after this position."""
        self._waiting = ""
        self._spilt = False
        self._dropping = True

    def take(self, *, last: bool = False) -> str:
        """Return the text since the last call. `last`: include the whitespace held back."""
        if last:
            self._out.append(self._waiting)
            self._waiting = ""
        text = "".join(self._out)
        self._out.clear()
        return text
