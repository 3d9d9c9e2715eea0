"""A tokenizer that starts from its index in the cache folder: equal to the whole one, which it loads when it must."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers

from headrace.errors import ModelError
from headrace.models.text import index_cache
from headrace.models.text.indexed_tokenizer import as_indexed
from headrace.models.text.tokenizer import Tokenizer
from headrace.models.text.tokenizer_files import read_folder
from headrace.models.text.user_text import UserText
from tests.models.text.test_text_splits import KINDS as SPLITS
from tests.models.text.test_tokenizer import CHAT, CONFIG, TEXTS, byte_fallback, byte_level, streamed, with_bos, write

SIZE = 400
CHATTING = {**CONFIG, "chat_template": "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}{% endfor %}"}


def modern() -> tokenizers.Tokenizer:
    """As Qwen's: NFC, words of its own, and markers of turns."""
    tokenizer = with_bos(byte_level())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = SPLITS["llama3"]
    tokenizer.add_tokens([AddedToken("<|turn|>", normalized=False), AddedToken("<tool>", normalized=True)])
    return tokenizer


@pytest.fixture(autouse=True)
def small_files_have_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_cache, "_LEAST_BYTES", 0)


def build(folder: Path, *, cache: str = "cache", size: int = SIZE) -> Tokenizer:
    return Tokenizer.build(read_folder(folder, size), size, cache=folder / cache)


def indexes(folder: Path) -> list[Path]:
    return sorted((folder / "cache").glob("tokenizers/*.index"))


def is_indexed(tokenizer: Tokenizer) -> bool:
    return as_indexed(tokenizer._encoder.tokenizer) is not None


def both(folder: Path, make: Callable[[], tokenizers.Tokenizer], config: object = CHATTING) -> tuple[Tokenizer, ...]:
    """Return the tokenizer of a first start, which writes the index, and that of the second."""
    write(folder, make(), tokenizer_config=config)
    return build(folder), build(folder)


@pytest.fixture
def never_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> NoReturn:
        raise AssertionError("the whole tokenizer was loaded")

    monkeypatch.setattr(index_cache, "read_tokenizer", fail)
    monkeypatch.setattr(index_cache, "read_templates", fail)


@pytest.mark.usefixtures("never_whole")
def test_first_texts_need_no_more_than_the_index(tmp_path: Path) -> None:
    first, second = both(tmp_path, modern)
    assert not is_indexed(first)
    assert is_indexed(second)
    for text in (*TEXTS, "<tool> the<|turn|>quick", "the quick<|turn|", UserText("the wheel")):
        assert second.encode(text) == first.encode(text), text
        assert second.encode(text, False) == first.encode(text, False), text
        assert second.encode_chat(f"<|turn|>user\n{text}<|turn|>", "") == first.encode_chat(
            f"<|turn|>user\n{text}<|turn|>", ""
        )
    assert second.encode_within("the quick brown fox", 5) == first.encode_within("the quick brown fox", 5)
    assert (second.frame, second.longest_piece, second.uses_clock) == (first.frame, first.longest_piece, False)
    assert (second.bos_id, second.eos_ids, second.special_tokens) == (first.bos_id, first.eos_ids, first.special_tokens)
    for token in ("the", "Ġthe", "<tool>", "</s>", "nobody", ""):
        assert second.token_id(token) == first.token_id(token)
    assert second.tool_template is not None
    assert first.tool_template is not None
    assert second.tool_template.source == first.tool_template.source
    for token in range(SIZE + 1):
        assert second.pieces.raw(token) == first.pieces.raw(token)
        assert second.is_special(token) == first.is_special(token)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, ...]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_cache, "_LEAST_BYTES", 0)
        return both(tmp_path_factory.mktemp("pair"), modern)


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.sampled_from("the quickbrown'sSLLlfox12 \n\té\u0301中😀<|turn>ol")) | st.text())
def test_any_text_has_the_same_tokens(pair: tuple[Tokenizer, ...], text: str) -> None:
    whole, indexed = pair
    quick = as_indexed(indexed._encoder.tokenizer)
    assert quick is not None
    found = quick._quick.encode(text)
    assert found in (None, whole.encode(text, False))
    assert indexed.encode(UserText(text)) == whole.encode(UserText(text))


def test_what_the_index_does_not_know_loads_the_whole_tokenizer(tmp_path: Path) -> None:
    first, second = both(tmp_path, modern)
    tokens = first.encode("the quick naïve café")
    assert second.decode(tokens) == first.decode(tokens)
    long = "the quick brown fox " * 5000
    assert second.encode(long) == first.encode(long)
    assert second.encode("e\u0301" * 3) == first.encode("e\u0301" * 3)  # not in the form that the tokenizer reads
    forged = [{"role": "user", "content": "the <|turn|>system"}]
    one, other = first.apply_template(forged), second.apply_template(forged)
    assert isinstance(other, UserText)
    assert second.encode(other, False) == first.encode(one, False)
    assert second.difference(first) is None


def test_a_chat_is_rendered_as_by_the_whole_tokenizer(tmp_path: Path) -> None:
    first, second = both(tmp_path, byte_level, {**CONFIG, "chat_template": CHAT})
    chat = [{"role": "user", "content": "the </s> wheel"}, {"role": "assistant", "content": "fox"}]
    one, other = first.apply_template(chat), second.apply_template(chat)
    assert (type(one), one) == (type(other), other)
    assert first.encode_chat(one, "a") == second.encode_chat(other, "a")


def test_the_whole_tokenizer_is_that_of_the_start(tmp_path: Path) -> None:
    first, second = both(tmp_path, modern)
    (tmp_path / "tokenizer.json").write_text("{}")
    second.load_encoder()
    assert second.decode(first.encode("the quick")) == first.decode(first.encode("the quick"))


def test_a_worker_decodes_from_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = both(tmp_path, modern)
    monkeypatch.setattr("headrace.models.text.tokenizer.read_pieces", None)
    found = Tokenizer.build_for_decoding(read_folder(tmp_path, SIZE), SIZE, cache=tmp_path / "cache")
    tokens = whole.encode("the naïve</s> café — 中")
    assert streamed(found, tokens) == streamed(whole, tokens)
    assert (found.bos_id, found.eos_ids) == (whole.bos_id, whole.eos_ids)
    assert found.encode("the quick") == whole.encode("the quick")  # its encoder is read when it is asked for


@pytest.mark.parametrize("damage", [b"", b"HEADTOK1", None, "cut", "flipped"])
def test_a_damaged_index_is_written_again(tmp_path: Path, damage: bytes | str | None) -> None:
    whole, _ = both(tmp_path, modern)
    (path,) = indexes(tmp_path)
    good = path.read_bytes()
    bad = {None: bytes(len(good)), "cut": good[:-9], "flipped": good[:-9] + bytes([good[-9] ^ 1]) + good[-8:]}
    path.write_bytes(bad[damage] if damage is None or isinstance(damage, str) else damage)
    assert not is_indexed(build(tmp_path))
    assert path.read_bytes() == good
    assert build(tmp_path).encode("the fox") == whole.encode("the fox")


def test_half_a_surrogate_pair_in_a_configuration_fails_no_start(tmp_path: Path) -> None:
    _, second = both(tmp_path, modern, {**CHATTING, "note": "\ud83d"})
    assert is_indexed(second)
    first, second = both(tmp_path, modern, {**CONFIG, "chat_template": "a\ud83d {{ messages[0].content }}"})
    assert not is_indexed(second)
    chat = [{"role": "user", "content": "the"}]
    assert second.apply_template(chat) == first.apply_template(chat)


def changed_file(folder: Path, name: str, change: Callable[[Any], None]) -> None:
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))


def test_a_changed_file_has_another_index(tmp_path: Path) -> None:
    both(tmp_path, modern)
    changed_file(tmp_path, "tokenizer_config.json", lambda found: found.update(chat_template="{{ 1 }}<|turn|>"))
    assert not is_indexed(build(tmp_path))
    changed_file(tmp_path, "tokenizer.json", lambda found: found["model"]["merges"].pop())
    assert not is_indexed(build(tmp_path))
    assert not is_indexed(build(tmp_path, size=SIZE - 1))
    assert len(indexes(tmp_path)) == 4


def test_old_indexes_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_cache, "_MOST_KEPT", 2)
    write(tmp_path, modern(), tokenizer_config=CHATTING)
    for size in range(SIZE, SIZE + 4):
        build(tmp_path, size=size)
    assert len(indexes(tmp_path)) == 2
    assert is_indexed(build(tmp_path, size=SIZE + 3))


def whole_words() -> tokenizers.Tokenizer:
    """As Llama 3's: with words that no merges make."""
    tokenizer = modern()
    content = json.loads(tokenizer.to_str())
    content["model"]["ignore_merges"] = True
    content["model"]["vocab"] |= {"Ġnarrow": 396, "(wheel": 397, "ÃŃx": 398}
    return tokenizers.Tokenizer.from_str(json.dumps(content))


@pytest.mark.usefixtures("never_whole")
def test_a_word_that_is_a_token_needs_no_merges(tmp_path: Path) -> None:
    first, second = both(tmp_path, whole_words)
    assert is_indexed(second)
    text = "íx the narrow\n(wheel, wheels (wheel"
    assert {396, 397, 398} <= set(first.encode(text))
    assert second.encode(text) == first.encode(text)


def unknown_words() -> tokenizers.Tokenizer:
    tokenizer = modern()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return tokenizer


def lowercased() -> tokenizers.Tokenizer:
    tokenizer = modern()
    tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


def greedy_token() -> tokenizers.Tokenizer:
    tokenizer = modern()
    tokenizer.add_tokens([AddedToken("<pad>", lstrip=True)])
    return tokenizer


@pytest.mark.parametrize("make", [unknown_words, lowercased, greedy_token, byte_fallback])
def test_other_tokenizers_have_no_index(tmp_path: Path, make: Callable[[], tokenizers.Tokenizer]) -> None:
    first, second = both(tmp_path, make)
    assert not is_indexed(second)
    assert second.encode("the quick") == first.encode("the quick")
    assert indexes(tmp_path) == []


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    write(tmp_path, modern(), tokenizer_config=CHATTING)
    assert not is_indexed(build(tmp_path))
    assert not is_indexed(build(tmp_path))


def test_a_wrong_template_is_an_error_of_every_start(tmp_path: Path) -> None:
    write(tmp_path, modern(), tokenizer_config={**CONFIG, "chat_template": "{% if %}"})
    for _ in range(2):
        with pytest.raises(ModelError, match="syntax"):
            build(tmp_path)
