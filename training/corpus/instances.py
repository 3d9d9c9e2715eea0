"""Decides which instances of a task are held out of training.

An instance is a drawn conversation in which every assistant turn has a key: its question with its values. The hash of a
key alone decides whether it is held out, so training and evaluation are disjoint however many are drawn. Training
skips an instance with any held-out key; a held-out question ends at a turn whose key is held out. Knows no task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from random import Random

from training.corpus.conversation import JSON, Conversation, Question, Turn, rendered

BETWEEN_KEYS = " & "
DETAIL = " / "  # what follows it in a key tells instances apart, and does not decide whether they are held out
ALWAYS_TRAINED = "basic: "  # e.g. the times tables: too few to hold any out, and nobody can infer the missing one


@dataclass(frozen=True)
class Instance:
    turns: tuple[Turn, ...]
    keys: tuple[str, ...]  # one for each assistant turn
    metrics: tuple[str, ...]  # one for each assistant turn
    tools: tuple[JSON, ...] = ()


def is_held_out(key: str, one_in: int = 12) -> bool:
    """Whether any part of the key is: a turn may ask for two things."""
    parts = key.partition(DETAIL)[0].split(BETWEEN_KEYS)
    hashes = [blake2b(part.encode(), digest_size=8) for part in parts if not part.startswith(ALWAYS_TRAINED)]
    return any(int.from_bytes(part.digest()) % one_in == 0 for part in hashes)


def training_conversations(
    task: str, draw: Callable[[Random], Instance], random: Random, count: int
) -> Iterator[Conversation]:
    made = 0
    while made < count:
        instance = draw(random)
        if not any(is_held_out(key) for key in instance.keys):
            yield Conversation(task, instance.turns, instance.tools, BETWEEN_KEYS.join(instance.keys))
            made += 1


def held_out_questions(task: str, draw: Callable[[Random], Instance], seed: int, count: int) -> list[Question]:
    random = Random(seed)
    found: dict[str, Question] = {}
    while len(found) < count:
        instance = draw(random)
        ends = [place for place, turn in enumerate(instance.turns) if turn.role == "assistant"]
        held = [number for number, key in enumerate(instance.keys) if is_held_out(key)]
        if not held:
            continue
        number = random.choice(held)
        key, end = instance.keys[number], ends[number]
        expected = rendered(instance.turns[end])
        question = Question(task, instance.turns[:end], instance.tools, expected, instance.metrics[number], key)
        found.setdefault(key, question)
    return list(found.values())
