"""Drafts with one layer (see `joined_layer.py` and `eagle3_head.py`), which reads its own drafts.

Owns the layer's KV blocks. All sequences are drafted together, one token per pass. The context of an EAGLE layer begins
with the newest token of the prompt. That of a prediction module or an EAGLE-3 layer is the whole text, but for a
beginning whose KV the model found in its cache: its hidden states are not computed.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Final

import msgspec
import numpy as np

from headrace.engine.executors.executor import StepBatch, StepResult
from headrace.engine.interface.request import SequenceState
from headrace.engine.scheduling.step_time import StepTimeModel, pairs_of
from headrace.engine.speculation.draft_model import Constrain
from headrace.engine.speculation.drafters import DraftRequests, sample_rows
from headrace.engine.speculation.head_drafter import DraftChoice, Floats, HeadDrafter
from headrace.engine.speculation.joined_layer import DraftLayer

_FEW: Final = 32  # tokens of a prompt that may wait for the next draft


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

    def joined(self) -> Floats:
        """Return the waiting states, of which there is at least one."""
        if len(self.waiting) > 1:
            self.waiting = [np.concatenate(self.waiting)]
        return self.waiting[0]

    def shorten(self, most: int) -> Floats:
        """Leave all but the newest `most` waiting states out of the layer's context, and return those."""
        states = self.joined()
        self.first += max(0, len(states) - most)
        self._wait_for(states[-most:])
        return states[-most:]

    def advance(self, count: int) -> None:
        """Take the first waiting states as computed."""
        self._wait_for(self.joined()[count:])
        self.computed += count

    def _wait_for(self, states: Floats) -> None:
        self.waiting, self.waits = [states] if len(states) else [], len(states)


class _Part(msgspec.Struct, eq=False):
    """Rows of a sequence in a step: tokens, and the hidden states before them."""

    past: _Past
    start: int  # place of the first
    tokens: list[int]
    states: Floats


class _Work(msgspec.Struct, eq=False):
    past: _Past
    most: int
    tokens: list[int]  # whose embeddings the next pass reads, with `states`
    states: Floats
    ahead: int = 0  # places after `computed` that hold drafts
    drafts: list[int] = []


class LayerDrafter(HeadDrafter):
    def __init__(self, layer: DraftLayer) -> None:
        self._reader = layer
        self.reads_prompts = layer.reads_prompts
        self.reads = layer.reads
        self._width = max(1, len(layer.reads)) * layer.target.spec.hidden_size  # of the states that it reads
        self._layer = layer.executor
        self._hidden = layer.executor.spec.hidden_size
        self._choice = DraftChoice(layer.target, layer.tokens)
        self.constrain: Constrain | None = None  # returns the grammar mask after a sequence's tokens and drafts
        self._free = list(range(self._layer.capacity.blocks))
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
        past.add(states[:, : self._width].copy())
        # While nothing is drafted, keep no more than a pass can read.
        most = self._layer.capacity.max_rows
        while self.reads_prompts and past.waits > _FEW and self._absorb(past):
            pass
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
        return _Work(past, most, tokens[len(tokens) - len(states) :], self._reader.joined(states))

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
        parts = [_Part(work.past, work.past.computed + work.ahead, work.tokens, work.states) for work in taken]
        result = self._run(parts, is_last=True)
        logits, states = self._reader.results(result)
        for work, part in zip(taken, parts, strict=True):
            if work.drafts:
                work.ahead += len(part.tokens)
            else:
                work.past.advance(len(part.tokens))
        self._choose(taken, logits, states)
        return [work for work in taken if work.tokens]

    def _absorb(self, past: _Past) -> bool:
        """Compute waiting states of tokens whose successor is known, as many as fit a pass. Return False if there are
        none or memory is short."""
        capacity = self._layer.capacity
        tokens = past.sequence.tokens
        first = past.first + past.computed + 1
        count = min(past.waits, len(tokens) - first, capacity.max_rows)
        total = past.computed + count
        self._asked = {id(past.sequence)}
        if count <= 0 or total > capacity.context or not self._grow(past, -(-total // capacity.block_tokens)):
            return False
        states = self._reader.joined(past.joined()[:count])
        self._run([_Part(past, past.computed, tokens[first : first + count], states)], is_last=False)
        past.advance(count)
        return True

    def _run(self, parts: list[_Part], *, is_last: bool) -> StepResult:
        """Run one step of the layer. `is_last`: return the results of each sequence's last row; otherwise of none."""
        began = time.perf_counter()
        counts = [len(part.tokens) for part in parts]
        ends = np.cumsum(counts, dtype=np.int32)
        rows = int(ends[-1])
        tables = np.zeros((len(parts), max(len(part.past.blocks) for part in parts)), dtype=np.int32)
        for place, part in enumerate(parts):
            tables[place, : len(part.past.blocks)] = part.past.blocks
        tokens = np.array([token for part in parts for token in part.tokens], dtype=np.int32)
        starts = [part.start for part in parts]
        has_logits = self._reader.has_logits
        batch = StepBatch(
            tokens=np.zeros(rows, dtype=np.int32),
            offsets=np.concatenate([np.zeros(1, np.int32), ends]),
            computed=np.array(starts, dtype=np.int32),
            block_tables=tables,
            rope_variants=np.zeros(len(parts), dtype=np.int32),
            wanted=ends - 1 if is_last else ends[:0],
            hidden=not has_logits,
            features=self._reader.features(tokens, np.concatenate([part.states for part in parts])),
            feature_rows=np.arange(rows, dtype=np.int32),
            final_states=np.empty((len(parts), self._hidden), dtype=np.float32) if is_last and has_logits else None,
        )
        result = self._layer.collect(self._layer.launch(batch))
        if is_last:
            self.step_time.observe(rows, sum(map(pairs_of, starts, counts)), time.perf_counter() - began)
        return result

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
