"""Says how the BPE vocabularies of GGUF files divide a text into words, by the names in `tokenizer.ggml.pre`.

Each entry is that of the tokenizer.json which the name stands for. A name that is not here is rejected, because another
way to divide a text gives other tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple


class PreTokenizer(NamedTuple):
    steps: tuple[dict[str, Any], ...]  # in the form of tokenizer.json
    ignore_merges: bool = False  # a word that is a token is taken as it is
    adds_bos: bool = False  # unless `add_bos_token` says otherwise
    normalizer: dict[str, Any] | None = None


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _bytes(*, words: bool = False) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": words}


_DIGITS: Final = {"type": "Digits", "individual_digits": True}
_NFC: Final = {"type": "NFC"}
_ENDS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_ENDS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased(digits: str, contractions: str = "") -> tuple[dict[str, Any], ...]:
    start = r"[^\r\n\p{L}\p{N}]?"
    words = f"{start}{_UPPER}*{_LOWER}+{contractions}|{start}{_UPPER}+{_LOWER}*{contractions}"
    return _split(f"{words}|{digits}|{_CASED_ENDS}"), _bytes()


_GPT2: Final = (_bytes(words=True),)
_DIGIT_WORDS: Final = (_DIGITS, _bytes(words=True))
_LLAMA3: Final = (_split(rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_ENDS}"), _bytes())
_QWEN2: Final = (_split(rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_ENDS}"), _bytes())
_DEEPSEEK_CODER: Final = (
    _split(r"[\r\n]"),
    _split(r"\s?\p{L}+"),
    _split(r"\s?\p{P}+"),
    _split("[一-龥ࠀ-一가-\ud7ff]+"),
    _DIGITS,
    _bytes(),
)

PRE_TOKENIZERS: Final[Mapping[str, PreTokenizer]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais"), PreTokenizer(_GPT2)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), PreTokenizer(_DIGIT_WORDS)
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3"), PreTokenizer(_LLAMA3, ignore_merges=True, adds_bos=True)
    ),
    **dict.fromkeys(("smaug-bpe", "dbrx"), PreTokenizer(_LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), PreTokenizer(_QWEN2, normalizer=_NFC)),
    "stablelm2": PreTokenizer(_QWEN2),
    "tekken": PreTokenizer(_cased(r"\p{N}"), ignore_merges=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), PreTokenizer(_cased(r"\p{N}{1,3}", f"{_CONTRACTIONS}?"))),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
}
