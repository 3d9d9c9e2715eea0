"""Reads the half of a tokenizer that turns texts and chats into tokens, with `tokenizers` and jinja.

This takes most of the time of loading a tokenizer, so the libraries are imported where they are needed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from headrace.errors import ModelError
from headrace.models.formats.json_file import decode_text, parse_json_object
from headrace.models.text.bpe_file import is_tokenizers_error, read_bpe
from headrace.models.text.control_tokens import ControlTokens, encoding_of
from headrace.models.text.indexed_tokenizer import as_indexed
from headrace.models.text.prompt_pieces import PromptPieces
from headrace.models.text.tokenizer_files import TokenizerFiles

if TYPE_CHECKING:
    import tokenizers

    from headrace.models.text.chat_template import ChatTemplate


class HasTokenIds(Protocol):
    def token_to_id(self, token: str) -> int | None: ...


class TextEncoder(NamedTuple):
    tokenizer: tokenizers.Tokenizer
    templates: Mapping[str, ChatTemplate]
    frame: tuple[list[int], list[int]] | None  # tokens around a text; None: those of the tokenizer
    control: ControlTokens
    pieces: PromptPieces


def read_tokenizer(files: TokenizerFiles, vocab_size: int) -> tokenizers.Tokenizer:
    """Return the tokenizer alone. ModelError if its file is missing, corrupt or does not fit `vocab_size` tokens."""
    tokenizer = _drop_excess_tokens(files.read(), vocab_size, files.path)
    # Truncation saved with the tokenizer would silently cut prompts.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _mark_special(tokenizer, files.special_tokens)
    return tokenizer


def read_encoder(files: TokenizerFiles, vocab_size: int) -> TextEncoder:
    tokenizer = read_tokenizer(files, vocab_size)
    templates = read_templates(files)
    control = ControlTokens(tokenizer, [(template.source, template.literals) for template in templates.values()])
    pieces = PromptPieces(tokenizer, control.ids, lambda text: encoding_of(tokenizer, text).ids)
    return TextEncoder(tokenizer, templates, frame_of(files.config, tokenizer, files.special_tokens), control, pieces)


def _parse(text: str, path: Path) -> tokenizers.Tokenizer:
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_str(text)
    except BaseException as error:
        if not is_tokenizers_error(error):
            raise
        raise ModelError(f"The file is not a tokenizer: {str(error)[:200]}.", path=path) from None


def _drop_excess_tokens(data: bytes, vocab_size: int, path: Path) -> tokenizers.Tokenizer:
    """Parse a tokenizer without added tokens past the vocabulary; raise ModelError if other tokens are past it."""
    bpe = read_bpe(data)
    if bpe is not None and bpe[1] < vocab_size:
        return bpe[0]  # the usual case
    tokenizer = _parse(decode_text(data, path), path)
    past = {token: id for token, id in tokenizer.get_vocab(with_added_tokens=True).items() if id >= vocab_size}
    if not past:
        return tokenizer
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    token, highest = max(past.items(), key=lambda item: item[1])
    if not past.keys() <= added or past.keys() & tokenizer.get_vocab(with_added_tokens=False).keys():
        raise ModelError(
            f"Token {token[:80]!r} has id {highest}, but the model's vocabulary has {vocab_size} tokens.", path=path
        )
    # Public models have such tokens: Gemma 3 1B has the <image_soft_token> of the larger models. The model cannot use
    # them, so their text is ordinary text.
    content = parse_json_object(data, path=path)
    listed = cast("list[dict[str, object]]", content.get("added_tokens"))
    content["added_tokens"] = [entry for entry in listed if cast(int, entry["id"]) < vocab_size]
    return _parse(json.dumps(content), path)


def _mark_special(tokenizer: tokenizers.Tokenizer, special_tokens: Mapping[str, str]) -> None:
    """Mark named special tokens that older converters left unmarked."""
    from tokenizers import AddedToken

    marked = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    known = {token for token in special_tokens.values() if tokenizer.token_to_id(token) is not None}
    missing = [AddedToken(token, special=True, normalized=False) for token in sorted(known - marked)]
    tokenizer.add_special_tokens(missing)  # pyright: ignore[reportUnknownMemberType] - a bare `list` in its stubs


def frame_of(
    config: Mapping[str, object], tokenizer: HasTokenIds, special_tokens: Mapping[str, str]
) -> tuple[list[int], list[int]] | None:
    """Return the tokens that add_bos_token and add_eos_token put around a text. They override tokenizer.json."""
    if not isinstance(config.get("add_bos_token"), bool) and not isinstance(config.get("add_eos_token"), bool):
        return None
    ends: list[list[int]] = []
    for flag, name in (("add_bos_token", "bos_token"), ("add_eos_token", "eos_token")):
        named = special_tokens.get(name)
        token = None if named is None else tokenizer.token_to_id(named)
        ends.append([token] if config.get(flag) is True and token is not None else [])
    return ends[0], ends[1]


def own_frame(tokenizer: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """Return the tokens that the tokenizer puts before and after a text."""
    quick = as_indexed(tokenizer)
    if quick is not None:
        return quick.frame
    encoding = tokenizer.encode("a", add_special_tokens=True)
    mask: list[int] = encoding.special_tokens_mask
    first = mask.index(0) if 0 in mask else len(mask)
    last = len(mask) - mask[::-1].index(0) if 0 in mask else len(mask)
    return encoding.ids[:first], encoding.ids[last:]


def read_templates(files: TokenizerFiles) -> dict[str, ChatTemplate]:
    """Compile the chat templates. TemplateError for one that cannot be."""
    from headrace.models.text.chat_template import ChatTemplate

    return {
        name: ChatTemplate(source, special_tokens=files.special_tokens, path=path)
        for name, (source, path) in files.templates().items()
    }
