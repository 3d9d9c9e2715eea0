"""Tokenizers: the files beside tokenizer.json, rejected files, and streamed text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from headrace.errors import ModelError, RequestError
from headrace.models.text.tokenizer import Detokenizer, Tokenizer
from headrace.models.text.user_text import UserText

CORPUS = ["the quick brown fox jumps over the lazy dog", "the wheel, the water and the narrow channel", "naïve café"]
SPECIAL = ["<unk>", "<s>", "</s>"]
TEXTS = [
    "the quick brown fox",
    " the  lazy dog ",
    "naïve café — 中文字 😀👩‍👩‍👧 ǅ ߷",
    "tab\tnew\nline\r\n",
    "ends with \ufffd itself \ufffd",
    "▁ marks ▁▁ and <0x41> and </notspecial>",
    "a",
    "",
]
CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ eos_token }}"


def byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_fallback(*, metaspace_decoder: bool = False) -> tokenizers.Tokenizer:
    """As in Llama 2: pieces with a mark for the space, bytes for what the pieces do not cover."""
    characters = sorted({"▁", *"".join(CORPUS).replace(" ", "▁")} - {"é", "ï"})
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *characters, "th", "the", "▁the"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            {token: id for id, token in enumerate(tokens)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
        )
    )
    if metaspace_decoder:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def metaspace_only() -> tokenizers.Tokenizer:
    tokenizer = byte_fallback(metaspace_decoder=True)
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def with_bos(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def write(folder: Path, tokenizer: tokenizers.Tokenizer, **files: object) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def load(folder: Path, vocab_size: int = 1000) -> Tokenizer:
    return Tokenizer.load(folder, vocab_size)


CONFIG = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}, "unk_token": None}
KINDS = {
    "byte level": byte_level,
    "byte fallback": byte_fallback,
    "byte fallback and metaspace": lambda: byte_fallback(metaspace_decoder=True),
    "metaspace": metaspace_only,
}
FORMS = {
    "byte level": "bytes",
    "byte fallback": "pieces",
    "byte fallback and metaspace": "pieces",
    "metaspace": "pieces",
}


@pytest.fixture(scope="session")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {
        name: load(write(tmp_path_factory.mktemp(name.replace(" ", "-")), make(), tokenizer_config=CONFIG))
        for name, make in KINDS.items()
    }


def streamed(tokenizer: Tokenizer, ids: list[int], *, skip_special_tokens: bool = True) -> list[str]:
    stream = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    return [*(stream.push(id) for id in ids), stream.finish()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_comes_back(kinds: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = kinds[kind]
    assert tokenizer.pieces.kind.form == FORMS[kind]
    for text in TEXTS if kind != "metaspace" else TEXTS[:2]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == KINDS[kind]().decode(ids)
        if "fallback" not in kind or "▁" not in text:
            # Only what a mark for the space cannot hold is lost.
            assert tokenizer.decode(ids).strip(" ") == text.strip(" ")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_is_the_text_of_the_whole(kinds: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = kinds[kind]
    ids = [1, *tokenizer.encode(text), 2]
    for skip in (True, False):
        pieces = streamed(tokenizer, ids, skip_special_tokens=skip)
        assert "".join(pieces) == KINDS[kind]().decode(ids, skip_special_tokens=skip)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
def test_a_character_arrives_whole(kinds: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = kinds[kind]
    ids = tokenizer.encode("a😀中b", add_special_tokens=False)
    pieces = [piece for piece in streamed(tokenizer, ids) if piece]
    assert "".join(pieces) == "a😀中b"
    assert pieces == ["a", "😀", "中", "b"]


def test_a_script_that_is_all_bytes_is_streamed(kinds: dict[str, Tokenizer]) -> None:
    tokenizer = kinds["byte fallback"]
    ids = tokenizer.encode("བོད", add_special_tokens=False)
    stream = Detokenizer(tokenizer)
    before_the_end = "".join(stream.push(id) for id in ids)
    assert before_the_end == "བོད"
    assert stream.finish() == ""


def test_bytes_that_never_become_a_character_are_replaced(kinds: dict[str, Tokenizer]) -> None:
    tokenizer = kinds["byte level"]
    emoji = tokenizer.encode("😀", add_special_tokens=False)
    letter = tokenizer.encode("a", add_special_tokens=False)
    assert len(emoji) == 4
    assert streamed(tokenizer, [*emoji[:2], *letter]) == ["", "", "\ufffda", ""]
    assert streamed(tokenizer, emoji[:3]) == ["", "", "", "\ufffd"]
    fallback = kinds["byte fallback"]
    euro = [3 + byte for byte in "€".encode()]
    # A run of bytes that is not UTF-8 as a whole keeps its whole characters.
    assert streamed(fallback, [*euro, 3 + 0xFF, 2]) == ["", "", "€", "\ufffd", "", ""]
    assert fallback.decode([*euro, 3 + 0xFF]) == "€\ufffd"


def valid_runs(ids: list[int]) -> bool:
    """True where every run of byte tokens is UTF-8: `tokenizers` replaces the other runs as a whole."""
    run = bytearray()
    for id in [*ids, 0]:
        if 3 <= id < 259:
            run.append(id - 3)
            continue
        if id <= 2:  # special tokens are taken out before runs are looked at
            continue
        try:
            run.decode()
        except UnicodeDecodeError:
            return False
        run.clear()
    try:
        run.decode()
    except UnicodeDecodeError:
        return False
    return True


@settings(deadline=None, derandomize=True, max_examples=300)
@given(ids=st.lists(st.integers(0, 330), max_size=40), skip=st.booleans())
def test_any_byte_level_tokens_are_streamed_as_they_are_decoded(
    kinds: dict[str, Tokenizer], ids: list[int], skip: bool
) -> None:
    tokenizer = kinds["byte level"]
    assert "".join(streamed(tokenizer, ids, skip_special_tokens=skip)) == tokenizer.decode(ids, skip)


REFERENCE = {name: make() for name, make in KINDS.items() if name != "byte level"}


@settings(deadline=None, derandomize=True, max_examples=400)
@given(
    kind=st.sampled_from(sorted(REFERENCE)),
    words=st.lists(st.text(max_size=3).map(lambda text: (text, True)) | st.integers(0, 310), max_size=12),
)
def test_any_sentencepiece_tokens_are_streamed_as_they_are_decoded(
    kinds: dict[str, Tokenizer], kind: str, words: list[Any]
) -> None:
    tokenizer = kinds[kind]
    ids: list[int] = []
    for word in words:
        ids.extend([word] if isinstance(word, int) else tokenizer.encode(word[0], add_special_tokens=False))
    text = "".join(streamed(tokenizer, ids))
    assert text == tokenizer.decode(ids)
    if valid_runs(ids) or kind == "metaspace":
        assert text == REFERENCE[kind].decode(ids, skip_special_tokens=True)


def test_a_text_that_continues_keeps_its_first_space(kinds: dict[str, Tokenizer]) -> None:
    for kind in ("byte fallback", "byte fallback and metaspace"):
        tokenizer = kinds[kind]
        ids = tokenizer.encode("the dog", add_special_tokens=False)
        stream = Detokenizer(tokenizer, continues=True)
        assert "".join([*map(stream.push, ids), stream.finish()]) == " the dog"


def test_a_decoder_of_another_kind_is_streamed_through_a_window(tmp_path: Path) -> None:
    words = ["[UNK]", "hel", "##lo", "world", "wor", "##ld", "."]
    tokenizer = tokenizers.Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    loaded = load(write(tmp_path, tokenizer))
    ids = loaded.encode("hello world hello hello world")
    assert loaded.pieces.kind.form == "window"
    assert streamed(loaded, ids) == ["hel", "lo", " world", " hel", "lo", " hel", "lo", " world", ""]
    assert "".join(streamed(loaded, ids)) == loaded.decode(ids) == "hello world hello hello world"


def test_tokens_past_the_tokenizer_have_no_text(kinds: dict[str, Tokenizer]) -> None:
    # Public models pad their vocabulary; a padded token may be generated all the same.
    for tokenizer in kinds.values():
        assert "".join(streamed(tokenizer, [999, 998])) == tokenizer.decode([999, 998]) == ""


def test_special_tokens_by_name_id_and_mark(tmp_path: Path) -> None:
    loaded = load(write(tmp_path, with_bos(byte_level()), tokenizer_config=CONFIG))
    assert loaded.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert loaded.bos_id == 1
    assert loaded.eos_ids == frozenset({2})
    assert loaded.is_special(2)
    assert not loaded.is_special(50)
    ids = loaded.encode("the")
    assert ids[0] == 1
    assert loaded.encode("the", add_special_tokens=False) == ids[1:]
    assert loaded.encode("</s>", add_special_tokens=False) == [2]
    assert loaded.decode([*ids, 2]) == "the"
    assert loaded.decode([*ids, 2], skip_special_tokens=False) == "<s>the</s>"


def test_a_named_special_token_that_is_not_marked_becomes_special(tmp_path: Path) -> None:
    tokenizer = byte_fallback()
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>", "bos_token": "<nothing>"}))
    loaded = load(tmp_path)
    assert loaded.bos_id is None
    assert loaded.encode("a</s>", add_special_tokens=False)[-1] == 2
    assert loaded.decode([2]) == ""
    assert streamed(loaded, [2]) == ["", ""]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, [1]),
        ({"add_bos_token": True}, [1]),
        ({"add_bos_token": False}, []),
        ({"add_bos_token": True, "add_eos_token": True}, [1, 2]),
        ({"add_eos_token": True}, [2]),
        ({"add_bos_token": None}, [1]),
    ],
)
def test_the_flags_of_the_config_rule_over_the_tokenizers_own_frame(
    tmp_path: Path, flags: dict[str, Any], expected: list[int]
) -> None:
    loaded = load(write(tmp_path, with_bos(byte_level()), tokenizer_config=CONFIG | flags))
    assert loaded.encode("") == expected


def test_limits_saved_with_the_tokenizer_do_not_cut_a_prompt(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    loaded = load(write(tmp_path, tokenizer))
    assert loaded.decode(loaded.encode("the quick brown fox jumps")) == "the quick brown fox jumps"
    assert len(loaded.encode("a")) == 1


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": 5}, {"eos_token_id": 6}, {5}),
        ({"eos_token_id": [5, 7]}, {}, {5, 7}),
        ({}, {"eos_token_id": [6]}, {6}),
        ({"eos_token_id": None}, {"eos_token_id": None}, {2}),
        ({"eos_token_id": 10**6}, {"eos_token_id": 6}, {6}),
        (None, {}, {2}),
    ],
)
def test_the_tokens_that_end_a_text(tmp_path: Path, generation: object, config: object, expected: set[int]) -> None:
    files = {"config": config, "tokenizer_config": CONFIG} | ({"generation_config": generation} if generation else {})
    assert load(write(tmp_path, byte_level(), **files)).eos_ids == expected


@pytest.mark.parametrize("value", ["</s>", [1, "2"], True, 1.0, {"id": 1}])
def test_an_eos_id_of_another_type_is_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(ModelError, match="'eos_token_id' must be") as caught:
        load(write(tmp_path, byte_level(), generation_config={"eos_token_id": value}))
    assert caught.value.path == str(tmp_path / "generation_config.json")


def test_a_tokenizer_past_the_vocabulary_is_refused(tmp_path: Path) -> None:
    tokenizer = byte_level()
    size = tokenizer.get_vocab_size()
    write(tmp_path, tokenizer)
    assert load(tmp_path, size).vocab_size == size
    with pytest.raises(ModelError, match=f"has id {size - 1}, but the model's vocabulary has {size - 1}") as caught:
        load(tmp_path, size - 1)
    assert caught.value.path == str(tmp_path / "tokenizer.json")


def test_a_token_past_the_vocabulary_is_found_also_where_ids_are_left_out(tmp_path: Path) -> None:
    content = json.loads(byte_level().to_str())
    vocab = content["model"]["vocab"]
    size = len(vocab)
    token = max(vocab, key=vocab.__getitem__)
    vocab[token] = 5000
    content["added_tokens"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match="has id 5000, but the model's vocabulary has 1000"):
        load(tmp_path)
    assert load(tmp_path, 5001).token_id(token) == 5000
    assert size < 1000


def test_added_tokens_past_the_vocabulary_are_text_like_any_other(tmp_path: Path) -> None:
    # As in Gemma 3 1B, whose tokenizer has a token for images that only its larger sisters know.
    tokenizer = byte_level()
    size = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([AddedToken("<image>", special=True)])
    loaded = load(write(tmp_path, tokenizer), size)
    ids = loaded.encode("the <image>")
    assert max(ids) < size
    assert loaded.decode(ids) == "the <image>"
    assert load(tmp_path, size + 1).encode("<image>") == [size]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b'{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}',
        b'{"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}',
        b'{"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "((("}, '
        b'"behavior": "Isolated", "invert": false}, "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}',
    ],
)
def test_a_corrupt_tokenizer_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelError) as caught:
        load(tmp_path)
    assert caught.value.path == str(tmp_path / "tokenizer.json")


@settings(deadline=None, derandomize=True, max_examples=100)
@given(data=st.data())
def test_a_damaged_tokenizer_is_refused_or_loaded(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "tokenizer.json"
    content = bytearray(BYTE_FALLBACK)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=2))
    path.write_bytes(content)
    try:
        loaded = load(path.parent, 400)
    except ModelError:
        return
    loaded.decode(loaded.encode("the dog"))


BYTE_FALLBACK = byte_fallback().to_str().encode()


@pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json", "vocab.json"])
def test_a_folder_with_only_a_slow_tokenizer_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ModelError, match=f"only as '{name}'. Expected tokenizer.json"):
        load(tmp_path)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"Expected tokenizer\.json"):
        load(tmp_path)


def test_half_of_a_surrogate_pair_is_the_requests_fault(kinds: dict[str, Tokenizer]) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        kinds["byte level"].encode("a\ud800")


MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def test_the_template_of_the_config(tmp_path: Path) -> None:
    loaded = load(write(tmp_path, byte_level(), tokenizer_config=CONFIG | {"chat_template": CHAT}))
    assert loaded.template is not None
    assert loaded.apply_template(MESSAGES) == loaded.template.render(MESSAGES) == "[user]hi</s>"


def test_a_template_file_wins(tmp_path: Path) -> None:
    write(tmp_path, byte_level(), tokenizer_config=CONFIG | {"chat_template": CHAT})
    (tmp_path / "chat_template.jinja").write_text("file {{ add_generation_prompt }} {{ mood }}", encoding="utf-8")
    loaded = load(tmp_path)
    assert loaded.apply_template(MESSAGES, mood="calm") == "file True calm"
    assert loaded.apply_template(MESSAGES, add_generation_prompt=False) == "file False "


def test_the_named_template_for_tools_is_used_with_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    loaded = load(write(tmp_path, byte_level(), tokenizer_config={"chat_template": named}))
    assert loaded.apply_template(MESSAGES) == "plain"
    assert loaded.apply_template(MESSAGES, tools=TOOLS) == "1 tools"
    assert loaded.apply_template(MESSAGES, tools=[]) == "plain"


@pytest.mark.parametrize("value", [1, {"a": "b"}, ["x"], [{"name": "default"}], [{"name": 1, "template": "x"}]])
def test_a_chat_template_of_another_type_is_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(ModelError, match="'chat_template' must be"):
        load(write(tmp_path, byte_level(), tokenizer_config={"chat_template": value}))


def test_a_model_without_a_template_completes_text_only(tmp_path: Path) -> None:
    loaded = load(write(tmp_path, byte_level()))
    assert loaded.template is None
    with pytest.raises(RequestError, match="no chat template") as caught:
        loaded.apply_template(MESSAGES)
    assert caught.value.parameter == "messages"


def test_the_ids_are_those_of_transformers(tmp_path: Path) -> None:
    import transformers

    for index, tokenizer in enumerate((with_bos(byte_level()), byte_fallback())):
        folder = tmp_path / str(index)
        folder.mkdir()
        write(folder, tokenizer, tokenizer_config=CONFIG | {"tokenizer_class": "PreTrainedTokenizerFast"})
        reference = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        loaded = load(folder)
        for text in TEXTS:
            assert loaded.encode(text) == reference(text)["input_ids"]
            ids = loaded.encode(text)
            assert loaded.decode(ids) == reference.decode(ids, skip_special_tokens=True)


@pytest.fixture(scope="session")
def framed(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(write(tmp_path_factory.mktemp("framed"), with_bos(byte_level()), tokenizer_config=CONFIG))


@settings(max_examples=150, deadline=None)
@given(
    words=st.lists(st.sampled_from(["mill", "the", "wheel", " ", "é", "[SEP]", "<s>"]), max_size=40),
    most=st.integers(3, 30),
)
def test_a_text_is_cut_at_either_end_between_the_tokens_around_it(
    framed: Tokenizer, words: list[str], most: int
) -> None:
    tokenizer = framed
    text = UserText(" ".join(words))
    whole = tokenizer.encode(text)
    inner = whole[1:]
    for keep_end in (False, True):
        found, was_cut = tokenizer.encode_within(text, most, keep_end=keep_end)
        assert was_cut == (len(whole) > most)
        room = most - 1
        kept = inner if not was_cut else inner[-room:] if keep_end else inner[:room]
        assert found == [whole[0], *kept]


def test_the_frame_is_what_stands_around_every_text(framed: Tokenizer, kinds: dict[str, Tokenizer]) -> None:
    for tokenizer in (framed, kinds["byte level"]):
        before, after = tokenizer.frame
        assert tokenizer.encode("the mill") == [
            *before,
            *tokenizer.encode("the mill", add_special_tokens=False),
            *after,
        ]
    assert framed.frame[0] == framed.encode("the mill")[:1]


def test_tokenizers_differ_by_a_token_that_is_named(kinds: dict[str, Tokenizer], tmp_path: Path) -> None:
    one = kinds["byte level"]
    for name in ("same", "longer"):
        (tmp_path / name).mkdir()
    assert one.difference(load(write(tmp_path / "same", byte_level(), tokenizer_config=CONFIG))) is None
    longer = byte_level()
    longer.add_tokens([AddedToken("<padding>")])
    assert one.difference(load(write(tmp_path / "longer", longer, tokenizer_config=CONFIG))) is None
    why = one.difference(kinds["byte fallback"])
    assert why is not None
    assert re.fullmatch(r"token 3 is '.+' in one and '<0x00>' in the other", why)


def test_of_a_very_long_text_only_a_part_is_tokenised(framed: Tokenizer) -> None:
    tokenizer = framed
    text = "the mill turns the wheel and the water runs down " * 4000
    whole = tokenizer.encode(text)
    assert tokenizer.encode_within(text, 50) == (whole[:50], True)
    assert tokenizer.encode_within(text, 50, keep_end=True) == ([whole[0], *whole[-49:]], True)
    assert tokenizer.encode_within(text, len(whole)) == (whole, False)
    assert tokenizer.encode_within(text, len(whole) - 1)[1]


def test_room_for_no_text_is_refused(framed: Tokenizer) -> None:
    with pytest.raises(RequestError, match="no room"):
        framed.encode_within("the mill", 1)
