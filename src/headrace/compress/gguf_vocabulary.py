"""Turns a tokenizer.json into the vocabulary of a GGUF file's metadata, and a chat template too.

The opposite of models/gguf/gguf_tokenizer, for the same kinds: BPE over bytes whose way to divide words has a name in
GGUF, and SentencePiece's BPE. Others are rejected.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final, cast

import numpy as np

from headrace.errors import RequestError
from headrace.models.formats.gguf_writer import Value
from headrace.models.gguf.pre_tokenizers import PRE_TOKENIZERS
from headrace.models.model_folder import ModelFolder
from headrace.models.text.tokenizer_files import TokenizerFiles

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_BYTE_TOKEN: Final = re.compile(r"<0x[0-9A-F]{2}>")
_SPACE: Final = "\u2581"
_NAMED: Final[Mapping[str, str]] = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}

Json = dict[str, Any]


def vocabulary(folder: ModelFolder) -> dict[str, Value]:
    """Return the keys of a model's tokenizer and chat template. Raise RequestError if GGUF has no form for them."""
    files = folder.tokenizer_files
    content = cast("Json", json.loads(files.read()))
    model = cast("Json", content["model"])
    if model.get("type", "BPE") != "BPE":
        raise _error(f"it is of the kind {model.get('type')}")
    listed = cast("list[Json]", content.get("added_tokens") or [])
    added = {int(token["id"]): token for token in listed}
    tokens = {int(id): str(token) for token, id in cast("dict[str, int]", model["vocab"]).items()}
    tokens |= {id: str(token["content"]) for id, token in added.items()}
    size = folder.spec.vocab_size
    texts = [tokens.get(id, f"[PAD{id}]") for id in range(size)]
    types = [_type(tokens.get(id), added.get(id), model) for id in range(size)]
    keys: dict[str, Value] = {}
    if model.get("byte_fallback"):
        keys |= _sentencepiece(content, model, texts)
    else:
        keys |= _bytes(content, model)
    keys["tokenizer.ggml.tokens"] = texts
    keys["tokenizer.ggml.token_type"] = np.array(types, dtype=np.int32)
    return keys | _special(folder, files, tokens) | _templates(files)


def _type(token: str | None, added: Json | None, model: Json) -> int:
    if token is None:
        return _UNUSED
    if token == model.get("unk_token"):
        return _UNKNOWN
    if added is not None:
        return _CONTROL if added.get("special") else _USER_DEFINED
    return _BYTE if model.get("byte_fallback") and _BYTE_TOKEN.fullmatch(token) else _NORMAL


def _bytes(content: Json, model: Json) -> dict[str, Value]:
    found = (_steps(content.get("pre_tokenizer")), _steps(content.get("normalizer")))
    ignores = bool(model.get("ignore_merges"))
    names = [
        name
        for name, known in PRE_TOKENIZERS.items()
        if ([each for step in known.steps for each in _steps(step)], _steps(known.normalizer)) == found
        and known.ignore_merges == ignores
    ]
    if not names:
        raise _error("GGUF has no name for the way in which its tokenizer.json divides a text into words")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": names[0],
        "tokenizer.ggml.merges": merges,
    }


def _sentencepiece(content: Json, model: Json, texts: list[str]) -> dict[str, Value]:
    """Scores put tokens in the order of the merges that make them."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(model["merges"]):
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        ranks.setdefault(left + right, rank)
    prefixed = json.dumps([content.get("normalizer"), content.get("pre_tokenizer")])
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": np.array([-float(ranks.get(text, 0)) for text in texts], dtype=np.float32),
        "tokenizer.ggml.add_space_prefix": '"Prepend"' in prefixed
        or '"prepend_scheme": "always"' in prefixed
        or '"prepend_scheme": "first"' in prefixed,
    }


def _steps(part: object) -> list[Json]:
    """Return the steps of a normaliser or pre-tokenizer, with only what changes the words."""
    if not isinstance(part, dict):
        return []
    step = cast("Json", part)
    if step.get("type") == "Sequence":
        inner = cast("list[Json]", step.get("pretokenizers") or step.get("normalizers") or [])
        return [each for one in inner for each in _steps(one)]
    return [{key: value for key, value in step.items() if key != "trim_offsets"}]


def _special(folder: ModelFolder, files: TokenizerFiles, tokens: Mapping[int, str]) -> dict[str, Value]:
    ids = {token: id for id, token in tokens.items()}
    keys: dict[str, Value] = {}
    for name, key in _NAMED.items():
        if (token := files.special_tokens.get(name)) in ids:
            keys[key] = ids[token]
    ends = sorted(folder.tokenizer.eos_ids)
    if ends and keys.get("tokenizer.ggml.eos_token_id") not in ends:
        keys["tokenizer.ggml.eos_token_id"] = ends[0]
    others = [id for id in ends if id != keys.get("tokenizer.ggml.eos_token_id")]
    for key, id in zip(("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"), others, strict=False):
        keys[key] = id
    before, after = folder.tokenizer.frame
    keys["tokenizer.ggml.add_bos_token"] = before == [keys.get("tokenizer.ggml.bos_token_id")]
    keys["tokenizer.ggml.add_eos_token"] = after == [keys.get("tokenizer.ggml.eos_token_id")]
    return keys


def _templates(files: TokenizerFiles) -> dict[str, Value]:
    names = {"default": "tokenizer.chat_template", "tool_use": "tokenizer.chat_template.tool_use"}
    return {names[name]: source for name, (source, _) in files.templates().items()}


def _error(reason: str) -> RequestError:
    return RequestError(
        f"The model's tokenizer cannot be written into a GGUF file: {reason}. Write a folder instead.", parameter="out"
    )
