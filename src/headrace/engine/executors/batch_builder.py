"""Builds the arrays that an executor takes from a step's plan, in memory that is reused from step to step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.engine.executors.executor import Capacity, StepBatch, peaks_of
from headrace.engine.executors.image_batch import image_features, image_spans, token_places
from headrace.engine.interface.request import AdapterRef, SequenceState
from headrace.engine.scheduling.step_plan import Share, StepPlan


class BlockRow:
    """One sequence's block numbers as an array. The sequence's list only grows, or is replaced by another list."""

    __slots__ = ("blocks", "filled", "numbers", "stamp")

    def __init__(self, width: int) -> None:
        self.numbers = np.zeros(width, dtype=np.int32)
        self.blocks: list[int] | None = None
        self.filled = 0
        self.stamp = 0  # identifies the content: no other content of any row has the same stamp

    def follow(self, blocks: list[int], stamp: int) -> None:
        if blocks is not self.blocks:
            self.blocks = blocks
            self.filled = 0
        count = len(blocks)
        self.numbers[self.filled : count] = blocks[self.filled :]
        self.filled = count
        self.stamp = stamp


class BatchBuilder:
    def __init__(
        self,
        capacity: Capacity,
        vocab_size: int,
        hidden_size: int,
        sequences: int,
        *,
        feature_size: int | None = None,
        spans: bool = False,
        places: bool = False,
    ) -> None:
        """`sequences` is a first guess of the sequences in one step. `feature_size`: of an image's token, if that is
        not `hidden_size`. `spans` and `places`: what the model takes of images beside their features."""
        self._feature_size = hidden_size if feature_size is None else feature_size
        self._spans, self._places = spans, places
        self._has_states = capacity.states > 0
        self._width = -(-capacity.context // capacity.block_tokens)
        self._tokens = np.empty(capacity.max_rows, dtype=np.int32)
        self._wanted = np.empty(capacity.max_rows, dtype=np.int32)
        self._stamps = itertools.count(1)
        self._make_room(sequences)
        self._logits = np.empty((0, vocab_size), dtype=np.float32)
        self._peaks = np.empty((0, peaks_of(vocab_size)), dtype=np.float32)
        self._states = np.empty((0, hidden_size), dtype=np.float32)
        self.keeps_states = False  # whether steps with logits return the hidden states that these are computed from
        self.reads: tuple[int, ...] = ()  # layers whose input they return before those
        self.keeps_prompts = False  # whether they return those of all rows, for requests that may be drafted for

    def row(self) -> BlockRow:
        """Return the block row of a new sequence."""
        return BlockRow(self._width)

    def build(self, plan: StepPlan, rows: list[BlockRow]) -> StepBatch:
        """Return the step's batch. It, and the step's result, are valid until the next build."""
        shares = plan.shares
        count = len(shares)
        if count > len(self._tables):
            self._make_room(count)
        tokens: list[int] = []
        offsets = [0]
        wanted: list[int] = []
        answered: list[int] | None = None
        if self.keeps_states and self.keeps_prompts and not plan.hidden:
            wanted, answered = all_rows(shares)
        end = 0
        for share in shares:
            sequence = share.sequence
            number = share.count
            end += number
            offsets.append(end)
            if number == 1:
                tokens.append(sequence.tokens[sequence.computed])
            else:
                tokens += share_tokens(sequence, number)
            if answered is not None:
                continue
            if share.wanted == 1:
                wanted.append(end - 1)
            elif share.wanted:
                wanted += range(end - share.wanted, end)
        self._place(shares, rows)
        results = len(wanted if answered is None else answered)
        if not plan.hidden and results > len(self._logits):
            self._make_logits(results)
        if (plan.hidden or self.keeps_states) and len(wanted) > len(self._states):
            self._make_states(len(wanted))
        self._tokens[:end] = tokens
        self._offsets[: count + 1] = offsets
        self._computed[:count] = [share.sequence.computed for share in shares]
        seconds = None
        if plan.hidden and any(share.sequence.request.second_text >= 0 for share in shares):
            seconds = np.array([share.sequence.request.second_text for share in shares], dtype=np.int32)
        slots = trails = None
        if self._has_states:
            slots = np.array([share.sequence.state_slot for share in shares], dtype=np.int32)
            trails = state_trails(shares, end)
        features, feature_rows = image_features(shares, end, self._feature_size)
        self._variants[:count] = [share.sequence.rope_variant for share in shares]
        self._wanted[: len(wanted)] = wanted
        adapters, adapter_places = adapter_slots([share.sequence.request.adapter for share in shares])
        return StepBatch(
            tokens=self._tokens[:end],
            offsets=self._offsets[: count + 1],
            computed=self._computed[:count],
            block_tables=self._tables[:count],
            rope_variants=self._variants[:count],
            wanted=self._wanted[: len(wanted)],
            hidden=plan.hidden,
            copies=plan.copies,
            out=(self._states if plan.hidden else self._logits)[:results],
            peaks=None if plan.hidden else self._peaks[:results],
            final_states=self._states[: len(wanted)] if self.keeps_states and not plan.hidden else None,
            reads=self.reads if self.keeps_states and not plan.hidden else (),
            answered=None if answered is None else np.array(answered, dtype=np.int32),
            second_texts=seconds,
            state_slots=slots,
            state_copies=plan.state_copies,
            state_trails=trails,
            features=features,
            feature_rows=feature_rows,
            spans=image_spans(shares, end) if self._spans else None,
            places=token_places(shares) if self._places else None,
            adapters=adapters,
            slots=adapter_places,
        )

    def _place(self, shares: list[Share], rows: list[BlockRow]) -> None:
        """Copy each sequence's blocks into its row of the tables. Most are unchanged since the previous step."""
        placed = self._placed
        for place, row in enumerate(rows):
            blocks = shares[place].sequence.blocks
            if blocks is not row.blocks or len(blocks) != row.filled:
                row.follow(blocks, next(self._stamps))
            elif placed[place] == row.stamp:
                continue
            self._tables[place, : row.filled] = row.numbers[: row.filled]
            placed[place] = row.stamp

    # Untouched pages cost nothing, so allocate some more.

    def _make_logits(self, rows: int) -> None:
        rows += rows // 2
        self._logits = np.empty((rows, self._logits.shape[1]), dtype=np.float32)
        self._peaks = np.empty((rows, self._peaks.shape[1]), dtype=np.float32)

    def _make_states(self, rows: int) -> None:
        self._states = np.empty((rows + rows // 2, self._states.shape[1]), dtype=np.float32)

    def _make_room(self, sequences: int) -> None:
        self._tables = np.zeros((sequences, self._width), dtype=np.int32)
        self._placed = [0] * sequences  # stamps of the rows that the tables hold
        self._offsets = np.zeros(sequences + 1, dtype=np.int32)
        self._computed = np.zeros(sequences, dtype=np.int32)
        self._variants = np.zeros(sequences, dtype=np.int32)


def adapter_slots(refs: Sequence[AdapterRef | None]) -> tuple[list[AdapterRef], NDArray[np.int32] | None]:
    """Return the adapters of a step's sequences, each once, and each sequence's index among them."""
    if not any(refs):
        return [], None
    places: dict[str, int] = {}
    adapters: list[AdapterRef] = []
    slots = np.full(len(refs), -1, dtype=np.int32)
    for place, ref in enumerate(refs):
        if ref is None:
            continue
        if ref.digest not in places:
            places[ref.digest] = len(adapters)
            adapters.append(ref)
        slots[place] = places[ref.digest]
    return adapters, slots


def all_rows(shares: Sequence[Share]) -> tuple[list[int], list[int]]:
    """Return the rows whose hidden states a drafter reads or whose results are wanted, and the places of the latter."""
    rows: list[int] = []
    answered: list[int] = []
    end = 0
    for share in shares:
        end += share.count
        rows += range(end - kept_rows(share), end)
        answered += range(len(rows) - share.wanted, len(rows))
    return rows, answered


def kept_rows(share: Share) -> int:
    """Return how many of a share's last rows have hidden states for a drafter that reads prompts too."""
    return share.count if share.sequence.request.speculate else share.wanted


def state_trails(shares: Sequence[Share], rows: int) -> NDArray[np.int32] | None:
    """Return for each row before a draft where the recurrent state after it goes, so that the draft can be rejected."""
    trails: NDArray[np.int32] | None = None
    end = 0
    for share in shares:
        end += share.count
        sequence = share.sequence
        drafts = share.count - (len(sequence.tokens) - sequence.computed)
        if drafts > 0:
            if trails is None:
                trails = np.full(rows, -1, dtype=np.int32)
            trails[end - 1 - drafts : end - 1] = sequence.state_trail[:drafts]
    return trails


def share_tokens(sequence: SequenceState, count: int) -> list[int]:
    """Return the next `count` tokens to compute: pending ones, then drafts."""
    found = sequence.tokens[sequence.computed : sequence.computed + count]
    if len(found) < count:
        found += sequence.drafted[: count - len(found)]
    return found
