"""StructureBlock: a piece of a document's structure, and the readers of Markdown and plain text.

Readers of other formats (html_reader, pdf_reader) give the same blocks. Chunking does not know where they came from.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, Literal

import msgspec

BlockKind = Literal["heading", "text", "code"]

_FENCE: Final = re.compile(r"[ ]{0,3}(`{3,}|~{3,})[^`]*$")
_HEADING: Final = re.compile(r"[ ]{0,3}(#{1,6})[ \t]+(.*?)[ \t]*#*[ \t]*$")
_UNDERLINE: Final = re.compile(r"[ ]{0,3}(=+|-+)[ \t]*$")
_COMMENT: Final = re.compile(r"<!--.*?-->", re.DOTALL)
_FRONT_MATTER: Final = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)
_LINK: Final = re.compile(r"!?\[([^\]\n]*)\]\([^()\n]*\)")


class StructureBlock(msgspec.Struct, frozen=True):
    kind: BlockKind
    text: str
    level: int = 0  # of a heading, from 1


class ReadDocument(msgspec.Struct, frozen=True):
    title: str  # empty if the document has none
    blocks: list[StructureBlock]


def read_text(text: str) -> ReadDocument:
    """Read plain text: blank lines separate paragraphs."""
    paragraphs = re.split(r"\n[ \t]*\n", _normalised(text))
    return ReadDocument("", [StructureBlock("text", each.strip()) for each in paragraphs if each.strip()])


def read_markdown(text: str) -> ReadDocument:
    """Read Markdown's headings, fenced code and paragraphs. Links keep their text; comments are dropped."""
    text = _FRONT_MATTER.sub("", _normalised(text))
    blocks = list(_markdown_blocks(_COMMENT.sub("", text)))
    title = next((block.text for block in blocks if block.kind == "heading"), "")
    return ReadDocument(title, blocks)


def _markdown_blocks(text: str) -> Iterator[StructureBlock]:
    fence = ""
    lines: list[str] = []

    def paragraph() -> Iterator[StructureBlock]:
        joined = _LINK.sub(r"\1", "\n".join(lines)).strip()
        lines.clear()
        if joined:
            yield StructureBlock("text", joined)

    for line in text.split("\n"):
        found = _FENCE.match(line)
        if fence:
            if found is not None and line.strip().startswith(fence) and not line.strip().strip(fence[0]):
                yield from _code(lines)
                fence = ""
            else:
                lines.append(line)
            continue
        if found is not None:
            yield from paragraph()
            fence = found[1]
        elif (heading := _HEADING.match(line)) is not None:
            yield from paragraph()
            if heading[2]:
                yield StructureBlock("heading", _LINK.sub(r"\1", heading[2]), len(heading[1]))
        elif len(lines) == 1 and lines[0].strip() and (under := _UNDERLINE.match(line)) is not None:
            title = _LINK.sub(r"\1", lines.pop().strip())
            yield StructureBlock("heading", title, 1 if under[1][0] == "=" else 2)
        elif line.strip():
            lines.append(line)
        else:
            yield from paragraph()
    if fence:
        yield from _code(lines)
    yield from paragraph()


def _code(lines: list[str]) -> Iterator[StructureBlock]:
    joined = "\n".join(lines).strip("\n")
    lines.clear()
    if joined.strip():
        yield StructureBlock("code", joined)


def _normalised(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "\ufffd")
