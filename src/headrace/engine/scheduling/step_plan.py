"""What goes between the scheduler and the engine: a step's plan, its outcome, and what follows for each sequence.

Owns these shapes and the scheduler's SchedulerLimits. Decides nothing and knows no hardware.

    scheduler.plan(now) -> StepPlan -> executor -> Outcome per share -> scheduler.settle(...) -> Events

A loop around it (`now` is the engine's monotonic clock):

    events = scheduler.expire(now)       # what passed its deadline; also when there is nothing to run
    plan = scheduler.plan(now)           # None: nothing to compute
    ...                                  # admit and cancel may be called while the step runs
    events = scheduler.settle(plan, outcomes, now, seconds)
"""

from __future__ import annotations

import msgspec

from headrace.engine.interface.request import FinishReason, SequenceState


class SchedulerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds that every plan keeps. The first group comes from the executor's Capacity."""

    context: int = 8192  # most tokens of one sequence
    max_rows: int = 512  # of one step
    block_tokens: int = 16
    causal: bool = True  # an encoder's sequence goes whole into one step and leaves nothing behind to reuse

    max_sequences: int = 64  # running at once
    max_results: int = (
        128  # wanted rows of one step beyond one per sequence: each costs a row of the vocabulary's width
    )
    queued_sequences: int = 4096  # waiting, all tenants together
    queued_per_tenant: int = 1024
    queued_tokens: int = 8 * 1024 * 1024  # prompts of all that wait
    idle_tenants: int = 4096  # accounts of tenants without work that are remembered

    longest_step: float = 0.25  # seconds, where no running stream asks for less: an arrival or a cancel waits that long
    short_rows: int = 1024  # a prompt with at most this many rows to compute is short
    wide_rows: int = 3072  # and one with at most this many may use as much of a step as a short one once it is late
    least_rows: int = 8  # of prefill in a step, however slow the decodes are: nothing stands still


class Share(msgspec.Struct):
    """One sequence's rows of a step: (tokens + drafted)[computed : computed + count]."""

    sequence: SequenceState
    count: int
    wanted: int  # of the last rows, how many results are wanted: 0 while a prompt is not whole, then 1 + len(drafted)


class StepPlan(msgspec.Struct):
    shares: list[Share]
    copies: list[tuple[int, int]]  # blocks to copy before the step: source, target
    predicted: float  # seconds
    hidden: bool = False  # final hidden states in place of logits: every share is of kind "embed"
    rows: int = 0
    pairs: int = 0  # KV tokens that all rows together read


class Outcome(msgspec.Struct):
    """What the engine hands back for a share."""

    accepted: list[int] = []  # new tokens: verified drafts, the one sampled, forced ones
    finish: FinishReason | None = None  # where the engine knows that it ends: stop string, grammar, failure
    why: str = ""


class SequenceEvent(msgspec.Struct):
    sequence: SequenceState
    tokens: list[int]  # new ones, a stop id included
    finish: FinishReason | None = None
    why: str = ""


class Admission(msgspec.Struct, frozen=True):
    accepted: bool
    predicted: float  # seconds from now to the first token
    sequences: tuple[SequenceState, ...] = ()  # the request's n, where it was accepted
    retry_after: float = 0.0  # seconds after which it would be admitted, where it was refused
    why: str = ""
    parameter: str | None = None  # of the request, where that can never be served; None: a matter of load
