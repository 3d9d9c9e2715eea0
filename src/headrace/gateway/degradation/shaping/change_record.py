"""Describes one change that was made to a request, for headers, traces and metrics."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

ChangeValue = int | float | str


class ShapingChange(msgspec.Struct, frozen=True):
    name: str
    before: ChangeValue | None  # None: there is nothing to compare with
    after: ChangeValue

    def __str__(self) -> str:
        after = _header_text(self.after)
        return f"{self.name}={after}" if self.before is None else f"{self.name}={_header_text(self.before)}>{after}"


def header_value(changes: Iterable[ShapingChange]) -> str:
    """Return a header's value, such as `turns=5210>1980, max_tokens=1024>160`; empty without changes."""
    return ", ".join(map(str, changes))


def _header_text(value: ChangeValue) -> str:
    """Reduce a value to visible ASCII without the separators of the header."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return "".join(char if "!" <= char <= "~" and char not in ",=>" else "_" for char in text)[:128]
