"""PromptPieces: tokenises a rendered chat message by message, and remembers the messages that it has seen.

A conversation's next request repeats all of its earlier messages, and a system prompt comes with every request. Control
tokens are cut out of a text before anything else looks at it, so the text between two of them has the same tokens alone
as in the whole. Tokenizers for which that does not hold are found out and tokenise the whole text.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from itertools import pairwise
from threading import Lock
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import tokenizers

_MOST_CHARACTERS: Final = 2_000_000  # of the remembered pieces together; a token takes 4 bytes
_LONGEST_SHARE: Final = 8  # a piece of more than this part of the bound is not remembered
_PIECE_COST: Final = 64  # characters that a piece counts beside its own
# What the cut must not change, whatever the text: spaces at edges, words, marks that other texts are joined with.
_SAMPLES: Final = ("", "a", " a", "A b ", "\n\nc", "d\n", "  e  ", "é\u0301", "1 2", "'s", "▁x", "<", "|")


class PromptPieces:
    """The pieces of one tokenizer. Safe to use from several threads at once."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        control: Mapping[str, int],
        encode: Callable[[str], list[int]],
        *,
        most_characters: int = _MOST_CHARACTERS,
        cuts: bool | None = None,
    ) -> None:
        """`control`: the control tokens' ids by their text. `encode` tokenises a text without tokens around it. `cuts`
        is `can_cut`, if it is known from before."""
        self._tokenizer = tokenizer
        self._control = control
        self._encode = encode
        self._most = most_characters
        self._can_cut = cuts
        self._known: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        self._characters = 0
        self._lock = Lock()

    def encode(self, text: str, scope: str) -> list[int]:
        """Return the tokens of the whole text. Pieces are remembered per scope, so that nothing of one tenant's texts
        shows in the time that another's take."""
        cuts = self._cuts
        if cuts is None:
            return self._encode(text)
        places = [match.start() for match in cuts.finditer(text)]
        if not places:
            return self._encode(text)
        if places[0]:
            places.insert(0, 0)
        places.append(len(text))
        found: list[int] = []
        for start, stop in pairwise(places):
            found += self._piece(scope, text[start:stop])
        return found

    def _piece(self, scope: str, text: str) -> Iterable[int]:
        key = (scope, text)
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
                return known
        tokens = self._encode(text)
        size = len(text) + _PIECE_COST
        if size * _LONGEST_SHARE <= self._most:
            with self._lock:
                if key not in self._known:
                    self._known[key] = array("I", tokens)
                    self._characters += size
                while self._characters > self._most:
                    (_, old), _ = self._known.popitem(last=False)
                    self._characters -= len(old) + _PIECE_COST
        return tokens

    @property
    def can_cut(self) -> bool:
        """Whether a text can be cut before its control tokens."""
        return self._cuts is not None

    @cached_property
    def _cuts(self) -> re.Pattern[str] | None:
        """Where a text can be cut: before a control token. None if this tokenizer cannot be cut."""
        if self._can_cut is False:
            return None
        added = {token.content: token for token in self._tokenizer.get_added_tokens_decoder().values() if token.content}
        cutting = [
            content
            for content in self._control
            if (token := added.get(content)) is not None
            and not (token.normalized or token.lstrip or token.rstrip or token.single_word)
        ]
        if not cutting or any(_overlap(content, other) for content in cutting for other in added if other != content):
            return None
        cuts = re.compile("|".join(map(re.escape, sorted(cutting, key=len, reverse=True))))
        if self._can_cut:
            return cuts
        marker = cutting[0]
        for before in _SAMPLES:
            for after in _SAMPLES:
                whole = self._encode(f"{before}{marker}{after}{marker}{before}")
                if whole != [
                    *(self._encode(before) if before else ()),
                    *self._encode(marker + after),
                    *self._encode(marker + before),
                ]:
                    return None
        return cuts


def _overlap(content: str, other: str) -> bool:
    """True if a text could hold parts of both tokens in the same characters, and so be cut in two ways."""
    if content in other or other in content:
        return True
    shortest = min(len(content), len(other))
    return any(content[:size] == other[-size:] or content[-size:] == other[:size] for size in range(1, shortest))
