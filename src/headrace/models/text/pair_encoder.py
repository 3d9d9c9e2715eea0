"""Turns a query and a document into the tokens that a reranker reads.

An encoder reads them as its tokenizer joins two texts. Qwen3-Reranker reads a prompt that asks whether the document
meets the query's requirements. What does not fit is rejected, or cut if the caller says so.
"""

from __future__ import annotations

from typing import Final

import msgspec

from headrace.errors import RequestError
from headrace.models.spec import RankingSpec
from headrace.models.text.tokenizer import Tokenizer
from headrace.models.text.user_text import UserText

INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_AFTER: Final = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class EncodedPair(msgspec.Struct, frozen=True):
    tokens: tuple[int, ...]
    second_text: int  # token at which the second type of tokens begins; -1: there is one type
    cut: bool


class PairEncoder:
    """Encodes the pairs of one call, which have a query in common."""

    def __init__(
        self, tokenizer: Tokenizer, ranking: RankingSpec, query: str, *, context: int, instruction: str | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._context = context
        self._prompted = ranking.template == "qwen3"
        self._typed = ranking.typed
        self._query = query
        self._instruction = instruction or INSTRUCTION
        if instruction is not None and not self._prompted:
            raise RequestError("This reranker takes no instruction.", parameter="instruction")
        if self._prompted:
            self._before, self._after = (tokenizer.encode(text, add_special_tokens=False) for text in (_BEFORE, _AFTER))
        else:
            self._frame = tokenizer.pair_frame
            self._query_tokens = tokenizer.encode(UserText(query), add_special_tokens=False)

    def encode(
        self, document: str, *, most: int | None = None, cut: bool = False, keep_end: bool = False
    ) -> EncodedPair:
        """Return the tokens of the query and a document, `most` at most (default: the context).

        `cut`: shorten the longer of the two at its end, or with `keep_end` at its start, until the pair fits.
        """
        limit = self._context if most is None else min(most, self._context)
        if self._prompted:
            return self._prompt(document, limit, cut=cut, keep_end=keep_end)
        first = self._query_tokens
        second = self._tokenizer.encode(UserText(document), add_special_tokens=False)
        before, between, after, typed = self._frame
        room = limit - len(before) - len(between) - len(after)
        excess = len(first) + len(second) - room
        if excess > 0:
            self._check(cut, len(first) + len(second) + limit - room, limit, room)
            first, second = _shorten(first, second, room, keep_end=keep_end)
        tokens = (*before, *first, *between, *second, *after)
        second_text = -1 if typed is None or not self._typed else len(before) + len(first) + typed
        return EncodedPair(tokens, second_text, excess > 0)

    def _prompt(self, document: str, limit: int, *, cut: bool, keep_end: bool) -> EncodedPair:
        head = f"<Instruct>: {self._instruction}\n<Query>: {self._query}\n<Document>: "
        # As one text: a token may hold the space before a document's first word.
        text = self._tokenizer.encode(UserText(head + document), add_special_tokens=False)
        room = limit - len(self._before) - len(self._after)
        excess = len(text) - room
        if excess > 0:
            self._check(cut, len(text) + limit - room, limit, room)
            if keep_end:
                raise RequestError(
                    "This reranker reads the document last, so texts are cut at their end only.", parameter="truncate"
                )
            text = text[:room]
        return EncodedPair((*self._before, *text, *self._after), -1, excess > 0)

    def _check(self, cut: bool, count: int, limit: int, room: int) -> None:
        if not cut:
            raise RequestError(
                f"The query and the document have {count} tokens together. The model takes {limit}. Shorten them, or "
                "set 'truncate'.",
                parameter="documents",
            )
        if room < 2:
            raise RequestError(
                f"{limit} tokens have no room for two texts. Expected at least {limit - room + 2}.",
                parameter="truncate_prompt_tokens",
            )


def _shorten(first: list[int], second: list[int], room: int, *, keep_end: bool) -> tuple[list[int], list[int]]:
    """Shorten the longer text, and both alike once they are equally long."""
    shorter = min(len(first), len(second), room // 2)
    longer = room - shorter
    sizes = (shorter, longer) if len(first) <= len(second) else (longer, shorter)
    one, other = (text[-size:] if keep_end else text[:size] for text, size in zip((first, second), sizes, strict=True))
    return one, other
