"""Reads how the tokens of a tokenizer.json are written, without loading the encoder.

This is a fifth of the work of loading a whole tokenizer, and all that an engine needs until a request brings a grammar.
The result equals that of `tokenizers`; read_pieces returns None for a file where that is not certain.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import msgspec

from headrace.errors import ModelError
from headrace.models.formats.json_file import read_bounded
from headrace.models.text.detokenizer import TokenPieces, read_decoder
from headrace.models.text.tokenizer_files import TOKENIZER_LIMIT


class AddedTokenEntry(msgspec.Struct):
    """An entry of `added_tokens`."""

    id: Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
    content: str
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool
    special: bool


class _Model(msgspec.Struct):
    type: Literal["BPE", "WordLevel", "WordPiece", "Unigram"]
    vocab: dict[str, int] | list[tuple[str, float]]


class _File(msgspec.Struct):
    model: _Model
    added_tokens: list[AddedTokenEntry] = []
    decoder: msgspec.Raw = msgspec.Raw(b"null")


class TokenTable:
    def __init__(self, texts: Sequence[str | None]) -> None:
        self._texts = texts

    def id_to_token(self, id: int) -> str | None:
        return self._texts[id] if 0 <= id < len(self._texts) else None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> NoReturn:
        raise AssertionError("A decoder that needs the whole tokenizer was loaded as a table.")


def read_pieces(
    data: bytes, vocab_size: int, named_special: Iterable[str]
) -> tuple[TokenPieces, dict[str, int]] | None:
    """Return the written tokens and the ids by token, or None if only `tokenizers` can read or reject the file."""
    try:
        file = msgspec.json.decode(data, type=_File)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    decoder = read_decoder(bytes(file.decoder))
    ids = _ids(file)
    if decoder.form == "window" or ids is None or not ids:
        return None
    highest = max(ids.values())
    if min(ids.values()) < 0 or highest >= vocab_size:
        return None
    texts: list[str | None] = [None] * (highest + 1)
    for text, id in ids.items():
        texts[id] = text
    if texts.count(None) != len(texts) - len(ids):
        return None  # two tokens share an id
    special = {added.id for added in file.added_tokens if added.special}
    special.update(ids[text] for text in named_special if text in ids)
    return TokenPieces(TokenTable(texts), decoder, special), ids


def read_token_ids(path: Path, words: Iterable[str]) -> dict[str, int]:
    """Return the ids of words that are tokens. Raise ModelError if one is not."""
    if not path.exists():
        raise ModelError("The folder has no tokenizer. Expected tokenizer.json.", path=path)
    try:
        file = msgspec.json.decode(read_bounded(path, TOKENIZER_LIMIT), type=_File)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise ModelError("The file is not a tokenizer.", path=path) from None
    ids = _ids(file) or {}
    for word in words:
        if word not in ids:
            raise ModelError(f"The vocabulary has no token {word[:80]!r}.", path=path)
    return {word: ids[word] for word in words}


def _ids(file: _File) -> dict[str, int] | None:
    """Return the ids of all tokens, or None if added tokens have other ids than `tokenizers` would assign."""
    vocab = file.model.vocab
    ids = dict(vocab) if isinstance(vocab, dict) else {piece: id for id, (piece, _) in enumerate(vocab)}
    size = len(vocab)
    if len(ids) != size:
        return None
    following = size
    seen: set[str] = set()
    for added in file.added_tokens:
        if not added.content or added.content in seen:
            return None
        seen.add(added.content)
        known = ids.get(added.content)
        if known is None:
            known = ids[added.content] = following
            following += 1
        elif known >= size:
            return None  # ids with gaps: the next id depends on the version of `tokenizers`
        if known != added.id:
            return None
    return ids
