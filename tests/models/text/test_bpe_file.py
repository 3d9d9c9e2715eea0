"""A BPE tokenizer built from its parts equals the one of `tokenizers`, or is left to it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers

from headrace.models.model_folder import BUNDLED_NAMES, find_model
from headrace.models.text.bpe_file import read_bpe
from tests.models.text.test_tokenizer import TEXTS, byte_fallback, byte_level, with_bos


def written(tokenizer: tokenizers.Tokenizer, **model: Any) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(tokenizer.to_str())
    content["model"] |= model
    return content


def old(content: dict[str, Any]) -> dict[str, Any]:
    content["model"]["merges"] = [" ".join(merge) for merge in content["model"]["merges"]]
    return content


def with_tokens() -> tokenizers.Tokenizer:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.add_tokens(
        [
            AddedToken("QUICK", normalized=True),
            AddedToken("<left>", lstrip=True, special=True),
            AddedToken("<right>", rstrip=True),
            AddedToken("fox", single_word=True, normalized=False),
        ]
    )
    return tokenizer


def cut_and_padded() -> tokenizers.Tokenizer:
    tokenizer = with_bos(byte_level())
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    return tokenizer


READ: dict[str, dict[str, Any]] = {
    "byte level": written(byte_level()),
    "byte fallback": written(byte_fallback()),
    "metaspace": written(byte_fallback(metaspace_decoder=True)),
    "a frame, truncation and padding": written(cut_and_padded()),
    "added tokens": written(with_tokens()),
    "merges as they were written before": old(written(byte_fallback())),
    "every option": written(byte_level(), unk_token="<unk>", fuse_unk=True, byte_fallback=True, ignore_merges=True),
    "a suffix": written(byte_level(), end_of_word_suffix="</w>", dropout=None, merges=[]),
    "a prefix": written(byte_level(), continuing_subword_prefix="", merges=[]),
    "ids with gaps": written(byte_level(), vocab=written(byte_level())["model"]["vocab"] | {"late": 900}),
    "an added token of another id": written(byte_level())
    | {"added_tokens": [{"id": 7, "content": "<new>", "special": True} | dict.fromkeys(
        ("single_word", "lstrip", "rstrip", "normalized"), False)]},
    "nothing": written(byte_level(), vocab={}, merges=[]) | {"added_tokens": []},
}  # fmt: skip


def same(data: bytes) -> None:
    found = read_bpe(data)
    assert found is not None
    tokenizer, highest = found
    expected = tokenizers.Tokenizer.from_str(data.decode())
    assert json.loads(tokenizer.to_str()) == json.loads(expected.to_str())
    vocabulary = expected.get_vocab(with_added_tokens=True)
    assert tokenizer.get_vocab(with_added_tokens=True) == vocabulary
    assert highest == max(vocabulary.values(), default=0)
    for text in [*TEXTS, "a <left> b <right>  c", "the QUICK quick foxes fox", "</s>"]:
        assert tokenizer.encode(text).ids == expected.encode(text).ids


@pytest.mark.parametrize("case", READ)
def test_it_is_the_tokenizer_that_the_library_reads(case: str) -> None:
    same(json.dumps(READ[case]).encode())


@pytest.mark.parametrize("name", BUNDLED_NAMES)
def test_the_bundled_models_tokenizers_are_read_so(name: str) -> None:
    same((find_model(name) / "tokenizer.json").read_bytes())


LEFT: dict[str, Any] = {
    "another model": json.loads(tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a")).to_str()),
    "an option that is not known": written(byte_level(), later=True),
    "a merge of what is no token": written(byte_level(), merges=[["no", "pe"]]),
    "a merge of three": old(written(byte_level(), merges=[["a", "b", "c"]])),
    "merges of both forms": written(byte_level(), merges=[["t", "h"], "h e"]),
    "a merge that names a version": written(byte_level(), merges=["#version 0.2"]),
    "an id below zero": written(byte_level(), vocab={"a": -1}, merges=[]),
    "an id past 32 bits": written(byte_level(), vocab={"a": 2**33}, merges=[]),
    "an id that is no whole number": written(byte_level(), vocab={"a": 1.5}, merges=[]),
    "a dropout of 2": written(byte_level(), dropout=2.0),
    "no model": {"version": "1.0"},
    "an added token without its flags": written(byte_level()) | {"added_tokens": [{"id": 0, "content": "a"}]},
    "a list": [],
}


@pytest.mark.parametrize("case", LEFT)
def test_uncertain_files_are_left_to_the_library(case: str) -> None:
    assert read_bpe(json.dumps(LEFT[case]).encode()) is None


@pytest.mark.parametrize("data", [b"", b"\xff", b"{", b'{"model": "\xff"}', b"[" * 5000])
def test_files_of_other_kinds_are_left_to_the_library(data: bytes) -> None:
    assert read_bpe(data) is None


@settings(deadline=None, derandomize=True, max_examples=300)
@given(data=st.data())
def test_a_damaged_file_is_read_alike_or_left(data: st.DataObject) -> None:
    content = bytearray(data.draw(st.sampled_from(FILES)))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=2))
    found = read_bpe(bytes(content))
    if found is None:
        return
    expected = tokenizers.Tokenizer.from_str(content.decode())  # raises for what it refuses
    assert found[0].get_vocab(with_added_tokens=True) == expected.get_vocab(with_added_tokens=True)
    ids = expected.get_vocab(with_added_tokens=True).values()
    if len(set(ids)) == len(ids):  # of two tokens of one id the library writes either
        assert json.loads(found[0].to_str()) == json.loads(expected.to_str())
    assert found[0].encode("the fox").ids == expected.encode("the fox").ids


FILES = [json.dumps(READ[name]).encode() for name in ("byte level", "byte fallback", "added tokens")]
