"""A tokenizer's vocabulary in llguidance's form: the bytes of every token, and how a text is tokenised."""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property
from typing import Final, cast

from llguidance import LLTokenizer, TokenizerWrapper

from headrace.engine.interface.output_text import token_bytes
from headrace.errors import RequestError
from headrace.models.text.tokenizer import Tokenizer

# Put before a text, so that a tokenizer that adds a space before the first word adds it before this.
_BEFORE: Final = "\n"
_MOST_CHARACTERS: Final = 256


class TokenVocabulary:
    """The interface that llguidance expects of a tokenizer; it defines the public names."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raise RequestError if the tokenizer's tokens have no bytes of their own."""
        if tokenizer.pieces.kind.form == "window":
            raise RequestError("This model's tokenizer cannot follow a grammar.", parameter="grammar")
        self._tokenizer = tokenizer
        size = tokenizer.vocab_size
        special = {token for token in range(size) if tokenizer.is_special(token)} | tokenizer.eos_ids
        self.tokens = [token_bytes(tokenizer, token) for token in range(size)]
        self.special_token_ids = sorted(special)
        self._special = frozenset(special)
        self.bos_token_id = tokenizer.bos_id
        self.eos_token_id = min(tokenizer.eos_ids, default=None)
        self._eos_ids = sorted(tokenizer.eos_ids)
        # Among tokens with the same bytes, the first; the text of a special token is not that token.
        self._own = [b"" if token in special else text for token, text in enumerate(self.tokens)]
        self._by_bytes = {text: token for token, text in reversed(list(enumerate(self._own))) if text}
        self._longest = max(map(len, self._by_bytes), default=0)
        self._containing: dict[bytes, list[int]] = {}  # by marker; there are as many as tool formats

    def for_llguidance(self) -> LLTokenizer:
        return LLTokenizer(cast("TokenizerWrapper", self), eos_token=self._eos_ids or None)

    def is_special(self, token: int) -> bool:
        return token in self._special

    def spell(self, text: bytes) -> list[int]:
        """Return tokens whose bytes form the text, longest first; none if there are no such tokens."""
        try:
            return self._greedy(text)
        except RequestError:
            return []

    def completing(self, tail: bytes, markers: tuple[bytes, ...]) -> list[int]:
        """Return the tokens that may complete one of the markers after `tail`, which is a beginning of a marker."""
        found: set[int] = set()
        for marker in markers:
            if marker not in self._containing:
                self._containing[marker] = [token for token, text in enumerate(self.tokens) if marker in text]
            found.update(self._containing[marker])
            if tail and marker.startswith(tail):
                found.update(self._beginning_with(marker[len(tail) :]))
        return sorted(found)

    def _beginning_with(self, start: bytes) -> list[int]:
        at = bisect_left(self._sorted, (start, -1))
        found: list[int] = []
        while at < len(self._sorted) and self._sorted[at][0].startswith(start):
            found.append(self._sorted[at][1])
            at += 1
        return found

    @cached_property
    def _sorted(self) -> list[tuple[bytes, int]]:
        return sorted((text, token) for token, text in enumerate(self.tokens))

    def __call__(self, text: str) -> list[int]:
        """Return tokens whose bytes form the text, as the tokenizer would produce them if possible.

        Only the beginning of a long text is tokenised: only its first tokens are needed, and for every token anew.
        """
        text = text[:_MOST_CHARACTERS]
        wanted = text.encode()
        for before in ("", _BEFORE):
            tokens = self._tokenizer.encode(before + text, add_special_tokens=False)
            found = self._ending(tokens, wanted)
            if found is not None:
                return found
        return self._greedy(wanted)

    def _ending(self, tokens: list[int], wanted: bytes) -> list[int] | None:
        """Return the last tokens that cover the wanted bytes."""
        missing = len(wanted)
        start = len(tokens)
        while missing > 0 and start > 0:
            start -= 1
            missing -= len(self._own[tokens[start]])
        found = tokens[start:]
        return found if b"".join(self._own[token] for token in found) == wanted else None

    def _greedy(self, wanted: bytes) -> list[int]:
        tokens: list[int] = []
        place = 0
        while place < len(wanted):
            for length in range(min(self._longest, len(wanted) - place), 0, -1):
                token = self._by_bytes.get(wanted[place : place + length])
                if token is not None:
                    tokens.append(token)
                    place += length
                    break
            else:
                raise RequestError("The tokenizer has no token for a byte of the grammar.", parameter="grammar")
        return tokens
