"""Reads an HTML page: its title, headings, paragraphs, lists, tables and code, without what surrounds the content.

Scripts, styles, navigation, forms and footers are dropped. If the page marks its content with <main> or <article>, only
that is kept. Uses html.parser, so broken markup is read as far as it goes; nothing is rendered or loaded.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Final

from headrace.pipelines.collections.blocks import BlockKind, ReadDocument, StructureBlock

_DROPPED: Final = frozenset(
    "script style noscript template svg math iframe object nav header footer aside form button select dialog".split()
)
_VOID: Final = frozenset("area base br col embed hr img input link meta param source track wbr".split())
# These end the paragraph before them.
_BLOCKS: Final = frozenset(
    "address article blockquote body dd details div dl dt fieldset figcaption figure h1 h2 h3 h4 h5 h6 hr html li main "
    "ol p pre section summary table tbody td tfoot th thead tr ul".split()
)
_MAIN: Final = frozenset(("main", "article"))
_SPACES: Final = re.compile(r"\s+")
_LEAST_MAIN: Final = 200  # characters below which <main> is not believed to be the content
_DEEPEST: Final = 2000  # open elements; deeper ones are read as if they were not nested


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[tuple[StructureBlock, bool]] = []  # with whether it is in <main>
        self.title = ""
        self._open: list[str] = []
        self._dropped = 0  # open elements whose content is dropped
        self._main = 0
        self._pre = 0
        self._in_title = False
        self._parts: list[str] = []
        self._kind: BlockKind = "text"
        self._level = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _BLOCKS:
            self._end_block(in_row=tag in ("td", "th"))
        if tag == "br":
            self._parts.append("\n")
        if tag == "img" and not self._dropped:
            self._parts.append(next((value or "" for name, value in attrs if name == "alt"), ""))
        if tag in _VOID or len(self._open) >= _DEEPEST:
            return
        if tag == "p" and "p" in self._open[-1:]:
            self._open.pop()
        self._open.append(tag)
        self._enter(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in _BLOCKS:
            self._end_block(in_row=tag in ("td", "th"))
        if tag not in self._open:
            return
        while True:  # elements that were never closed end with their parent
            closed = self._open.pop()
            self._leave(closed)
            if closed == tag:
                return

    def _enter(self, tag: str) -> None:
        self._dropped += tag in _DROPPED
        self._main += tag in _MAIN
        self._in_title = self._in_title or tag == "title"
        if tag == "pre":
            self._pre += 1
            self._kind = "code"
        if len(tag) == 2 and tag[0] == "h" and tag[1].isdigit():
            self._kind, self._level = "heading", int(tag[1])

    def _leave(self, tag: str) -> None:
        self._dropped -= tag in _DROPPED
        self._main -= tag in _MAIN
        self._pre -= tag == "pre"
        if tag == "title":
            self._in_title = False

    def handle_data(self, data: str) -> None:
        if self._in_title and "svg" not in self._open:
            self.title += data
        elif not self._dropped:
            self._parts.append(data if self._pre else _SPACES.sub(" ", data))

    def _end_block(self, *, in_row: bool = False) -> None:
        text = "".join(self._parts)
        if in_row and text.strip():
            if not text.rstrip().endswith("|"):
                self._parts.append(" | ")
            return
        self._parts.clear()
        kind, level, self._kind, self._level = self._kind, self._level, "text", 0
        if kind == "code":
            text = text.strip("\n").rstrip()
        else:
            lines = (line.strip().removesuffix("|").strip() for line in text.split("\n"))
            text = "\n".join(line for line in lines if line)
            if kind == "heading":
                text = text.replace("\n", " ")
        if text.strip():
            self.blocks.append((StructureBlock(kind, text, level), self._main > 0))

    def close(self) -> None:
        super().close()
        self._end_block()


def read_html(text: str) -> ReadDocument:
    reader = _Reader()
    reader.feed(text.replace("\0", "\ufffd"))
    reader.close()
    main = [block for block, in_main in reader.blocks if in_main]
    blocks = main if sum(len(block.text) for block in main) >= _LEAST_MAIN else [block for block, _ in reader.blocks]
    title = _SPACES.sub(" ", reader.title).strip()
    return ReadDocument(title or next((block.text for block in blocks if block.kind == "heading"), ""), blocks)
