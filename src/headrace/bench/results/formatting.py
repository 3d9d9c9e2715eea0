"""Formats durations, counts and foreign texts for tables, reports and the terminal. Does not escape markup."""

from __future__ import annotations

import math
import re
from typing import Final

MOST_TEXT: Final = 2000  # characters
# Control characters, invisible ones, those that change the writing direction, and those invalid in UTF-8 or XML.
_UNSEEN: Final = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\ufffe\uffff]"
)


def clean(text: str, most: int = MOST_TEXT) -> str:
    """Remove control characters from a foreign text and shorten it. Does not escape it."""
    shown = _UNSEEN.sub("\N{REPLACEMENT CHARACTER}", text[: most + 1])
    return shown if len(shown) <= most else shown[: max(0, most - 1)] + "…"


def milliseconds(value: float | None) -> str:
    """Format a duration in a suitable unit with three significant digits."""
    if value is None or not math.isfinite(value):
        return "-"
    size = abs(value)
    if size == 0.0:
        return "0 ms"
    if size < 0.9995:
        return f"{three(value * 1e3)} µs"
    if size < 999.5:
        return f"{three(value)} ms"
    return f"{three(value / 1e3)} s"


def seconds(value: float) -> str:
    """Format elapsed time."""
    if value < 120.0:
        return f"{three(value)} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def number(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 999.5 or value == round(value) else three(value)


def share(value: float) -> str:
    percent = 100.0 * value
    return f"{percent:.0f} %" if percent in (0.0, 100.0) else f"{three(percent)} %"


def three(value: float) -> str:
    """Format with three significant digits and no exponent."""
    if value == 0.0:
        return "0"
    rounded = float(f"{value:.2e}")  # 0.9996 is 1.00
    return f"{rounded:,.{min(max(0, 2 - math.floor(math.log10(abs(rounded)))), 6)}f}"
