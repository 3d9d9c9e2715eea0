"""Tokenizers in GGUF files: texts have the tokens that llama.cpp gives them with the same file."""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from benchmarks.llama_server import llama_server
from headrace.models.gguf.pre_tokenizers import PRE_TOKENIZERS
from headrace.models.model_folder import BUNDLED, open_model, open_tokenizer
from headrace.models.text.tokenizer import Tokenizer
from tests.models.gguf.gguf_models import write_vocabulary
from tests.support.models.smollm2 import smollm2_file

# Composed characters only: qwen2's NFC, which llama.cpp leaves out, does not change them.
TEXTS = [
    "The quick brown fox jumps over 13 lazy dogs, 1234567 times.",
    "I'll say it's JOHN'S; they'Re here, we'd've gone",
    " leading,  double   triple    spaces and trailing  ",
    "line\nline\r\n\r\n  indented\n\n\n\tTab\t\tTabs /path/to//x\n",
    "naïve café Ünïcode — “quotes” … ½ ² Ⅷ ٣٤",
    "中文字符测试、日本語テスト。한국어 시험",
    "emoji 😀👩‍👩‍👧 end",
    "def f(x):\n    return x**2 != 3.14e-10 # comment\n",
    "HelloWorld camelCaseWords ABCdef XMLHttpRequest",
    "___ --- ... !!! ??? (a) [b] {c} <d> $5.00 50%",
    "",
    "a",
    " ",
    "\n",
]


def vocabulary_file(path: Path, write: Callable[[gguf.GGUFWriter], int]) -> Path:
    """Write a llama of one tiny layer around a vocabulary; `write` returns how many tokens it has."""
    writer = gguf.GGUFWriter(str(path), "llama")
    size = write(writer)
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(32)
    writer.add_vocab_size(size)
    generator = np.random.default_rng(1)
    for name, shape in (("token_embd", (size, 32)), ("output_norm", (32,)), ("blk.0.attn_norm", (32,))):
        writer.add_tensor(f"{name}.weight", generator.normal(0, 0.1, shape).astype(np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", generator.normal(0, 0.1, (32, 32)).astype(np.float32))
    writer.add_tensor("blk.0.ffn_norm.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def bpe(pre: str) -> Callable[[gguf.GGUFWriter], int]:
    def write(writer: gguf.GGUFWriter) -> int:
        tokenizer = json.loads((BUNDLED / "mini" / "tokenizer.json").read_text())
        write_vocabulary(writer, tokenizer, pre=pre)
        return len({**tokenizer["model"]["vocab"], **{each["content"]: 0 for each in tokenizer["added_tokens"]}})

    return write


def sentencepiece(*, prefix: bool) -> Callable[[gguf.GGUFWriter], int]:
    """A vocabulary of words and parts of words, in which the score falls with the place."""

    def write(writer: gguf.GGUFWriter) -> int:
        kind = gguf.TokenType
        tokens: list[tuple[str, Any]] = [("<unk>", kind.UNKNOWN), ("<s>", kind.CONTROL), ("</s>", kind.CONTROL)]
        tokens += [(f"<0x{byte:02X}>", kind.BYTE) for byte in range(256)]
        tokens += [("<tool>", kind.USER_DEFINED), ("  ", kind.USER_DEFINED), ("<end_of_turn>", kind.CONTROL)]
        words = "the fox jumps over lazy dogs times line quotes return trailing triple double brown quick they".split()
        pieces = [word[:end] for end in range(2, 9) for word in words if len(word) >= end]
        pieces += [f"▁{piece}" for piece in pieces] + [
            "▁▁",
            "er",
            "in",
            "es",
            "on",
            "▁t",
            "▁a",
            "é",
            "中",
            "文",
            "中文",
        ]
        pieces += ["▁", *string.ascii_letters, *string.digits, *string.punctuation]
        taken = {text for text, _ in tokens}
        tokens += [(piece, kind.NORMAL) for piece in dict.fromkeys(pieces) if piece not in taken]
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list([text for text, _ in tokens])
        writer.add_token_types([each for _, each in tokens])
        writer.add_token_scores([-float(place) for place in range(len(tokens))])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_add_space_prefix(prefix)
        return len(tokens)

    return write


def disagreements(file: Path, texts: Sequence[str], *, special: bool = False) -> list[tuple[str, list[int], list[int]]]:
    pytest.importorskip("xllamacpp", reason="the package xllamacpp is not installed: no llama.cpp to compare with")
    ours = open_tokenizer(file, 1 << 20)
    with llama_server(file, threads=2) as theirs:
        pairs = [
            (text, ours.encode(text, add_special_tokens=False), theirs.tokens(text, special=special)) for text in texts
        ]
    return [pair for pair in pairs if pair[1] != pair[2]]


# One name of each way to divide a text; the others share it.
WAYS = {str(each): name for name, each in reversed(PRE_TOKENIZERS.items())}


@pytest.mark.parametrize("pre", sorted(WAYS.values()))
def test_words_are_divided_as_llama_cpp_divides_them(pre: str, tmp_path: Path) -> None:
    file = vocabulary_file(tmp_path / "vocabulary.gguf", bpe(pre))
    assert disagreements(file, TEXTS) == []


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_texts_have_the_tokens_of_llama_cpp(prefix: bool, tmp_path: Path) -> None:
    file = vocabulary_file(tmp_path / "vocabulary.gguf", sentencepiece(prefix=prefix))
    marked = ["<s>the fox<end_of_turn> jumps", "a<tool>b  c</s>"]
    assert disagreements(file, [*TEXTS, *marked], special=True) == []


def test_sentencepiece_texts_come_back(tmp_path: Path) -> None:
    model = open_model(vocabulary_file(tmp_path / "vocabulary.gguf", sentencepiece(prefix=False)))
    for tokenizer in (model.tokenizer, model.decoding_tokenizer):
        for text in TEXTS:
            assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert model.tokenizer.encode("the") == [1, *model.tokenizer.encode("the", add_special_tokens=False)]
    assert model.tokenizer.eos_ids == {2, model.tokenizer.token_id("<end_of_turn>")}
    assert model.tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def test_smollm2_tokenises_as_llama_cpp_does() -> None:
    file = smollm2_file()
    chat = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert disagreements(file, [*TEXTS, chat, "<repo_name> <|endoftext|>"], special=True) == []


def test_smollm2_renders_its_own_template() -> None:
    tokenizer: Tokenizer = open_model(smollm2_file()).tokenizer
    prompt = tokenizer.apply_template([{"role": "user", "content": "Hi <|im_end|>"}])
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert (tokenizer.eos_ids, tokenizer.bos_id, ids.count(2)) == ({0, 2}, 1, 2)  # a forged end is plain text
