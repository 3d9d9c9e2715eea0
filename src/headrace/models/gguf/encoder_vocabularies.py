"""Turns the vocabularies of encoders in GGUF files into the form of a tokenizer.json: `bert` (WordPiece) and `t5`
(unigrams with scores), and says which tokens come around a text and between two.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, Final

_SPACE: Final = "▁"
_CONTINUED: Final = "##"


def wordpiece(tokens: Sequence[str], whole: Sequence[bool], unknown: str, *, lowercase: bool) -> dict[str, Any]:
    """Return the parts of a tokenizer of words and their continuations. Files mark the beginning of a word instead.
    `whole` says which tokens are as they are: those of the model, not of texts."""

    def spelled(token: str, is_whole: bool) -> str:
        if is_whole:
            return token
        return token.removeprefix(_SPACE) if token.startswith(_SPACE) else f"{_CONTINUED}{token}"

    return {
        "model": {
            "type": "WordPiece",
            "vocab": {spelled(token, each): id for id, (token, each) in enumerate(zip(tokens, whole, strict=True))},
            "unk_token": unknown,
            "continuing_subword_prefix": _CONTINUED,
            "max_input_chars_per_word": 100,
        },
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": lowercase,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": _CONTINUED, "cleanup": True},
    }


def unigram(tokens: Sequence[str], scores: Sequence[float], unknown: int, characters: bytes) -> dict[str, Any]:
    """Return the parts of a tokenizer of pieces with scores. `characters` are SentencePiece's replacements."""
    spaces = {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": "always", "split": True}
    replaced = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(characters).decode()}
    return {
        "model": {
            "type": "Unigram",
            "unk_id": unknown,
            "vocab": [[token, score] for token, score in zip(tokens, scores, strict=True)],
            "byte_fallback": False,
        },
        "normalizer": replaced if characters else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, spaces]},
        "decoder": spaces,
    }


def around(first: str, last: str, ids: Mapping[str, int], *, twice: bool) -> dict[str, Any]:
    """Return how texts stand between the first and the last token. `twice`: two of these are between two texts."""

    def special(token: str, kind: int = 0) -> dict[str, Any]:
        return {"SpecialToken": {"id": token, "type_id": kind}}

    def text(name: str, kind: int) -> dict[str, Any]:
        return {"Sequence": {"id": name, "type_id": kind}}

    kind = 0 if twice else 1
    alone = [special(first), text("A", 0), special(last)]
    return {
        "type": "TemplateProcessing",
        "single": alone,
        "pair": [*alone, *[special(last)] * twice, text("B", kind), special(last, kind)],
        "special_tokens": {
            token: {"id": token, "ids": [ids[token]], "tokens": [token]} for token in dict.fromkeys((first, last))
        },
    }
