"""Cuts a document into chunks by its structure and a number of tokens.

A chunk keeps to one section where it can: it ends at a heading, else between paragraphs, else between sentences (lines
of code), and only a sentence longer than a chunk is cut within. Chunks of one section overlap by their last sentences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from headrace.gateway.sentences import split_sentences
from headrace.pipelines.collections.blocks import StructureBlock

_SMALL: Final = 0.25  # a section with less of a chunk's tokens shares a chunk with the next one
_HEADING_SHARE: Final = 0.25  # of a chunk's tokens that the titles above it may take
_SENTENCE: Final = 480  # characters of the longest piece


class Chunk(msgspec.Struct, frozen=True):
    text: str
    heading: str  # titles above the chunk, outermost first, joined by " > "
    tokens: int  # of heading and text, about


def embedded_text(heading: str, text: str) -> str:
    """Return the text that the encoder reads: with the titles, because they often name what the text is about."""
    return f"{heading}\n{text}" if heading else text


class _Piece(msgspec.Struct, frozen=True):
    text: str
    tokens: int
    before: str  # what separates it from the piece before: "\n\n", "\n", " " or nothing


def cut_into_chunks(
    blocks: Sequence[StructureBlock], count_tokens: Callable[[str], int], *, title: str, most: int, overlap: int
) -> list[Chunk]:
    """`most`: tokens of a chunk with its heading. `overlap`: tokens at most that a chunk repeats of the one before."""
    chunks: list[Chunk] = []
    for path, section in _sections(blocks, title, count_tokens, most):
        heading, spent = _heading(path, count_tokens, int(most * _HEADING_SHARE))
        room = most - spent
        for pieces in _cut(section, room, min(overlap, room // 2)):
            text = "".join(piece.before + piece.text for piece in pieces).strip()
            if text:
                chunks.append(Chunk(text, heading, spent + sum(piece.tokens for piece in pieces)))
    return chunks


def _sections(
    blocks: Sequence[StructureBlock], title: str, count_tokens: Callable[[str], int], most: int
) -> Iterator[tuple[list[str], list[_Piece]]]:
    """Yield the titles above each section, and its pieces. Small sections are joined with what follows them."""
    titles: list[tuple[int, str]] = []
    path: list[str] = [title] if title else []
    pieces: list[_Piece] = []
    tokens = 0
    for block in blocks:
        if block.kind != "heading":
            new = list(_pieces(block, count_tokens, most))
            pieces += new
            tokens += sum(piece.tokens for piece in new)
            continue
        while titles and titles[-1][0] >= block.level:
            titles.pop()
        titles.append((block.level, block.text))
        above = [text for _, text in titles]
        if title and above[0] != title:
            above.insert(0, title)
        if tokens >= most * _SMALL:
            yield path, pieces
            pieces, tokens = [], 0
        if pieces:
            pieces.append(_Piece(block.text, count_tokens(block.text), "\n\n"))
        else:
            path = above
    if any(piece.text.strip() for piece in pieces):
        yield path, pieces


def _pieces(block: StructureBlock, count_tokens: Callable[[str], int], most: int) -> Iterator[_Piece]:
    before = "\n\n"
    if block.kind == "code":
        parts = block.text.split("\n")
    else:
        parts = [block.text[start:end] for start, end in split_sentences(block.text, _SENTENCE)]
    for part in parts:
        text = part if block.kind == "code" else part.strip()
        tokens = count_tokens(text) if text else 0
        if tokens <= most // 2:
            yield _Piece(text, tokens, before)
        else:
            for place, each in enumerate(_halves(text, count_tokens, most // 2)):
                yield _Piece(each, count_tokens(each), before if not place else " ")
        before = "\n" if block.kind == "code" or part.endswith("\n") else " "


def _halves(text: str, count_tokens: Callable[[str], int], most: int) -> Iterator[str]:
    """Cut a text without sentences at spaces, or anywhere if it has none, into parts of at most `most` tokens."""
    if len(text) < 2 or count_tokens(text) <= most:
        yield text
        return
    middle = len(text) // 2
    space = text.rfind(" ", 1, middle + 1)
    at = space if space > len(text) // 4 else middle
    for half in (text[:at].strip(), text[at:].strip()):
        if half:
            yield from _halves(half, count_tokens, most)


def _heading(path: Sequence[str], count_tokens: Callable[[str], int], most: int) -> tuple[str, int]:
    """Join the titles; drop inner ones, and cut the last, until they fit."""
    kept = list(path)
    while True:
        heading = " > ".join(kept)
        tokens = count_tokens(heading) if heading else 0
        if tokens <= most or not heading:
            return heading, tokens
        if len(kept) > 1:
            del kept[len(kept) // 2 if len(kept) > 2 else 0]
        else:
            kept = [heading[: len(heading) // 2].rstrip()]


def _cut(pieces: Sequence[_Piece], room: int, overlap: int) -> Iterator[list[_Piece]]:
    chunk: list[_Piece] = []
    tokens = 0
    fresh = False  # whether the chunk has more than what it repeats
    for piece in pieces:
        if chunk and tokens + piece.tokens > room and fresh:
            yield chunk
            chunk = _tail(chunk, min(overlap, room - piece.tokens))
            tokens = sum(each.tokens for each in chunk)
            fresh = False
        chunk.append(piece)
        tokens += piece.tokens
        fresh = True
    if fresh:
        yield chunk


def _tail(chunk: Sequence[_Piece], most: int) -> list[_Piece]:
    kept: list[_Piece] = []
    tokens = 0
    for piece in reversed(chunk):
        tokens += piece.tokens
        if tokens > most:
            break
        kept.insert(0, piece)
    return kept
