"""Small tokenizers of the two kinds that models have: bytes, and SentencePiece's pieces with bytes to fall back to."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from headrace.models.text.tokenizer import Tokenizer

SPECIAL = ["<unk>", "<s>", "</s>", "<|end|>"]
CORPUS = [
    '{"name": "the wheel", "value": 12.5, "tags": ["water", "narrow"], "done": true, "next": null}',
    "the quick brown fox jumps over the lazy dog, and the water runs to the narrow wheel",
    "naïve café — 中文字 😀",
    "User: hello\n\nAssistant: Thought: value value value",
]


def byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return tokenizer


def sentencepiece() -> tokenizers.Tokenizer:
    """As in Llama 2: a mark for the space, put before the first word too."""
    characters = sorted({"▁", *"".join(CORPUS[:2]).replace(" ", "▁")})
    words = ["th", "the", "▁the", "na", "nam", "name", "▁wh", '"name', '▁"', "er", "▁w", "▁wa"]
    merges = [
        ("t", "h"), ("th", "e"), ("▁", "the"), ("n", "a"), ("na", "m"), ("nam", "e"), ("▁", "w"), ("▁w", "h"),
        ('"', "name"), ("▁", '"'), ("e", "r"), ("▁w", "a"),
    ]  # fmt: skip
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *characters, *words]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            {token: id for id, token in enumerate(tokens)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def metaspace() -> tokenizers.Tokenizer:
    """As in newer conversions: the space before the first word is the pre-tokenizer's."""
    tokenizer = sentencepiece()
    tokenizer.normalizer = normalizers.Sequence([])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


MAKERS = {"byte level": byte_level, "sentencepiece": sentencepiece, "metaspace": metaspace}


def load(
    folder: Path, tokenizer: tokenizers.Tokenizer, *, vocab_size: int = 500, eos: int | list[int] = 2
) -> Tokenizer:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}), encoding="utf-8")
    return Tokenizer.load(folder, vocab_size)
