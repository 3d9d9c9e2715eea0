"""What an executor is: the one place where tokens become logits.

Owns the contract between a step's planner and the hardware: a Batch goes in by `launch`, which returns at once, and a
Result comes out by `collect`, so that the host's work for the next step overlaps with the device's. Knows no hardware.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from millrace.engine.sampling import Chosen, SampleRow
from millrace.models.spec import ModelSpec

Int32s = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Capacity:
    """What fits: the bounds that a planner must keep."""

    blocks: int
    block_tokens: int
    max_rows: int  # new tokens of one step, all sequences together
    context: int  # most tokens of one sequence


@dataclass(frozen=True, slots=True)
class Batch:
    """One step over several sequences, each with any number of new tokens; a sequence's rows follow one another."""

    tokens: Int32s  # [rows]
    offsets: Int32s  # [sequences + 1] where each sequence's rows start
    computed: Int32s  # [sequences] tokens whose KV is in the blocks already
    block_tables: Int32s  # [sequences, most blocks of any]
    rope_variants: Int32s  # [sequences] ModelSpec.rope_variant, fixed for a sequence's life
    wanted: Int32s  # rows whose result is wanted, ascending
    hidden: bool = False  # final hidden states in place of logits


@dataclass(frozen=True, slots=True)
class Result:
    values: NDArray[np.float32]  # [wanted, vocab], or [wanted, hidden]


class Ticket(Protocol):
    """A step under way."""

    def done(self) -> bool: ...


class Executor(Protocol):
    @property
    def spec(self) -> ModelSpec: ...

    @property
    def capacity(self) -> Capacity: ...

    def launch(self, batch: Batch) -> Ticket: ...

    def collect(self, ticket: Ticket) -> Result:
        """Waits for the step; raises what went wrong in it."""
        ...

    def sample(self, logits: NDArray[np.float32], rows: Sequence[SampleRow]) -> list[Chosen]:
        """The next token of every row of logits, which it may change."""
        ...
