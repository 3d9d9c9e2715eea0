"""Builds a small corpus task, tokenizer and shape, so that tests of the recipe are fast."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

from training.corpus.conversation import JSON, Conversation, Question, ToolCall, Turn
from training.rows import Stream, Task, pool
from training.shape import Shape
from training.tokenizer import read, text_of, train, write

WORDS = "wheel river stone mill water channel bridge garden letter window Anna Boris Clara Dmitri Elena".split()
VOCABULARY = 384
SHAPE = Shape(vocabulary=VOCABULARY, hidden=64, layers=2, heads=4, kv_heads=2, head_size=16, inner=128)
LOOKUP: JSON = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks up a word.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}


class Repeat:
    """The assistant repeats a word; now and then with a tool and after a system turn."""

    def conversations(self, random: Random, count: int) -> Iterator[Conversation]:
        for _ in range(count):
            word, number = random.choice(WORDS), random.randrange(100)
            asked = Turn("user", f"Say {word} {number}")
            if random.random() < 0.2:
                call = Turn("assistant", tool_calls=(ToolCall("look_up", {"word": word, "times": number}),))
                found = Turn("tool", '{"found": true}', name="look_up")
                turns = (Turn("system", "You repeat words."), asked, call, found, Turn("assistant", f"Found {word}."))
                yield Conversation("repeat", turns, (LOOKUP,), f"tool {word} {number}")
            else:
                yield Conversation("repeat", (asked, Turn("assistant", f"{word} {number}")), (), f"{word} {number}")

    def questions(self) -> list[Question]:
        return [
            Question("repeat", (Turn("user", f"Say {word} {number}"),), (), f"{word} {number}", "exact", f"{word}")
            for word in WORDS[:4]
            for number in (101, 102)
        ]


def tasks() -> dict[str, Task]:
    return {"repeat": Repeat()}


def write_tokenizer(folder: Path) -> None:
    texts = [text_of(conversation.turns, conversation.tools) for conversation in pool(tasks(), 0, -1, 300)]
    # Words that fill the vocabulary, for the corpus itself has too few.
    filling = [f" {first}{second}" * 3 for first in WORDS[:10] for second in WORDS[:10]]
    write(train(texts + filling, VOCABULARY), folder)


def stream(folder: Path, *, step_tokens: int = 512, pool_size: int = 60) -> Stream:
    return Stream(tasks(), read(folder), seed=3, step_tokens=step_tokens, pool_size=pool_size)
