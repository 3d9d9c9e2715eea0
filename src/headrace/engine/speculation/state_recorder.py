"""Records the hidden states of a model's own answers, for training draft heads. Drafts nothing."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headrace.engine.interface.request import SequenceState
from headrace.engine.speculation.drafters import DraftRequests
from headrace.engine.speculation.head_drafter import Floats, HeadDrafter


class RecordedAnswer(NamedTuple):
    tokens: list[int]
    states: Floats  # [tokens, hidden]: what each token was chosen from


class StateRecorder(HeadDrafter):
    free = True

    def __init__(self) -> None:
        self.answers: list[RecordedAnswer] = []  # of the sequences that have ended; without a token that ended one
        self._running: dict[int, list[Floats]] = {}

    def read_states(self, sequence: SequenceState, first: int, states: Floats) -> None:
        self._running.setdefault(id(sequence), []).append(states.copy())

    def pass_seconds(self, sequences: int) -> float:
        return 0.0

    def propose_all(self, wanted: DraftRequests) -> list[list[int]]:
        return [[] for _ in wanted]

    def forget(self, sequence: SequenceState) -> None:
        found = self._running.pop(id(sequence), None)
        if found is not None:
            states = np.concatenate(found)
            self.answers.append(RecordedAnswer(sequence.output[: len(states)], states))

    def close(self) -> None:
        self._running.clear()
