"""A drafter with a model of its own: a small one that writes ahead of the one that it drafts for.

Owns DraftModelDrafter: its executor, its blocks, and how far each sequence is computed there. All sequences are drafted
for together, a token a pass; what the large model did not keep is taken back by computing over it. Knows nothing of
scheduling or of verification.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.engine.executors.executor import Executor, StepBatch
from headrace.engine.interface.request import SequenceState
from headrace.engine.memory.block_manager import BlockManager, BlockStats, BlockTable
from headrace.engine.scheduling.step_time import StepTimeModel, pairs_of
from headrace.engine.speculation.drafters import DraftRequests, Mask, sample_rows
from headrace.errors import RequestError

Constrain = Callable[[SequenceState, Sequence[int]], "Mask | None"]


class _Past(msgspec.Struct, eq=False):
    """A sequence as the draft model has it: `computed` of its tokens, and after them drafts that may not have held."""

    sequence: SequenceState
    table: BlockTable
    rope_variant: int
    computed: int
    ahead: list[int] = []

    def settle(self) -> None:
        """Drafts that the sequence went on with are computed already; the others are to be computed over."""
        tokens = self.sequence.tokens
        for token in self.ahead:
            if self.computed >= len(tokens) or tokens[self.computed] != token:
                break
            self.computed += 1
        self.ahead.clear()
        self.computed = min(self.computed, len(tokens) - 1)  # the last token's result is wanted


class _Work(msgspec.Struct, eq=False):
    past: _Past
    most: int
    feed: list[int]  # tokens of the next pass
    drafts: list[int] = []


class DraftModelDrafter:
    """Draws each draft as the large model will draw its token, with the same random numbers: where both models think
    alike, they choose alike, also at a temperature."""

    free = False

    def __init__(
        self,
        executor: Executor,
        *,
        vocab_size: int,
        catch_up: int = 256,
        sequences: int = 1024,
    ) -> None:
        """`catch_up` is how many tokens that are not computed here yet, prompts above all, one call computes beside the
        drafts. The tokenizers must be the same."""
        if executor.spec.vocab_size != vocab_size:
            raise RequestError(
                f"the draft model's vocabulary has {executor.spec.vocab_size} tokens and the model's {vocab_size}",
                parameter="draft",
            )
        capacity = executor.capacity
        self._executor = executor
        self._blocks = BlockManager(capacity.blocks, capacity.block_tokens)
        self.constrain: Constrain | None = None  # gives the mask after a sequence's tokens and drafts
        self._catch_up = min(catch_up, capacity.max_rows)
        self._most = sequences
        self._pasts: OrderedDict[int, _Past] = OrderedDict()  # those that were drafted for last at the end
        self._asked: set[int] = set()  # in the call under way
        # Rather too little: who is thought too slow is never asked, and so never timed.
        self.step_time = StepTimeModel(fixed=0.2e-3, per_row=0.02e-3)

    def pass_seconds(self, sequences: int) -> float:
        """What it takes to draft one token for so many sequences."""
        return self.step_time.predict(sequences, 0)

    def propose(self, sequence: SequenceState, most: int) -> list[int]:
        return self.propose_all([(sequence, most)])[0]

    def propose_all(self, wanted: DraftRequests) -> list[list[int]]:
        """Sequences for which there is no memory, or whose prompt is not computed here yet, get none this time."""
        self._asked = {id(sequence) for sequence, _ in wanted}
        works = [self._begin(sequence, most) if most > 0 else None for sequence, most in wanted]
        ready = self._first_pass([work for work in works if work is not None])
        while ready:
            ready = self._pass(ready)
        return [work.drafts if work is not None else [] for work in works]

    def forget(self, sequence: SequenceState) -> None:
        past = self._pasts.pop(id(sequence), None)
        if past is not None:
            past.settle()
            self._blocks.release(past.table, sequence.tokens, past.computed)

    def close(self) -> None:
        self._executor.close()

    def stats(self) -> BlockStats:
        return self._blocks.stats()

    def check(self) -> None:
        """IntegrityError where the blocks' books do not agree; for tests."""
        self._blocks.check()

    def _begin(self, sequence: SequenceState, most: int) -> _Work | None:
        tokens = sequence.tokens
        most = min(most, self._executor.capacity.context - len(tokens))
        if most <= 0:
            return None
        total = len(tokens) + most - 1  # the last draft is not computed
        past = self._pasts.get(id(sequence))
        if past is None:
            past = self._open(sequence, total)
            if past is None:
                return None
        else:
            self._pasts.move_to_end(id(sequence))
            past.settle()
            while not self._blocks.grow(past.table, total):
                if not self._evict():
                    return None
        self._blocks.publish(past.table, tokens, past.computed)
        return _Work(past, most, tokens[past.computed :])

    def _open(self, sequence: SequenceState, total: int) -> _Past | None:
        request = sequence.request
        variant = self._executor.spec.rope_variant(len(request.prompt) + request.max_tokens)
        match = self._blocks.match(sequence.tokens, request.salt, variant=variant)
        while (table := self._blocks.acquire(match, total)) is None:
            if not self._evict():
                return None
        while len(self._pasts) >= self._most and self._evict():
            pass
        past = self._pasts[id(sequence)] = _Past(sequence, table, variant, table.cached_tokens)
        return past

    def _evict(self) -> bool:
        """Lets go of the sequence that was drafted for longest ago; False where there are none but those asked for."""
        for key, past in self._pasts.items():
            if key not in self._asked:
                self.forget(past.sequence)
                return True
        return False

    def _first_pass(self, works: list[_Work]) -> list[_Work]:
        """Computes what is not computed yet, the shortest parts first; returns those that can go on."""
        room, catch_up = self._executor.capacity.max_rows, self._catch_up
        parts: list[tuple[_Work, list[int]]] = []
        for work in sorted(works, key=lambda work: len(work.feed)):
            count = min(len(work.feed), room, catch_up + 1 if len(work.feed) > 1 else 1)
            if count <= 0:
                continue
            room -= count
            catch_up -= count - 1
            parts.append((work, work.feed[:count]))
        return self._run(parts)

    def _pass(self, works: list[_Work]) -> list[_Work]:
        return self._run([(work, work.feed) for work in works[: self._executor.capacity.max_rows]])

    def _run(self, parts: list[tuple[_Work, list[int]]]) -> list[_Work]:
        """One step of the draft model, and a draft for each whose tokens are all computed by it."""
        if not parts:
            return []
        tables = np.zeros((len(parts), max(len(work.past.table.blocks) for work, _ in parts)), dtype=np.int32)
        tokens: list[int] = []
        offsets = [0]
        finishing: list[_Work] = []
        last_rows: list[int] = []
        pairs = 0
        starts: list[int] = []
        for place, (work, feed) in enumerate(parts):
            past = work.past
            tables[place, : len(past.table.blocks)] = past.table.blocks
            start = past.computed + len(past.ahead)
            starts.append(start)
            pairs += pairs_of(start, len(feed))
            tokens += feed
            offsets.append(len(tokens))
            if len(feed) == len(work.feed):
                finishing.append(work)
                last_rows.append(len(tokens) - 1)
        batch = StepBatch(
            tokens=np.array(tokens, dtype=np.int32),
            offsets=np.array(offsets, dtype=np.int32),
            computed=np.array(starts, dtype=np.int32),
            block_tables=tables,
            rope_variants=np.array([work.past.rope_variant for work, _ in parts], dtype=np.int32),
            wanted=np.array(last_rows, dtype=np.int32),
            copies=self._blocks.take_copies(),
        )
        began = time.perf_counter()
        result = self._executor.collect(self._executor.launch(batch))
        for work, feed in parts:
            if work.drafts:
                work.past.ahead += feed
            else:
                work.past.computed += len(feed)
                work.feed = work.feed[len(feed) :]
        self._choose(finishing, result.values)
        self.step_time.observe(len(tokens), pairs, time.perf_counter() - began)
        return [work for work in finishing if work.feed]

    def _choose(self, works: list[_Work], logits: NDArray[np.float32]) -> None:
        """The next draft of each, and what is to be computed for the one after it."""
        rows = [sample_rows(work.past.sequence, work.drafts)[-1] for work in works]
        if self.constrain is not None:
            for work, row in zip(works, rows, strict=True):
                row.mask = self.constrain(work.past.sequence, work.drafts)
        if not rows:
            return
        for work, token in zip(works, self._executor.choose(logits, self._executor.lay_out(rows)), strict=True):
            work.feed = []
            if token < 0:
                continue
            work.drafts.append(token)
            if len(work.drafts) < work.most and token not in work.past.sequence.request.stop_ids:
                work.feed = [token]
