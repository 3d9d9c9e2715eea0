"""Builds a model's tokenizer: special tokens, chat templates and end-of-text tokens.

The encoder takes most of the loading time. A server loads it at start and a worker only when a grammar needs it, so its
libraries are imported where it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headrace.errors import RequestError
from headrace.models.text.control_tokens import encoding_of
from headrace.models.text.detokenizer import Detokenizer, TokenPieces, read_decoder
from headrace.models.text.index_cache import IndexPlace, load_templates, load_whole
from headrace.models.text.indexed_tokenizer import as_indexed
from headrace.models.text.text_encoder import TextEncoder, own_frame, read_encoder
from headrace.models.text.token_table import read_pieces
from headrace.models.text.tokenizer_files import TokenizerFiles, read_folder
from headrace.models.text.tokenizer_index import TokenizerIndex
from headrace.models.text.user_text import UserText

if TYPE_CHECKING:
    from headrace.models.text.chat_template import ChatTemplate

__all__ = ["Detokenizer", "PairFrame", "Tokenizer"]

_LEAST_PART: Final = 16 * 1024  # characters
_EDGE: Final = 64  # tokens
_MANY: Final = 1024  # tokens; beyond, a batch of one is decoded, because only that releases the interpreter lock


class PairFrame(NamedTuple):
    """The tokens around two texts."""

    before: list[int]
    between: list[int]
    after: list[int]
    typed: int | None  # the token of `between` at which the second type begins (its length: the second text)


class Tokenizer:
    """Text to tokens and back; safe to use from several threads at once."""

    def __init__(
        self,
        encoder: Callable[[], TextEncoder],
        pieces: TokenPieces,
        *,
        vocab_size: int,
        special_tokens: Mapping[str, str],
        bos_id: int | None,
        eos_ids: frozenset[int],
    ) -> None:
        self._read_encoder = encoder
        self.pieces = pieces
        self.vocab_size = vocab_size
        self.special_tokens = dict(special_tokens)
        self.bos_id = bos_id
        self.eos_ids = eos_ids

    @classmethod
    def load(cls, folder: Path, vocab_size: int) -> Tokenizer:
        """Load the tokenizer of a folder in Hugging Face layout."""
        return cls.build(read_folder(folder, vocab_size), vocab_size)

    @classmethod
    def build(cls, files: TokenizerFiles, vocab_size: int, *, cache: Path | None = None) -> Tokenizer:
        """Load everything; raise ModelError if files are missing, corrupt or do not fit `vocab_size` tokens. With an
        index in the cache folder, load `tokenizers` only when a text needs it; `load_encoder` does it ahead. Without,
        write the index."""
        place = IndexPlace.of(files, vocab_size, cache)
        if place is not None and (index := place.read()) is not None:
            quick = place.tokenizer(index)
            return cls._of(files, partial(place.encoder, index, quick), _pieces(index), index.token_to_id, vocab_size)
        encoder = read_encoder(files, vocab_size)
        tokenizer = encoder.tokenizer
        special = {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        special.update(
            id for token in files.special_tokens.values() if (id := tokenizer.token_to_id(token)) is not None
        )
        decoder: Any = tokenizer.decoder
        kind = read_decoder(b"null" if decoder is None else decoder.__getstate__())
        pieces = TokenPieces(tokenizer, kind, special)
        if place is not None:
            place.write(encoder, special)
        return cls._of(files, lambda: encoder, pieces, tokenizer.token_to_id, vocab_size)

    @classmethod
    def build_for_decoding(cls, files: TokenizerFiles, vocab_size: int, *, cache: Path | None = None) -> Tokenizer:
        """Load what decoding needs, from an index in the cache folder if there is one. The encoder is loaded on first
        use and raises its errors then."""
        place = IndexPlace.of(files, vocab_size, cache)
        if place is not None and (index := place.read()) is not None:
            pieces, id_of = _pieces(index), index.token_to_id
            return cls._of(files, partial(read_encoder, files, vocab_size), pieces, id_of, vocab_size)
        table = read_pieces(files.read(), vocab_size, files.special_tokens.values())
        if table is None:
            return cls.build(files, vocab_size)
        pieces, ids = table
        return cls._of(files, partial(read_encoder, files, vocab_size), pieces, ids.get, vocab_size)

    @classmethod
    def _of(
        cls,
        files: TokenizerFiles,
        encoder: Callable[[], TextEncoder],
        pieces: TokenPieces,
        token_to_id: Callable[[str], int | None],
        vocab_size: int,
    ) -> Tokenizer:
        def named(name: str) -> int | None:
            token = files.special_tokens.get(name)
            return None if token is None else token_to_id(token)

        eos_id = named("eos_token")
        return cls(
            encoder,
            pieces,
            vocab_size=vocab_size,
            special_tokens=files.special_tokens,
            bos_id=named("bos_token"),
            eos_ids=files.eos_ids or (frozenset() if eos_id is None else frozenset({eos_id})),
        )

    @cached_property
    def _encoder(self) -> TextEncoder:
        return self._read_encoder()

    @property
    def template(self) -> ChatTemplate | None:
        """The template for chats without tools."""
        return self._encoder.templates.get("default")

    @property
    def tool_template(self) -> ChatTemplate | None:
        """The template for chats with tools."""
        return self._encoder.templates.get("tool_use") or self.template

    def load_encoder(self) -> None:
        """Load all of the encoder now; raise ModelError if that fails."""
        load_whole(self._encoder)

    def load_templates(self) -> None:
        """Compile the chat templates now, if they are not yet."""
        load_templates(self._encoder)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokenise a text. Strings of control tokens in it become control tokens, except in a UserText the user's."""
        tokenizer, frame, control = self._encoder.tokenizer, self._encoder.frame, self._encoder.control
        framed = add_special_tokens and frame is None
        try:
            if isinstance(text, UserText) and (len(text.spans) != 1 or control.may_be_in((text,))):
                ids: list[int] = control.encode(text)
                if framed:
                    before, after = own_frame(tokenizer)
                    ids = [*before, *ids, *after]
            else:
                ids = encoding_of(tokenizer, text, add_special_tokens=framed).ids
        except (TypeError, UnicodeEncodeError):  # depends on the version of `tokenizers`
            raise RequestError("The text contains half of a surrogate pair, which is not a character.") from None
        if add_special_tokens and frame is not None:
            return [*frame[0], *ids, *frame[1]]
        return ids

    def encode_chat(self, text: str, scope: str) -> list[int]:
        """Tokenise a rendered chat like `encode(text, add_special_tokens=False)`, but its messages only once for each
        scope, as far as there is room to remember them."""
        _, _, _, control, pieces = self._encoder
        if isinstance(text, UserText) and (len(text.spans) != 1 or control.may_be_in((text,))):
            return self.encode(text, False)
        try:
            return pieces.encode(text, scope)
        except (TypeError, UnicodeEncodeError):  # as in `encode`
            return self.encode(text, False)

    @property
    def frame(self) -> tuple[list[int], list[int]]:
        """The tokens that `encode` puts before and after a text."""
        tokenizer, frame = self._encoder.tokenizer, self._encoder.frame
        return own_frame(tokenizer) if frame is None else frame

    @cached_property
    def pair_frame(self) -> PairFrame:
        """The tokens that the tokenizer puts around and between two texts. RequestError if it knows no pairs."""
        tokenizer = self._encoder.tokenizer
        pair = tokenizer.encode("a", "b", add_special_tokens=True)
        sides: list[int | None] = pair.sequence_ids
        types: list[int] = pair.type_ids
        if 0 not in sides or 1 not in sides:
            raise RequestError("The tokenizer has no form for a pair of texts.", parameter="model")
        first, last = sides.index(0), len(sides) - sides[::-1].index(0)
        second, end = sides.index(1), len(sides) - sides[::-1].index(1)
        typed = types.index(1) if 1 in types else -1
        if last > second or (typed >= 0 and 0 in types[typed:]) or (typed >= 0 and not last <= typed <= second):
            raise RequestError("The tokenizer's form for a pair of texts is not supported.", parameter="model")
        ids: list[int] = pair.ids
        return PairFrame(ids[:first], ids[last:second], ids[end:], typed - last if typed >= 0 else None)

    def difference(self, other: Tokenizer) -> str | None:
        """Return in words a token that this tokenizer and another do not share, or None. Unused tokens at the end of a
        vocabulary do not count."""
        mine, others = (
            {id: text for text, id in each._encoder.tokenizer.get_vocab().items()} for each in (self, other)
        )
        for id in range(min(max(mine, default=-1), max(others, default=-1)) + 1):
            if mine.get(id) != others.get(id):
                return f"token {id} is {mine.get(id)!r} in one and {others.get(id)!r} in the other"
        return None

    def encode_within(self, text: str, most: int, *, keep_end: bool = False) -> tuple[list[int], bool]:
        """Tokenise a text into at most this many tokens, and say whether it was cut. The tokens around a text stay."""
        if len(text) > 2 * _LEAST_PART:
            text, was_cut = self._part(text, most, keep_end=keep_end)
        else:
            was_cut = False
        ids = self.encode(text)
        if len(ids) <= most:
            return ids, was_cut
        before, after = self.frame
        room = most - len(before) - len(after)
        if room < 1:
            raise RequestError(
                f"{most} tokens have no room for a text between the model's own. Expected at least {most - room + 1}.",
                parameter="truncate_prompt_tokens",
            )
        inner = ids[len(before) : len(ids) - len(after)]
        return [*before, *(inner[-room:] if keep_end else inner[:room]), *after], True

    def _part(self, text: str, most: int, *, keep_end: bool) -> tuple[str, bool]:
        """Return a part of a long text that surely has more than `most` tokens, so that not all of it is tokenised."""
        size = _LEAST_PART
        while size < len(text):
            part = text[-size:] if keep_end else text[:size]
            # A token at the edge may be another in the whole text, so a few more are wanted.
            if len(self.encode(part, add_special_tokens=False)) > most + _EDGE:
                return part, True
            size *= 4
        return text, False

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text that a Detokenizer emits piece by piece."""
        if self.pieces.kind.form != "pieces":
            tokens = list(ids)
            if len(tokens) <= _MANY:
                return self._encoder.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
            return self._encoder.tokenizer.decode_batch([tokens], skip_special_tokens=skip_special_tokens)[0]
        stream = Detokenizer(self, skip_special_tokens=skip_special_tokens)
        return "".join([*map(stream.push, ids), stream.finish()])

    def token_id(self, text: str) -> int | None:
        """Return the token with exactly this text in the vocabulary, if there is one."""
        return self._encoder.tokenizer.token_to_id(text)

    @cached_property
    def longest_piece(self) -> int:
        """Characters in the longest token."""
        quick = as_indexed(self._encoder.tokenizer)
        if quick is not None:
            return quick.longest_piece
        return max(map(len, self._encoder.tokenizer.get_vocab()), default=1)

    def is_special(self, token: int) -> bool:
        return self.pieces.is_special(token)

    @property
    def uses_clock(self) -> bool:
        """True if the same messages may give another prompt later."""
        return any(template.uses_clock for template in self._encoder.templates.values())

    def apply_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,  # `extra` comes from requests and may have any name in it
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str:
        """Render a chat. Encode the result with add_special_tokens=False: the template writes the special tokens.

        If the messages could be read as control tokens, the result is a UserText, which `encode` keeps apart.
        """
        template = self.tool_template if tools else self.template
        if template is None:
            raise RequestError("The model has no chat template. Use it for text completion.", parameter="messages")
        forges = self._encoder.control.may_be_in
        return template.render(messages, forges, tools=tools, add_generation_prompt=add_generation_prompt, **extra)


def _pieces(index: TokenizerIndex) -> TokenPieces:
    return TokenPieces(index, read_decoder(index.facts.decoder), index.facts.special)
