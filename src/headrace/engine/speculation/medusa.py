"""Drafts with Medusa heads: each reads the same hidden state and predicts a token further ahead.

All drafts of all sequences take one product with the heads' blocks and one with the vocabulary. Keeps one hidden state
for each sequence, and no KV.
"""

from __future__ import annotations

import time
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headrace.engine.executors.cpu_executor import CpuExecutor
from headrace.engine.interface.request import SequenceState
from headrace.engine.interface.sampling import SampleRow
from headrace.engine.scheduling.step_time import StepTimeModel
from headrace.engine.speculation.drafters import DraftRequests, PerSequence, sample_rows
from headrace.engine.speculation.head_drafter import DraftChoice, Floats, HeadDrafter
from headrace.models.draft_heads import MedusaHeads
from headrace.models.precision import Precision

_MOST_SEQUENCES: Final = 4096


class _Latest:
    """The newest hidden state of a sequence, and the token that it belongs to."""

    __slots__ = ("place", "state")

    def __init__(self) -> None:
        self.place = -1
        self.state: Floats | None = None


class MedusaDrafter(HeadDrafter):
    def __init__(self, executor: CpuExecutor, heads: MedusaHeads, precision: Precision) -> None:
        """`precision` is that of the heads' weights, and of the head over the tokens that they choose from."""
        self._products = products = executor.products
        self._count = heads.count
        self._hidden = executor.spec.hidden_size
        self._choice = DraftChoice(executor, heads.tokens)
        self._first = products.pack(np.concatenate([blocks[0].weight for blocks in heads.blocks]), precision)
        self._first_bias = np.stack([blocks[0].bias for blocks in heads.blocks])
        self._further = [
            [(products.pack(block.weight, precision), block.bias) for block in blocks[1:]] for blocks in heads.blocks
        ]
        if heads.outputs:
            self._outputs = [products.pack(output, precision) for output in heads.outputs]
        else:
            self._outputs = [products.head(heads.tokens, precision)]
        self._latest: PerSequence[_Latest] = PerSequence(_MOST_SEQUENCES)
        self.step_time = StepTimeModel(fixed=0.2e-3, per_row=0.05e-3)

    def pass_seconds(self, sequences: int) -> float:
        """Return a draft's share of the seconds that all heads take."""
        return self.step_time.predict(sequences * self._count, 0) / self._count

    def read_states(self, sequence: SequenceState, first: int, states: Floats) -> None:
        latest = self._latest.find(sequence, _Latest)
        latest.place = first + len(states) - 1
        latest.state = states[-1].copy()

    def propose_all(self, wanted: DraftRequests) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in wanted]
        works: list[tuple[int, int, int]] = []  # place in `wanted`, first head, last head
        states: list[Floats] = []
        for place, (sequence, most) in enumerate(wanted):
            latest = self._latest.find(sequence, _Latest)
            # Head 0 predicts the token after the next one. Tokens that a grammar forced need no head.
            first = len(sequence.tokens) - 2 - latest.place
            last = min(self._count, first + most)
            if latest.state is not None and 0 <= first < last:
                works.append((place, first, last))
                states.append(latest.state)
        if not works:
            return drafts
        began = time.perf_counter()
        rows = np.concatenate(
            [opened[first:last] for opened, (_, first, last) in zip(self._open(states), works, strict=True)]
        )
        logits = self._logits(rows, np.concatenate([np.arange(first, last) for _, first, last in works]))
        likeliest = self._choice.likeliest(logits)
        at = 0
        asked: list[SampleRow] = []
        for place, first, last in works:
            # Penalties count the likeliest of the drafts before.
            asked += sample_rows(wanted[place][0], likeliest[at : at + last - first - 1])
            at += last - first
        chosen = self._choice.choose(logits, asked)
        at = 0
        for place, first, last in works:
            drafts[place] = _until_stop(chosen[at : at + last - first], wanted[place][0].request.stop_ids)
            at += last - first
        self.step_time.observe(len(rows), 0, time.perf_counter() - began)
        return drafts

    def forget(self, sequence: SequenceState) -> None:
        self._latest.forget(sequence)

    def close(self) -> None:
        pass  # its products need no KV

    def _open(self, states: list[Floats]) -> NDArray[np.float32]:
        """Return each state after the blocks of every head, [states, heads, hidden]."""
        inputs = np.stack(states)
        inner = self._products.multiply(self._first, inputs, self._count * self._hidden)
        opened = inputs[:, None] + _silu(inner.reshape(len(states), self._count, self._hidden) + self._first_bias)
        for head, blocks in enumerate(self._further):
            for weights, bias in blocks:
                opened[:, head] += _silu(self._products.multiply(weights, opened[:, head], self._hidden) + bias)
        return opened

    def _logits(self, rows: Floats, heads: NDArray[np.int64]) -> Floats:
        count = self._choice.count
        if len(self._outputs) == 1:
            return self._products.multiply(self._outputs[0], rows, count)
        logits = np.empty((len(rows), count), dtype=np.float32)
        for head, output in enumerate(self._outputs):
            own = np.flatnonzero(heads == head)
            if len(own):
                logits[own] = self._products.multiply(output, rows[own], count)
        return logits


def _silu(values: Floats) -> Floats:
    return values / (np.float32(1.0) + np.exp(-values))


def _until_stop(tokens: list[int], stop_ids: frozenset[int]) -> list[int]:
    """Return the tokens before one that could not be chosen, and none after one that ends the output."""
    for place, token in enumerate(tokens):
        if token < 0:
            return tokens[:place]
        if token in stop_ids:
            return tokens[: place + 1]
    return tokens
