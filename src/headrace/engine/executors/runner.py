"""Drives an executor directly, without a scheduler: greedy tokens, logits and embeddings, for tests and
measurements."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.engine.executors.batch_builder import adapter_slots
from headrace.engine.executors.executor import Executor, StepBatch
from headrace.engine.interface.request import AdapterRef
from headrace.errors import RequestError

Floats = NDArray[np.float32]


class RunnerSequence(msgspec.Struct):
    tokens: list[int]
    rope_variant: int
    blocks: list[int] = []
    computed: int = 0  # tokens whose KV is in the blocks
    state_slot: int = -1
    adapter: AdapterRef | None = None

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed


class Runner:
    """Sequences on one executor. A sequence gets all the blocks that it may need when it is opened."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self._free = list(range(executor.capacity.blocks))
        self._free_states = list(range(executor.capacity.states))

    def open(
        self, tokens: Sequence[int], *, total: int | None = None, adapter: AdapterRef | None = None
    ) -> RunnerSequence:
        """Open a sequence that may grow to `total` tokens. Its adapter must be loaded."""
        capacity = self.executor.capacity
        most = len(tokens) if total is None else total
        if not tokens:
            raise RequestError("The prompt has no tokens.", parameter="prompt")
        if most > capacity.context:
            raise RequestError(
                f"a prompt of {len(tokens)} tokens and what may follow, {most} together, do not fit the context of "
                f"{capacity.context}",
                parameter="max_tokens" if len(tokens) < capacity.context else "prompt",
            )
        needed = -(-most // capacity.block_tokens)
        if needed > len(self._free):
            raise RequestError(
                f"The sequence needs {needed} KV blocks, and {len(self._free)} blocks are free.", parameter="kv_tokens"
            )
        slot = -1
        if capacity.states:
            if not self._free_states:
                raise RequestError(
                    f"All {capacity.states} slots of recurrent states are in use.", parameter="max_sequences"
                )
            slot = self._free_states.pop()
        blocks = [self._free.pop() for _ in range(needed)]
        return RunnerSequence(
            list(tokens), self.executor.spec.rope_variant(most), blocks, state_slot=slot, adapter=adapter
        )

    def close(self, sequence: RunnerSequence) -> None:
        self._free.extend(sequence.blocks)
        sequence.blocks = []
        if sequence.state_slot >= 0:
            self._free_states.append(sequence.state_slot)
            sequence.state_slot = -1

    def step(
        self, work: Sequence[tuple[RunnerSequence, int]], wanted: Sequence[int], *, hidden: bool = False
    ) -> Floats:
        """Compute the next `count` tokens of each sequence. Return the wanted rows' logits or hidden states."""
        tables = np.zeros((len(work), max(len(sequence.blocks) for sequence, _ in work)), dtype=np.int32)
        tokens: list[int] = []
        offsets = [0]
        for index, (sequence, count) in enumerate(work):
            tables[index, : len(sequence.blocks)] = sequence.blocks
            tokens += sequence.tokens[sequence.computed : sequence.computed + count]
            offsets.append(len(tokens))
        adapters, slots = adapter_slots([sequence.adapter for sequence, _ in work])
        batch = StepBatch(
            adapters=adapters,
            slots=slots,
            tokens=np.array(tokens, dtype=np.int32),
            offsets=np.array(offsets, dtype=np.int32),
            computed=np.array([sequence.computed for sequence, _ in work], dtype=np.int32),
            block_tables=tables,
            rope_variants=np.array([sequence.rope_variant for sequence, _ in work], dtype=np.int32),
            wanted=np.array(wanted, dtype=np.int32),
            hidden=hidden,
            state_slots=(
                np.array([sequence.state_slot for sequence, _ in work], dtype=np.int32)
                if self.executor.capacity.states
                else None
            ),
        )
        result = self.executor.collect(self.executor.launch(batch))
        for sequence, count in work:
            sequence.computed += count
        return result.values

    def plan(self, sequences: Sequence[RunnerSequence]) -> list[tuple[RunnerSequence, int]]:
        """Return how much of each pending part fits in one step. An encoder's sequence is computed whole or waits."""
        room = self.executor.capacity.max_rows
        work: list[tuple[RunnerSequence, int]] = []
        for sequence in sequences:
            count = min(sequence.pending, room)
            if count == 0 or (not self.executor.spec.causal and count < sequence.pending):
                continue
            work.append((sequence, count))
            room -= count
        return work

    def prefill(self, sequences: Sequence[RunnerSequence]) -> Floats:
        """Compute everything pending. Return each sequence's logits after its last token."""
        last = np.empty((len(sequences), self.executor.spec.vocab_size), dtype=np.float32)
        places = {id(sequence): index for index, sequence in enumerate(sequences)}
        while work := self.plan(sequences):
            ends = np.cumsum([count for _, count in work]) - 1
            finishing = [i for i, (sequence, count) in enumerate(work) if count == sequence.pending]
            rows = self.step(work, [int(ends[i]) for i in finishing])
            for row, i in zip(rows, finishing, strict=True):
                last[places[id(work[i][0])]] = row
        return last


def logits(executor: Executor, prompts: Sequence[Sequence[int]]) -> list[Floats]:
    """Return the logits after every token of every prompt, the prompts computed together."""
    return _every_row(executor, prompts, hidden=False)


def hidden_states(executor: Executor, prompts: Sequence[Sequence[int]]) -> list[Floats]:
    """Return the final hidden states of every token of every prompt."""
    return _every_row(executor, prompts, hidden=True)


def _every_row(executor: Executor, prompts: Sequence[Sequence[int]], *, hidden: bool) -> list[Floats]:
    runner = Runner(executor)
    sequences = [runner.open(prompt) for prompt in prompts]
    rows: dict[int, list[Floats]] = {id(sequence): [] for sequence in sequences}
    while work := runner.plan(sequences):
        values = runner.step(work, range(sum(count for _, count in work)), hidden=hidden)
        start = 0
        for sequence, count in work:
            rows[id(sequence)].append(values[start : start + count])
            start += count
    return [np.concatenate(rows[id(sequence)]) for sequence in sequences]


def greedy(executor: Executor, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Return the `count` most likely tokens after each prompt, all prompts decoded together."""
    if count < 1:
        return [[] for _ in prompts]
    runner = Runner(executor)
    sequences = [runner.open(prompt, total=len(prompt) + count) for prompt in prompts]
    starts = [len(sequence.tokens) for sequence in sequences]
    for _ in range(count):
        for sequence, row in zip(sequences, runner.prefill(sequences), strict=True):
            sequence.tokens.append(int(row.argmax()))
    return [sequence.tokens[start:] for sequence, start in zip(sequences, starts, strict=True)]


def embed(executor: Executor, prompts: Sequence[Sequence[int]]) -> Floats:
    """Return one vector per prompt, pooled and normalised as the spec says (default: the mean over all tokens)."""
    spec = executor.spec
    vectors: list[Floats] = []
    for states in hidden_states(executor, prompts):
        match spec.pooling or "mean":
            case "cls":
                vector = states[0]
            case "last":
                vector = states[-1]
            case "max":
                vector = states.max(axis=0)
            case "weighted":
                places = np.arange(1, len(states) + 1, dtype=np.float32)
                vector = places @ states / places.sum()
            case "mean_sqrt":
                vector = states.sum(axis=0) / np.float32(np.sqrt(len(states)))
            case "mean":
                vector = states.mean(axis=0)
        vectors.append(executor.after_pooling(vector) if spec.pooled_layers else vector)
    pooled = np.stack(vectors)
    if spec.normalise_embedding:
        pooled /= np.maximum(np.linalg.norm(pooled, axis=1, keepdims=True), 1e-12)
    return pooled
