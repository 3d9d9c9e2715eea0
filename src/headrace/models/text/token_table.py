"""How the tokens of a tokenizer.json are written, without what cuts a text into them.

Owns TokenTable and the form of an added token. To read what a model writes is a fifth of the work of reading a whole
tokenizer, and all that an engine needs until somebody asks for a grammar. What is read here is what `tokenizers` would
say; a file of which that is not certain is not read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, NoReturn

import msgspec

from headrace.models.text.detokenizer import TokenPieces, read_decoder


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
        raise AssertionError("a decoder that needs the whole tokenizer was read as a table")


def read_pieces(
    data: bytes, vocab_size: int, named_special: Iterable[str]
) -> tuple[TokenPieces, dict[str, int]] | None:
    """What the tokens of a tokenizer.json are written as, and their ids by that. None where only `tokenizers` can tell,
    or would refuse the file."""
    try:
        file = msgspec.json.decode(data, type=_File)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    kind = read_decoder(bytes(file.decoder))
    ids = _ids(file)
    if kind.form == "window" or ids is None or not ids:
        return None
    highest = max(ids.values())
    if min(ids.values()) < 0 or highest >= vocab_size:
        return None
    texts: list[str | None] = [None] * (highest + 1)
    for text, id in ids.items():
        texts[id] = text
    if texts.count(None) != len(texts) - len(ids):
        return None  # two tokens of one id
    special = {added.id for added in file.added_tokens if added.special}
    special.update(ids[text] for text in named_special if text in ids)
    return TokenPieces(TokenTable(texts), kind, special), ids


def _ids(file: _File) -> dict[str, int] | None:
    """The ids of all tokens; None where added ones have others than `tokenizers` would give them."""
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
            return None  # ids with gaps: which is the next one depends on the version of `tokenizers`
        if known != added.id:
            return None
    return ids
