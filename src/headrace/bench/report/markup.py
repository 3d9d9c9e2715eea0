"""Builds the HTML of a report: elements that escape their text, and a page that loads nothing."""

from __future__ import annotations

import base64
import hashlib
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


def page(title: str, *body: Html, style: str, script: str) -> str:
    """Build a whole page. Its style and script are inline."""
    # Nothing may be loaded. Even if escaping failed, no other script could run: only this digest is allowed.
    own = f"style-src {_digest(style)}; script-src {_digest(script)}"
    policy = f"default-src 'none'; {own}; base-uri 'none'; form-action 'none'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", clean(title, 120)),
        Html(f"<style>{style}</style>"),
    )
    return f'<!doctype html>\n<html lang="en">{head}{tag("body", *body, Html(f"<script>{script}</script>"))}</html>\n'


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def short(value: float) -> str:
    """Format with at most two decimals: a hundredth of a pixel is enough."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if value % 1 else f"{value:.0f}"


def _attribute(value: str | float) -> str:
    return html.escape(clean(value, MOST_ATTRIBUTE), quote=True) if isinstance(value, str) else short(value)
