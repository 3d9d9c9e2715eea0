"""Drafts with an EAGLE layer: it reads a token's embedding and the hidden state before it, and predicts the token's own
hidden state, from which the head gives the next token.

Owns the layer's executor and KV blocks. All sequences are drafted together, one token per pass. The layer's context
begins with the newest token of the prompt: hidden states of the rest are not kept.
"""

from __future__ import annotations

import time
from collections import OrderedDict

import msgspec
import numpy as np

from headrace.engine.executors.cpu_executor import CpuExecutor
from headrace.engine.executors.executor import StepBatch
from headrace.engine.interface.request import SequenceState
from headrace.engine.scheduling.step_time import StepTimeModel, pairs_of
from headrace.engine.speculation.draft_model import Constrain
from headrace.engine.speculation.drafters import DraftRequests, sample_rows
from headrace.engine.speculation.head_drafter import DraftChoice, Floats, HeadDrafter
from headrace.models.draft_heads import EagleLayer
from headrace.models.precision import Precision


class _Past(msgspec.Struct, eq=False):
    """A sequence in the layer. Its KV holds `computed` places; the last is that of the token before
    `first + computed`."""

    sequence: SequenceState
    first: int
    computed: int = 0
    blocks: list[int] = []
    waiting: list[Floats] = []  # verified hidden states that are not computed yet: each [tokens, hidden]
    waits: int = 0  # tokens of `waiting`

    @property
    def known(self) -> int:
        """The token after the last whose hidden state is known."""
        return self.first + self.computed + self.waits

    def add(self, states: Floats) -> None:
        self.waiting.append(states)
        self.waits += len(states)

    def shorten(self, most: int) -> Floats:
        """Leave all but the newest `most` waiting states out of the layer's context, and return those."""
        states = self.waiting[0] if len(self.waiting) == 1 else np.concatenate(self.waiting)
        self.first += max(0, len(states) - most)
        states = states[-most:]
        self.waiting, self.waits = [states], len(states)
        return states

    def advance(self) -> None:
        """Take the waiting states as computed."""
        self.computed += self.waits
        self.waiting, self.waits = [], 0


class _Work(msgspec.Struct, eq=False):
    past: _Past
    most: int
    tokens: list[int]  # whose embeddings the next pass reads, with `states`
    states: Floats
    ahead: int = 0  # places after `computed` that hold drafts
    drafts: list[int] = []


class EagleDrafter(HeadDrafter):
    def __init__(self, executor: CpuExecutor, layer: EagleLayer, precision: Precision) -> None:
        """`precision` is that of the layer, and of the head over the tokens that it chooses from."""
        self._products = products = executor.products
        every = np.arange(executor.spec.vocab_size, dtype=np.int32)
        tensors = {**layer.tensors, "embed": products.head_rows(every if layer.tokens is None else layer.tokens)}
        self._layer = executor.beside(layer.spec, products.pack_layers(layer.spec, tensors, precision))
        self._join = products.pack(layer.join, precision)
        self._join_bias = layer.join_bias
        self._hidden = layer.spec.hidden_size
        self._choice = DraftChoice(executor, layer.tokens)
        self.constrain: Constrain | None = None  # returns the grammar mask after a sequence's tokens and drafts
        self._free = list(range(executor.capacity.blocks))
        self._pasts: OrderedDict[int, _Past] = OrderedDict()  # least recently drafted first
        self._asked: set[int] = set()  # sequences of the call under way
        self.step_time = StepTimeModel(fixed=0.2e-3, per_row=0.05e-3)

    def pass_seconds(self, sequences: int) -> float:
        return self.step_time.predict(sequences, 0)

    def read_states(self, sequence: SequenceState, first: int, states: Floats) -> None:
        past = self._pasts.get(id(sequence))
        if past is not None and past.known != first:
            self._drop(past)  # tokens that a grammar forced, or that were computed again, left a gap
            past = None
        if past is None:
            past = self._pasts[id(sequence)] = _Past(sequence, first)
        past.add(states.copy())
        # While nothing is drafted, keep no more than a pass can read.
        most = self._layer.capacity.max_rows
        if past.waits > 2 * most:
            past.shorten(most)

    def propose_all(self, wanted: DraftRequests) -> list[list[int]]:
        """Return drafts for each sequence; none if memory is short or its newest hidden state is not known."""
        self._asked = {id(sequence) for sequence, _ in wanted}
        works = [self._begin(sequence, most) if most > 0 else None for sequence, most in wanted]
        ready = [work for work in works if work is not None]
        while ready:
            ready = self._pass(ready)
        return [work.drafts if work is not None else [] for work in works]

    def forget(self, sequence: SequenceState) -> None:
        past = self._pasts.get(id(sequence))
        if past is not None:
            self._drop(past)

    def close(self) -> None:
        self._layer.close()

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def _begin(self, sequence: SequenceState, most: int) -> _Work | None:
        past = self._pasts.get(id(sequence))
        tokens = sequence.tokens
        if past is None or not past.waiting or past.known != len(tokens) - 1:
            return None
        self._pasts.move_to_end(id(sequence))
        capacity = self._layer.capacity
        states = past.shorten(capacity.max_rows)  # what fits a step
        total = past.computed + len(states) + most - 1
        if total > capacity.context or not self._grow(past, -(-total // capacity.block_tokens)):
            return None
        return _Work(past, most, tokens[len(tokens) - len(states) :], states)

    def _grow(self, past: _Past, blocks: int) -> bool:
        while len(past.blocks) < blocks:
            if self._free:
                past.blocks.append(self._free.pop())
                continue
            other = next((other for key, other in self._pasts.items() if key not in self._asked), None)
            if other is None:
                return False
            self._drop(other)
        return True

    def _drop(self, past: _Past) -> None:
        del self._pasts[id(past.sequence)]
        self._free += past.blocks

    def _pass(self, works: list[_Work]) -> list[_Work]:
        """Run one step of the layer, and draft a token for each sequence. Return those that can continue."""
        room = self._layer.capacity.max_rows
        taken: list[_Work] = []
        for work in works:
            room -= len(work.tokens)
            if room < 0:
                break
            taken.append(work)
        began = time.perf_counter()
        counts = [len(work.tokens) for work in taken]
        starts = [work.past.computed + work.ahead for work in taken]
        ends = np.cumsum(counts, dtype=np.int32)
        rows = int(ends[-1])
        tables = np.zeros((len(taken), max(len(work.past.blocks) for work in taken)), dtype=np.int32)
        for place, work in enumerate(taken):
            tables[place, : len(work.past.blocks)] = work.past.blocks
        tokens = np.array([token for work in taken for token in work.tokens], dtype=np.int32)
        inputs = np.concatenate(
            [self._products.embeddings(tokens), np.concatenate([work.states for work in taken])], axis=1
        )
        features = self._products.multiply(self._join, inputs, self._hidden)
        if self._join_bias is not None:
            features += self._join_bias
        batch = StepBatch(
            tokens=np.zeros(rows, dtype=np.int32),
            offsets=np.concatenate([np.zeros(1, np.int32), ends]),
            computed=np.array(starts, dtype=np.int32),
            block_tables=tables,
            rope_variants=np.zeros(len(taken), dtype=np.int32),
            wanted=ends - 1,
            features=features,
            feature_rows=np.arange(rows, dtype=np.int32),
            final_states=np.empty((len(taken), self._hidden), dtype=np.float32),
        )
        result = self._layer.collect(self._layer.launch(batch))
        assert result.final_states is not None
        for work, count in zip(taken, counts, strict=True):
            if work.drafts:
                work.ahead += count
            else:
                work.past.advance()
        self._choose(taken, result.values, result.final_states)
        self.step_time.observe(rows, sum(map(pairs_of, starts, counts)), time.perf_counter() - began)
        return [work for work in taken if work.tokens]

    def _choose(self, works: list[_Work], logits: Floats, states: Floats) -> None:
        """Choose each sequence's next draft, and set the input of the pass after it."""
        rows = [sample_rows(work.past.sequence, work.drafts)[-1] for work in works]
        if self.constrain is not None:
            for work, row in zip(works, rows, strict=True):
                row.mask = self.constrain(work.past.sequence, work.drafts)
        for place, (work, token) in enumerate(zip(works, self._choice.choose(logits, rows), strict=True)):
            work.tokens = []
            if token < 0:
                continue
            work.drafts.append(token)
            if len(work.drafts) < work.most and token not in work.past.sequence.request.stop_ids:
                work.tokens = [token]
                work.states = states[place : place + 1]
