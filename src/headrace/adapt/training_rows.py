"""TrainingRow: the tokens of one example and which of them are learnt. Orders and groups rows; reads no files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from random import Random

import msgspec


class TrainingRow(msgspec.Struct, frozen=True):
    tokens: list[int]
    first: int  # tokens from here on are learnt; those before are the prompt

    @property
    def learnt(self) -> int:
        return len(self.tokens) - self.first


def answer_row(prompt_and_answer: Sequence[int], first: int, ends: frozenset[int], end: int | None) -> TrainingRow:
    """Return the row of a prompt with its answer, whose tokens begin at `first`.

    The answer ends with its first end-of-text token, so that nothing after it is learnt. `end` is added if there is
    none.
    """
    first = max(1, first)  # nothing predicts the first token
    tokens = list(prompt_and_answer)
    for place in range(first, len(tokens)):
        if tokens[place] in ends:
            return TrainingRow(tokens[: place + 1], first)
    return TrainingRow(tokens if end is None else [*tokens, end], first)


def hold_out(count: int, share: float, seed: int) -> tuple[list[int], list[int]]:
    """Split the places 0 to `count` - 1 at random into those to train on and those to evaluate on.

    At least one is held out, and one is left. Equal seeds give equal splits.
    """
    order = list(range(count))
    Random(f"{seed}/held-out").shuffle(order)
    held_out = min(count - 1, max(1, round(count * share)))
    return sorted(order[held_out:]), sorted(order[:held_out])


def steps_of_epoch(count: int, batch: int) -> int:
    return -(-count // batch)


def batch_rows(rows: Sequence[TrainingRow], batch: int, seed: int, step: int) -> list[TrainingRow]:
    """Return the rows of a step. Each epoch has its own order, which depends on the seed alone."""
    steps = steps_of_epoch(len(rows), batch)
    epoch, place = divmod(step, steps)
    order = list(range(len(rows)))
    Random(f"{seed}/epoch {epoch}").shuffle(order)
    return [rows[index] for index in order[place * batch : (place + 1) * batch]]


def pieces(rows: Iterable[TrainingRow], most: int) -> list[list[TrainingRow]]:
    """Group rows by length into pieces of at most `most` tokens with their padding, or of one row."""
    found: list[list[TrainingRow]] = []
    for row in sorted(rows, key=lambda row: len(row.tokens)):
        # The row is the longest so far: with it, the piece is so many rows of its length.
        if found and (len(found[-1]) + 1) * len(row.tokens) <= most:
            found[-1].append(row)
        else:
            found.append([row])
    return found


def digest(rows: Sequence[TrainingRow]) -> str:
    return hashlib.sha256(msgspec.msgpack.encode(rows)).hexdigest()
