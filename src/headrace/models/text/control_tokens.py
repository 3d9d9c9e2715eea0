"""Keeps user text from becoming control tokens: finds it in a request's texts, and tokenises it as plain text.

Control tokens are the special tokens of a tokenizer, and the added tokens that its chat templates write (`<tool_call>`)
or that look like markers (`<|fim_prefix|>`). Added tokens of ordinary text, such as Gemma's `<table>`, stay tokens.

A text without the string of a control token takes the usual way and has the usual tokens. Any other is tokenised by a
twin of the tokenizer, which shares its model and knows the control tokens only by secret names: the template's markers
are renamed and the user's are not. All else about the text stays in place, so a text has the same tokens on both ways
unless a marker in it is the user's.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from headrace.errors import RequestError
from headrace.models.text.user_text import ROLES, Spans, UserText, plain

if TYPE_CHECKING:
    import tokenizers

# A secret name is between two characters of a private area, which no vocabulary has.
_FIRST: Final = "\U000f0000"
_LAST: Final = "\U000f0001"
_MARKER: Final = re.compile(r"<[|\uff5c].*[|\uff5c]>", re.DOTALL)
_BETWEEN: Final = "\0"  # texts that are searched together
_END: Final = rf"(?:\Z|{_BETWEEN})"
_ROLE: Final = f"(?:{'|'.join(sorted(ROLES))}){_END}"
_LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_ATTEMPTS: Final = 8
_LONG: Final = 4096  # characters


class ControlTokens:
    """The control tokens of one tokenizer. Safe to use from several threads at once."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        templates: Iterable[tuple[str, Iterable[str]]] = (),
        *,
        normalises: bool | None = None,
    ) -> None:
        """`templates` holds the source and the literals of each chat template. `normalises` is known from before."""
        if normalises is not None:
            self.normalises = normalises
        self._tokenizer = tokenizer
        known = tuple(templates)
        self._added = dict(sorted(tokenizer.get_added_tokens_decoder().items()))
        self.ids: dict[str, int] = {
            token.content: id
            for id, token in self._added.items()
            if token.content and (token.special or _is_marker(token.content, (source for source, _ in known)))
        }
        # The secret name of each control token, and of a break that has no token. Made here and not on first use, so
        # that all threads use the same.
        self._secret = secrets.token_hex(12)
        self._names = {
            content: f"{_FIRST}{self._secret}{number:06x}{_LAST}" for number, content in enumerate((*self.ids, ""))
        }
        self._openers = sorted({content[0] for content in self.ids})
        self._rests = self._rests_of({literal for _, literals in known for literal in literals})
        self._rest_openers = frozenset(rest[0] for rest in self._rests)

    # Search

    def may_be_in(self, texts: Sequence[str]) -> bool:
        """Return whether user texts could be read as a control token, alone or joined with a template's text."""
        if not self.ids:
            return False
        whole = _BETWEEN + _BETWEEN.join(texts)
        for opener in self._openers:
            if opener in whole:
                if self._forged.search(whole) is not None:
                    return True
                break
        # A text of many requests begins with none of these characters, which is found out without an expression.
        begins = any(text[:1] in self._rest_openers for text in whole.split(_BETWEEN))
        if begins and self._completed.search(whole) is not None:
            return True
        return self.normalises and any(map(self._is_in_normalised, texts))

    # The expressions are compiled when they are first needed: each takes milliseconds.

    @cached_property
    def _search(self) -> re.Pattern[str]:
        return re.compile(_one_of(self.ids, partly=False))

    @cached_property
    def _forged(self) -> re.Pattern[str]:
        """A whole marker, or one that begins at the end of a text and may end in the next."""
        return re.compile(_one_of(self.ids, partly=True))

    @cached_property
    def _completed(self) -> re.Pattern[str]:
        """A text that continues a marker which the template begins. The template's own roles may do that."""
        return re.compile(f"{_BETWEEN}(?!{_ROLE}){_one_of(self._rests, partly=True)}")

    def _rests_of(self, literals: Iterable[str]) -> frozenset[str]:
        """Return what is left of a marker after the end of a template's literal, for every such pair."""
        longest = max(map(len, self.ids), default=0)
        beginnings = {content[:size] for content in self.ids for size in range(1, len(content))}
        ends = {
            literal[-size:]
            for literal in literals
            for size in range(1, min(longest, len(literal) + 1))
            if literal[-size:] in beginnings
        }
        return frozenset(content[len(end) :] for end in ends for content in self.ids if content.startswith(end))

    @cached_property
    def normalises(self) -> bool:
        """True if another text may become a control token when it is normalised."""
        if self._tokenizer.normalizer is None:
            return False
        if any(token.normalized for token in self._added.values() if token.content in self.ids):
            return True
        return any(
            not self._words.isdisjoint(self._twin.encode(content, add_special_tokens=False).ids) for content in self.ids
        )

    @cached_property
    def _keeps_ascii(self) -> bool:
        normalizer = self._tokenizer.normalizer
        return normalizer is None or _LETTERS in normalizer.normalize_str(_LETTERS)

    @cached_property
    def _changed(self) -> re.Pattern[str] | None:
        """Control tokens that look different when they are normalised."""
        normalizer = self._tokenizer.normalizer
        assert normalizer is not None
        contents = {normalizer.normalize_str(content) for content in self.ids} - {*self.ids, ""}
        return re.compile(_one_of(contents, partly=False)) if contents else None

    def _is_in_normalised(self, text: str) -> bool:
        normalizer = self._tokenizer.normalizer
        if normalizer is None or (text.isascii() and self._keeps_ascii):
            return False
        normalised = normalizer.normalize_str(text)
        return self._forged.search(normalised) is not None or (
            self._changed is not None and self._changed.search(normalised) is not None
        )

    # Tokenise

    def encode(self, text: UserText) -> list[int]:
        """Tokenise a text, without tokens around it. Control tokens are read in its template's spans only."""
        given = plain(text)
        parts: list[str] = []
        last = 0
        for start, stop in self._own(given, text.spans):
            parts += (given[last:start], self._names[given[start:stop]])
            last = stop
        pieces = "".join((*parts, given[last:]))
        if pieces.count(self._secret) != len(parts) // 2:
            raise RequestError("The text contains a secret of this server.")
        for _ in range(_ATTEMPTS):
            encoding = encoding_of(self._twin, pieces)
            # The model itself may know a marker as a word (SentencePiece's `</s>`). Break it after its first character.
            breaks = {
                start + 1
                for id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True)
                if id in self._words and stop - start > 1
            }
            if not breaks:
                if not self._words.isdisjoint(encoding.ids):
                    break
                return [real for id in encoding.ids if (real := self._real.get(id, id)) >= 0]
            places = [0, *sorted(breaks), len(pieces)]
            pieces = self._names[""].join(pieces[start:stop] for start, stop in pairwise(places))
        raise RequestError("The text contains a character that the model reads as a control token.")

    def _own(self, text: str, users: Spans) -> Iterable[tuple[int, int]]:
        """Yield the markers that are all the template's."""
        if not self.ids:
            return
        place = index = 0
        while (match := self._search.search(text, place)) is not None:
            start, stop = match.span()
            while index < len(users) and users[index][1] <= start:
                index += 1
            if index < len(users) and users[index][0] < stop:
                place = start + 1
            else:
                yield start, stop
                place = stop

    @cached_property
    def _words(self) -> frozenset[int]:
        """The control tokens that the model itself knows, and may find in a text."""
        found = (self._tokenizer.model.token_to_id(content) for content in self.ids)
        return frozenset(id for id in found if id is not None)

    @cached_property
    def _twin(self) -> tokenizers.Tokenizer:
        """The same tokenizer with secret names for its control tokens."""
        twin = self._made_twin(0)
        model = self._tokenizer.model
        ids = (twin.token_to_id(name) for name in self._names.values())
        if any(id is not None and model.id_to_token(id) is not None for id in ids):
            # New tokens follow the count of the model's words. Its ids have gaps here, so fillers pass the words' ids.
            words = self._tokenizer.get_vocab(with_added_tokens=False)
            twin = self._made_twin(max(words.values()) + 1 - len(words))
        return twin

    def _made_twin(self, fillers: int) -> tokenizers.Tokenizer:
        import tokenizers

        own = self._tokenizer
        twin = tokenizers.Tokenizer(own.model)  # shared, not copied
        if own.normalizer is not None:
            twin.normalizer = own.normalizer
        if own.pre_tokenizer is not None:
            twin.pre_tokenizer = own.pre_tokenizer
        added = [tokenizers.AddedToken(f"{_FIRST}{self._secret}-{number}") for number in range(fillers)]
        for token in self._added.values():
            name = self._names.get(token.content)
            added.append(
                tokenizers.AddedToken(
                    token.content if name is None else name,
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=token.normalized,
                    special=token.special and name is None,
                )
            )
        added.append(tokenizers.AddedToken(self._names[""], normalized=False, special=False))
        twin.add_tokens(added)  # pyright: ignore[reportUnknownMemberType] - a bare `list` in its stubs
        return twin

    @cached_property
    def _real(self) -> Mapping[int, int]:
        """The ids of the twin's added tokens -> those of the tokenizer; -1 for a break."""
        names = self._names
        found: dict[int, int] = {}
        for id, token in self._added.items():
            own = self._twin.token_to_id(names.get(token.content, token.content))
            if own is not None and own != id:
                found[own] = id
        end = self._twin.token_to_id(names[""])
        return {**found, end: -1} if end is not None else found


def encoding_of(tokenizer: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool = False) -> tokenizers.Encoding:
    """Tokenise a text; a long one as a batch of one, because only that releases the interpreter lock."""
    if len(text) <= _LONG:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0]


def _is_marker(content: str, sources: Iterable[str]) -> bool:
    if content.isspace():
        return False
    return _MARKER.fullmatch(content) is not None or any(content in source for source in sources)


def _one_of(contents: Iterable[str], *, partly: bool) -> str:
    """Return an expression for the longest of some texts. `partly`: or for the beginning of one at a text's end."""
    tree = _Node()
    for content in contents:
        node = tree
        for character in content:
            node = node.below.setdefault(character, _Node())
        node.ends = True
    return _branches(tree, partly=partly, root=True)


class _Node:
    """A place in the tree of some texts' characters."""

    def __init__(self) -> None:
        self.below: dict[str, _Node] = {}
        self.ends = False


def _branches(node: _Node, *, partly: bool, root: bool = False) -> str:
    found = [re.escape(character) + _branches(below, partly=partly) for character, below in sorted(node.below.items())]
    if node.ends:
        found.append("")
    elif partly and not root:
        found.append(f"(?={_END})")
    return found[0] if len(found) == 1 else f"(?:{'|'.join(found)})"
