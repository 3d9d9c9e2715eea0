"""QuickEncoder: tokenises texts with the merges of a mapped file, so that nothing has to be loaded first.

It is for the texts of the first requests, because it holds the interpreter while it works. Its tokens are those of
`tokenizers`; it returns None for a text where that is not certain.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Final, Protocol

from headrace.models.text.detokenizer import byte_of_character
from headrace.models.text.text_splits import Splits

_LONGEST_TEXT: Final = 64 * 1024  # characters
_LONGEST_WORD: Final = 256  # bytes: the time of a word grows with the square of its length
_MOST_WORDS: Final = 20_000  # remembered
_NO_RANK: Final = 1 << 62


class AddedToken(Protocol):
    """A token that is cut out of a text before anything else looks at it."""

    @property
    def content(self) -> str: ...

    @property
    def normalized(self) -> bool: ...


class QuickEncoder:
    """Safe to use from several threads at once."""

    def __init__(
        self,
        splits: Splits,
        added: Mapping[int, AddedToken],
        bytes_ids: Sequence[int],
        pairs: Sequence[int],
        merged: Sequence[int],
        *,
        composes: bool,
        find_word: Callable[[str], int | None] | None = None,
    ) -> None:
        """`bytes_ids`: the token of each byte. `pairs`, in order: pairs of tokens that merge, as left << 32 | right;
        `merged`: the rank and the token of each, as rank << 32 | token. `composes`: the normaliser is NFC.
        `find_word`: finds a token by its text, for a model in which a word that is a token needs no merges."""
        self._splits = splits
        self._bytes_ids = bytes_ids
        self._pairs = pairs
        self._merged = merged
        self._composes = composes
        self._find_word = find_word
        self._added = frozenset(added)
        # Those that are searched before the text is normalised, and after.
        self._cuts = [
            (_any_of(ids), ids)
            for late in (False, True)
            if (ids := {token.content: id for id, token in added.items() if token.normalized is late})
        ]
        self._characters = {byte: character for character, byte in byte_of_character().items()}
        self._known: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str) -> list[int] | None:
        """Return the tokens of a text without those around it."""
        if len(text) > _LONGEST_TEXT:
            return None
        if self._composes and not text.isascii() and not unicodedata.is_normalized("NFC", text):
            return None
        found: list[int] = []
        return found if self._encode(text, 0, found) else None

    def _encode(self, text: str, stage: int, found: list[int]) -> bool:
        """Append the tokens of a text that was searched for the added tokens of all stages before this one."""
        if stage < len(self._cuts):
            search, ids = self._cuts[stage]
            place = 0
            for match in search.finditer(text):
                start, stop = match.span()
                if not self._encode(text[place:start], stage + 1, found):
                    return False
                found.append(ids[match[0]])
                place = stop
            return self._encode(text[place:], stage + 1, found)
        words = self._splits.words(text) if text else []
        if words is None:
            return False
        for word in words:
            tokens = self._known.get(word)
            if tokens is None:
                tokens = self._merge(word)
                if tokens is None:
                    return False
                if len(self._known) < _MOST_WORDS:
                    self._known[word] = tokens
            found += tokens
        return True

    def _merge(self, word: str) -> tuple[int, ...] | None:
        data = word.encode()
        if len(data) > _LONGEST_WORD:
            return None
        if self._find_word is not None:
            whole = self._find_word("".join([self._characters[byte] for byte in data]))
            if whole is not None and whole not in self._added:
                return (whole,)
        ids = [self._bytes_ids[byte] for byte in data]
        ranks = [self._rank(*each) for each in pairwise(ids)]
        while ranks and (best := min(ranks)) < _NO_RANK:
            place = ranks.index(best)
            ids[place : place + 2] = [best & 0xFFFFFFFF]
            del ranks[place]
            if place < len(ranks):
                ranks[place] = self._rank(ids[place], ids[place + 1])
            if place:
                ranks[place - 1] = self._rank(ids[place - 1], ids[place])
        return tuple(ids)

    def _rank(self, left: int, right: int) -> int:
        pair = left << 32 | right
        place = bisect_left(self._pairs, pair)
        if place < len(self._pairs) and self._pairs[place] == pair:
            return self._merged[place]
        return _NO_RANK


def _any_of(contents: dict[str, int]) -> re.Pattern[str]:
    """Return an expression for the longest of some texts."""
    return re.compile("|".join(map(re.escape, sorted(contents, key=len, reverse=True))))
