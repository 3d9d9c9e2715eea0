"""Token tables read from tokenizer.json agree with `tokenizers`, or are left to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from headrace.errors import ModelError
from headrace.models.model_folder import BUNDLED_NAMES, find_model, open_model
from headrace.models.text.token_table import read_pieces
from headrace.models.text.tokenizer import Tokenizer
from headrace.models.text.tokenizer_files import read_folder
from tests.models.text.test_tokenizer import CONFIG, KINDS, byte_fallback, byte_level, streamed, write

SIZE = 400


def for_decoding(folder: Path, vocab_size: int) -> Tokenizer:
    return Tokenizer.build_for_decoding(read_folder(folder, vocab_size), vocab_size)


def unigram() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("▁the", -1.0), ("▁", -2.0), ("x", -3.0)], 0))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def agree(written: Tokenizer, whole: Tokenizer) -> None:
    size = whole.vocab_size
    assert [written.pieces.raw(token) for token in range(size)] == [whole.pieces.raw(token) for token in range(size)]
    assert [written.is_special(token) for token in range(size)] == [whole.is_special(token) for token in range(size)]
    assert written.pieces.kind == whole.pieces.kind
    assert (written.bos_id, written.eos_ids, written.vocab_size) == (whole.bos_id, whole.eos_ids, whole.vocab_size)
    assert written.special_tokens == whole.special_tokens


@pytest.mark.parametrize("kind", [*KINDS, "unigram"])
def test_it_agrees_with_the_whole_tokenizer(tmp_path: Path, kind: str) -> None:
    make = KINDS.get(kind, unigram)
    write(tmp_path, make(), tokenizer_config=CONFIG)
    assert read_pieces((tmp_path / "tokenizer.json").read_bytes(), SIZE, []) is not None
    written, whole = for_decoding(tmp_path, SIZE), Tokenizer.load(tmp_path, SIZE)
    agree(written, whole)
    text = "the quick</s> x"
    tokens = whole.encode(text)
    assert streamed(written, tokens) == streamed(whole, tokens)
    assert written.encode(text) == tokens  # what cuts texts is there once it is asked for
    assert written.decode(tokens) == whole.decode(tokens)
    assert written.token_id("</s>") == whole.token_id("</s>") is not None
    assert written.longest_piece == whole.longest_piece


@pytest.mark.parametrize("name", BUNDLED_NAMES)
def test_the_bundled_models_tokens_are_read_so(name: str) -> None:
    folder = open_model(find_model(name))
    data = (folder.path / "tokenizer.json").read_bytes()
    assert read_pieces(data, folder.spec.vocab_size, []) is not None
    agree(folder.decoding_tokenizer, folder.tokenizer)
    chat = [{"role": "user", "content": "hello"}]
    assert folder.decoding_tokenizer.apply_template(chat) == folder.tokenizer.apply_template(chat)


def test_the_encoder_is_loaded_on_first_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, byte_level(), tokenizer_config=CONFIG)
    read: list[str] = []
    whole = tokenizers.Tokenizer.from_str

    def counted(text: str) -> tokenizers.Tokenizer:
        read.append(text)
        return whole(text)

    class Counted:
        from_str = staticmethod(counted)

    monkeypatch.setattr(tokenizers, "Tokenizer", Counted)
    written = for_decoding(tmp_path, SIZE)
    assert streamed(written, [50, 2, 60])
    assert not read
    written.encode("the")
    written.encode("dog")
    assert len(read) == 1


def changed(tokenizer: tokenizers.Tokenizer, **model: Any) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(tokenizer.to_str())
    content["model"] |= model
    return content


def added(id: int, content: str) -> dict[str, object]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": id, "content": content, "special": True} | flags


def with_added(*tokens: dict[str, object]) -> dict[str, Any]:
    content = changed(byte_level())
    content["added_tokens"] += tokens
    return content


UNCERTAIN: dict[str, Any] = {
    "an added token of another id": with_added(added(350, "<late>")),
    "an added token twice": with_added(added(320, "<new>"), added(321, "<new>")),
    "an empty added token": with_added(added(320, "")),
    "two tokens of one id": changed(
        byte_level(), vocab=json.loads(byte_level().to_str())["model"]["vocab"] | {"zz": 5}
    ),
    "a decoder of another kind": changed(byte_level()) | {"decoder": {"type": "BPEDecoder", "suffix": "</w>"}},
    "a decoder as old files have it": changed(byte_level())
    | {"decoder": {"type": "Metaspace", "replacement": "▁", "add_prefix_space": True, "str_rep": "▁"}},
    "no decoder": changed(byte_level()) | {"decoder": None},
    "a model that does not say what it is": {**changed(byte_level()), "model": {"vocab": {"a": 0}, "merges": []}},
}


@pytest.mark.parametrize("case", UNCERTAIN)
def test_uncertain_files_fall_back_to_the_whole_tokenizer(tmp_path: Path, case: str) -> None:
    data = json.dumps(UNCERTAIN[case]).encode()
    assert read_pieces(data, SIZE, []) is None
    (tmp_path / "tokenizer.json").write_bytes(data)
    assert for_decoding(tmp_path, SIZE).encode("a")


def test_new_added_tokens_follow_the_vocabulary(tmp_path: Path) -> None:
    tokenizer = byte_level()
    size = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(["<new>"])
    tokenizer.add_tokens([AddedToken("<newer>")])
    write(tmp_path, tokenizer)
    assert read_pieces((tmp_path / "tokenizer.json").read_bytes(), size + 2, []) is not None
    written = for_decoding(tmp_path, size + 2)
    agree(written, Tokenizer.load(tmp_path, size + 2))
    assert streamed(written, [size, size + 1]) == ["", "<newer>", ""]
    # One that the model has no room for is text like any other: that is the whole tokenizer's matter.
    agree(for_decoding(tmp_path, size + 1), Tokenizer.load(tmp_path, size + 1))


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff", b'{"model": {"type": "BPE", "vocab": {"a": -1}}}'])
def test_a_corrupt_file_is_refused_at_once(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelError) as caught:
        for_decoding(tmp_path, SIZE)
    assert caught.value.path == str(tmp_path / "tokenizer.json")


def test_a_half_that_is_corrupt_is_refused_when_it_is_read(tmp_path: Path) -> None:
    content = changed(byte_level(), merges=[["no", "pe"]])
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    written = for_decoding(tmp_path, SIZE)
    assert streamed(written, [50])
    with pytest.raises(ModelError, match="not a tokenizer"):
        written.encode("the")


def test_a_token_past_the_vocabulary_is_refused(tmp_path: Path) -> None:
    tokenizer = byte_level()
    write(tmp_path, tokenizer)
    with pytest.raises(ModelError, match="but the model's vocabulary has"):
        for_decoding(tmp_path, tokenizer.get_vocab_size() - 1)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(data=st.data())
def test_a_damaged_file_says_the_same_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged" / "tokenizer.json"
    path.parent.mkdir(exist_ok=True)
    content = bytearray(data.draw(st.sampled_from(FILES)))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=2))
    path.write_bytes(content)
    try:
        whole = Tokenizer.load(path.parent, SIZE)
    except ModelError:
        return  # as the table may find too, or whoever asks for the other half
    if read_pieces(bytes(content), SIZE, []) is not None:  # else it is the same whole tokenizer
        agree(for_decoding(path.parent, SIZE), whole)


FILES = [byte_fallback().to_str().encode(), byte_level().to_str().encode(), unigram().to_str().encode()]
