"""What was done to a request, in a form that headers, traces and metrics can say.

Owns Shaped and its writing as a header's value. Knows no step: names come from whoever does something.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

Value = int | float | str


class ShapingChange(msgspec.Struct, frozen=True):
    """One thing that was done. `before` is None where there was nothing to compare with."""

    step: str
    before: Value | None
    after: Value

    def __str__(self) -> str:
        after = _text(self.after)
        return f"{self.step}={after}" if self.before is None else f"{self.step}={_text(self.before)}>{after}"


def header_value(shaped: Iterable[ShapingChange]) -> str:
    """Such as `turns=5210>1980, max_tokens=1024>160`; empty where nothing was done."""
    return ", ".join(map(str, shaped))


def _text(value: Value) -> str:
    """Fit for a header: visible ASCII, and nothing that would end one part and begin another."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return "".join(char if "!" <= char <= "~" and char not in ",=>" else "_" for char in text)[:128]
