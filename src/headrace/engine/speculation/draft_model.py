"""A drafter with its own small model.

Owns that model's executor and blocks, and how far each sequence is computed there. All sequences are drafted together,
one token per pass; rejected drafts are recomputed over. Does not schedule or verify.
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
from headrace.engine.memory.block_manager import BlockManager
from headrace.engine.memory.block_stats import BlockStats
from headrace.engine.memory.block_table import BlockTable
from headrace.engine.scheduling.step_time import StepTimeModel, pairs_of
from headrace.engine.speculation.drafters import DraftRequests, Mask, sample_rows
from headrace.errors import RequestError

_FEW = 32  # missing tokens that a pass computes beside the drafts

Constrain = Callable[[SequenceState, Sequence[int]], "Mask | None"]


class _Past(msgspec.Struct, eq=False):
    """A sequence in the draft model: `computed` of its tokens, followed by drafts that may have been rejected."""

    sequence: SequenceState
    table: BlockTable
    rope_variant: int
    computed: int
    ahead: list[int] = []

    def settle(self) -> None:
        """Count accepted drafts as computed. Rejected ones are overwritten later."""
        tokens = self.sequence.tokens
        for token in self.ahead:
            if self.computed >= len(tokens) or tokens[self.computed] != token:
                break
            self.computed += 1
        self.ahead.clear()
        self.computed = min(self.computed, len(tokens) - 1)  # the last token must be computed for its result


class _Work(msgspec.Struct, eq=False):
    past: _Past
    most: int
    feed: list[int]  # input tokens of the next pass
    drafts: list[int] = []


class DraftModelDrafter:
    """Samples each draft with the random numbers that the large model will use, so both choose alike where they agree,
    also at a temperature."""

    free = False

    def __init__(
        self,
        executor: Executor,
        *,
        vocab_size: int,
        catch_up: int = 256,
        sequences: int = 1024,
    ) -> None:
        """`catch_up` is how many uncomputed tokens, mostly prompts, one call computes beside the drafts. Both models
        must use the same tokenizer."""
        if executor.spec.vocab_size != vocab_size:
            raise RequestError(
                f"the draft model's vocabulary has {executor.spec.vocab_size} tokens and the model's {vocab_size}",
                parameter="draft",
            )
        capacity = executor.capacity
        self._executor = executor
        self._blocks = BlockManager(capacity.blocks, capacity.block_tokens)
        self.constrain: Constrain | None = None  # returns the grammar mask after a sequence's tokens and drafts
        self._catch_up = min(catch_up, capacity.max_rows)
        self._most = sequences
        self._pasts: OrderedDict[int, _Past] = OrderedDict()  # least recently drafted first
        self._asked: set[int] = set()  # sequences of the call under way
        # An optimistic start: a drafter that is thought too slow is never used, and so never timed.
        self.step_time = StepTimeModel(fixed=0.2e-3, per_row=0.02e-3)

    def pass_seconds(self, sequences: int) -> float:
        """Return the seconds to draft one token for so many sequences."""
        return self.step_time.predict(sequences, 0)

    def start_seconds(self, sequence: SequenceState) -> float:
        """Return the seconds to compute what is missing of a sequence here; 0 if that is a few accepted tokens."""
        past = self._pasts.get(id(sequence))
        missing = len(sequence.tokens) - (0 if past is None else past.computed + len(past.ahead))
        if missing <= _FEW:
            return 0.0
        rows = min(missing, self._catch_up)
        return missing / rows * self.step_time.predict(rows, pairs_of(missing // 2, rows))

    def propose(self, sequence: SequenceState, most: int) -> list[int]:
        return self.propose_all([(sequence, most)])[0]

    def propose_all(self, wanted: DraftRequests) -> list[list[int]]:
        """Return drafts for each sequence; none if memory is short or its prompt is not computed here yet."""
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
        """Raise IntegrityError if the block accounting is inconsistent; for tests."""
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
        """Release the sequence that was drafted for longest ago. Return False if only requested ones are left."""
        for key, past in self._pasts.items():
            if key not in self._asked:
                self.forget(past.sequence)
                return True
        return False

    def _first_pass(self, works: list[_Work]) -> list[_Work]:
        """Compute what is not computed yet, shortest parts first. Return the sequences that can continue."""
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
        """Run one step of the draft model, and draft a token for each sequence that it completes."""
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
        """Choose each sequence's next draft, and set the input of the pass after it."""
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
