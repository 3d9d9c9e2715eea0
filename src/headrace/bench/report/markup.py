"""Builds the HTML of a report: elements that escape their text."""

from __future__ import annotations

import html
from typing import Final

from headrace.bench.results.formatting import clean

MOST_ATTRIBUTE: Final = 4_000_000  # characters; a chart's data are one attribute
_VOID: Final = frozenset({"br", "input", "meta"})


class Html(str):
    """Markup whose text is escaped already."""

    __slots__ = ()


def escape(text: str) -> Html:
    return text if isinstance(text, Html) else Html(html.escape(clean(text), quote=True))


def tag(name: str, /, *parts: str, **attributes: str | float | None) -> Html:
    """Build an element. `class_` becomes class, `data_x` data-x; attributes that are None are omitted."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{''.join(escape(part) for part in parts)}</{name}>")


def join(*parts: Html) -> Html:
    return Html("".join(parts))


def short(value: float) -> str:
    """Format with at most two decimals: a hundredth of a pixel is enough."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if value % 1 else f"{value:.0f}"


def _attribute(value: str | float) -> str:
    return html.escape(clean(value, MOST_ATTRIBUTE), quote=True) if isinstance(value, str) else short(value)
