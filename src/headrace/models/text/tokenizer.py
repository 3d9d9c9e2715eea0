"""Loads the tokenizer of a model folder: special tokens, chat templates and end-of-text tokens.

The encoder takes most of the loading time. A server loads it at start and a worker only when a grammar needs it, so its
libraries are imported where it is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from headrace.errors import ModelError, RequestError
from headrace.models.formats.json_file import decode_text, parse_json_object, read_bounded, read_json, read_text
from headrace.models.text.bpe_file import is_tokenizers_error, read_bpe
from headrace.models.text.detokenizer import Detokenizer, TokenPieces, read_decoder
from headrace.models.text.token_table import read_pieces

if TYPE_CHECKING:
    import tokenizers

    from headrace.models.text.chat_template import ChatTemplate

__all__ = ["Detokenizer", "Tokenizer"]

TOKENIZER_LIMIT: Final = 256 * 1024 * 1024  # 256 MiB; the largest in use are about 40 MiB
_NAMED: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Tokenizer files that `tokenizers` cannot read.
_SLOW: Final = ("tokenizer.model", "tokenizer.model.v3", "tekken.json", "spiece.model", "vocab.json", "vocab.txt")


class _Encoder(NamedTuple):
    """The half of a tokenizer that turns texts and chats into tokens."""

    tokenizer: tokenizers.Tokenizer
    templates: Mapping[str, ChatTemplate]
    frame: tuple[list[int], list[int]] | None  # tokens around a text; None: those of the tokenizer


class Tokenizer:
    """Text to tokens and back; safe to use from several threads at once."""

    def __init__(
        self,
        encoder: Callable[[], _Encoder],
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
        """Load everything; raise ModelError if files are missing, corrupt or do not fit `vocab_size` tokens."""
        config, special_tokens = _read_settings(folder)
        encoder = _read_encoder(folder, vocab_size, config, special_tokens)
        tokenizer = encoder.tokenizer
        special = {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        special.update(id for token in special_tokens.values() if (id := tokenizer.token_to_id(token)) is not None)
        decoder: Any = tokenizer.decoder
        kind = read_decoder(b"null" if decoder is None else decoder.__getstate__())
        pieces = TokenPieces(tokenizer, kind, special)
        return cls._of(folder, lambda: encoder, pieces, tokenizer.token_to_id, vocab_size, special_tokens)

    @classmethod
    def load_for_decoding(cls, folder: Path, vocab_size: int) -> Tokenizer:
        """Load what decoding needs. The encoder is loaded on first use and raises its errors then."""
        config, special_tokens = _read_settings(folder)
        data = read_bounded(_tokenizer_path(folder), TOKENIZER_LIMIT)
        table = read_pieces(data, vocab_size, special_tokens.values())
        if table is None:
            return cls.load(folder, vocab_size)
        pieces, ids = table
        encoder = partial(_read_encoder, folder, vocab_size, config, special_tokens)
        return cls._of(folder, encoder, pieces, ids.get, vocab_size, special_tokens)

    @classmethod
    def _of(
        cls,
        folder: Path,
        encoder: Callable[[], _Encoder],
        pieces: TokenPieces,
        token_to_id: Callable[[str], int | None],
        vocab_size: int,
        special_tokens: Mapping[str, str],
    ) -> Tokenizer:
        def named(name: str) -> int | None:
            token = special_tokens.get(name)
            return None if token is None else token_to_id(token)

        return cls(
            encoder,
            pieces,
            vocab_size=vocab_size,
            special_tokens=special_tokens,
            bos_id=named("bos_token"),
            eos_ids=_eos_ids(folder, named("eos_token"), vocab_size),
        )

    @cached_property
    def _encoder(self) -> _Encoder:
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
        """Load the encoder now; raise ModelError if that fails."""
        _ = self._encoder

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        tokenizer, _, frame = self._encoder
        own_frame = add_special_tokens and frame is None
        try:
            ids: list[int] = tokenizer.encode(text, add_special_tokens=own_frame).ids
        except (TypeError, UnicodeEncodeError):  # depends on the version of `tokenizers`
            raise RequestError("The text contains half of a surrogate pair, which is not a character.") from None
        if add_special_tokens and frame is not None:
            return [*frame[0], *ids, *frame[1]]
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text that a Detokenizer emits piece by piece."""
        if self.pieces.kind.form != "pieces":
            return self._encoder.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        stream = Detokenizer(self, skip_special_tokens=skip_special_tokens)
        return "".join([*map(stream.push, ids), stream.finish()])

    def token_id(self, text: str) -> int | None:
        """Return the token with exactly this text in the vocabulary, if there is one."""
        return self._encoder.tokenizer.token_to_id(text)

    @cached_property
    def longest_piece(self) -> int:
        """Characters in the longest token."""
        return max(map(len, self._encoder.tokenizer.get_vocab()), default=1)

    def is_special(self, token: int) -> bool:
        return self.pieces.is_special(token)

    @property
    def uses_clock(self) -> bool:
        """Whether the same messages may give another prompt later."""
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
        """Render a chat. Encode the result with add_special_tokens=False: the template writes the special tokens."""
        template = self.tool_template if tools else self.template
        if template is None:
            raise RequestError("The model has no chat template. Use it for text completion.", parameter="messages")
        return template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt, **extra)


def _read_settings(folder: Path) -> tuple[dict[str, object], dict[str, str]]:
    """Read tokenizer_config.json and the special tokens by their names in templates."""
    config = _optional_json(folder / "tokenizer_config.json")
    return config, _special_tokens(config, _optional_json(folder / "special_tokens_map.json"))


def _read_encoder(
    folder: Path, vocab_size: int, config: Mapping[str, object], special_tokens: Mapping[str, str]
) -> _Encoder:
    path = _tokenizer_path(folder)
    tokenizer = _drop_excess_tokens(read_bounded(path, TOKENIZER_LIMIT), vocab_size, path)
    # Truncation saved with the tokenizer would silently cut prompts.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _mark_special(tokenizer, special_tokens)
    return _Encoder(tokenizer, _templates(folder, config, special_tokens), _frame(config, tokenizer, special_tokens))


def _tokenizer_path(folder: Path) -> Path:
    path = folder / "tokenizer.json"
    if not path.exists():
        raise _missing(folder)
    return path


def _missing(folder: Path) -> ModelError:
    slow = next((name for name in _SLOW if (folder / name).exists()), None)
    if slow is None:
        return ModelError("The folder has no tokenizer. Expected tokenizer.json.", path=folder)
    return ModelError(
        f"The folder has its tokenizer only as '{slow}'. Expected tokenizer.json. Convert it with transformers: "
        "AutoTokenizer.from_pretrained(folder).save_pretrained(folder).",
        path=folder,
    )


def _optional_json(path: Path) -> dict[str, object]:
    return read_json(path) if path.exists() else {}


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


def _special_tokens(config: Mapping[str, object], legacy: Mapping[str, object]) -> dict[str, str]:
    """Return the special tokens by their names in templates."""
    tokens: dict[str, str] = {}
    for source in (legacy, config):
        for name in _NAMED:
            if (content := _token_content(source.get(name))) is not None:
                tokens[name] = content
    extra = config.get("extra_special_tokens")
    if isinstance(extra, dict):
        for name, value in cast("dict[str, object]", extra).items():
            if (content := _token_content(value)) is not None:
                tokens.setdefault(name, content)
    return tokens


def _token_content(value: object) -> str | None:
    """Return the text of a special token, which is a string or an object with "content"."""
    if isinstance(value, dict):
        value = cast("dict[str, object]", value).get("content")
    return value if isinstance(value, str) else None


def _mark_special(tokenizer: tokenizers.Tokenizer, special_tokens: Mapping[str, str]) -> None:
    """Mark named special tokens that older converters left unmarked."""
    from tokenizers import AddedToken

    marked = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    known = {token for token in special_tokens.values() if tokenizer.token_to_id(token) is not None}
    missing = [AddedToken(token, special=True, normalized=False) for token in sorted(known - marked)]
    tokenizer.add_special_tokens(missing)  # pyright: ignore[reportUnknownMemberType] - a bare `list` in its stubs


def _frame(
    config: Mapping[str, object], tokenizer: tokenizers.Tokenizer, special_tokens: Mapping[str, str]
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


def _eos_ids(folder: Path, eos_id: int | None, vocab_size: int) -> frozenset[int]:
    """Return the end-of-text tokens of the first file that names any, or else the tokenizer's own."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        value = _optional_json(path).get("eos_token_id")
        ids = cast("list[object]", value) if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(id, int) and not isinstance(id, bool) for id in ids):
            raise ModelError("Key 'eos_token_id' must be an integer or a list of integers.", path=path)
        # Ids past the vocabulary are never generated.
        fitting = frozenset(id for id in cast("list[int]", ids) if 0 <= id < vocab_size)
        if fitting:
            return fitting
    return frozenset() if eos_id is None else frozenset({eos_id})


def _templates(
    folder: Path, config: Mapping[str, object], special_tokens: Mapping[str, str]
) -> dict[str, ChatTemplate]:
    from headrace.models.text.chat_template import SOURCE_LIMIT, ChatTemplate

    sources: dict[str, tuple[str, Path]] = {}
    path = folder / "tokenizer_config.json"
    value = config.get("chat_template")
    if isinstance(value, str):
        sources["default"] = (value, path)
    elif isinstance(value, list):
        for entry in cast("list[object]", value):
            named = cast("dict[str, object]", entry) if isinstance(entry, dict) else {}
            name, source = named.get("name"), named.get("template")
            if not isinstance(name, str) or not isinstance(source, str):
                raise ModelError(
                    "Key 'chat_template' must be a string or a list of objects with name and template.", path=path
                )
            sources[name] = (source, path)
    elif value is not None:
        raise ModelError("Key 'chat_template' must be a string or a list of objects with name and template.", path=path)
    for name, place in (("default", "chat_template.jinja"), ("tool_use", "additional_chat_templates/tool_use.jinja")):
        if (folder / place).exists():
            sources[name] = (read_text(folder / place, limit=4 * SOURCE_LIMIT), folder / place)
    return {
        name: ChatTemplate(source, special_tokens=special_tokens, path=origin)
        for name, (source, origin) in sources.items()
        if name in ("default", "tool_use")
    }
