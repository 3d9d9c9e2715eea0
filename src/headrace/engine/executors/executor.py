"""What an executor is: the one place where tokens become logits.

Owns the contract between a step's planner and the hardware: a StepBatch goes in by `launch`, which returns at once, and
a StepResult comes out by `collect`, so that the host's work for the next step overlaps with the device's. Knows no
hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.engine.interface.sampling import SampledToken, SampleRow
from headrace.models.spec import ModelSpec

Int32s = NDArray[np.int32]


class Capacity(msgspec.Struct, frozen=True):
    """What fits: the bounds that a planner must keep."""

    blocks: int
    block_tokens: int
    max_rows: int  # new tokens of one step, all sequences together
    context: int  # most tokens of one sequence


class StepBatch(msgspec.Struct, frozen=True):
    """One step over several sequences, each with any number of new tokens; a sequence's rows follow one another."""

    tokens: Int32s  # [rows]
    offsets: Int32s  # [sequences + 1] where each sequence's rows start
    computed: Int32s  # [sequences] tokens whose KV is in the blocks already
    block_tables: Int32s  # [sequences, most blocks of any]
    rope_variants: Int32s  # [sequences] ModelSpec.rope_variant, fixed for a sequence's life
    wanted: Int32s  # rows whose result is wanted, ascending
    hidden: bool = False  # final hidden states in place of logits
    copies: Sequence[tuple[int, int]] = ()  # KV blocks to copy first, in order: from, to
    out: NDArray[np.float32] | None = None  # where the result goes, [wanted, vocab or hidden]; None: a new array
    peaks: NDArray[np.float32] | None = None  # where what `choose` is helped by goes, [wanted, peaks_of(vocab)]


class StepResult(msgspec.Struct, frozen=True):
    values: NDArray[np.float32]  # [wanted, vocab], or [wanted, hidden]
    peaks: NDArray[np.float32] | None = None  # of the logits, where the batch brought room for them


def peaks_of(vocab_size: int) -> int:
    """How many peaks a row of logits has: the largest of every 32 values."""
    return -(-vocab_size // 32)


class StepTicket(Protocol):
    """A step under way."""

    def done(self) -> bool: ...

    def add_done_callback(self, fn: Callable[[Any], object], /) -> None:
        """Calls `fn` when the step is done, on whatever thread ran it; at once where it is done already."""
        ...


class SampleBatch(Protocol):
    """What is wished of the rows of a step, laid out for the sampler of one executor."""

    @property
    def count(self) -> int: ...

    def chosen(self, row: int) -> SampledToken:
        """What was chosen for a row, with log-probabilities where they were asked for; NoTokenError where nothing."""
        ...


class Executor(Protocol):
    @property
    def spec(self) -> ModelSpec: ...

    @property
    def capacity(self) -> Capacity: ...

    def launch(self, batch: StepBatch) -> StepTicket: ...

    def collect(self, ticket: StepTicket) -> StepResult:
        """Waits for the step; raises what went wrong in it."""
        ...

    def sample(self, logits: NDArray[np.float32], rows: Sequence[SampleRow]) -> list[SampledToken]:
        """The next token of every row of logits, which it may change."""
        ...

    def lay_out(self, rows: Sequence[SampleRow]) -> SampleBatch:
        """The part of `sample` that needs no logits, to be done while the step runs."""
        ...

    def choose(
        self, logits: NDArray[np.float32], rows: SampleBatch, peaks: NDArray[np.float32] | None = None
    ) -> list[int]:
        """The rest of it: a token for every row, -1 where none can be chosen. `peaks` are the logits', unchanged."""
        ...

    def read_block(self, block: int) -> NDArray[np.uint8]:
        """A copy of a block's KV in all layers, after the steps that were launched before."""
        ...

    def write_block(self, block: int, data: NDArray[np.uint8]) -> None:
        """Puts back what `read_block` gave, before the steps that are launched after."""
        ...

    @property
    def block_bytes(self) -> int:
        """Length of what `read_block` gives."""
        ...

    def close(self) -> None: ...
