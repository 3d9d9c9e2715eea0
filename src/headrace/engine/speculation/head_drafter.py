"""What drafters with heads share: the hidden states that the engine hands over, and the choice among the heads' tokens.

Does not compute hidden states or drafts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.engine.executors.executor import Executor
from headrace.engine.interface.request import SequenceState
from headrace.engine.interface.sampling import SampleRow
from headrace.engine.speculation.drafters import DraftRequests

Floats = NDArray[np.float32]


class HeadDrafter(ABC):
    """A drafter that reads the model's final hidden states. The engine calls `read_states` after each step."""

    free = False
    reads_prompts = False  # whether it wants the hidden states of all tokens, not only of those with results
    reads: tuple[int, ...] = ()  # layers of the model: what they begin with is wanted beside the final states

    @abstractmethod
    def read_states(self, sequence: SequenceState, first: int, states: Floats) -> None:
        """Take the hidden states of the tokens `first`, `first` + 1, ... that the step verified: what the
        layers in `reads` began with, then the final ones, side by side. The last one's result is the sequence's newest
        token, unless a grammar forced more or it is a part of the prompt."""

    @abstractmethod
    def pass_seconds(self, sequences: int) -> float: ...

    def start_seconds(self, sequence: SequenceState) -> float:
        return 0.0

    @abstractmethod
    def propose_all(self, wanted: DraftRequests) -> list[list[int]]: ...

    def propose(self, sequence: SequenceState, most: int) -> list[int]:
        return self.propose_all([(sequence, most)])[0]

    @abstractmethod
    def forget(self, sequence: SequenceState) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Release what the drafter holds beside the model."""


class DraftChoice:
    """Chooses tokens from logits over some of the vocabulary, as the model would choose from its own."""

    def __init__(self, executor: Executor, tokens: NDArray[np.int32] | None) -> None:
        """`tokens` are those that the columns of the logits stand for; None: all."""
        self._executor = executor
        self._tokens = tokens
        self.count = executor.spec.vocab_size if tokens is None else len(tokens)

    def likeliest(self, logits: Floats) -> list[int]:
        best = logits.argmax(axis=-1)
        return (best if self._tokens is None else self._tokens[best]).tolist()

    def choose(self, logits: Floats, rows: Sequence[SampleRow]) -> list[int]:
        """Return a token for every row, -1 if none can be chosen."""
        if all(map(_is_plain, rows)):
            return self.likeliest(logits)
        if self._tokens is not None:
            # The rest of the vocabulary cannot be drafted, so the same random numbers mean the same tokens.
            whole = np.full((len(logits), self._executor.spec.vocab_size), -np.inf, dtype=np.float32)
            whole[:, self._tokens] = logits
            logits = whole
        return self._executor.choose(logits, self._executor.lay_out(rows))


def _is_plain(row: SampleRow) -> bool:
    """Return whether a row takes the likeliest token of all."""
    sampling = row.sampling
    return (
        sampling.temperature == 0.0
        and row.mask is None
        and not row.forbidden
        and not sampling.logit_bias
        and not sampling.penalises
    )
