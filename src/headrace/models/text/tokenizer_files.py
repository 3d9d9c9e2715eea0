"""Reads what a model's files say about its tokenizer: TokenizerFiles, and how a folder in Hugging Face layout fills it.

Builds no tokenizer and compiles no template.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, cast

from headrace.errors import ModelError
from headrace.models.formats.json_file import read_bounded, read_json, read_text

TOKENIZER_LIMIT: Final = 256 * 1024 * 1024  # 256 MiB; the largest in use are about 40 MiB
TEMPLATE_LIMIT: Final = 512 * 1024  # bytes
_NAMED: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Tokenizer files that `tokenizers` cannot read.
_SLOW: Final = ("tokenizer.model", "tokenizer.model.v3", "tekken.json", "spiece.model", "vocab.json", "vocab.txt")

TemplateSources = dict[str, tuple[str, Path]]  # "default" and "tool_use": source, and the file that it is in


class TokenizerFiles(NamedTuple):
    """A tokenizer in the form of Hugging Face's files, whatever form it is stored in."""

    path: Path  # of the file that holds the vocabulary, for messages
    read: Callable[[], bytes]  # the content of a tokenizer.json; raises ModelError
    config: Mapping[str, object]  # the keys of a tokenizer_config.json
    special_tokens: dict[str, str]  # by their names in templates
    eos_ids: frozenset[int]  # empty: the tokenizer's own
    templates: Callable[[], TemplateSources]
    is_quick: bool = False  # whether `read` only reads a file


def read_folder(folder: Path, vocab_size: int) -> TokenizerFiles:
    """Read tokenizer_config.json and the special tokens of a folder. The rest is read when it is needed."""
    config = _optional_json(folder / "tokenizer_config.json")
    return TokenizerFiles(
        path=folder / "tokenizer.json",
        read=partial(_read_tokenizer, folder),
        config=config,
        special_tokens=_special_tokens(config, _optional_json(folder / "special_tokens_map.json")),
        eos_ids=_eos_ids(folder, vocab_size),
        templates=partial(_templates, folder, config),
        is_quick=True,
    )


def _read_tokenizer(folder: Path) -> bytes:
    path = folder / "tokenizer.json"
    if not path.exists():
        raise _missing(folder)
    return read_bounded(path, TOKENIZER_LIMIT)


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


def _eos_ids(folder: Path, vocab_size: int) -> frozenset[int]:
    """Return the end-of-text tokens of the first file that names any."""
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
    return frozenset()


def _templates(folder: Path, config: Mapping[str, object]) -> TemplateSources:
    sources: TemplateSources = {}
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
    processor = folder / "chat_template.json"  # of models that read images
    if processor.exists() and isinstance(source := read_json(processor).get("chat_template"), str):
        sources["default"] = (source, processor)
    for name, place in (("default", "chat_template.jinja"), ("tool_use", "additional_chat_templates/tool_use.jinja")):
        if (folder / place).exists():
            sources[name] = (read_text(folder / place, limit=TEMPLATE_LIMIT), folder / place)
    return {name: found for name, found in sources.items() if name in ("default", "tool_use")}
