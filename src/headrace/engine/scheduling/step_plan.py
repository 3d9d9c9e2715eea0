"""Data that passes between the scheduler and the engine: a step's plan, its outcomes, and the resulting events.

    scheduler.plan(now) -> StepPlan -> executor -> Outcome per share -> scheduler.settle(...) -> events

A loop around it (`now` is the engine's monotonic clock):

    events = scheduler.expire(now)       # past their deadline; also when there is nothing to run
    plan = scheduler.plan(now)           # None: nothing to compute
    ...                                  # admit and cancel may be called while the step runs
    events = scheduler.settle(plan, outcomes, now, seconds)
"""

from __future__ import annotations

import msgspec

from headrace.engine.interface.request import FinishReason, SequenceState


class SchedulerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds that every plan keeps. The first group comes from the executor's Capacity."""

    context: int = 8192  # tokens of one sequence
    max_rows: int = 512  # of one step
    block_tokens: int = 16
    whole_images: bool = False  # a chunk of a prompt cuts no image apart
    keeps_states: bool = False  # chunks of prompts end where a recurrent state can be kept for reuse
    causal: bool = True  # False for an encoder, whose sequence is computed in one step and is never reused

    max_sequences: int = 64  # running at once
    max_results: int = 128  # wanted rows of a step beyond one per sequence; each costs a row of vocabulary width
    queued_sequences: int = 4096  # waiting, all tenants together
    queued_per_tenant: int = 1024
    queued_tokens: int = 8 * 1024 * 1024  # prompt tokens of everything that waits
    idle_tenants: int = 4096  # remembered accounts of tenants without work

    # seconds, unless a running stream needs less; bounds the delay of an arrival or a cancel
    longest_step: float = 0.25
    short_rows: int = 1024  # a prompt with at most this many rows to compute is short
    wide_rows: int = 3072  # a late prompt with at most this many rows may use as much of a step as a short one
    least_rows: int = 8  # of prefill in every step, however slow decoding is, so that prompts make progress


class Share(msgspec.Struct):
    """One sequence's rows of a step: (tokens + drafted)[computed : computed + count]."""

    sequence: SequenceState
    count: int
    wanted: int  # results wanted of the last rows: 0 while the prompt is incomplete, then 1 + len(drafted)


class StepPlan(msgspec.Struct):
    shares: list[Share]
    copies: list[tuple[int, int]]  # blocks to copy before the step: source, target
    predicted: float  # seconds
    hidden: bool = False  # final hidden states instead of logits: every share is of kind "embed"
    rows: int = 0
    pairs: int = 0  # KV tokens that all rows together read
    state_copies: list[tuple[int, int]] = []  # recurrent states to copy before the step: source, target


class ShareOutcome(msgspec.Struct):
    """The engine's result for one share."""

    accepted: list[int] = []  # new tokens: verified drafts, the sampled one, forced ones
    finish: FinishReason | None = None  # set if the engine ends it: stop string, grammar, failure
    why: str = ""


class SequenceEvent(msgspec.Struct):
    sequence: SequenceState
    tokens: list[int]  # new tokens, a stop id included
    finish: FinishReason | None = None
    why: str = ""


class AdmissionDecision(msgspec.Struct, frozen=True):
    accepted: bool
    predicted: float  # seconds from now to the first token
    sequences: tuple[SequenceState, ...] = ()  # the request's n sequences, if accepted
    retry_after: float = 0.0  # seconds after which a retry would be admitted
    why: str = ""
    parameter: str | None = None  # set if the request can never be served; None: a matter of load
