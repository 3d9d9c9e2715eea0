"""A sequence's state outside the scheduler: text, grammar, undelivered results, times. Reads the results of a step.

Decides which rows of logits are sampled and which only measured, what the sequence accepts of them, and whether that
ends it. Does not know blocks or the order in which sequences run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from headrace.engine.executors.batch_builder import BlockRow
from headrace.engine.executors.executor import SampleBatch
from headrace.engine.interface.grammar_spec import NOT_FOLLOWED
from headrace.engine.interface.output_text import OutputText
from headrace.engine.interface.outputs import SequenceEnd, SequenceOutput, SequenceUsage
from headrace.engine.interface.request import FinishReason, SequenceState
from headrace.engine.interface.sampling import SampledToken, SampleRow, SamplingParams, sequence_seed
from headrace.engine.scheduling.step_plan import SequenceEvent, Share, ShareOutcome
from headrace.engine.speculation.drafters import Mask, sample_rows, verify
from headrace.errors import HeadraceError
from headrace.models.spec import ModelSpec

if TYPE_CHECKING:
    from headrace.engine.grammar.constraints import GrammarState

Floats = NDArray[np.float32]

_NO_CHOICE: Final = "no token can be chosen: all are masked, or the logits are NaN or infinite"


class SequenceProgress:
    """One sequence from admission to its end."""

    __slots__ = (
        "accepted",
        "blind",
        "block_row",
        "careful",
        "chosen",
        "drafted",
        "first_at",
        "first_step",
        "grammar",
        "held_text",
        "measured",
        "pool",
        "queued_at",
        "seed",
        "sequence",
        "started_at",
        "steps",
        "text",
    )

    def __init__(
        self,
        sequence: SequenceState,
        text: OutputText | None,
        grammar: GrammarState | None,
        block_row: BlockRow,
        now: float,
    ) -> None:
        """`text` and `grammar` have already been advanced over the sequence's existing output."""
        request = sequence.request
        self.sequence = sequence
        self.text = text
        self.grammar = grammar
        self.block_row = block_row
        self.seed = sequence_seed(request.sampling.seed, sequence.index)
        # The text can end the sequence, so it is detokenised before the step is settled.
        self.careful = bool(request.stop) and text is not None
        self.blind = request.sampling.logprobs is None  # no log-probabilities requested
        self.held_text = ""  # detokenised, not delivered yet
        self.chosen: list[SampledToken] = []  # with log-probabilities, not delivered yet
        self.measured: list[SampledToken] = []  # prompt tokens, not delivered yet
        self.pool: NDArray[np.float32] | None = None  # sum of hidden states, or the one that counts
        self.queued_at = now
        self.started_at: float | None = None  # when it had its first share of a step
        self.first_at = 0.0
        self.first_step = 0  # the step of its first token
        self.steps = 0  # with a share of it
        self.drafted = 0
        self.accepted = 0

    # Before the results

    def rows(self, share: Share, masks: Sequence[Mask | None] | None) -> list[SampleRow]:
        """Return how to sample each wanted row of the share. Prompt rows are only measured; the last ones choose
        tokens."""
        sequence = self.sequence
        request = sequence.request
        sampled = self._sampled(share)
        rows: list[SampleRow] = []
        if share.wanted > sampled:
            top = request.sampling.logprobs if request.kind == "score" else request.prompt_logprobs
            measure = SamplingParams(logprobs=top or 0)
            end = sequence.computed + share.count
            for position in range(end - share.wanted, end - sampled):
                known = position + 1 < len(sequence.tokens)
                given = sequence.tokens[position + 1] if known else 0  # the last row of a scored text predicts nothing
                rows.append(SampleRow(measure, position + 1, given=given))
        if sampled:
            drafts = sequence.drafted[: sampled - 1]
            chosen = sample_rows(sequence, drafts, masks, seed=self.seed)
            # Rows past the end of the grammar are in the logits and must be ignored.
            chosen += [SampleRow(SamplingParams(), 0, given=0)] * (sampled - len(chosen))
            rows += chosen
        return rows

    def _sampled(self, share: Share) -> int:
        """Return how many wanted rows choose a token: the one after all known tokens, and one per draft."""
        if self.sequence.request.kind != "generate":
            return 0
        return min(share.wanted, max(0, self.sequence.computed + share.count + 1 - len(self.sequence.tokens)))

    # After the results

    def outcome(self, share: Share, tokens: list[int], at: int, rows: SampleBatch, masks: int | None) -> ShareOutcome:
        """Return the step's outcome for the sequence. `at` is the index of its first row; `masks` is how many its
        grammar had."""
        sequence = self.sequence
        sampled = self._sampled(share)
        if share.wanted > sampled:
            self._measure(share, share.wanted - sampled, at, rows)
            at += share.wanted - sampled
        if not sampled:
            whole = sequence.computed + share.count >= len(sequence.tokens)
            return ShareOutcome([], FinishReason.STOP if whole and sequence.request.kind == "score" else None)
        if sampled == 1 and self.grammar is None and tokens[at] >= 0:
            accepted = [tokens[at]]
        else:
            if masks is not None:
                sampled = masks
            accepted = self._verified(sequence, tokens[at : at + sampled], share.wanted - 1)
            if not accepted:
                error = self.grammar.error if self.grammar is not None else None
                return ShareOutcome([], FinishReason.FAILED, _NO_CHOICE if error is None else NOT_FOLLOWED + error)
        if not self.blind:
            self.chosen += [rows.chosen(at + place) for place in range(len(accepted))]
        finish = None
        if self.grammar is not None:
            try:
                finish = self._follow(self.grammar, accepted)
            except HeadraceError as error:
                return ShareOutcome(accepted, FinishReason.FAILED, str(error))
        if self.careful and self.text is not None:
            before = self.text.count
            self.held_text += self.text.push(accepted)
            if isinstance(self.text.ended, str):
                del accepted[self.text.count - before :]
                finish = FinishReason.STOP
        return ShareOutcome(accepted, finish)

    def _verified(self, sequence: SequenceState, sampled: list[int], drafts: int) -> list[int]:
        request = sequence.request
        drafted = sequence.drafted[:drafts]
        count = verify(drafted, sampled, stop_ids=request.stop_ids, most=request.max_tokens - sequence.output_count)
        held = sum(map(int.__eq__, drafted, sampled[:count]))
        self.drafted += len(drafted)
        self.accepted += held
        return sampled[:count]

    def _follow(self, grammar: GrammarState, accepted: list[int]) -> FinishReason | None:
        """Advance the grammar over the accepted tokens, and append the tokens that it forces."""
        del accepted[grammar.advance(accepted) :]
        request = self.sequence.request
        room = request.max_tokens - self.sequence.output_count - len(accepted)
        # With log-probabilities, forced tokens are sampled like all others, so that they have one.
        if self.blind and room > 0 and not grammar.finished and accepted[-1] not in request.stop_ids:
            accepted += grammar.forced(room)
        return FinishReason.STOP if grammar.finished else None

    def _measure(self, share: Share, count: int, at: int, rows: SampleBatch) -> None:
        sequence = self.sequence
        first = sequence.computed + share.count - share.wanted
        known = len(sequence.tokens) - 1
        self.measured += [rows.chosen(at + place) for place in range(count) if first + place < known]

    def pool_states(self, share: Share, states: NDArray[np.float32], spec: ModelSpec) -> ShareOutcome:
        """Add the hidden states of the share's rows to the pooled vector, which is complete after the last share."""
        sequence = self.sequence
        first = sequence.computed + share.count - len(states)
        match spec.pooling or "mean":
            case "cls":
                if first == 0:
                    self.pool = states[0].copy()
            case "last":
                self.pool = states[-1].copy()
            case "max":
                rows = states if first == 0 or self.pool is None else np.concatenate([self.pool[None], states])
                self.pool = rows.max(axis=0)
            case "mean" | "mean_sqrt" | "weighted" as pooling:
                if pooling == "weighted":
                    places = np.arange(first + 1, first + 1 + len(states), dtype=np.float32)
                    states = states * places[:, None]
                # Add one row after the other, so that the sum does not depend on how the text was split into steps.
                rows = states if first == 0 or self.pool is None else np.concatenate([self.pool[None], states])
                self.pool = np.add.reduce(rows, axis=0)
        whole = sequence.computed + share.count >= len(sequence.tokens)
        return ShareOutcome([], FinishReason.STOP if whole else None)

    # Output

    def output(
        self, event: SequenceEvent, spec: ModelSpec, now: float, after_pooling: Callable[[Floats], Floats]
    ) -> SequenceOutput:
        """Return the new output. Text that decides nothing is detokenised only here, while the next step runs."""
        sequence = self.sequence
        text = self.held_text
        self.held_text = ""
        ended = event.finish is not None
        if self.text is not None:
            if not self.careful:
                text += self.text.push(event.tokens)
            if ended:
                text += self.text.finish()
        chosen, self.chosen = self.chosen[: len(event.tokens)], []
        measured, self.measured = self.measured, []
        return SequenceOutput(
            sequence.request.id,
            sequence.index,
            event.tokens,
            text,
            None if self.blind else chosen,
            measured or None,
            self._vector(spec, after_pooling) if ended and sequence.request.kind == "embed" else None,
            self._ending(event, now) if ended else None,
        )

    def _vector(self, spec: ModelSpec, after_pooling: Callable[[Floats], Floats]) -> bytes | None:
        if self.pool is None:
            return None
        pooled = self.pool
        count = len(self.sequence.tokens)
        match spec.pooling or "mean":
            case "mean":
                pooled = pooled / np.float32(count)
            case "mean_sqrt":
                pooled = pooled / np.float32(math.sqrt(count))
            case "weighted":
                pooled = pooled / np.float32(count * (count + 1) // 2)
            case _:
                pass
        if spec.pooled_layers:
            pooled = after_pooling(pooled)
        if spec.normalise_embedding:
            pooled = pooled / max(float(np.linalg.norm(pooled)), 1e-12)
        return np.asarray(pooled, dtype="<f4").tobytes()

    def _ending(self, event: SequenceEvent, now: float) -> SequenceEnd:
        sequence = self.sequence
        started = now if self.started_at is None else self.started_at
        first = self.first_at or now
        usage = SequenceUsage(
            prompt_tokens=0 if self.started_at is None else len(sequence.request.prompt),  # 0: it was cut in the queue
            output_tokens=sequence.output_count,
            cached_tokens=sequence.cached,
            drafted=self.drafted,
            accepted=self.accepted,
            queue_s=started - self.queued_at,
            prefill_s=first - started,
            decode_s=now - first,
            prefill_steps=self.first_step or self.steps,
            decode_steps=self.steps - (self.first_step or self.steps),
        )
        stop = self.text.ended if self.text is not None and isinstance(self.text.ended, str) else None
        return SequenceEnd(event.finish or FinishReason.FAILED, usage, event.why, stop)
