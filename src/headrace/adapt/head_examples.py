"""HeadExample: an answer that a model wrote, with its hidden states. Chooses the tokens that draft heads know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from random import Random
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


class HeadExample(NamedTuple):
    tokens: NDArray[np.int64]  # of the answer, and for an EAGLE-3 layer of its prompt before
    # [tokens, hidden]: what each of these tokens was chosen from, before the head. For an EAGLE-3 layer, the states of
    # the layers that it reads come first.
    states: Floats
    prompt: int = 0  # tokens of the prompt

    @property
    def answer(self) -> NDArray[np.int64]:
        return self.tokens[self.prompt :]


class HeadModel(NamedTuple):
    """What heads read of their model: rows for the tokens that occur, and for those that heads choose from."""

    embedded: NDArray[np.int32]  # ascending: every token of the examples
    embeddings: Floats  # of these, [tokens, hidden]
    tokens: NDArray[np.int32] | None  # that heads choose from, ascending; None: all
    head: Floats  # of these, [tokens, hidden]
    norm: Floats  # factors of the norm before the head, [hidden]


def choose_vocabulary(texts: Iterable[Sequence[int]], vocab_size: int, most: int) -> NDArray[np.int32] | None:
    """Return the `most` tokens that occur most often, filled up with the first of the vocabulary, which a tokenizer
    learnt first; None if that is all."""
    if most >= vocab_size:
        return None
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(text)
    chosen = {token for token, _ in counts.most_common(most)}
    rest = (token for token in range(vocab_size) if token not in chosen)
    while len(chosen) < most:
        chosen.add(next(rest))
    return np.array(sorted(chosen), dtype=np.int32)


def batches(examples: Sequence[HeadExample], size: int, seed: int, epoch: int) -> list[list[HeadExample]]:
    """Return the batches of an epoch, each of answers of about the same length, in an order of the epoch's own."""
    chance = Random(f"{seed}/heads {epoch}")
    order = sorted(examples, key=lambda each: len(each.tokens) + 8.0 * chance.random())
    found = [order[start : start + size] for start in range(0, len(order), size)]
    chance.shuffle(found)
    return found
