"""TokenizerIndex: what a server needs of a large tokenizer to start and to read its first texts, in a mapped file.

`tokenizers` parses a vocabulary of 150,000 tokens for 0.3 s; a mapped file is there at once. The file holds facts
alone, no code. A damaged file is no index. Does not know where the facts come from: see index_facts.
"""

from __future__ import annotations

import mmap
import struct
import sys
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Final, NoReturn

import msgspec

from headrace.models.formats.atomic_file import new_file
from headrace.models.text.token_table import AddedTokenEntry

_MAGIC: Final = b"HEADTOK1"
_START: Final = struct.Struct("<8sQQ")  # magic, bytes of the facts, crc32 of all that follows
_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class IndexFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What is small. The rest are arrays."""

    tokens: _Count  # the highest id + 1
    named: _Count  # tokens that have a text
    merges: _Count
    pre_tokenizer: bytes  # JSON, of a kind that read_splits knows
    decoder: bytes  # JSON
    whole_words: bool  # a word that is a token needs no merges
    composes: bool  # the normaliser is NFC; otherwise there is none
    byte_tokens: Annotated[list[int], msgspec.Meta(min_length=256, max_length=256)]
    added: list[AddedTokenEntry]
    special: list[int]
    frame: tuple[list[int], list[int]]  # tokens that the tokenizer puts around a text
    literals: dict[str, list[str]]  # of each chat template
    normalises: bool  # see ControlTokens
    cuts: bool  # see PromptPieces
    longest_piece: int


class IndexArrays(msgspec.Struct, frozen=True):
    texts: dict[int, str]
    merges: Sequence[tuple[int, int, int]]  # left, right and merged token, by rank


class TokenizerIndex:
    """The tokens of one tokenizer by id and by text, and its merges."""

    def __init__(self, facts: IndexFacts, data: memoryview) -> None:
        """`data` are the arrays, as `write_index` writes them. ValueError if they do not fit the facts."""
        self.facts = facts
        pairs, offsets = 8 * facts.merges, 4 * (facts.tokens + 1)
        ends = (pairs, 2 * pairs, 2 * pairs + offsets, 2 * pairs + offsets + 4 * facts.named)
        if len(data) < ends[-1]:
            raise ValueError("The arrays are too short.")
        self.pairs: Sequence[int] = data[: ends[0]].cast("Q")
        self.merged: Sequence[int] = data[ends[0] : ends[1]].cast("Q")
        self._offsets: Sequence[int] = data[ends[1] : ends[2]].cast("I")
        self._order: Sequence[int] = data[ends[2] : ends[3]].cast("I")
        self._texts = data[ends[3] :]

    def id_to_token(self, id: int) -> str | None:
        text = self._text(id) if 0 <= id < self.facts.tokens else b""
        return text.decode() if text else None

    def token_to_id(self, text: str) -> int | None:
        wanted = text.encode()
        place = bisect_left(self._order, wanted, key=self._text)
        if place < len(self._order) and self._text(self._order[place]) == wanted:
            return self._order[place]
        return None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> NoReturn:
        raise AssertionError("A decoder that needs the whole tokenizer has no index.")

    def _text(self, id: int) -> bytes:
        return bytes(self._texts[self._offsets[id] : self._offsets[id + 1]])

    @cached_property
    def added(self) -> dict[int, AddedTokenEntry]:
        return {each.id: each for each in self.facts.added}


def read_index(path: Path) -> TokenizerIndex | None:
    """Map an index. None if there is none, or it is damaged."""
    try:
        with path.open("rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        magic, size, checksum = _START.unpack_from(data)
        if magic != _MAGIC or zlib.crc32(data[_START.size :]) != checksum:
            return None
        facts = msgspec.msgpack.decode(data[_START.size : _START.size + size], type=IndexFacts)
        return TokenizerIndex(facts, data[_aligned(_START.size + size) :])
    except (OSError, ValueError, struct.error, msgspec.MsgspecError):
        return None


def write_index(path: Path, facts: IndexFacts, arrays: IndexArrays) -> None:
    """Write an index whole or not at all. OSError if the file cannot be written."""
    texts = {id: text.encode() for id, text in arrays.texts.items()}
    pairs = ordered_pairs(arrays.merges)
    offsets, blob = array("I", [0]), bytearray()
    for id in range(facts.tokens):
        blob += texts.get(id, b"")
        offsets.append(len(blob))
    order = array("I", sorted(texts, key=texts.__getitem__))
    packed = msgspec.msgpack.encode(facts)
    padding = bytes(_aligned(_START.size + len(packed)) - _START.size - len(packed))
    numbers = (array("Q", [pair for pair, _ in pairs]), array("Q", [merged for _, merged in pairs]), offsets, order)
    body = b"".join((packed, padding, *(each.tobytes() for each in numbers), blob))
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path, durable=False) as file:
        file.write(_START.pack(_MAGIC, len(packed), zlib.crc32(body)) + body)


def ordered_pairs(merges: Sequence[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Return left << 32 | right and rank << 32 | merged of each merge, in order."""
    return sorted((left << 32 | right, rank << 32 | merged) for rank, (left, right, merged) in enumerate(merges))


def is_supported() -> bool:
    """Whether this machine writes numbers as the file has them."""
    return sys.byteorder == "little" and array("I").itemsize == 4


def _aligned(position: int) -> int:
    return -(-position // 8) * 8
