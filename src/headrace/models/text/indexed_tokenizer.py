"""IndexedTokenizer: takes the place of a tokenizer of `tokenizers` until that is loaded, with the facts of an index.

What the index does not know loads the whole tokenizer, and then everything is asked of that. Equal in every result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.models.text.quick_encoder import QuickEncoder
from headrace.models.text.text_splits import read_splits
from headrace.models.text.token_table import AddedTokenEntry
from headrace.models.text.tokenizer_index import TokenizerIndex

if TYPE_CHECKING:
    import tokenizers

    from headrace.models.text.chat_template import ChatTemplate


class EncodedTokens(NamedTuple):
    """What callers read of an encoding without pairs."""

    ids: list[int]


class IndexedTokenizer:
    """Safe to use from several threads at once."""

    def __init__(self, index: TokenizerIndex, load: Callable[[], tokenizers.Tokenizer]) -> None:
        """`load` returns the whole tokenizer, or raises a ModelError."""
        self._index = index
        self._load = load
        self._lock = Lock()
        self._whole: tokenizers.Tokenizer | None = None

    def __getattr__(self, name: str) -> Any:  # of all that the index does not know
        return getattr(self.whole(), name)

    def whole(self) -> tokenizers.Tokenizer:
        """Return the whole tokenizer, which is loaded once."""
        with self._lock:
            if self._whole is None:
                self._whole = self._load()
            return self._whole

    @property
    def frame(self) -> tuple[list[int], list[int]]:
        """The tokens that the tokenizer puts before and after a text."""
        return self._index.facts.frame

    @property
    def longest_piece(self) -> int:
        return self._index.facts.longest_piece

    def get_added_tokens_decoder(self) -> Mapping[int, AddedTokenEntry]:
        return self._index.added

    def token_to_id(self, token: str) -> int | None:
        return self._index.token_to_id(token)

    def id_to_token(self, id: int) -> str | None:
        return self._index.id_to_token(id)

    def encode(self, text: str, pair: str | None = None, *, add_special_tokens: bool = True) -> Any:
        if self._whole is None and pair is None:
            ids = self._quick.encode(text)
            if ids is not None:
                before, after = self.frame if add_special_tokens else ([], [])
                return EncodedTokens([*before, *ids, *after])
        return self.whole().encode(text, pair, add_special_tokens=add_special_tokens)

    @cached_property
    def _quick(self) -> QuickEncoder:
        facts = self._index.facts
        splits = read_splits(facts.pre_tokenizer)
        assert splits is not None  # otherwise there would be no index
        return QuickEncoder(
            splits,
            self._index.added,
            facts.byte_tokens,
            self._index.pairs,
            self._index.merged,
            composes=facts.composes,
            find_word=self._index.token_to_id if facts.whole_words else None,
        )


def as_indexed(tokenizer: object) -> IndexedTokenizer | None:
    """Return what stands in for a tokenizer; None for the tokenizer itself."""
    return tokenizer if isinstance(tokenizer, IndexedTokenizer) else None


class StoredTemplate:
    """A chat template that was compiled before, and is compiled again when a chat comes: jinja takes a while."""

    def __init__(self, source: str, literals: Sequence[str], compile: Callable[[], ChatTemplate]) -> None:
        self.source = source
        self.literals = frozenset(literals)
        self._compile = compile
        self._lock = Lock()
        self._compiled: ChatTemplate | None = None

    @property
    def uses_clock(self) -> bool:
        return "strftime_now" in self.source

    def compiled(self) -> ChatTemplate:
        with self._lock:
            if self._compiled is None:
                self._compiled = self._compile()
            return self._compiled

    def render(self, *arguments: Any, **values: Any) -> str:
        return self.compiled().render(*arguments, **values)
