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

_HAN_RUNS: Final = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK3: Final = (
    _split(r"\p{N}{1,3}"),
    _split(_HAN_RUNS),
    _split(
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    _bytes(),
)
# Letters of alphabets with two cases.
_CASED_LETTERS: Final = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a"
    "\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-"
    "\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-"
    "\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4"
    "\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113"
    "\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183"
    "\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-"
    "\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
_DEEPSEEK: Final = (
    _split(r"[\r\n]"),
    _split(rf"\s?[{_CASED_LETTERS}]+"),
    _split("\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"),
    _split(r"\s+$"),
    _split("[一-龥ࠀ-一가-\ud7ff]+"),
    _DIGITS,
    _bytes(),
)
_MARKED: Final = r"[\p{L}\p{M}]+"
_QWEN35: Final = (
    _split(
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{_MARKED}|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    _bytes(),
)
_SEED: Final = (
    _split(
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    _bytes(),
)
_BLOOM: Final = (_split(" ?[^(\\s|.,!?…。\uff0c、।\u06d4،)]+"), _bytes())
_FALCON: Final = (
    {"type": "Punctuation", "behavior": "Contiguous"},
    _bytes(words=True),
    {"type": "Digits", "individual_digits": False},
    _split("[0-9][0-9][0-9]"),
)

PRE_TOKENIZERS: Final[Mapping[str, PreTokenizer]] = {
    **dict.fromkeys(
        (
            *("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "modern-bert", "gigachat", "a.x-4.0", "mellum"),
            *("roberta-bpe", "granite-docling", "trillion", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de"),
        ),
        PreTokenizer(_GPT2),
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), PreTokenizer(_DIGIT_WORDS)
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "midm-2.0"),
        PreTokenizer(_LLAMA3, ignore_merges=True, adds_bos=True),
    ),
    **dict.fromkeys(("smaug-bpe", "dbrx", "chatglm-bpe"), PreTokenizer(_LLAMA3)),
    "glm4": PreTokenizer(_LLAMA3, ignore_merges=True),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), PreTokenizer(_QWEN2, normalizer=_NFC)),
    "stablelm2": PreTokenizer(_QWEN2),
    "tekken": PreTokenizer(_cased(r"\p{N}"), ignore_merges=True, adds_bos=True),
    **dict.fromkeys(
        ("gpt-4o", "llama4", "kanana2", "minimax-m2"), PreTokenizer(_cased(r"\p{N}{1,3}", f"{_CONTRACTIONS}?"))
    ),
    "qwen35": PreTokenizer(_QWEN35, normalizer=_NFC),
    "seed-coder": PreTokenizer(_SEED),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
    "deepseek-llm": PreTokenizer(_DEEPSEEK),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), PreTokenizer(_DEEPSEEK3)),
    "bloom": PreTokenizer(_BLOOM),
    "falcon": PreTokenizer(_FALCON),
}
