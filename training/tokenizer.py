"""Trains the tokenizer that both models share: byte-level BPE on a sample of the corpus. Does not know models.

Two choices suit models of this size. Every digit is a token, so numbers are written and copied digit by digit. A
capitalised word never includes the space before it, so a name or a code has the same tokens in running text and after a
quotation mark, and can be copied. That space joins the sign before it, or stands alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from headrace.models.formats.atomic_file import new_file
from headrace.models.synthetic.synthetic_tokenizer import byte_tokens
from headrace.models.text.chat_template import ChatTemplate
from training.corpus.conversation import CALL_BEGIN, CALL_END, JSON, Turn
from training.shape import CONTEXT

BEGIN: Final = "<|begin|>"
END: Final = "<|end|>"
PAD: Final = "<|pad|>"
USER: Final = "<|user|>"
ASSISTANT: Final = "<|assistant|>"
# Their ids are 0, 1, 2 ... in this order. The calls' marks are part of the text: decoding keeps them.
SPECIAL: Final = (PAD, BEGIN, END, "<|system|>", USER, ASSISTANT, "<|tool|>")
MARKS: Final = (CALL_BEGIN, CALL_END)
WORD_PATTERN: Final = "|".join(
    (
        r"'(?:s|t|re|ve|m|ll|d)(?!\p{L})",
        r"[\p{Lu}\p{Lt}]\p{L}*",
        r" ?[\p{Ll}\p{Lm}\p{Lo}]\p{L}*",
        r"\p{N}",
        r" (?=[\p{Lu}\p{Lt}\p{N}])",
        r" ?[^\s\p{L}\p{N}]+(?: (?=[\p{Lu}\p{Lt}\p{N}]))?",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
TEMPLATE: Final = Path(__file__).with_name("template.jinja")
FILES: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def train(texts: Iterable[str], vocabulary: int) -> tokenizers.Tokenizer:
    """Train exactly `vocabulary` tokens. The same texts give the same tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(tokenizers.Regex(WORD_PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    special += [AddedToken(token, special=False, normalized=False) for token in MARKS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special,
        initial_alphabet=list(byte_tokens()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if (size := tokenizer.get_vocab_size()) != vocabulary:
        raise ValueError(f"the texts give {size} tokens only, and {vocabulary} are wanted")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, token_id(tokenizer, BEGIN))]
    )
    return with_plain_marks(tokenizer)


def with_plain_marks(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Unmark the tool call markers: the trainer makes all given tokens special, but these must stay in decoded text."""
    content = json.loads(tokenizer.to_str())
    for entry in content["added_tokens"]:
        entry["special"] = entry["content"] not in MARKS
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def tokenizer_config() -> dict[str, Any]:
    return {
        "bos_token": BEGIN,
        "chat_template": TEMPLATE.read_text(encoding="utf-8"),
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": CONTEXT,
        "pad_token": PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def write(tokenizer: tokenizers.Tokenizer, folder: Path) -> None:
    """Write FILES; tokenizer.json comes last, so that its presence means all are complete."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "chat_template.jinja", TEMPLATE.read_text(encoding="utf-8"))
    write_text(folder / "tokenizer_config.json", json.dumps(tokenizer_config(), indent=2, ensure_ascii=False) + "\n")
    write_text(folder / "tokenizer.json", tokenizer.to_str())


def read(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def token_id(tokenizer: tokenizers.Tokenizer, token: str) -> int:
    """Return the id of a token that every tokenizer of the recipe has."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer has no {token}")
    return found


def write_text(path: Path, text: str) -> None:
    with new_file(path) as file:
        file.write(text.encode())


@cache
def template() -> ChatTemplate:
    names = {"bos_token": BEGIN, "eos_token": END, "pad_token": PAD}
    return ChatTemplate(TEMPLATE.read_text(encoding="utf-8"), special_tokens=names, path=TEMPLATE)


def messages_of(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Return the turns as an OpenAI client sends them."""
    messages: list[dict[str, Any]] = []
    for turn in turns:
        message: dict[str, Any] = {"role": turn.role, "content": turn.content}
        if turn.tool_calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in turn.tool_calls
            ]
        if turn.name:
            message["name"] = turn.name
        messages.append(message)
    return messages


def text_of(turns: Sequence[Turn], tools: Sequence[JSON], *, prompt: bool = False) -> str:
    """Render what the model reads. A prompt ends where the assistant's turn begins."""
    declared: Any = list(tools) or None
    return template().render(messages_of(turns), tools=declared, add_generation_prompt=prompt)
