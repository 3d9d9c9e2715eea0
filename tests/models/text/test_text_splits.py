"""Words of texts, split without `tokenizers`: the same as its own, or left to it."""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from headrace.models.text.text_splits import Splits, read_splits

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    rf"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace("{1,3}", "")


def split(expression: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(expression), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


KINDS: dict[str, Any] = {
    "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "llama3": split(LLAMA3),
    "qwen": split(QWEN),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "digits": pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
}
# Letters, numbers, marks, spaces and contractions in ASCII and beyond, so that a short text has many edges.
EDGES = "aBsStTdlLvVeErRmMé中\u0301'\u2019 ''  09٣½ \t\n\r\v\x1c\x85\u00a0\u2028\u3000.,!?-_<>|{}\"/\\😀\u200d\0\1ßΣ"


def read(kind: str) -> Splits:
    found = read_splits(KINDS[kind].__getstate__())
    assert found is not None
    return found


SPLITS = {kind: read(kind) for kind in KINDS}


def own_words(kind: str, text: str) -> list[str]:
    return [text[slice(*place)] for _, place in KINDS[kind].pre_tokenize_str(text)]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=50, deadline=None)
@given(text=st.text(st.sampled_from(EDGES)) | st.text())
def test_words_are_those_of_tokenizers(kind: str, text: str) -> None:
    found = SPLITS[kind].words(text)
    if found is None:
        assert any(unicodedata.category(each) in ("Cn", "Cs") or each in "\u017f\u212a" for each in text)
    elif text:
        assert found == own_words(kind, text)


def test_every_character_is_of_its_class() -> None:
    alike = (range(0x3400, 0xA000), range(0xAC00, 0xD7A4), range(0x17000, 0x18D00))  # ideographs and syllables
    codes = (code for code in range(0x20000) if not any(code in each for each in alike))
    assigned = [chr(code) for code in codes if unicodedata.category(chr(code)) not in ("Cn", "Cs", "Co")]
    text = "".join(f"a{each} {each}7" for each in assigned if each not in "\u017f\u212a")
    assert SPLITS["llama3"].words(text) == own_words("llama3", text)


@pytest.mark.parametrize("text", ["new \U0003fffd", "\u212aelvin", "it'\u017f"])
def test_what_another_version_of_unicode_may_read_differently_is_left_alone(text: str) -> None:
    assert SPLITS["llama3"].words(text) is None
    assert SPLITS["llama3"].words(f"\0{text}") is None


@pytest.mark.parametrize(
    "kind",
    [
        pre_tokenizers.ByteLevel(add_prefix_space=True),
        pre_tokenizers.Whitespace(),
        pre_tokenizers.Metaspace(),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        split(r"\w+|\W+"),
        pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=False), pre_tokenizers.Digits()]),
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(tokenizers.Regex(QWEN), "removed"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(tokenizers.Regex(QWEN), "isolated", invert=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
    ],
)
def test_other_pre_tokenizers_are_left_to_tokenizers(kind: Any) -> None:
    assert read_splits(kind.__getstate__()) is None
    assert read_splits(b"null") is None
