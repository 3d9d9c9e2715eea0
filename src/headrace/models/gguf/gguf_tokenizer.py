"""Turns the vocabulary in a GGUF file's metadata into the form of a tokenizer.json.

These kinds of vocabularies are read: `gpt2` (BPE over bytes, with merges), `llama` (SentencePiece's BPE, with scores),
`gemma4` (the same with merges), and those of encoders (see encoder_vocabularies). Others are rejected by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.errors import ModelError
from headrace.models.formats.gguf_file import GgufFile
from headrace.models.gguf.encoder_vocabularies import around, unigram, wordpiece
from headrace.models.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from headrace.models.text.tokenizer_files import TemplateSources, TokenizerFiles

_KINDS: Final = ("gpt2", "llama", "gemma4", "bert", "t5")
# Ways to divide a text whose models are encoders, with a token before it and one after.
_ENCODERS: Final = ("modern-bert", "roberta-bpe")
_MODEL: Final = "tokenizer.ggml.model"
_PRE: Final = "tokenizer.ggml.pre"
_TOKENS: Final = "tokenizer.ggml.tokens"
_TYPES: Final = "tokenizer.ggml.token_type"
_SCORES: Final = "tokenizer.ggml.scores"
_MERGES: Final = "tokenizer.ggml.merges"
_CHARACTERS: Final = "tokenizer.ggml.precompiled_charsmap"
_LOWERCASE: Final = "tokenizer.ggml.normalizer.lowercase"
_TEMPLATE: Final = "tokenizer.chat_template"

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE: Final = "▁"
# Names in templates -> keys.
_NAMED: Final[Mapping[str, str]] = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "sep_token": "tokenizer.ggml.seperator_token_id",  # as the format spells it
    "pad_token": "tokenizer.ggml.padding_token_id",
    "cls_token": "tokenizer.ggml.cls_token_id",
    "mask_token": "tokenizer.ggml.mask_token_id",
}
_ENDS: Final = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
# A file names one or two tokens that end a turn; models have these too, and llama.cpp stops at them.
_END_TEXTS: Final = frozenset(
    "<|eot_id|> <|eom_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> <|end_of_text|>"
    " <\uff5cend▁of▁sentence\uff5c> <EOT> </s> <eos>".split()
)
# Tokens of Phi-3 that leave the spaces after them alone.
_PHI3_PLAIN: Final = frozenset(("<unk>", "<s>", "<|endoftext|>"))


class Vocabulary(msgspec.Struct, frozen=True):
    tokens: list[str]
    types: NDArray[np.int32]

    def has_type(self, id: int, *types: int) -> bool:
        return int(self.types[id]) in types


def read_tokenizer(file: GgufFile) -> TokenizerFiles:
    """Return the tokenizer of a file. Raise ModelError if a key is missing, wrong or not supported."""
    kind = _text(file, _MODEL)
    if kind not in _KINDS:
        supported = ", ".join(_KINDS)
        raise _error(file, _MODEL, f"Tokenizer {kind[:60]!r} is not supported. Supported are {supported}.")
    vocabulary = _vocabulary(file)
    pre = _pre_tokenizer(file) if kind == "gpt2" else None
    special = {name: vocabulary.tokens[id] for name, key in _NAMED.items() if (id := _id(file, key, vocabulary)) >= 0}
    frame = None
    if kind in ("bert", "t5") or _pre_name(file) in _ENCODERS:
        twice = kind != "bert" and _pre_name(file) != "modern-bert"
        frame = _frame(file, vocabulary, special, twice=twice)
    config: dict[str, object] = {}
    if frame is None:
        adds_bos = pre is None or pre.adds_bos
        config["add_bos_token"] = _flag(file, "tokenizer.ggml.add_bos_token", default=adds_bos)
        config["add_eos_token"] = _flag(file, "tokenizer.ggml.add_eos_token", default=False)
    if pre is not None:
        read = partial(_bpe, file, vocabulary, pre, frame)
    elif frame is not None:
        read = partial(_encoder, file, vocabulary, frame, special)
    else:
        read = partial(_sentencepiece, file, vocabulary)
    return TokenizerFiles(file.path, read, config, special, _ends(file, vocabulary), partial(_templates, file))


def _frame(file: GgufFile, vocabulary: Vocabulary, special: Mapping[str, str], *, twice: bool) -> dict[str, Any]:
    """Return which tokens come around the texts of an encoder."""
    first = special.get("cls_token") or special.get("bos_token")
    last = special.get("sep_token") or special.get("eos_token")
    if first is None or last is None:
        key = _NAMED["bos_token" if first is None else "eos_token"]
        raise _error(file, key, "The key is missing, so what comes around a text is unknown.")
    ids = {token: vocabulary.tokens.index(token) for token in (first, last)}
    return around(first, last, ids, twice=twice)


def _encoder(file: GgufFile, vocabulary: Vocabulary, frame: dict[str, Any], special: Mapping[str, str]) -> bytes:
    kind = _text(file, _MODEL)
    unknown = next((id for id in range(len(vocabulary.tokens)) if vocabulary.has_type(id, _UNKNOWN)), -1)
    if kind == "bert":
        whole = np.isin(vocabulary.types, (_UNKNOWN, _CONTROL)).tolist()
        token = special.get("unk_token", "[UNK]" if unknown < 0 else vocabulary.tokens[unknown])
        if token not in vocabulary.tokens:
            raise _error(file, _NAMED["unk_token"], "The key is missing, and no token stands for unknown words.")
        parts = wordpiece(vocabulary.tokens, whole, token, lowercase=_flag(file, _LOWERCASE, default=True))
    else:
        if unknown < 0:
            raise _error(file, _TYPES, "No token stands for unknown characters.")
        parts = unigram(vocabulary.tokens, _scores(file, vocabulary), unknown, _replacements(file))
    return _tokenizer_json(parts.pop("model"), added=_added(vocabulary), post_processor=frame, **parts)


def _replacements(file: GgufFile) -> bytes:
    value = file.metadata.get(_CHARACTERS)
    if value is None:
        return b""
    if not isinstance(value, np.ndarray) or value.dtype.itemsize != 1:
        raise _error(file, _CHARACTERS, "Expected an array of bytes.")
    return value.tobytes()


def _vocabulary(file: GgufFile) -> Vocabulary:
    """Return the tokens, each with a text of its own, and their types."""
    tokens = list(_texts(file, _TOKENS))
    for id in (id for id, token in enumerate(tokens) if not token):
        tokens[id] = f"[EMPTY_{id}]"  # unused places; llama.cpp has the same name for them
    if len(set(tokens)) != len(tokens):
        places: dict[str, int] = {}
        for id, token in enumerate(tokens):
            if (other := places.setdefault(token, id)) != id:
                raise _error(file, _TOKENS, f"Token {token[:80]!r} is in the list twice, as {other} and {id}.")
    types = _numbers(file, _TYPES, len(tokens)) if _TYPES in file.metadata else np.full(len(tokens), _NORMAL)
    if types.dtype.kind not in "iu" or (len(types) and not _NORMAL - 1 <= types.min() <= types.max() <= _BYTE):
        raise _error(file, _TYPES, "Expected an array of token types from 0 to 6.")
    return Vocabulary(tokens, types.astype(np.int32))


def _pre_name(file: GgufFile) -> object:
    return file.metadata.get(_PRE)


def _pre_tokenizer(file: GgufFile) -> PreTokenizer:
    if _PRE not in file.metadata:
        raise _error(
            file, _PRE, "The key is missing, so how words are divided is unknown. Convert the model with a newer tool."
        )
    name = _text(file, _PRE)
    if name not in PRE_TOKENIZERS:
        supported = ", ".join(sorted(PRE_TOKENIZERS))
        raise _error(file, _PRE, f"Pre-tokenizer {name[:60]!r} is not supported. Supported are {supported}.")
    return PRE_TOKENIZERS[name]


def _merges(file: GgufFile) -> list[list[str]]:
    merges = _texts(file, _MERGES)
    for merge in merges:
        if merge.count(" ") != 1:
            raise _error(file, _MERGES, f"Expected two tokens and a space between them, found {merge[:80]!r}.")
    return [merge.split(" ") for merge in merges]


def _bpe(file: GgufFile, vocabulary: Vocabulary, pre: PreTokenizer, frame: dict[str, Any] | None) -> bytes:
    model = {
        "type": "BPE",
        "vocab": {token: id for id, token in enumerate(vocabulary.tokens)},
        "merges": _merges(file),
        "ignore_merges": pre.ignore_merges,
    }
    return _tokenizer_json(
        model,
        added=_added(vocabulary),
        post_processor=frame,
        normalizer=pre.normalizer,
        pre_tokenizer={"type": "Sequence", "pretokenizers": pre.steps},
        decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    )


def _sentencepiece(file: GgufFile, vocabulary: Vocabulary) -> bytes:
    merges = (
        _merges(file) if _text(file, _MODEL) == "gemma4" else merges_by_score(vocabulary, _scores(file, vocabulary))
    )
    prefixed = _flag(file, "tokenizer.ggml.add_space_prefix", default=True)
    unknown = next((token for id, token in enumerate(vocabulary.tokens) if vocabulary.has_type(id, _UNKNOWN)), None)
    model = {
        "type": "BPE",
        "vocab": {token: id for id, token in enumerate(vocabulary.tokens)},
        "merges": merges,
        "unk_token": unknown,
        "fuse_unk": True,
        "byte_fallback": True,
    }
    prefix = [{"type": "Prepend", "prepend": _SPACE}] if prefixed else []
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefixed:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    strips = file.metadata.get("general.architecture") == "phi3"
    return _tokenizer_json(
        model,
        added=_added(vocabulary, strips=strips),
        normalizer={"type": "Sequence", "normalizers": [*prefix, spaces]},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": decoders},
    )


def _scores(file: GgufFile, vocabulary: Vocabulary) -> list[float]:
    scores = _numbers(file, _SCORES, len(vocabulary.tokens))
    if scores.dtype.kind != "f" or not np.isfinite(scores).all():
        raise _error(file, _SCORES, "Expected an array of finite numbers.")
    return scores.tolist()


def merges_by_score(vocabulary: Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return every way to make a token from two others, tokens with the highest score first."""
    ids = {
        token: id
        for id, token in enumerate(vocabulary.tokens)
        if vocabulary.has_type(id, _NORMAL - 1, _NORMAL, _UNUSED)
    }
    found: list[tuple[float, int, int, str, str]] = []
    for token, id in ids.items():
        score = -scores[id]
        for cut in range(1, len(token)):
            left = ids.get(token[:cut])
            right = ids.get(token[cut:]) if left is not None else None
            if left is not None and right is not None:
                found.append((score, left, right, token[:cut], token[cut:]))
    found.sort(key=lambda merge: merge[:3])
    return [(left, right) for *_, left, right in found]


def _added(vocabulary: Vocabulary, *, strips: bool = False) -> list[dict[str, Any]]:
    """Return the tokens that are found in a text before it is divided: control tokens, and those that a user defined.
    `strips`: control tokens take the spaces after them along."""
    ids = np.flatnonzero(np.isin(vocabulary.types, (_UNKNOWN, _CONTROL, _USER_DEFINED))).tolist()
    return [
        {
            "id": id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": strips and vocabulary.has_type(id, _CONTROL) and token not in _PHI3_PLAIN,
            "normalized": _SPACE in token,  # a run of spaces, which the normaliser writes so
            "special": vocabulary.has_type(id, _UNKNOWN, _CONTROL),
        }
        for id in ids
        if (token := vocabulary.tokens[id])
    ]


def _tokenizer_json(
    model: dict[str, Any], *, added: list[dict[str, Any]], post_processor: dict[str, Any] | None = None, **parts: Any
) -> bytes:
    return msgspec.json.encode(
        {"version": "1.0", "added_tokens": added, **parts, "post_processor": post_processor, "model": model}
    )


def _ends(file: GgufFile, vocabulary: Vocabulary) -> frozenset[int]:
    named = {id for key in _ENDS if (id := _id(file, key, vocabulary)) >= 0}
    known = {
        id
        for id, token in enumerate(vocabulary.tokens)
        if token in _END_TEXTS and vocabulary.has_type(id, _CONTROL, _USER_DEFINED)
    }
    return frozenset(named | known)


def _templates(file: GgufFile) -> TemplateSources:
    sources: TemplateSources = {}
    for name, key in (("default", _TEMPLATE), ("tool_use", f"{_TEMPLATE}.tool_use")):
        if key in file.metadata:
            sources[name] = (_text(file, key), file.path)
    return sources


def _id(file: GgufFile, key: str, vocabulary: Vocabulary) -> int:
    """Return the token that a key names, or -1 if it names none."""
    value = file.metadata.get(key, -1)
    if not isinstance(value, int) or isinstance(value, bool):
        raise _error(file, key, "Expected the number of a token.")
    if value in (-1, 0xFFFF_FFFF):  # how some tools write that there is none
        return -1
    if not 0 <= value < len(vocabulary.tokens):
        raise _error(file, key, f"Names token {value} of {len(vocabulary.tokens)}.")
    return value


def _flag(file: GgufFile, key: str, *, default: bool) -> bool:
    value = file.metadata.get(key, default)
    if not isinstance(value, bool):
        raise _error(file, key, "Expected true or false.")
    return value


def _text(file: GgufFile, key: str) -> str:
    value = file.metadata.get(key)
    if not isinstance(value, str):
        raise _error(file, key, "The key is missing." if value is None else "Expected a text.")
    return value


def _texts(file: GgufFile, key: str) -> Iterable[str]:
    value = file.metadata.get(key)
    if not isinstance(value, list):
        raise _error(file, key, "The key is missing." if value is None else "Expected an array of texts.")
    return value


def _numbers(file: GgufFile, key: str, count: int) -> NDArray[Any]:
    value = file.metadata.get(key)
    if not isinstance(value, np.ndarray) or len(value) != count:
        raise _error(
            file,
            key,
            "The key is missing." if value is None else f"Expected an array of {count} numbers, one per token.",
        )
    return value


def _error(file: GgufFile, key: str, reason: str) -> ModelError:
    return ModelError(f"Key {key!r}: {reason}", path=file.path)
