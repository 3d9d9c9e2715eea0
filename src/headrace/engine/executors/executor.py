"""The contract of an executor: a StepBatch goes in by `launch`, which returns at once; `collect` returns a StepResult.

So the host can prepare the next step while the device runs. Does not know hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.engine.interface.request import AdapterRef
from headrace.engine.interface.sampling import SampledToken, SampleRow
from headrace.models.spec import ModelSpec

Int32s = NDArray[np.int32]


class Capacity(msgspec.Struct, frozen=True):
    """The executor's bounds, which a planner must keep."""

    blocks: int
    block_tokens: int
    max_rows: int  # new tokens of one step, all sequences together
    context: int  # tokens of one sequence
    states: int = 0  # slots of recurrent states; 0 if the model has none


class StepBatch(msgspec.Struct, frozen=True):
    """One step over several sequences, each with any number of new tokens. A sequence's rows are contiguous."""

    tokens: Int32s  # [rows]
    offsets: Int32s  # [sequences + 1] where each sequence's rows start
    computed: Int32s  # [sequences] tokens whose KV is in the blocks
    block_tables: Int32s  # [sequences, most blocks of any sequence]
    rope_variants: Int32s  # [sequences] ModelSpec.rope_variant, fixed for a sequence's life
    wanted: Int32s  # indices of rows whose result is wanted, ascending
    hidden: bool = False  # return final hidden states instead of logits
    copies: Sequence[tuple[int, int]] = ()  # KV blocks to copy first, in order: from, to
    out: NDArray[np.float32] | None = None  # array for the result, [wanted, vocab or hidden]; None: allocate one
    peaks: NDArray[np.float32] | None = None  # array for the peaks that speed up `choose`, [wanted, peaks_of(vocab)]
    final_states: NDArray[np.float32] | None = None  # array for the hidden states beside the logits, [wanted, hidden]
    reads: tuple[int, ...] = ()  # layers: what they begin with is returned before the final states
    answered: Int32s | None = None  # places in `wanted` that the result has logits of, beside final states; None: all
    state_slots: Int32s | None = None  # [sequences] of a model with recurrent layers: where a sequence's state is
    state_copies: Sequence[tuple[int, int]] = ()  # states to copy first, in order: from, to
    state_trails: Int32s | None = None  # [rows] another slot for the state after a row, -1: none
    adapters: Sequence[AdapterRef] = ()  # of the sequences
    slots: Int32s | None = None  # [sequences] index of each one's adapter, -1: it has none
    second_texts: Int32s | None = None  # [sequences] where the second text of a pair starts, -1: there is none
    features: NDArray[np.float32] | None = None  # [features, feature size] in place of token embeddings
    feature_rows: Int32s | None = None  # [rows] which feature a row begins with, -1: its token's embedding
    spans: Int32s | None = None  # [rows, 2] first token and end of the image that a row is in, or itself alone
    places: Int32s | None = None  # [rows, 3] what ropes turn by, if that is not the position


class StepResult(msgspec.Struct, frozen=True):
    values: NDArray[np.float32]  # [wanted or answered, vocab], or [wanted, hidden]
    peaks: NDArray[np.float32] | None = None  # peaks of the logits, if the batch had an array for them
    # What the logits are computed from, if it had an array for them: [wanted, hidden]. With `reads`, what those layers
    # began with comes first: [wanted, (reads + 1) * hidden].
    final_states: NDArray[np.float32] | None = None


def peaks_of(vocab_size: int) -> int:
    """Return the number of peaks of a row of logits. A peak is the largest of 32 values."""
    return -(-vocab_size // 32)


class StepTicket(Protocol):
    """A step under way."""

    def done(self) -> bool: ...

    def add_done_callback(self, fn: Callable[[Any], object], /) -> None:
        """Call `fn` when the step is done, on the thread that ran it; at once if it is done already."""
        ...


class SampleBatch(Protocol):
    """How to sample the rows of a step, laid out for one executor's sampler."""

    @property
    def count(self) -> int: ...

    def chosen(self, row: int) -> SampledToken:
        """Return a row's token, with log-probabilities if requested. Raise NoTokenError if there is none."""
        ...


class Executor(Protocol):
    @property
    def spec(self) -> ModelSpec: ...

    @property
    def capacity(self) -> Capacity: ...

    def launch(self, batch: StepBatch) -> StepTicket: ...

    def collect(self, ticket: StepTicket) -> StepResult:
        """Wait for the step. Raise its error if it failed."""
        ...

    def sample(self, logits: NDArray[np.float32], rows: Sequence[SampleRow]) -> list[SampledToken]:
        """Choose the next token of every row of logits. May change the logits."""
        ...

    def lay_out(self, rows: Sequence[SampleRow]) -> SampleBatch:
        """Do the part of `sample` that needs no logits, while the step runs."""
        ...

    def choose(
        self, logits: NDArray[np.float32], rows: SampleBatch, peaks: NDArray[np.float32] | None = None
    ) -> list[int]:
        """Do the rest: return a token for every row, -1 if none can be chosen. `peaks` are those of the unchanged
        logits."""
        ...

    def after_pooling(self, vector: NDArray[np.float32]) -> NDArray[np.float32]:
        """Pass a pooled hidden state through the spec's `pooled_layers`."""
        ...

    def read_block(self, block: int) -> NDArray[np.uint8]:
        """Return a copy of a block's KV in all layers, after the steps launched before."""
        ...

    def write_block(self, block: int, data: NDArray[np.uint8]) -> None:
        """Restore what `read_block` returned, before the steps launched after."""
        ...

    @property
    def block_bytes(self) -> int:
        """Length of the array that `read_block` returns."""
        ...

    def close(self) -> None: ...
