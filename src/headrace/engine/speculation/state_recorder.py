"""Records the hidden states of a model's own answers, for training draft heads. Drafts nothing."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from headrace.engine.interface.request import SequenceState
from headrace.engine.speculation.drafters import DraftRequests
from headrace.engine.speculation.head_drafter import Floats, HeadDrafter


class RecordedAnswer(NamedTuple):
    tokens: list[int]  # of the answer; with prompts, of these before
    # [tokens, hidden]: what each token was chosen from. With layers, what those began with comes first.
    states: Floats
    prompt: int  # tokens of the prompt


class _Running(msgspec.Struct, eq=False):
    """States of the tokens `first` to `end` of a text."""

    first: int
    end: int
    states: list[Floats] = []

    def begin_again(self, at: int) -> None:
        """Forget the states of the token `at` and those after it; all of them if some before it are missing."""
        if self.first < at < self.end:
            self.states = [np.concatenate(self.states)[: at - self.first]]
        else:
            self.first, self.states = at, []
        self.end = at

    def add(self, states: Floats) -> None:
        self.states.append(states.copy())
        self.end += len(states)


class StateRecorder(HeadDrafter):
    free = True

    def __init__(self, reads: tuple[int, ...] = (), *, prompts: bool = False) -> None:
        """`reads` are layers whose input is recorded too. `prompts`: whole texts are recorded, not only answers."""
        self.reads = reads
        self.reads_prompts = prompts
        self.answers: list[RecordedAnswer] = []  # of the sequences that have ended; without a token that ended one
        self._running: dict[int, _Running] = {}

    def read_states(self, sequence: SequenceState, first: int, states: Floats) -> None:
        running = self._running.setdefault(id(sequence), _Running(first, first))
        if first != running.end:  # the text was preempted and is computed again
            running.begin_again(first)
        running.add(states)

    def pass_seconds(self, sequences: int) -> float:
        return 0.0

    def propose_all(self, wanted: DraftRequests) -> list[list[int]]:
        return [[] for _ in wanted]

    def forget(self, sequence: SequenceState) -> None:
        found = self._running.pop(id(sequence), None)
        if found is not None:
            states = np.concatenate(found.states)
            tokens = sequence.tokens[found.first + 1 : found.first + 1 + len(states)]
            prompt = len(sequence.request.prompt) - found.first - 1
            self.answers.append(RecordedAnswer(tokens, states, prompt))

    def close(self) -> None:
        self._running.clear()
